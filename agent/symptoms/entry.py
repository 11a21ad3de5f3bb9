"""One symptom: the schema of ``catalogue/<slug>.md`` and the reader that checks it.

A file is YAML front matter (facts that commands use) and a body of five short sections (for a person). Anything that
does not fit the schema raises ``EntryError`` with the file's name, so a broken entry never reaches a user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

CATALOGUE = Path(__file__).parent / "catalogue"
SAMPLES = Path(__file__).parent / "samples"

SEVERITIES = ("crash", "hang", "silent", "slow", "noise")
PHASES = ("install", "start", "rollout", "update", "save", "resume", "export")
GROUPS = {
    "start": "Does not start",
    "crash": "Crashed",
    "hang": "Hangs",
    "learn": "Runs but does not learn",
    "slow": "Slow",
    "resume": "Resume and export",
}
# By ``resume_safe``; backticks are code.
GOING_ON = {
    True: "yes, `mmqa train --run-dir RUN --resume auto`, with changed settings behind it as `key=value`.",
    False: "no, the weights were trained wrongly; `--resume STEP` takes a checkpoint made before, if there is one.",
    None: "depends on the cause.",
}
LOGS = ("trainer", "gateway", "controller", "install", "terminal")
ROLES = ("cause", "note")
SECTIONS = ("What you see", "Fix now", "Check that it is gone", "Why", "If that did not help")
EVIDENCE = ("measured", "source", "maintainer", "report")

# Python's re and JavaScript's RegExp read this subset alike (Python with re.ASCII): no look-behind, no named groups,
# no inline flags, no atomic or possessive parts, no \A \Z \b \s (JavaScript's \s knows more spaces).
_NOT_PORTABLE = re.compile(r"\(\?(?!:|=|!)|\\[AZzbBGhHsSpPkuUxN0-9]|[*+?}]\+|\[\[|&&|\[\^?\]")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


class EntryError(ValueError):
    """A catalogue file breaks the schema; the message names the file and the field."""


@dataclass(frozen=True)
class Origin:
    """Where a text comes from: ``text`` stands in ``file`` of every release of ``package`` that ``versions`` covers.

    ``versions`` is ``">=low,<=high"`` with two releases that exist: both are checked against the released wheels.
    """

    package: str
    file: str
    versions: str
    text: str

    @property
    def ends(self) -> tuple[str, str]:
        """The low and the high release of the range."""
        bounds = {spec.operator: spec.version for spec in SpecifierSet(self.versions)}
        if "==" in bounds:
            return bounds["=="], bounds["=="]
        return bounds[">="], bounds["<="]


@dataclass(frozen=True)
class Signature:
    """One text by which a log line is known: a literal, or a regular expression with a literal it cannot do without.

    ``role`` is ``note`` for a line that also stands in healthy logs; from ``min_count`` such lines on it is a cause
    (with a ``min_count`` of 1 it stays a note). A later line that matches ``cleared_by`` takes back those before it.
    ``writer``: what the process prefixes of the line must match, "(EngineCore_DP0 pid=7)" for example.
    """

    needs: str
    regex: str | None
    origins: tuple[Origin, ...]
    logs: tuple[str, ...]
    role: str
    min_count: int
    cleared_by: str | None = None
    writer: str | None = None

    @cached_property
    def _clearing(self) -> re.Pattern[str] | None:
        return re.compile(self.cleared_by, re.ASCII) if self.cleared_by else None

    def cleared(self, line: str) -> bool:
        """Whether the line says that what the signature found is over."""
        return self._clearing is not None and self._clearing.search(line) is not None

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.regex or re.escape(self.needs), re.ASCII)

    def matches(self, line: str, writer: str = "") -> bool:
        """Whether the cleaned log line, which ``writer`` wrote, carries this signature."""
        if self.writer is not None and not re.search(self.writer, writer, re.ASCII):
            return False
        return self.needs in line and (self.regex is None or self._compiled.search(line) is not None)


@dataclass(frozen=True)
class Cause:
    """One reason for a symptom, the releases and settings it needs, and the change that ends it."""

    when: str
    fix: str
    evidence: str
    package: str | None = None
    versions: str | None = None
    condition: str | None = None
    command: str | None = None
    config: str | None = None

    def applies(self, versions: dict[str, str]) -> bool | None:
        """True or False if the package's version is known (``None`` if not, or if the cause is not tied to one)."""
        if not self.package or not self.versions or self.package not in versions:
            return None
        return SpecifierSet(self.versions).contains(versions[self.package], prereleases=True)


@dataclass(frozen=True)
class Entry:
    """One symptom of the catalogue. ``group`` is what a person sees (``GROUPS``), ``severity`` what it does.

    ``consequence``: something else came before it. ``one_rollout``: it ends a rollout, and the run goes on.
    """

    slug: str
    title: str
    severity: str
    group: str
    component: str
    phase: str
    consequence: bool
    one_rollout: bool
    signatures: tuple[Signature, ...]
    observable: str | None
    causes: tuple[Cause, ...]
    lost: str
    resume_safe: bool | None
    aliases: tuple[str, ...]
    sources: tuple[str, ...]
    config_keys: tuple[str, ...]
    tell_apart: dict[str, str]
    samples: tuple[str, ...]
    body: str = field(repr=False)

    @property
    def stops_a_run(self) -> bool:
        """Whether it ends a run, or keeps it waiting, by itself."""
        return self.severity in ("crash", "hang") and not self.one_rollout

    def sections(self) -> dict[str, str]:
        """The body's sections by heading, in order."""
        parts = re.split(r"^## (.+)$", self.body, flags=re.MULTILINE)
        return {head.strip(): text.strip() for head, text in zip(parts[1::2], parts[2::2], strict=True)}


