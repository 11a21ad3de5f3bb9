"""Go on with a run: what to start from, what may differ, and what the run's files must look like before it goes on."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.errors import InputError, page
from agent.training import checkpoints
from agent.training.course import belongs, course
from agent.training.rundir import STEP_METRICS, RunDir, append_jsonl, read_json, read_jsonl, write_jsonl

# What a checkpoint was made with: another value would make it meaningless, or shift the order of the data.
FIXED = {
    "mmqa.task": "the rows would be others",
    "mmqa.data_root": "the rows would be others",
    "mmqa.train_samples": "the order of the data would be another",
    "mmqa.val_samples": "the held-out rows would be others",
    "mmqa.max_pixels": "the pictures would be others",
    "mmqa.seed": "the rows would be others",
    "mmqa.blank_images": "the pictures would be others",
    "mmqa.backend": "the checkpoint belongs to the other one",
    "data.seed": "the order of the data would be another",
    "data.shuffle": "the order of the data would be another",
    "data.train_batch_size": "the place in the data would be another",
    "actor_rollout_ref.model.path": "the checkpoint holds the weights of the run's own model",
    "actor_rollout_ref.actor.strategy": "the checkpoint is written in the other one's layout",
    "actor_rollout_ref.actor.optim.optimizer": "the checkpoint holds the other one's state",
    "actor_rollout_ref.actor.optim.optimizer_impl": "the checkpoint holds the other one's state",
}
# Set for each attempt by this package, never by the user's change of mind.
_OWN = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.val_before_train")


@dataclass(frozen=True)
class Start:
    """Where an attempt begins: after ``step`` (0: from the model), with ``checkpoint`` if there is one."""

    step: int = 0
    checkpoint: checkpoints.Checkpoint | None = None
    notes: list[str] = field(default_factory=list)


def flat(config: Any, path: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        where = f"{path}.{key}" if path else str(key)
        found |= flat(value, where) if isinstance(value, dict) else {where: value}
    return found


def differences(saved: Any, wanted: Any) -> list[str]:
    """The keys whose values differ, as "key: old -> new". Both are plain nested dicts.

    Raises ``InputError`` for a key of ``FIXED``.
    """
    before, after = flat(saved), flat(wanted)
    changed = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if old == new or key in _OWN:
            continue
        if key in FIXED:
            raise InputError(
                f"{key}: {old} -> {new} cannot change in a run that goes on ({FIXED[key]}); "
                "leave it out, or begin another run with another --run-dir"
            )
        changed.append(f"{key}: {old} -> {new}")
    return changed


def curve_note(config: Any, changed: list[str]) -> str | None:
    """What other steps do to the learning rate, if they do anything: verl lays the whole curve over the new total."""
    optim, total = config.actor_rollout_ref.actor.optim, config.trainer.total_training_steps
    longer = any(one.startswith("trainer.total_training_steps:") for one in changed)
    warm_up = optim.lr_warmup_steps <= 0 and optim.lr_warmup_steps_ratio > 0
    if not longer or (optim.lr_scheduler_type == "constant" and not warm_up):
        return None
    return (
        f"the learning rate follows the {optim.lr_scheduler_type} curve of {total} steps from here on, "
        "which has another value at this step than the curve before"
    )


def finished(run: RunDir, total_steps: int) -> str | None:
    """What to say about a run that has made all its steps; None if there is more to do."""
    status = read_json(run.status)
    if status.get("state") != "finished" or status.get("step", 0) < total_steps:
        return None
    return (
        f"this run has finished: step {status['step']} of {total_steps}. "
        f"Train further with: mmqa train --run-dir {run.root} --resume auto --steps {2 * total_steps}"
        f"\n  -> {page('resume-finishes-immediately')}"
    )


def choose(run: RunDir, step: str | None) -> Start:
    """The newest whole checkpoint (or that of ``step``, or ``best``), or the beginning if there is none yet.

    Torn ones are named in the notes and never chosen. Raises ``InputError`` if ``step`` is asked for and is not there.
    """
    found = checkpoints.checkpoints(run)
    torn = page("checkpoint-partial-or-disk-full")
    notes = [
        f"checkpoint of step {one.step} is not whole and is left alone: {one.problem}  -> {torn}"
        for one in found
        if one.problem
    ]
    if step is None and not any(one.problem is None for one in found):
        notes.append(f"there is no whole checkpoint: it begins again at step 1  -> {page('nothing-to-resume')}")
        return Start(notes=notes)
    chosen = checkpoints.choose(run, step)
    if later := [str(one.step) for one in found if one.problem is None and one.step > chosen.step and not one.left]:
        notes.append(
            f"the checkpoints of step {', '.join(later)} are left behind: they can be asked for until newer ones "
            "take their place (the best one stays)"
        )
    notes.append(f"it goes on after step {chosen.step} ({chosen.path.name}, {chosen.size / 1e6:,.0f} MB, whole)")
    return Start(chosen.step, chosen, notes)


def for_world_size(run: RunDir, start: Start, world_size: int, say: Any) -> Path | None:
    """The checkpoint's folder for this number of GPUs, rewritten first if it was made on another one."""
    if start.checkpoint is None:
        return None
    if start.checkpoint.world_size == world_size:
        return start.checkpoint.path
    from agent.training import reshard

    say(
        f"  the checkpoint of {start.checkpoint.world_size} GPU(s) is rewritten for {world_size}: "
        "weights, optimizer and schedule are kept"
    )
    target = run.root / "resharded" / f"world_size_{world_size}" / start.checkpoint.path.name
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    reshard.reshard(start.checkpoint.path, target, world_size)
    return target


