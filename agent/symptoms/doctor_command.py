"""``mmqa doctor``: print what the hazard checks found; nothing on a healthy set-up."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from agent.errors import page
from agent.symptoms.doctor import installed_versions, look_at_machine
from agent.symptoms.doctor_config import read_config
from agent.symptoms.hazards import Finding, check
from agent.symptoms.hazards_facts import dialect_of

_COLOURS = {"crash": "red", "hang": "red", "silent": "yellow", "slow": "yellow", "noise": "blue"}


def register(app: typer.Typer) -> None:
    """Add ``doctor`` to ``mmqa``."""
    app.command()(doctor)


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            help="A config to check too: verl or Agent Lightning YAML (or the Python file that holds it), key=value "
            "overrides or the script with them, NeMo-RL YAML, or a preset of this project."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check versions, machine and config for known hazards. Says nothing if there are none.

    Exit code 1 if a finding would stop the run, else 0. Nothing is imported, started or changed.
    """
    missing: list[str] = []
    tree: dict[str, Any] = read_config(config, missing) if config else {}
    versions = installed_versions()
    findings = check(tree, versions, look_at_machine(tree))
    findings += [
        Finding(
            f"{name}, which {config} builds on, was not found and not read",
            "what it sets was not checked",
            "put it beside this file, or run doctor where it lies",
            "",
            "noise",
        )
        for name in missing
    ]
    if as_json:
        report = {
            "findings": [asdict(one) | {"page": f"/s/{one.slug}/" if one.slug else None} for one in findings],
            "versions": versions,
            "dialect": dialect_of(tree),
        }
        typer.echo(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        for line in render(findings):
            typer.echo(line)
    if any(one.severity == "crash" for one in findings):
        raise typer.Exit(1)


def render(findings: list[Finding]) -> list[str]:
    """The findings as lines for a terminal."""
    lines = []
    for one in findings:
        lines.append(f"{typer.style(one.severity.ljust(7), fg=_COLOURS[one.severity], bold=True)} {one.what}")
        lines.append(f"  why     {one.why}")
        lines.append(f"  change  {one.change}")
        if one.slug:
            lines.append(f"  page    {page(one.slug)}")
        lines.append("")
    if findings:
        counts = Counter(one.severity for one in findings)
        lines.append("found: " + ", ".join(f"{count} {severity}" for severity, count in counts.items()))
    return lines
