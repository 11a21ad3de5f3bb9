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
TRACE_LINES = 400

_TRACE = b"Traceback (most recent call last)"
_IN_TRACE = (" ", "\t", "Traceback", "\u2502", "\u256d", "\u2570")  # the last three: the box that rich draws around one
_GROUP_LINE = re.compile(r"^ *\| ?")  # before each line of an exception group
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


def _finder(literals: list[bytes]) -> Callable[[bytes], Iterable[tuple[int, int, int]]]:
    """A function that yields (literal's number, offset, end) for every literal in a block, line by line."""
    try:
        import ahocorasick_rs
    except ImportError:  # no wheel for this platform: the same answer, many times slower

        def each(block: bytes) -> Iterator[tuple[int, int, int]]:
            for number, literal in enumerate(literals):
                at = block.find(literal)
                while at >= 0:
                    yield number, at, at + len(literal)
                    at = block.find(literal, at + 1)

        return lambda block: sorted(each(block), key=lambda pair: pair[1])
    automaton = ahocorasick_rs.BytesAhoCorasick(literals, implementation=ahocorasick_rs.Implementation.DFA)
    return lambda block: automaton.find_matches_as_indexes(block, overlapping=True)


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


def _bounds(block: bytes, at: int) -> tuple[int, int]:
    """Start and end of the line around ``at``, cut to ``WINDOW`` on both sides."""
    start = block.rfind(b"\n", max(0, at - WINDOW), at) + 1
    end = block.find(b"\n", at, at + WINDOW)
    return start or max(0, at - WINDOW), min(len(block), at + WINDOW) if end < 0 else end


class _Watch:
    """One signature while a log is read: most lines are told apart in the raw bytes, without cleaning them."""

    def __init__(self, entry: Entry, signature: Signature) -> None:
        self.entry, self.signature = entry, signature
        self.found: Match | None = None
        anchored = signature.regex and re.search(r"(?<!\\)\$|(?<![\\\[])\^", signature.regex)
        self._raw = re.compile(signature.regex.encode()) if signature.regex and not anchored else None
        self._cleaned = bool(anchored or signature.writer)
        self.quick = self._raw is not None and (signature.regex or "").startswith(signature.needs)
        self.clears = signature.cleared_by is not None
        self._clearing = re.compile(signature.cleared_by.encode()) if signature.cleared_by else None

    def matches(self, block: bytes, start: int, end: int) -> bool:
        """Whether the line carries the signature; the literal is known to be in it."""
        if self._cleaned:
            raw = block[start:end].decode("utf-8", "replace")
            return self.signature.matches(clean(raw), writer(raw))
        return self._raw is None or self._raw.search(block, start, end) is not None

    def cleared(self, block: bytes, start: int, end: int) -> bool:
        """Whether the line takes back what was found."""
        return self._clearing is not None and self._clearing.search(block, start, end) is not None


def _quick(watches: list[_Watch]) -> re.Pattern[bytes] | None:
    """One expression for all signatures of a literal if each begins with it: most lines of a log end here."""
    parts = [watch.signature.regex for watch in watches if watch.quick]
    return re.compile("|".join(f"(?:{part})" for part in parts).encode()) if len(parts) == len(watches) > 0 else None


def _time_before(block: bytes, at: int) -> str | None:
    """The last time written at or before a line, within the last lines of this block."""
    end = block.find(b"\n", at)
    recent = block[max(0, at - 16384) : len(block) if end < 0 else end].decode("utf-8", "replace")
    return next((time for line in reversed(recent.split("\n")) if (time := month_to_second(line))), None)


class _Trace:
    """Follows the first traceback of a log, through the lines of other processes, to its last line.

    What an unknown logger puts before "Traceback" it puts before the other lines too. Of an exception group, whose own
    last line says nothing, it is the first exception inside.
    """

    def __init__(self) -> None:
        self.last: str | None = None
        self._writer: str | None = None
        self._left = TRACE_LINES
        self._before = ""
        self._group = False

    def feed(self, text: str) -> bool:
        """Take whole lines, the first time from the traceback's own; True when the last line is known."""
        for raw in text.split("\n"):
            who = writer(raw)
            if self._writer is None:
                self._writer = who
                self._before, found, _ = clean(raw).partition("Traceback")
                self._group = self._before.endswith("+ Exception Group ")
                if self._group or not found:
                    self._before = ""
                continue
            if who != self._writer:
                continue
            self._left -= 1
            line = clean(raw).removeprefix(self._before)
            if self._group:
                line = "" if line.lstrip().startswith("+-") else _GROUP_LINE.sub("", line)
            if line and not line.startswith(_IN_TRACE):
                self.last = line[:500]
                if not (self._group and "sub-exception" in line):
                    return True
            if self._left <= 0:
                return True
        return False


