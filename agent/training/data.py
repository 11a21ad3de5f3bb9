"""From a task to the rows of a run: pictures into the image store, everything else plain JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from agent import tasks
from agent.errors import InputError
from agent.images import ImageError, ImageStore
from agent.training.config import STOCK_AGENT
from agent.training.picture_tokens import PromptRoom, prompt_room
from agent.training.rundir import RunDir, read_jsonl, write_jsonl

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
    most_images: int | None = None,
    room: PromptRoom | None = None,
) -> list[dict[str, Any]]:
    """Make the rows of one split. ``blank``: every picture is replaced by a white one of its size.

    ``most_images``: in one row; ``room``: of the longest prompt. Raises ``InputError`` naming the row for a picture
    that cannot be used or is one too many, a row that is too large, an empty split.
    """
    task = tasks.load(task_name)
    if task_name == "folder":
        task.data_root = Path(str(data_root)) if data_root else None  # type: ignore[attr-defined]
    rows = []
    for sample in task.samples(split, count, seed):
        if most_images is not None and len(sample.images) > most_images:
            limit = "actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt.image"
            raise InputError(
                f"{split} row {sample.id}: {len(sample.images)} pictures, the engine takes {most_images} from a row; "
                f"raise {limit} (each turn of mmqa.agent.max_turns after the first needs one more)"
            )
        try:
            references = [_put(store, image, blank) for image in sample.images]
        except ImageError as error:
            raise InputError(f"{split} row {sample.id}: {error}") from None
        if room and (problem := room.problem([store.size(one) for one in references], sample.question)):
            raise InputError(f"{split} row {sample.id}: {problem}", slug="image-prompt-truncated")
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


def images_in_a_row(config: Any) -> int | None:
    """How many pictures of a row the engine takes: its limit for a prompt, less those that zooming adds.

    None: any number, or a limit that is not written out. An agent of the user's own may never zoom.
    """
    limits = (config.actor_rollout_ref.rollout.engine_kwargs.vllm or {}).get("limit_mm_per_prompt")
    limit = limits.get("image") if isinstance(limits, Mapping) else None
    limit = limit.get("count") if isinstance(limit, Mapping) else limit
    if not isinstance(limit, int):
        return None
    return limit - (config.mmqa.agent.max_turns - 1 if config.mmqa.agent_class == STOCK_AGENT else 0)


def write_rows(run: RunDir, config: Any, report: Callable[[str], None] = lambda line: None) -> dict[str, int]:
    """Build both splits of a run and write them below ``data/``; returns the row counts."""
    settings = config.mmqa
    store = ImageStore(run.images, settings.max_pixels)
    room = prompt_room(config)
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
            most_images=images_in_a_row(config),
            room=room,
        )
        write_jsonl(run.rows(split), rows)
        counts[split] = len(rows)
    report(f"rows: {counts['train']} to train on, {counts['val']} held out; pictures in {run.images}")
    return counts


def follow_move(run: RunDir) -> int:
    """Point the rows of a run directory that was moved at its image store as it lies now; returns how many changed.

    Raises ``InputError`` if a picture did not come along.
    """
    changed = 0
    for split in ("train", "val"):
        rows = read_jsonl(run.rows(split))
        moved = 0
        for row in rows:
            before = row["images"]
            row["images"] = [_followed(run, reference) for reference in before]
            moved += row["images"] != before
        if moved:
            write_jsonl(run.rows(split), rows)
        changed += moved
    return changed


def _followed(run: RunDir, reference: str) -> str:
    path = Path(reference.removeprefix("file://"))
    if not reference.startswith("file://") or path.parent == run.images.resolve():
        return reference
    here = run.images.resolve() / path.name
    if not here.exists():
        raise InputError(
            f"{run.root}: the picture {path.name} of its rows is not in {run.images}; move the whole folder"
        )
    return f"file://{here}"
