"""From a task to the rows of a run: pictures into the image store, everything else plain JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from agent import tasks
from agent.errors import InputError
from agent.images import ImageError, ImageStore
from agent.training.rundir import RunDir

MAX_ROW_BYTES = 100_000  # a row travels in one environment variable; Linux refuses 131,072 bytes and more


def build_rows(
    task_name: str,
    split: str,
    count: int,
    seed: int,
    store: ImageStore,
    *,
    blank: bool = False,
    data_root: str | None = None,
) -> list[dict[str, Any]]:
    """Make the rows of one split. ``blank``: every picture is replaced by a white one of its size.

    Raises ``InputError`` naming the row for a picture that cannot be used, a row that is too large, an empty split.
    """
    task = tasks.load(task_name)
    if task_name == "folder":
        task.data_root = Path(data_root) if data_root else None  # type: ignore[attr-defined]
    rows = []
    for sample in task.samples(split, count, seed):
        try:
            references = [_put(store, image, blank) for image in sample.images]
        except ImageError as error:
            raise InputError(f"{split} row {sample.id}: {error}") from None
        row = {
            "id": sample.id,
            "task": task_name,
            "question": sample.question,
            "images": references,
            "answer": sample.answer,
            "allowed": list(task.ANSWERS),
            **sample.extra,
        }
        if (size := len(json.dumps(row).encode())) > MAX_ROW_BYTES:
            raise InputError(
                f"{split} row {sample.id}: {size:,} bytes of JSON, at most {MAX_ROW_BYTES:,} fit; shorten the question",
                slug="env-too-large-base64",
            )
        rows.append(row)
    if not rows:
        raise InputError(f"the {split} split of task {task_name!r} is empty; at least one row is needed")
    return rows


def _put(store: ImageStore, image: Image.Image | str, blank: bool) -> str:
    if not blank:
        return store.put(image)
    reference = store.put(image)
    return store.put(Image.new("RGB", store.open(reference).size, "white"))


def write_rows(run: RunDir, config: Any, report: Callable[[str], None] = lambda line: None) -> dict[str, int]:
    """Build both splits of a run and write them below ``data/``; returns the row counts."""
    settings = config.mmqa
    store = ImageStore(run.images, settings.max_pixels)
    counts = {}
    for split in ("train", "val"):
        rows = build_rows(
            settings.task,
            split,
            settings[f"{split}_samples"],
            settings.seed,
            store,
            blank=settings.blank_images,
            data_root=settings.data_root,
        )
        path = run.rows(split)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        counts[split] = len(rows)
    report(f"rows: {counts['train']} to train on, {counts['val']} held out; pictures in {run.images}")
    return counts