def _strings(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(str(item) for item in value or ())


def _one_of(value: Any, allowed: tuple[str, ...] | dict[str, str], what: str) -> str:
    if value not in allowed:
        raise EntryError(f"{what} is {value!r}; one of {', '.join(allowed)}")
    return str(value)


def _known(data: dict[str, Any], allowed: set[str], what: str) -> None:
    if unknown := set(data) - allowed:
        raise EntryError(f"{what}: unknown field {', '.join(sorted(unknown))}")


def _origin(data: dict[str, Any], default_text: str) -> Origin:
    _known(data, {"package", "file", "versions", "text"}, "origin")
    origin = Origin(data["package"], data["file"], str(data["versions"]), data.get("text", default_text))
    try:
        _ = origin.ends
    except (KeyError, InvalidSpecifier):
        raise EntryError(f"origin versions {origin.versions!r}: write >=low,<=high or ==only") from None
    return origin


def _signature(data: dict[str, Any]) -> Signature:
    _known(
        data, {"literal", "regex", "needs", "origin", "in", "role", "min_count", "cleared_by", "writer"}, "signature"
    )
    regex, cleared_by, writer = data.get("regex"), data.get("cleared_by"), data.get("writer")
    needs = data.get("needs") if regex else data.get("literal")
    if not needs or ("literal" in data) == (regex is not None):
        raise EntryError("a signature has either a literal, or a regex with the literal it needs (needs:)")
    for expression in filter(None, (regex, cleared_by, writer)):
        if _NOT_PORTABLE.search(expression):
            raise EntryError(f"regex {expression!r} is outside what Python and JavaScript read alike")
        re.compile(expression, re.ASCII)
    origins = data.get("origin") or []
    origins = [origins] if isinstance(origins, dict) else origins
    return Signature(
        needs=needs,
        regex=regex,
        origins=tuple(_origin(origin, needs) for origin in origins),
        logs=tuple(_one_of(log, LOGS, "in") for log in _strings(data.get("in"))),
        role=_one_of(data.get("role", "cause"), ROLES, "role"),
        min_count=int(data.get("min_count", 1)),
        cleared_by=cleared_by,
        writer=writer,
    )


def _cause(data: dict[str, Any]) -> Cause:
    _known(data, set(Cause.__dataclass_fields__), "cause")
    cause = Cause(**{key: str(value).strip() for key, value in data.items()})
    if cause.versions:
        SpecifierSet(cause.versions)
    if cause.config:
        yaml.safe_load(cause.config)
    _one_of(cause.evidence.split(":")[0], EVIDENCE, "evidence")
    return cause


_FIELDS = set(Entry.__dataclass_fields__) - {"body"}


def parse(text: str, name: str) -> Entry:
    """The entry in a catalogue file's text. ``name`` is the file's stem. Raises ``EntryError``."""
    try:
        _, front, body = text.split("---\n", 2)
        data = yaml.safe_load(front)
        _known(data, _FIELDS, "front matter")
        if data["slug"] != name or not _SLUG.fullmatch(name):
            raise EntryError(f"slug is {data['slug']!r}; it must be the file's name")
        entry = Entry(
            slug=name,
            title=data["title"],
            severity=_one_of(data["severity"], SEVERITIES, "severity"),
            group=_one_of(data["group"], GROUPS, "group"),
            component=data["component"],
            phase=_one_of(data["phase"], PHASES, "phase"),
            consequence=bool(data.get("consequence", False)),
            one_rollout=bool(data.get("one_rollout", False)),
            signatures=tuple(_signature(item) for item in data.get("signatures") or ()),
            observable=data.get("observable"),
            causes=tuple(_cause(item) for item in data["causes"]),
            lost=data["lost"],
            resume_safe=data["resume_safe"],
            aliases=_strings(data.get("aliases")),
            sources=_strings(data.get("sources")),
            config_keys=_strings(data.get("config_keys")),
            tell_apart=dict(data.get("tell_apart") or {}),
            samples=_strings(data.get("samples")),
            body=body.strip() + "\n",
        )
        if not entry.signatures and not entry.observable:
            raise EntryError("an entry needs a signature or an observable")
        if tuple(entry.sections()) != SECTIONS:
            raise EntryError(f"the body's sections are {', '.join(SECTIONS)}, in this order")
    except (EntryError, KeyError, TypeError, ValueError, re.error, yaml.YAMLError) as error:
        raise EntryError(
            f"catalogue/{name}.md: {error!r}" if isinstance(error, KeyError) else f"catalogue/{name}.md: {error}"
        ) from error
    return entry


@lru_cache(maxsize=1)
def load() -> dict[str, Entry]:
    """Every entry of the catalogue by slug, in alphabetical order."""
    return {path.stem: parse(path.read_text(encoding="utf-8"), path.stem) for path in sorted(CATALOGUE.glob("*.md"))}
