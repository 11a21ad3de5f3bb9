"""What checkpoints a run has, and which of them are whole.

verl's layout of a step: ``actor/{model,optim,extra_state}_world_size_<n>_rank_<r>.pt`` and ``data.pt``;
``manifest.json`` (``agent.training.saving``) is written after them and says that the save was finished.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import InputError
from agent.training.course import belongs, course
from agent.training.rundir import STEP_METRICS, RunDir, read_json, read_jsonl
from agent.training.summary import latest_per_step

MANIFEST, SCHEMA = "manifest.json", 1
REFUSED = "not-whole.txt"  # why a save was refused; without it the first save of a run could pass for verl's own
KINDS = ("model", "optim", "extra_state")
_SHARD = re.compile(r"(model|optim|extra_state)_world_size_(\d+)_rank_(\d+)\.pt")


@dataclass(frozen=True)
class Checkpoint:
    """One ``global_step_<k>``. ``problem`` says why it is not whole; ``reward`` is that of its validation, if any."""

    step: int
    path: Path
    size: int  # bytes
    world_size: int
    reward: float | None
    problem: str | None
    attempt: int = 0  # that wrote it, by its manifest; 0 without one
    left: bool = False  # of a course that the run has left (``agent.training.course``)


def shard_names(world_size: int) -> list[str]:
    """The shards of a whole checkpoint, relative to its folder (verl's ``FSDPCheckpointManager.save_checkpoint``)."""
    return [f"actor/{kind}_world_size_{world_size}_rank_{rank}.pt" for kind in KINDS for rank in range(world_size)]


def world_sizes(folder: Path) -> list[int]:
    """The numbers of ranks that the shards of a checkpoint name, ascending; one number if it is in order."""
    shards = (_SHARD.fullmatch(file.name) for file in folder.glob("actor/*.pt"))
    return sorted({int(match.group(2)) for match in shards if match})


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint, None if it has none; ``ValueError`` says why it cannot be used."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{MANIFEST} is not readable ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(schema := manifest.get("schema"), int):
        raise ValueError(f"{MANIFEST} is not one of this package")
    if schema > SCHEMA:
        raise ValueError(f"{MANIFEST} has schema {schema}; this version of mmqa reads {SCHEMA}")
    if not isinstance(manifest.get("files"), dict) or not isinstance(manifest.get("attempt"), int):
        raise ValueError(f"{MANIFEST} lists no files")
    return manifest


def problem_of(folder: Path, plain: bool = True) -> str | None:
    """Why the checkpoint in ``folder`` is not whole, or None.

    With a manifest each file that it lists must be there in its size. Without one the save was not finished, unless
    ``plain``: verl by itself writes none, and then each shard must have a zip directory (torch.save writes it last).
    """
    if not world_sizes(folder):
        return "no model shard in actor/ (removed by max_actor_ckpt_to_keep, or never written)"
    if (folder / REFUSED).is_file():
        return (folder / REFUSED).read_text(encoding="utf-8").strip() or "refused after the save"
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if manifest is None:
        return _plain_problem(folder) if plain else "no manifest: the save did not finish"
    for name, size in manifest["files"].items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if (found := (folder / name).stat().st_size) != size:
            return f"{name} has {found} bytes; {size} were saved"
    return None


def _plain_problem(folder: Path) -> str | None:
    ranks, *others = world_sizes(folder)
    if others:
        return f"actor/ has shards of {' and '.join(map(str, (ranks, *others)))} ranks"
    for name in [*shard_names(ranks), "data.pt"]:
        if not (folder / name).is_file():
            return f"{name} is missing"
        if not zipfile.is_zipfile(folder / name):
            return f"{name} is cut short"
    return None


def _attempt(folder: Path) -> int:
    try:
        return (read_manifest(folder) or {"attempt": 0})["attempt"]
    except ValueError:
        return 0


def checkpoints(run: RunDir) -> list[Checkpoint]:
    """All checkpoints of a run, ordered by step.

    One without a manifest counts as unfinished, unless it comes before the first one with a manifest: that one may be
    from verl by itself, or from before manifests were written, and is judged by its files.
    """
    validated = {
        one["step"]: one["val/reward"] for one in latest_per_step(read_jsonl(run.metrics)) if "val/reward" in one
    }
    now = course(run)
    folders = {
        int(number): folder
        for folder in run.checkpoints.glob("global_step_*")
        if (number := folder.name.removeprefix("global_step_")).isdigit() and folder.is_dir()
    }
    first = min((step for step, folder in folders.items() if (folder / MANIFEST).exists()), default=math.inf)
    found = []
    for step, folder in sorted(folders.items()):
        attempt = _attempt(folder)
        left = not belongs(now, attempt, step)
        own = _own_reward(folder)
        found.append(
            Checkpoint(
                step=step,
                path=folder,
                size=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()),
                world_size=max(world_sizes(folder), default=0),
                reward=own if own is not None or left else validated.get(step),
                problem=problem_of(folder, plain=step < first),
                attempt=attempt,
                left=left,
            )
        )
    return found


