"""Own data: a folder with pictures and one ``train.jsonl`` and ``val.jsonl``.

Each line is one question, its pictures relative to the folder:

    {"id": "42", "question": "How many sheep?", "images": ["photos/42.jpg"], "answer": "3"}

``id`` may be left out; a line may carry "allowed" (the closed set of answers, a list of texts). Set
``mmqa.task=folder mmqa.data_root=FOLDER``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.errors import InputError
from agent.images import inside
from agent.tasks.base import Sample

NAME = "folder"
CHANCE = 0.0  # unknown
ANSWERS: tuple[str, ...] = ()
data_root: Path | None = None  # set by the caller from mmqa.data_root


def parse(line: str, where: str) -> dict[str, Any]:
    """One line to a row with "question", "images", "answer"; ``InputError`` names the line and the key."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object with question, images and answer")
    for key in ("question", "answer"):
        if isinstance(row.get(key), int | float) and not isinstance(row[key], bool):
            row[key] = str(row[key])
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise InputError(f"{where}: key {key!r} must be a text that is not empty")
    images = row.get("images", [row["image"]] if isinstance(row.get("image"), str) else None)
    if not isinstance(images, list) or not images or not all(isinstance(one, str) for one in images):
        raise InputError(f"{where}: key 'images' must be a list of file names, for example [\"photos/42.jpg\"]")
    allowed = row.get("allowed") or []
    if not isinstance(allowed, list):
        raise InputError(f'{where}: key \'allowed\' must be a list of answers, for example ["yes", "no"]')
    return {**row, "images": images, "allowed": [str(one) for one in allowed]}


def samples(split: str, count: int, seed: int) -> Iterator[Sample]:
    """Yield at most ``count`` rows of ``<split>.jsonl`` in the file's order (the trainer shuffles)."""
    if data_root is None:
        raise InputError("the folder task needs mmqa.data_root=FOLDER (with train.jsonl and val.jsonl in it)")
    root = Path(str(data_root))
    file = root / f"{split}.jsonl"
    if not file.is_file():
        raise InputError(f"{file}: not found; the folder task reads train.jsonl and val.jsonl from mmqa.data_root")
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = "not a text in UTF-8" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise InputError(f"{file}: {why}") from None
    number = 0
    for position, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if number >= count:
            return
        row = parse(line, f"{file.name} line {position}")
        number += 1
        yield Sample(
            str(row.get("id", f"{split}-{position}")),
            row["question"],
            row["answer"],
            tuple(str(inside(root, one)) for one in row["images"]),
            {"allowed": row["allowed"]} if row["allowed"] else {},
        )
