"""``mmqa``: the command line. Each part of the package registers its own commands here.

Exit codes: 0 fine, 1 the run failed, 2 the input was wrong.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from agent.errors import InputError, RunFailed, RunStopped, one_line, page

app = typer.Typer(
    name="mmqa",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train a vision-language model on image questions with GRPO, and find out what is wrong when a run breaks.",
)


@app.callback()
def _root() -> None:
    pass


for _part in ("agent.training.commands", "agent.symptoms.commands", "agent.caches.commands", "agent.report.commands"):
    import_module(_part).register(app)


def main() -> None:
    """Entry point: errors that a user can act on are one line on stderr, without a traceback."""
    try:
        app()
    except (InputError, RunFailed) as error:
        told = one_line(error)
        typer.echo(told if isinstance(error, RunStopped) else f"error: {told}", err=True)
        sys.exit(error.exit_code)
    except SystemExit as end:
        if end.code == InputError.exit_code and sys.argv[1:]:  # typer has said what is wrong with the command line
            typer.echo(f"  -> {page('input-refused')}", err=True)
        raise


if __name__ == "__main__":
    main()
