"""The run directory: one place that knows its layout.

runs/<name>/
  config.yaml versions.json status.json metrics.jsonl samples.jsonl report.html
  data/{train,val}.jsonl   images/<digest>.png   checkpoints/global_step_<k>/
  attempts/<n>/{gateway,controller,trainer}.log, progress.jsonl, image_proof.json;  attempts/latest -> <n>
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STEP_METRICS = "metrics.json"  # in a checkpoint's folder: its step's line of metrics.jsonl
STATES = ("starting", "rollout", "training", "saving", "finished", "failed", "stopped")


class RunHeld(RuntimeError):
    """Another process supervises the run."""


@dataclass(frozen=True)
class RunDir:
    """Paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def status(self) -> Path:
        return self.root / "status.json"

    @property
    def versions(self) -> Path:
        return self.root / "versions.json"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.root / "samples.jsonl"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    def rows(self, split: str) -> Path:
        return self.root / "data" / f"{split}.jsonl"

    def attempt(self, number: int) -> Path:
        return self.root / "attempts" / str(number)

    def attempts(self) -> list[int]:
        """Numbers of the attempts made so far, ascending."""
        folder = self.root / "attempts"
        return sorted(int(one.name) for one in folder.iterdir() if one.name.isdigit()) if folder.is_dir() else []

    def new_attempt(self) -> int:
        """Make the next attempt's folder and point ``attempts/latest`` at it."""
        number = (self.attempts() or [0])[-1] + 1
        self.attempt(number).mkdir(parents=True)
        link = self.root / "attempts" / ".latest"
        link.unlink(missing_ok=True)
        link.symlink_to(str(number))
        os.replace(link, self.root / "attempts" / "latest")
        return number

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the run for one supervisor; ``RunHeld`` if another process (its id is the message) holds it."""
        with (self.root / ".lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise RunHeld(file.read().strip()) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def exists(self) -> bool:
        """Whether a run was begun here."""
        return self.status.exists() or self.config.exists() or bool(self.attempts())


def stop_file(attempt: Path) -> Path:
    """Where the supervisor asks the trainer to stop after the step that it is making."""
    return attempt / "stop"


def write_text(path: Path, text: str, *, lasting: bool = True) -> None:
    """Replace ``path`` whole: a reader sees the old or the new text, never half of one.

    ``lasting``: also after the machine has lost its power (fsync).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(scratch, 0o644)
        os.replace(scratch, path)
    except OSError:
        os.unlink(scratch)
        raise


def write_json(path: Path, value: Any, *, lasting: bool = True) -> None:
    """``write_text`` of an indented JSON value."""
    write_text(path, json.dumps(value, indent=1) + "\n", lasting=lasting)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no file, or none that can be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_jsonl(path: Path, rows: Iterable[Any]) -> None:
    """``write_text`` of one object a line."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def append_jsonl(path: Path, value: Any) -> None:
    """Append one object as one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """All objects of a JSON-lines file (none if it does not exist); a line cut short, in a letter even, is left out."""
    return [*json_lines(path.read_bytes())] if path.exists() else []


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects among lines of JSON. Bytes, since ``str.splitlines`` would also cut at U+2028 inside a text."""
    for line in data.split(b"\n"):
        try:
            value = json.loads(line.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value
