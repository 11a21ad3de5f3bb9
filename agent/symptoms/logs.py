"""What ``mmqa diagnose`` reads: one log, standard input, or all logs of a run, each as a stream of UTF-8 bytes."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from agent.errors import InputError

HEAD = 1 << 16
_PACKED = {b"\x1f\x8b": "gunzip -c", b"BZh": "bunzip2 -c", b"\xfd7zXZ": "xz -dc", b"\x28\xb5\x2f\xfd": "zstd -dc"}
_ORDER = {"gateway.log": 0, "controller.log": 1, "trainer.log": 2}
_RUN_FILES = ("status.json", "metrics.jsonl", "attempts")
SAMPLES = "samples.jsonl"


class Readable(Protocol):
    """The one method of a binary stream that is used here."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Source:
    """One log. ``name`` is shown; ``attempt`` is 0 for a log that is not part of a run."""

    name: str
    path: Path
    attempt: int = 0


class _Log:
    """A stream whose head was looked at, and that may have to be turned into UTF-8."""

    def __init__(self, head: bytes, rest: BinaryIO, encoding: str | None) -> None:
        self._head, self._rest = head, rest
        self._decoder = codecs.getincrementaldecoder(encoding)("replace") if encoding else None

    def read(self, size: int, /) -> bytes:
        data, self._head = (self._head, b"") if self._head else (self._rest.read(size), b"")
        if self._decoder is None:
            return data
        out = self._decoder.decode(data, final=not data).encode("utf-8", "replace")
        return out if out or not data else self.read(size)


class _RolloutErrors:
    """``samples.jsonl`` as a log of one attempt: each rollout's error on the line of its row, and nothing else."""

    def __init__(self, stream: BinaryIO, attempt: int) -> None:
        self._stream, self._attempt = stream, attempt

    def read(self, size: int, /) -> bytes:
        lines = self._stream.readlines(size)
        return b"".join(_error_of(line, self._attempt) + b"\n" for line in lines)


def _error_of(line: bytes, attempt: int) -> bytes:
    if b'"error"' not in line:
        return b""
    try:
        row = json.loads(line)
        error = row.get("error") if row.get("attempt", attempt) == attempt else None
    except (ValueError, AttributeError):
        return b""
    return str(error or "").replace("\n", " ").encode()


def encoding_of(head: bytes, name: str) -> str | None:
    """``None`` for UTF-8 and its kin, a codec's name for UTF-16. Raises ``InputError`` for what is no text."""
    for magic, command in _PACKED.items():
        if head.startswith(magic):
            raise InputError(f"{name}: this file is compressed; unpack it: {command} {name} | mmqa diagnose -")
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros, even, odd = head.count(0), head[::2].count(0), head[1::2].count(0)
    if zeros > len(head) * 0.3 and min(even, odd) * 10 <= max(even, odd):  # every other byte, as in Latin letters
        return "utf-16-le" if odd > even else "utf-16-be"
    controls = sum(head.count(code) for code in (*range(1, 8), *range(14, 27), *range(28, 32), 127))
    if zeros + controls > len(head) * 0.02:
        raise InputError(f"{name}: this is a binary file, not a log; give the text that the run printed")
    return None


@contextmanager
def open_log(source: Source) -> Iterator[Readable]:
    """The log's bytes as UTF-8. Raises ``InputError`` if it cannot be read, is empty or is no text."""
    if str(source.path) == "-" and sys.stdin is None:
        raise InputError("standard input is closed; give a log, a run directory, or a log through a pipe")
    try:
        stream = sys.stdin.buffer if str(source.path) == "-" else source.path.open("rb")
    except OSError as error:
        raise InputError(
            f"{source.name}: {error.strerror}; give a log, a run directory or - for standard input"
        ) from None
    try:
        if source.path.name == SAMPLES:
            yield _RolloutErrors(stream, source.attempt)
            return
        head = stream.read(HEAD)
        if not head and not source.attempt:
            where = "standard input" if str(source.path) == "-" else source.name
            raise InputError(f"{where} is empty: there is nothing to diagnose; give the log of the process that failed")
        yield _Log(head, stream, encoding_of(head, source.name) if head else None)
    finally:
        if stream is not sys.stdin.buffer:
            stream.close()


def is_run(path: Path) -> bool:
    """Whether the directory was made by ``mmqa train``."""
    return any((path / name).exists() for name in _RUN_FILES)


def sources_of(target: str) -> tuple[list[Source], Path | None]:
    """The logs behind a command line argument, oldest attempt first, and the run's directory if it is one.

    Raises ``InputError`` for a path that is neither a file nor a run.
    """
    if target == "-":
        return [Source("standard input", Path("-"))], None
    path = Path(target)
    if not path.exists():
        raise InputError(f"{target}: no such file or directory; give a log, a run directory or - for standard input")
    if not path.is_dir():
        return [Source(target, path)], None
    if path.parent.name == "attempts" and is_run(path.parent.parent):
        return _logs_in(path, path.parent.parent, _number(path)), None
    if not is_run(path):
        logs = sorted(file.name for file in path.glob("*.log"))
        hint = f"; did you mean {target.rstrip('/')}/{logs[0]}?" if logs else ""
        raise InputError(f"{target}: no run directory (it has none of {', '.join(_RUN_FILES)}){hint}")
    folders = (
        [one for one in (path / "attempts").glob("*") if one.name.isdigit()] if (path / "attempts").is_dir() else []
    )
    sources = [source for one in sorted(folders, key=_number) for source in _logs_in(one, path, _number(one))]
    last = max((_number(one) for one in folders), default=1)
    if (path / SAMPLES).is_file():
        sources.append(Source(SAMPLES, path / SAMPLES, last))
    return sources, path


def _number(folder: Path) -> int:
    real = Path(os.path.realpath(folder))
    return int(real.name) if real.name.isdigit() else 1


def _logs_in(folder: Path, root: Path, attempt: int) -> list[Source]:
    files = sorted(folder.glob("*.log"), key=lambda file: (_ORDER.get(file.name, 3), file.name))
    return [Source(str(file.relative_to(root)), file, attempt) for file in files]