def point_at(run: RunDir, config: Any, start: Start, say: Any) -> Path | None:
    """Make verl begin where ``start`` says, on the configuration's number of GPUs; the checkpoint's folder, if any."""
    folder = for_world_size(run, start, config.trainer.n_gpus_per_node * config.trainer.nnodes, say)
    config.trainer.resume_mode = "resume_path" if folder else "disable"
    config.trainer.resume_from_path = str(folder) if folder else None
    return folder


def supersede(run: RunDir, step: int, attempt: int) -> int:
    """Leave in ``metrics.jsonl`` and ``samples.jsonl`` what belongs to the run's course up to ``step``.

    The rest, which the coming attempt makes anew, moves to ``attempts/<attempt>/superseded-*.jsonl``: each file keeps
    one object a step, and nothing is lost. If the course is one that was left before, its rows come back from there.
    Returns the number of steps that moved and are made again.
    """
    now = course(run)

    def stays(row: dict[str, Any]) -> bool:
        return row["step"] <= step and belongs(now, row.get("attempt", 0), row["step"])

    redone: set[int] = set()
    for path in (run.metrics, run.samples):
        rows = read_jsonl(path)
        kept = [row for row in rows if stays(row)]
        there = {row["step"] for row in kept}
        moved = (row for row in _moved_before(run, path) if stays(row) and row["step"] not in there)
        back = {(row["step"], row.get("rollout_id")): row for row in moved}
        if len(kept) == len(rows) and not back and _ends_whole(path):
            continue
        gone = [row for row in rows if not stays(row)]
        if path == run.metrics:
            redone = {row["step"] for row in gone if row["step"] > step}
        if gone:
            write_jsonl(run.attempt(attempt) / f"superseded-{path.name}", gone)
        write_jsonl(path, sorted([*kept, *back.values()], key=lambda row: row["step"]))
    _restore_line(run, step)
    return len(redone)


def _moved_before(run: RunDir, path: Path) -> Iterator[dict[str, Any]]:
    """The rows that earlier calls of ``supersede`` moved away from ``path``."""
    for number in run.attempts():
        yield from read_jsonl(run.attempt(number) / f"superseded-{path.name}")


def _restore_line(run: RunDir, step: int) -> None:
    """Put back the line of a step that was saved and not yet logged when its attempt was killed."""
    file = run.checkpoints / f"global_step_{step}" / STEP_METRICS
    if file.exists() and step not in {row["step"] for row in read_jsonl(run.metrics)}:
        append_jsonl(run.metrics, json.loads(file.read_text(encoding="utf-8")))


def _ends_whole(path: Path) -> bool:
    """Whether the last line is a whole one: after half a line (disk full), the next one appended would be lost too."""
    if not path.exists() or not path.stat().st_size:
        return True
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"
