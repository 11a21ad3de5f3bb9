"""``mmqa report``."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add this part's commands to ``mmqa``."""
    app.command()(report)


def report(run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """Write report.html into a run directory: curves, what rose, and rollouts with their pictures."""
    from agent.report.html import render
    from agent.training.checkpoints import open_run

    found = open_run(run)
    found.report.write_text(render(found), encoding="utf-8")
    typer.echo(str(found.report))
