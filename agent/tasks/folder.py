"""Own data: a folder with pictures and one ``train.jsonl`` and ``val.jsonl``.

Each line is one question, its pictures relative to the folder:

    {"id": "42", "question": "How many sheep?", "images": ["photos/42.jpg"], "answer": "3"}

``id`` may be left out; a line may carry "allowed" (the closed set of answers, a list of texts). Set
``mmqa.task=folder mmqa.data_root=FOLDER``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from agent.errors import InputError
from agent.images import ImageError, inside
from agent.tasks.base import Sample

NAME = "folder"
CHANCE = 0.0  # unknown
ANSWERS: tuple[str, ...] = ()
SPLITS = ("train", "val")
data_root: Path | None = None  # set by the caller from mmqa.data_root


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON value")


def check_root(root: Path | None, splits: Sequence[str] = SPLITS) -> Path:
    """The data root; ``InputError`` if it is not given, is no folder, or a split's file is not in it."""
    if root is None:
        raise InputError("the folder task needs mmqa.data_root=FOLDER (with train.jsonl and val.jsonl in it)")
    if not root.is_dir():
        raise InputError(f"mmqa.data_root={root}: no such folder")
    for split in splits:
        if not (file := root / f"{split}.jsonl").is_file():
            raise InputError(f"{file}: not found; the folder task reads train.jsonl and val.jsonl from mmqa.data_root")
    return root


def parse(line: str, where: str) -> dict[str, Any]:
    """One line to a row with "question", "images", "answer"; ``InputError`` names the line and the key."""
    try:
        row = json.loads(line, parse_constant=_no_number)
        json.dumps(row, ensure_ascii=False).encode()  # half a letter ("\\ud800") can be neither written nor opened
    except json.JSONDecodeError as error:
        raise InputError(f"{where}: not valid JSON ({error.msg} at column {error.colno})") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start].encode("unicode_escape").decode()
        raise InputError(f"{where}: {half} is half a letter; write the line in UTF-8") from None
    except RecursionError:
        raise InputError(f"{where}: lists or objects nested too deeply") from None
    except ValueError as error:  # NaN, or a number of thousands of digits
        raise InputError(f"{where}: not valid JSON ({str(error).partition(';')[0]})") from None
    if not isinstance(row, dict):
        raise InputError(f"{where}: expected an object with question, images and answer")
    for key in ("question", "answer"):
        value = row.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) != math.inf:  # 1e999
            row[key] = str(value)
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
    root = check_root(None if data_root is None else Path(str(data_root)), [split])
    file = root / f"{split}.jsonl"
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
        where = f"{file.name} line {position}"
        row = parse(line, where)
        number += 1
        try:
            images = tuple(str(inside(root, one)) for one in row["images"])
        except ImageError as error:
            raise InputError(f"{where}: {error}") from None
        yield Sample(
            str(row.get("id", f"{split}-{position}")),
            row["question"],
            row["answer"],
            images,
            {"allowed": row["allowed"]} if row["allowed"] else {},
        )
