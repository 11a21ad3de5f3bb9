"""``mmqa report``."""

from __future__ import annotations

from typing import Annotated

import typer

from agent.errors import RunFailed


def register(app: typer.Typer) -> None:
    """Add this part's commands to ``mmqa``."""
    app.command()(report)


def report(run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")]) -> None:
    """Write report.html into a run directory: curves, what rose, and rollouts with their pictures."""
    from agent.report.html import render
    from agent.training.checkpoints import open_run
    from agent.training.rundir import write_text

    found = open_run(run)
    text = render(found)
    try:
        write_text(found.report, text)
    except OSError as error:
        raise RunFailed(f"{found.report}: {error.strerror}; the report could not be written") from None
    typer.echo(str(found.report))
