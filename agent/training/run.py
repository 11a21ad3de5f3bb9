"""``mmqa train`` as a function: compose, check, prepare the run directory, supervise, say what was learned."""

from __future__ import annotations

import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent import __version__
from agent.errors import InputError, RunFailed, RunStopped, page
from agent.training import checkpoints, data, preflight, summary, tiny_vlm
from agent.training import config as configs
from agent.training.display import Display
from agent.training.rundir import RunDir, write_json
from agent.training.supervise import Outcome, supervise


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide how a run behaves, from their metadata."""
    from agent.symptoms.doctor import installed_versions

    own = {"python": platform.python_version(), "platform": platform.platform(), "multimodal-qa-agent": __version__}
    return own | installed_versions()


def plan(
    preset: str,
    overrides: Sequence[str] = (),
    *,
    task: str | None = None,
    steps: int | None = None,
    saved: Path | None = None,
) -> Any:
    """The composed and checked configuration; from ``saved``, a run's ``config.yaml``, instead of the preset if given.

    Raises ``InputError``.
    """
    given = list(overrides)
    if task is not None:
        given.append(f"mmqa.task={task}")
    if steps is not None:
        given.append(f"trainer.total_training_steps={steps}")
    config = configs.recompose(saved, given) if saved else configs.compose(preset, given)
    preflight.check(config)
    return config


def default_run_dir(preset: str, task: str) -> Path:
    """``runs/<preset>-<task>-<time>`` below the current folder."""
    return Path("runs") / f"{Path(preset).stem}-{task}-{time.strftime('%Y%m%d-%H%M%S')}"


def train(
    preset: str = "cpu",
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    task: str | None = None,
    steps: int | None = None,
    resume: str | None = None,
) -> Path:
    """Train, and return the run directory.

    Raises ``InputError`` for wrong input (nothing was started) and ``RunFailed`` if the run failed; the run directory
    then says why.
    """
    old = RunDir(Path(run_dir).absolute()) if run_dir else None
    saved = None
    if old is not None and old.exists():
        if resume in (None, "never"):
            raise InputError(f"{old.root} already holds a run; go on with --resume auto, or choose another --run-dir")
        saved = old.config if old.config.exists() else None
    config = plan(preset, overrides, task=task, steps=steps, saved=saved)
    if resume not in (None, "never", "auto"):
        if old is None:
            raise InputError(f"--resume {resume} needs --run-dir, the run to go on with")
        config.trainer.resume_mode = "resume_path"
        config.trainer.resume_from_path = str(checkpoints.choose(old, resume).path)
    elif saved:
        config.trainer.resume_mode = "auto"
    run = old or RunDir(default_run_dir(preset, config.mmqa.task).absolute())
    preflight.check_machine(config, run.root)
    warnings = preflight.hazards(config, run.root)
    new = not run.root.exists()
    try:
        run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run directory {run.root}: {error.strerror}; choose another with --run-dir") from None
    display = Display(int(config.trainer.total_training_steps))
    try:
        display.say(f"run directory: {run.root}")
        for one in warnings:
            where = f"  -> {page(one.slug)}" if one.slug else ""
            display.say(f"warning ({one.severity}): {one.what}; {one.change}{where}")
        try:
            prepare(run, config, display)
        except InputError:
            if new:  # nothing was begun: the same command must work once the input is right
                shutil.rmtree(run.root)
            raise
        outcome = supervise(run, run.new_attempt(), config, display)
    finally:
        display.close()
    return conclude(run, outcome, display)


def prepare(run: RunDir, config: Any, display: Display) -> None:
    """Rows, pictures, the tiny model if asked for, ``config.yaml`` and ``versions.json``."""
    from omegaconf import OmegaConf

    data.write_rows(run, config, display.say)
    if config.actor_rollout_ref.model.path == "tiny":
        display.waiting("the tiny model")
        folder = tiny_vlm.ensure(tiny_vlm.recipe(config.mmqa.task), display.say)
        config.actor_rollout_ref.model.path = str(folder)
    OmegaConf.save(config, run.config)
    write_json(run.versions, versions())


def conclude(run: RunDir, outcome: Outcome, display: Display) -> Path:
    """Say how the run ended and what it learned."""
    if outcome.state == "failed":
        raise RunFailed(f"{outcome.reason}\n  logs: {run.root / 'attempts' / 'latest'}", slug=outcome.symptom)
    for line in summary.lines(run):
        display.say(line)
    if outcome.state == "stopped":
        raise RunStopped(f"stopped after step {outcome.step}; go on with: mmqa train --run-dir {run.root} --resume auto")
    display.say(f"done: {run.root}")
    return run.root