def _own_reward(folder: Path) -> float | None:
    """The validation reward that was written into the checkpoint; the run's figures may be another course's by now."""
    return read_json(folder / STEP_METRICS).get("val/reward")


def by_age(found: Iterable[Checkpoint]) -> list[Checkpoint]:
    """The whole ones, the one written last at the end.

    Those of a course that was left come first. Then the attempt goes before the step.
    """
    return sorted((one for one in found if one.problem is None), key=lambda one: (not one.left, one.attempt, one.step))


def best(found: Iterable[Checkpoint]) -> Checkpoint | None:
    """The whole one with the highest validation reward, the newest of several; None if none has a reward.

    Those of a course that was left count too: going back to step 20 must not cost the best model, of step 30.
    """
    scored = [one for one in by_age(found) if one.reward is not None and math.isfinite(one.reward)]
    return max(reversed(scored), key=lambda one: one.reward or 0.0, default=None)


def open_run(path: str | Path) -> RunDir:
    """The run in a folder; ``InputError`` if there is none."""
    run = RunDir(Path(path).absolute())
    if not run.exists():
        raise InputError(f"{run.root}: no run here (it has neither config.yaml nor attempts/)")
    return run


def choose(run: RunDir, step: str | None) -> Checkpoint:
    """The newest whole checkpoint, or that of ``step`` (a number, or "best": the highest validation reward).

    Raises ``InputError`` if it does not exist or is not whole.
    """
    found = checkpoints(run)
    whole = by_age(found)
    if not whole:
        raise InputError(
            f"{run.root}: no whole checkpoint (see: mmqa checkpoints {run.root})", slug="nothing-to-resume"
        )
    if step is None:
        return whole[-1]
    if step == "best":
        if (highest := best(found)) is None:
            raise InputError(f"{run.root}: no whole checkpoint has a validation reward; give --step N")
        return highest
    for one in found:
        if str(one.step) == step:
            if one.problem:
                raise InputError(f"step {step}: {one.problem}", slug="checkpoint-partial-or-disk-full")
            return one
    known = ", ".join(str(one.step) for one in found if one.problem is None)
    raise InputError(f"{run.root}: no checkpoint of step {step}; there are {known}, and best")


def as_json(found: list[Checkpoint]) -> str:
    """The list for a machine. A reward that is no number is null: JSON has no NaN."""
    keys = ("step", "size", "world_size", "problem", "left")
    return json.dumps(
        [
            {key: getattr(one, key) for key in keys} | {"path": str(one.path), "reward": _finite(one.reward)}
            for one in found
        ],
        allow_nan=False,
    )


def _finite(reward: float | None) -> float | None:
    return reward if reward is not None and math.isfinite(reward) else None
