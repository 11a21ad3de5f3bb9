"""``mmqa train`` and ``mmqa config``; see agent/cli.py."""

from __future__ import annotations

from typing import Annotated

import typer

Preset = Annotated[str, typer.Option(help="Name of a preset, or the path of a YAML file.")]


def register(app: typer.Typer) -> None:
    """Add this part's commands to ``mmqa``."""
    app.command()(train)


def train(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]")] = None,
    preset: Preset = "cpu",
    run_dir: Annotated[
        str | None, typer.Option(help="Where the run is kept [default: runs/<preset>-<task>-<time>].")
    ] = None,
    task: Annotated[str | None, typer.Option(help="circles, digits or folder (same as mmqa.task=...).")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps (same as trainer.total_training_steps=...).")
    ] = None,
    resume: Annotated[str | None, typer.Option(help="auto: go on with the run in --run-dir; never: refuse to.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Compose and check the configuration, start nothing.")] = False,
) -> None:
    """Train a vision-language model on image questions with GRPO."""
    from agent.training import run

    if dry_run:
        from omegaconf import OmegaConf

        config = run.plan(preset, overrides or (), task=task, steps=steps)
        typer.echo(OmegaConf.to_yaml(config, resolve=False))
        return
    run.train(preset, overrides or (), run_dir=run_dir, task=task, steps=steps, resume=resume)