class _Scanner:
    """The state of one scan; ``block`` is called for each piece of the log in turn."""

    def __init__(self, entries: dict[str, Entry]) -> None:
        watches: dict[bytes, list[_Watch]] = {}
        for entry in entries.values():
            for signature in entry.signatures:
                watches.setdefault(signature.needs.encode(), []).append(_Watch(entry, signature))
        self.literals = list(dict.fromkeys([_TRACE, *_VERSION_LITERALS, *watches]))
        self.watches = [watches.get(literal, []) for literal in self.literals]
        self.quick = [_quick(members) for members in self.watches]
        self.clearing = [[watch for watch in members if watch.clears] for members in self.watches]
        self.out = Scan()
        self._find = _finder(self.literals)
        self._trace: _Trace | None = None
        self._newlines = self._counted = self._passed = 0

    def block(self, block: bytes, ends: bool) -> None:
        """Look at one piece; ``ends`` tells whether it ends where a line does."""
        self._counted = self._passed = 0
        looked_at: dict[int, int] = {}  # start of the line in which each literal was found last
        if self._trace and self.out.traceback is None:
            self._follow(block, 0)
        for number, at, _ in self._find(block):
            quick = self.quick[number]
            if quick and not (quick.match(block, at, at + WINDOW) or self._may_clear(number)):
                continue
            literal, watches = self.literals[number], self.watches[number]
            if literal == _TRACE:
                if self._trace is None:
                    self._trace, self.out.traceback_line = _Trace(), self._line(block, at)
                    self._follow(block, _bounds(block, at)[0])
            elif literal in _VERSION_LITERALS:
                self._version(_VERSION_LITERALS[literal], block[at + len(literal) : at + len(literal) + 40])
            if watches:
                start, end = _bounds(block, at)
                if looked_at.get(number) != start:
                    looked_at[number] = start
                    for watch in watches:
                        self._look(watch, block, at, start, end)
        self._newlines += block.count(b"\n")
        self.out.size += len(block)
        self.out.lines = self._newlines + (0 if ends else 1)

    def _may_clear(self, number: int) -> bool:
        return any(watch.found for watch in self.clearing[number])

    def _look(self, watch: _Watch, block: bytes, at: int, start: int, end: int) -> None:
        known = watch.found
        if not watch.matches(block, start, end):
            if known and watch.cleared(block, start, end):
                watch.found = None
        elif known:
            # a piece of a long line begins with the end of the piece before it
            known.count += start > 0 or self._line(block, at) > known.line
        else:
            raw = block[start:end].decode("utf-8", "replace")
            text = clean(raw)
            if watch.signature.matches(text, writer(raw)):
                line = self._line(block, at)
                watch.found = Match(watch.entry, watch.signature, line, text[:500], _time_before(block, at))

    def _line(self, block: bytes, at: int) -> int:
        """The number of the line at an offset. Offsets come in order, so nothing is counted twice."""
        if at > self._counted:
            self._passed += block.count(b"\n", self._counted, at)
            self._counted = at
        return self._newlines + self._passed + 1

    def _version(self, name: str, after: bytes) -> None:
        if version := _VERSION.match(after.decode("utf-8", "replace")):
            self.out.versions.setdefault(name, version[0].rstrip("."))

    def _follow(self, block: bytes, start: int) -> None:
        assert self._trace
        if self._trace.feed(block[start : start + (BLOCK >> 2)].decode("utf-8", "replace")):
            self.out.traceback = self._trace.last

    def done(self) -> Scan:
        """The result, once the log was read to its end."""
        if self._trace and self.out.traceback is None:
            self.out.traceback = self._trace.last
        found = [watch.found for watches in self.watches for watch in watches if watch.found]
        self.out.matches = sorted(found, key=lambda match: match.line)
        return self.out


def scan(stream: Readable, entries: dict[str, Entry]) -> Scan:
    """Read a log (UTF-8 bytes, or anything close to it) to its end."""
    scanner = _Scanner(entries)
    for block, ends in _blocks(stream, overlap=max(map(len, scanner.literals)) + WINDOW):
        scanner.block(block, ends)
    return scanner.done()
