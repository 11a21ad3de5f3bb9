"""Commands of this part; see agent/cli.py."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add this part's commands to ``mmqa``."""
