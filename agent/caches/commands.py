"""``mmqa probe-engine``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agent.caches import _probe_cases as rules
from agent.caches import probe
from agent.errors import InputError


def register(app: typer.Typer) -> None:
    """Add this part's commands to ``mmqa``."""
    app.command("probe-engine")(probe_engine)


def probe_engine(
    only: Annotated[list[str] | None, typer.Option(help="Try this hazard only; may be given several times.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report, with every step's trace, here.")] = None,
    logs: Annotated[Path | None, typer.Option(help="Keep each engine's log in this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Try every cache hazard on the installed vLLM, each in an engine of its own, with a tiny model.

    Exit code 1 if an engine under cache_safe_rollout()'s settings did not hold where the gate says it does.
    """
    if out is not None:
        if not out.parent.is_dir():
            raise InputError(f"--out: no such folder: {out.parent}")
        if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
            raise InputError(f"--out {out}: not a file that can be written; name one")
    notes = Console(stderr=True)
    report = probe.run(only=tuple(only or ()), report=lambda line: notes.print(line, highlight=False), keep_logs=logs)
    text = json.dumps(report, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
    else:
        Console().print(table(report))
        for line in conclusion(report):
            typer.echo(line)
    if report["verdict"]["safe_settings_passed"] is False:
        raise typer.Exit(1)


def table(report: dict[str, Any]) -> Table:
    """One row per hazard and settings."""
    shown = Table(title=f"vLLM {report['version']} on {report['device']}", title_justify="left")
    for name in ("hazard", "settings", "outcome", "detail"):
        shown.add_column(name, overflow="fold")
    for row in report["cases"]:
        colour = "green" if row["outcome"] in rules.GOOD else "dim" if row["outcome"] == "unsupported" else "red"
        detail = f"same arguments as {row['same_as']}" if "same_as" in row else row.get("detail", "")
        shown.add_row(row["hazard"], row["variant"], f"[{colour}]{row['outcome']}[/{colour}]", detail)
    return shown


def conclusion(report: dict[str, Any]) -> list[str]:
    """The gate's word on this version beside what was seen."""
    verdict = report["verdict"]
    if verdict["default_crashed"] is None:
        return []
    seen = "crashed" if verdict["default_crashed"] else "held"
    said = "affected" if verdict["gate_says_affected"] else "not affected"
    safe = "held" if verdict["safe_settings_passed"] else "did NOT hold"
    return [
        f"cache_safe_rollout() calls this version {said}; with vLLM's defaults it {seen}, with its settings it {safe}."
    ]
