"""What checkpoints a run has, which of them are whole, and how to get a Hugging Face folder out of one.

verl's layout of a step: ``actor/{model,optim,extra_state}_world_size_<n>_rank_<r>.pt`` and ``data.pt``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from agent.errors import InputError, RunFailed
from agent.training import cpu_backend
from agent.training.rundir import RunDir, read_jsonl
from agent.training.summary import latest_per_step

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


def _problem(folder: Path, world_size: int) -> str | None:
    if world_size == 0:
        return "no model shard in actor/ (removed by max_actor_ckpt_to_keep, or never written)"
    wanted = [
        f"actor/{kind}_world_size_{world_size}_rank_{rank}.pt"
        for kind in ("model", "optim", "extra_state")
        for rank in range(world_size)
    ]
    for name in [*wanted, "data.pt"]:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if not zipfile.is_zipfile(file):  # torch.save writes its directory last: a torn file has none
            return f"{name} is cut short"
    return None


def checkpoints(run: RunDir) -> list[Checkpoint]:
    """All checkpoints of a run, oldest first."""
    validated = {
        one["step"]: one["val/reward"] for one in latest_per_step(read_jsonl(run.metrics)) if "val/reward" in one
    }
    found = []
    for folder in run.checkpoints.glob("global_step_*"):
        if not (number := folder.name.removeprefix("global_step_")).isdigit() or not folder.is_dir():
            continue
        shards = [match for file in folder.glob("actor/*.pt") if (match := _SHARD.fullmatch(file.name))]
        world_size = max((int(match.group(2)) for match in shards), default=0)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        step = int(number)
        found.append(Checkpoint(step, folder, size, world_size, validated.get(step), _problem(folder, world_size)))
    return sorted(found, key=lambda one: one.step)


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
    whole = [one for one in checkpoints(run) if one.problem is None]
    if not whole:
        raise InputError(
            f"{run.root}: no whole checkpoint (see: mmqa checkpoints {run.root})", slug="nothing-to-resume"
        )
    if step is None:
        return whole[-1]
    if step == "best":
        scored = [one for one in whole if one.reward is not None]
        if not scored:
            raise InputError(f"{run.root}: no whole checkpoint has a validation reward; give --step N")
        return max(scored, key=lambda one: (one.reward, one.step))
    for one in checkpoints(run):
        if str(one.step) == step:
            if one.problem:
                raise InputError(f"step {step}: {one.problem}", slug="checkpoint-partial-or-disk-full")
            return one
    known = ", ".join(str(one.step) for one in whole)
    raise InputError(f"{run.root}: no checkpoint of step {step}; there are {known}, and best")


def export(run: RunDir, out: Path, step: str | None = None) -> Checkpoint:
    """Write a Hugging Face folder (weights in bfloat16, processor, chat template) with verl's own merger.

    Raises ``InputError`` for a wrong step or a folder that is not empty, ``RunFailed`` if the merger fails.
    """
    chosen = choose(run, step)
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: not empty; choose another --out")
    done = subprocess.run(
        [sys.executable, "-m", "agent.training.checkpoints", str(chosen.path / "actor"), str(out)],
        capture_output=True,
        text=True,
    )
    if done.returncode or not list(out.glob("*.safetensors")):
        last = (done.stderr.strip().splitlines() or ["it wrote no weights"])[-1]
        raise RunFailed(f"verl's merger failed on step {chosen.step}: {last}", slug="merger-wrong-folder")
    return chosen


def as_json(found: list[Checkpoint]) -> str:
    """The list for a machine."""
    keys = ("step", "size", "world_size", "reward", "problem")
    return json.dumps([{key: getattr(one, key) for key in keys} | {"path": str(one.path)} for one in found])


def _merge(source: str, out: str) -> None:
    """In a process of its own: run verl's merger (it needs no GPU, but some of the cpu backend where there is none)."""
    import runpy

    from agent.training.preflight import installed

    if installed("vllm") is None:
        cpu_backend.install()
    sys.argv = ["model_merger", "merge", "--backend", "fsdp", "--local_dir", source, "--target_dir", out]
    runpy.run_module("verl.model_merger", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _merge(*sys.argv[1:3])
