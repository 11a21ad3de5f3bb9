"""``mmqa train`` and ``mmqa config``; see agent/cli.py."""

from __future__ import annotations

from typing import Annotated

import typer

Preset = Annotated[str, typer.Option(help="Name of a preset, or the path of a YAML file.")]
TrainPreset = Annotated[
    str | None, typer.Option(help="Name of a preset, or the path of a YAML file (default: cpu, or the run's own).")
]


RunDirOption = Annotated[str | None, typer.Option(help="Where the run is kept (default: runs/<preset>-<task>-<time>).")]
Steps = Annotated[int | None, typer.Option(help="Training steps (same as trainer.total_training_steps=...).")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]")]


def register(app: typer.Typer) -> None:
    """Add this part's commands to ``mmqa``."""
    app.command()(train)
    app.command()(config)
    app.command()(ask)
    app.command("eval")(evaluate)
    app.command()(checkpoints)
    app.command()(export)


def train(
    overrides: Overrides = None,
    preset: TrainPreset = None,
    run_dir: RunDirOption = None,
    task: Annotated[str | None, typer.Option(help="circles, digits or folder (same as mmqa.task=...).")] = None,
    steps: Steps = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on with the run in --run-dir: auto, or a step; never: refuse (default: ask).")
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Compose and check the configuration, start nothing.")] = False,
) -> None:
    """Train a vision-language model on image questions with GRPO."""
    from agent.training import run

    if dry_run:
        typer.echo(run.dry_run(preset, overrides or (), run_dir=run_dir, task=task, steps=steps))
        return
    run.train(preset, overrides or (), run_dir=run_dir, task=task, steps=steps, resume=resume)


def config(
    overrides: Overrides = None,
    preset: Preset = "cpu",
    everything: Annotated[bool, typer.Option("--all", help="The whole composed configuration.")] = False,
    vllm: Annotated[str | None, typer.Option(help="A vLLM version (default: the installed one).")] = None,
) -> None:
    """Print the resolved rollout section of a preset, to copy into another project."""
    from omegaconf import OmegaConf

    from agent.training import config as configs

    if everything:
        composed = configs.compose(preset, overrides or (), vllm_version=vllm)
        typer.echo(OmegaConf.to_yaml(composed, resolve=False))
        return
    typer.echo(configs.rollout_section(preset, overrides or (), vllm))


def ask(
    image: Annotated[str, typer.Argument(help="A picture file.")],
    question: Annotated[str, typer.Argument(help="What to ask about it.")],
    url: Annotated[str, typer.Option(help="Base address of an OpenAI-compatible endpoint, ending in /v1.")],
    model: Annotated[str, typer.Option(help="The model's name at that endpoint.")],
    turns: Annotated[int, typer.Option(help="Model calls at most; from 2 on the model may zoom.", min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask one question about a picture, with the loop that training uses (key in OPENAI_API_KEY)."""
    import json
    import os

    from agent.ask import ask as ask_model
    from agent.loop import AgentSettings

    key = os.environ.get("OPENAI_API_KEY", "")
    asked = ask_model(image, question, url=url, model=model, key=key, settings=AgentSettings(max_turns=turns))
    if as_json:
        typer.echo(json.dumps({"replies": asked.replies, "answer": asked.answer.value, "form": asked.answer.form}))
        return
    for reply in asked.replies:
        typer.echo(reply)
    typer.echo(f"answer: {asked.answer.value!r} ({asked.answer.form})")


def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN_OR_MODEL", help="A run directory, a model's folder or its name.")
    ],
    overrides: Overrides = None,
    step: Annotated[str | None, typer.Option(help="A run's step, or best (default: the newest whole one).")] = None,
    split: Annotated[str, typer.Option(help="val: the held-out questions; train: those of the training.")] = "val",
    blank_images: Annotated[
        bool, typer.Option("--blank-images", help="Every picture white: what guessing gives.")
    ] = False,
    preset: Annotated[str | None, typer.Option(help="For a model: the preset to load it with (default: cpu).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Answer held-out questions with a run's checkpoint or a model, greedily, and say how many are right."""
    import json
    from dataclasses import asdict

    from rich.console import Console

    from agent.training import evaluate as evaluating
    from agent.training.display import Display

    display = Display(0, Console(highlight=False, soft_wrap=True, stderr=True)) if as_json else None
    found = evaluating.evaluate(
        target,
        overrides or (),
        preset=preset,
        step=step,
        split=split,
        blank_images=blank_images,
        display=display,
    )
    if as_json:
        typer.echo(json.dumps(asdict(found)))
        return
    typer.echo(found.line())
    typer.echo(f"samples: {found.folder}/samples.jsonl")


def checkpoints(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List a run's checkpoints: step, size, validation reward, whole or why not."""
    from agent.training import checkpoints as kept

    found = kept.checkpoints(kept.open_run(run))
    if as_json:
        typer.echo(kept.as_json(found))
        return
    if not found:
        typer.echo("no checkpoint yet")
    for one in found:
        reward = f"reward {one.reward:.2f}" if one.reward is not None else "not validated"
        state = one.problem or ("whole, of a course that was left" if one.left else "whole")
        typer.echo(f"step {one.step:>6}  {one.size / 1e6:>10,.1f} MB  {one.world_size} GPU(s)  {reward}  {state}")


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run directory.")],
    out: Annotated[str, typer.Option(help="The folder to write; must not exist or be empty.")],
    step: Annotated[str | None, typer.Option(help="A step, or best (default: the newest whole one).")] = None,
) -> None:
    """Write a Hugging Face folder from a checkpoint, through verl's model merger (in the model's own precision)."""
    from pathlib import Path

    from agent.training.checkpoints import open_run
    from agent.training.export import export as write_folder

    chosen = write_folder(open_run(run), Path(out), step)
    typer.echo(f"step {chosen.step} -> {out}")
