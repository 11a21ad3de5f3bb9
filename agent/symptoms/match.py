"""Find the catalogue's signatures in a log of any size, reading it once and keeping only what was found.

One scan looks for all literals at once in the raw bytes; only lines that carry one are decoded, cleaned and compared
with the exact signatures. Memory does not grow with the log, nor with the length of a line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from agent.symptoms.clean import clean, month_to_second, writer
from agent.symptoms.entry import Entry, Signature
from agent.symptoms.logs import Readable

BLOCK = 1 << 20  # bytes read at a time
WINDOW = 4096  # bytes of a very long line kept on each side of a literal
ENOUGH = 1000  # matches of one signature after which further candidates are counted without a closer look
TRACE_LINES = 400

_TRACE = b"Traceback (most recent call last)"
# Places where a log names a version: what stands before it, and the distribution.
_VERSION_LITERALS = {
    b"LLM engine (v": "vllm",
    b"vLLM API server version ": "vllm",
    **{
        f"{name}==".encode(): name
        for name in ("vllm", "verl", "agentlightning", "transformers", "ray", "torch", "numpy")
    },
}
_VERSION = re.compile(r"[0-9]+\.[0-9]+[0-9A-Za-z.+]*")


@dataclass
class Match:
    """One signature's first line in a log (``line`` counts from 1) and how many lines carry it."""

    entry: Entry
    signature: Signature
    line: int
    text: str
    time: str | None
    count: int = 1


@dataclass
class Scan:
    """What one log contains."""

    lines: int = 0
    size: int = 0
    matches: list[Match] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    traceback: str | None = None
    traceback_line: int = 0


def _finder(literals: list[bytes]) -> Callable[[bytes], Iterable[tuple[int, int]]]:
    """A function that yields (literal's number, offset) for every literal in a block, in any order."""
    try:
        import ahocorasick_rs
    except ImportError:  # no wheel for this platform: the same answer, several times slower

        def each(block: bytes) -> Iterator[tuple[int, int]]:
            for number, literal in enumerate(literals):
                at = block.find(literal)
                while at >= 0:
                    yield number, at
                    at = block.find(literal, at + 1)

        return each
    automaton = ahocorasick_rs.BytesAhoCorasick(literals, implementation=ahocorasick_rs.Implementation.DFA)
    return lambda block: ((number, at) for number, at, _ in automaton.find_matches_as_indexes(block, overlapping=True))


def _blocks(stream: Readable, overlap: int) -> Iterator[tuple[bytes, bool]]:
    """Blocks that end at a line's end, and whether they do: a line longer than a block comes in overlapping pieces."""
    tail = b""
    while chunk := stream.read(BLOCK):
        data = tail + chunk
        cut = data.rfind(b"\n") + 1
        if cut:
            yield data[:cut], True
            tail = data[cut:]
        elif len(data) > BLOCK:
            yield data, False
            tail = data[-overlap:]
        else:
            tail = data
    if tail:
        yield tail, False


def _line_at(block: bytes, at: int) -> tuple[int, str]:
    """Start of the line around ``at`` and its text (cut to ``WINDOW`` on both sides)."""
    start = block.rfind(b"\n", 0, at) + 1
    end = block.find(b"\n", at)
    end = len(block) if end < 0 else end
    return start, block[max(start, at - WINDOW) : min(end, at + WINDOW)].decode("utf-8", "replace")


def _time_before(block: bytes, at: int) -> str | None:
    """The last time written at or before a line, within the last lines of this block."""
    end = block.find(b"\n", at)
    recent = block[max(0, at - 16384) : len(block) if end < 0 else end].decode("utf-8", "replace")
    return next((time for line in reversed(recent.split("\n")) if (time := month_to_second(line))), None)


class _Trace:
    """Follows the first traceback of a log, through the lines of other processes, to its last line."""

    def __init__(self) -> None:
        self.last: str | None = None
        self._writer: str | None = None
        self._left = TRACE_LINES

    def feed(self, text: str) -> bool:
        """Take whole lines, the first time from the traceback's own; True when the last line is known."""
        for raw in text.split("\n"):
            who = writer(raw)
            if self._writer is None:
                self._writer = who
                continue
            if who != self._writer:
                continue
            self._left -= 1
            line = clean(raw)
            if line and not line.startswith((" ", "\t")) and not line.startswith("Traceback"):
                self.last = line[:500]
                return True
            if self._left <= 0:
                return True
        return False


def scan(stream: Readable, entries: dict[str, Entry]) -> Scan:
    """Read a log (UTF-8 bytes, or anything close to it) to its end."""
    by_literal: dict[bytes, list[tuple[Entry, Signature]]] = {}
    for entry in entries.values():
        for signature in entry.signatures:
            by_literal.setdefault(signature.needs.encode(), []).append((entry, signature))
    literals = list(dict.fromkeys([_TRACE, *_VERSION_LITERALS, *by_literal]))
    find = _finder(literals)
    found: dict[int, Match] = {}
    last_line: dict[int, int] = {}
    trace: _Trace | None = None
    out = Scan()
    newlines = 0
    for block, ends in _blocks(stream, overlap=max(map(len, literals)) + WINDOW):
        if trace and out.traceback is None and trace.feed(block[: BLOCK >> 2].decode("utf-8", "replace")):
            out.traceback = trace.last
        counted, passed = 0, 0
        for number, at in sorted(find(block), key=lambda pair: pair[1]):
            passed += block.count(b"\n", counted, at)
            counted = at
            line = newlines + passed + 1
            literal = literals[number]
            if literal == _TRACE:
                if trace is None:
                    trace, out.traceback_line = _Trace(), line
                    if trace.feed(block[_line_at(block, at)[0] :][: BLOCK >> 2].decode("utf-8", "replace")):
                        out.traceback = trace.last
                continue
            if literal in _VERSION_LITERALS:
                after = block[at + len(literal) : at + len(literal) + 40].decode("utf-8", "replace")
                if version := _VERSION.match(after):
                    out.versions.setdefault(_VERSION_LITERALS[literal], version[0].rstrip("."))
                continue
            text: str | None = None
            for entry, signature in by_literal[literal]:
                key = id(signature)
                if last_line.get(key) == line:
                    continue
                known = found.get(key)
                if known and known.count >= ENOUGH and not signature.cleared_by:
                    known.count += 1
                    last_line[key] = line
                    continue
                if text is None:
                    text = clean(_line_at(block, at)[1])
                if not signature.matches(text):
                    if known and signature.cleared(text):
                        del found[key]
                    continue
                last_line[key] = line
                if known:
                    known.count += 1
                else:
                    found[key] = Match(entry, signature, line, text[:500], _time_before(block, at))
        newlines += block.count(b"\n")
        out.size += len(block)
        out.lines = newlines + (0 if ends else 1)
    if trace and out.traceback is None:
        out.traceback = trace.last
    out.matches = sorted(found.values(), key=lambda match: match.line)
    return out
