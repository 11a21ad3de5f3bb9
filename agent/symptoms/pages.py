"""The site's symptom pages and the catalogue as data for the page that reads a pasted log.

python -m agent.symptoms.pages            write docs/s/<slug>.md and docs/assets/catalogue.json
python -m agent.symptoms.pages --check    exit 1 if one of them is out of date
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from agent.symptoms.clean import ANYWHERE, PREFIXES, SUFFIX
from agent.symptoms.entry import GOING_ON, GROUPS, Cause, Entry, Signature, load

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
EFFECT = {
    "crash": "stops the run",
    "hang": "waits for ever",
    "silent": "goes on, with wrong results",
    "slow": "costs time",
    "noise": "harmless",
}
EVIDENCE = {
    "measured": "Measured",
    "source": "From the source",
    "maintainer": "From the maintainers",
    "report": "Reported",
}
_MARKUP = re.compile(r"[*\[\]|<>]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_SHELL = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:[a-z][a-z0-9_-]*)(?: |$)(?!=)")


def _code(text: str) -> str:
    """Text as inline code, whatever backticks it holds."""
    fence = "``" if "`" in text else "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _plain(text: str) -> str:
    """Text for a line of Markdown: nothing in it is markup but inline code."""
    parts = text.split("`")
    return "`".join(part if index % 2 else _MARKUP.sub(r"\\\g<0>", part) for index, part in enumerate(parts))


def _block(language: str, text: str, indent: str = "") -> list[str]:
    lines = [f"```{language}", *text.rstrip().splitlines(), "```"]
    return [indent + line if line else "" for line in lines]


def cause_lines(cause: Cause) -> list[str]:
    """One cause as a list item with its change below it."""
    tied = f" ({cause.package} {_code(cause.versions)})" if cause.package and cause.versions else ""
    lines = [f"-   **If** {_plain(cause.when)}{tied}: {_plain(cause.fix)}", ""]
    if cause.condition:
        lines += [f"    It needs: {_plain(cause.condition)}.", ""]
    if cause.command:
        language = "sh" if _SHELL.match(cause.command) and not cause.command.startswith("await ") else "text"
        lines += [*_block(language, cause.command, "    "), ""]
    if cause.config:
        lines += [*_block("yaml", cause.config, "    "), ""]
    kind, _, detail = cause.evidence.partition(": ")
    return [*lines, f"    <small>{EVIDENCE[kind]}: {_plain(detail)}.</small>", ""]


def _known_in(signature: Signature) -> str:
    spans: dict[str, list[str]] = {}
    for origin in signature.origins:
        spans.setdefault(origin.package, []).extend(origin.ends)
    parts = []
    for package, ends in spans.items():
        low, high = ends[0], ends[-1]
        shown = low if low == high else f"{low} to {high}"
        parts.append({"libc": "the operating system", "python": "Python"}.get(package, f"{package} {shown}"))
    return f" ({', '.join(parts)})" if parts else ""


def page_text(entry: Entry) -> str:
    """The Markdown page of an entry."""
    front = {
        "title": entry.title,
        "description": " ".join(f"{entry.slug}: {GROUPS[entry.group]}. {'; '.join(entry.aliases)}".split())[:300],
        "tags": [GROUPS[entry.group], entry.severity, entry.phase],
    }
    lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---", ""]
    lines += ["<!-- Written by python -m agent.symptoms.pages from agent/symptoms/catalogue. -->", ""]
    lines += [f"# {_plain(entry.title)}", ""]
    lines += [
        f"`{entry.slug}` · {entry.severity}: {EFFECT[entry.severity]} · {_plain(entry.component)} · {entry.phase}",
        "",
    ]
    if entry.consequence:
        lines += ['!!! note "A consequence"', "    The cause stands before this line.", ""]
    for heading, text in entry.sections().items():
        lines += [f"## {heading}", "", text, ""]
        if heading == "What you see":
            lines += _signs(entry)
        if heading == "Fix now":
            lines += [line for cause in entry.causes for line in cause_lines(cause)]
    lines += ["## What is lost", "", _plain(entry.lost), ""]
    lines += [f"Safe to [resume](../howto/resuming.md): {GOING_ON[entry.resume_safe]}", ""]
    if entry.tell_apart:
        lines += ["## Not to be confused with", ""]
        lines += [f"- [{slug}]({slug}.md): {_plain(how)}" for slug, how in entry.tell_apart.items()]
        lines.append("")
    if entry.config_keys:
        lines += ["## Settings named here", "", ", ".join(_code(key) for key in entry.config_keys), ""]
    if entry.aliases:
        lines += ["## Also searched as", "", "; ".join(_plain(alias) for alias in entry.aliases), ""]
    if entry.sources:
        lines += ["## Sources", "", *(f"- <{source}>" for source in entry.sources)]
    return "\n".join(lines).rstrip() + "\n"


def _signs(entry: Entry) -> list[str]:
    lines = []
    if entry.signatures:
        lines += ["In the log:", ""]
        lines += [f"- {_code(one.needs.strip())}{_known_in(one)}" for one in entry.signatures]
        lines.append("")
    if entry.observable:
        lines += [f"In metrics, configuration or data: {_plain(entry.observable)}", ""]
    return lines


def _signature(one: Signature) -> dict[str, Any]:
    fields = {"needs": one.needs, "regex": one.regex, "role": one.role, "min_count": one.min_count}
    return fields | {"cleared_by": one.cleared_by, "writer": one.writer}


def catalogue_json() -> str:
    """The catalogue as the browser needs it: signatures, what to do, and how to clean a line."""
    entries = [
        {
            "slug": entry.slug,
            "title": entry.title,
            "severity": entry.severity,
            "group": entry.group,
            "consequence": entry.consequence,
            "one_rollout": entry.one_rollout,
            "lost": entry.lost,
            "signatures": [_signature(one) for one in entry.signatures],
            "causes": [
                {
                    "when": cause.when,
                    "fix": cause.fix,
                    "package": cause.package,
                    "versions": cause.versions,
                    "command": cause.command,
                    "config": cause.config,
                }
                for cause in entry.causes
            ],
        }
        for entry in load().values()
    ]
    data = {"clean": {"anywhere": ANYWHERE, "prefixes": PREFIXES, "suffix": SUFFIX}, "entries": entries}
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def files() -> dict[Path, str]:
    """Every generated file and its text."""
    pages = {DOCS / "s" / f"{entry.slug}.md": page_text(entry) for entry in load().values()}
    return pages | {DOCS / "assets" / "catalogue.json": catalogue_json()}


def main(check: bool) -> int:
    """Write or check all files; the exit code."""
    wanted = files()
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    extra = [path for path in (DOCS / "s").glob("*.md") if path not in wanted and path.name != "index.md"]
    if not check:
        for path in stale:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[path], encoding="utf-8")
        for path in extra:
            path.unlink()
    for path in [*stale, *extra]:
        print(f"{'out of date' if check else 'written'}: {path.relative_to(ROOT)}")
    if check and (stale or extra):
        print("run: python -m agent.symptoms.pages")
    return int(check and bool(stale or extra))


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
