"""What checkpoints a run has, which of them are whole, and how to get a Hugging Face folder out of one.

verl's layout of a step: ``actor/{model,optim,extra_state}_world_size_<n>_rank_<r>.pt`` and ``data.pt``;
``manifest.json`` (``agent.training.saving``) is written after them and says that the save was finished.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import InputError, RunFailed
from agent.training import cpu_backend
from agent.training.course import belongs, course
from agent.training.model_folder import model_folder
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


def pinned(checkpoint: Checkpoint, folder: Path) -> Path:
    """The checkpoint once more below ``folder``, as hard links (copies where the disk cannot): retention may go on.

    Raises ``InputError`` if the run that is being trained has removed it meanwhile, ``RunFailed`` if it cannot be
    linked or copied (no room, no permission).
    """

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copy2(source, target)

    target = folder / checkpoint.path.name
    try:
        shutil.copytree(checkpoint.path, target, copy_function=link)
    except OSError as error:  # shutil.Error holds those of the single files
        shutil.rmtree(target, ignore_errors=True)
        if checkpoint.path.exists() and problem_of(checkpoint.path) is None:
            source, _, why = error.args[0][0] if isinstance(error, shutil.Error) else (checkpoint.path, "", error)
            raise RunFailed(f"{source} cannot be read or copied to {folder}: {why}") from None
        raise InputError(
            f"the checkpoint of step {checkpoint.step} was removed meanwhile: its run goes on and keeps the newest; "
            "try again, or take --step best"
        ) from None
    return target


def export(run: RunDir, out: Path, step: str | None = None) -> Checkpoint:
    """Write a Hugging Face folder (weights, processor, chat template) with verl's own merger.

    The weights are bfloat16, as the merger writes them, but float32 if the run began with a float32 model.
    Raises ``InputError`` for a wrong step or a folder that is not empty, ``RunFailed`` if the merger fails; what it
    had written by then is removed.
    """
    chosen = choose(run, step)
    if out.exists() and not out.is_dir():
        raise InputError(f"{out}: a file; choose a folder for --out")
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out}: not empty; choose another --out")
    dtype = own_dtype(run)
    there = out.exists()
    with _steady(run, chosen) as folder:
        done = subprocess.run(
            [sys.executable, "-m", "agent.training.checkpoints", str(folder / "actor"), str(out), dtype],
            capture_output=True,
            text=True,
        )
    if done.returncode or not list(out.glob("*.safetensors")):
        last = (done.stderr.strip().splitlines() or ["it wrote no weights"])[-1]
        shutil.rmtree(out, ignore_errors=True)  # the same command must work once the cause is gone
        if there:
            out.mkdir()
        full = "No space left on device" in done.stderr or "Disk quota exceeded" in done.stderr
        raise RunFailed(
            f"verl's merger failed on step {chosen.step}: {last}",
            slug="checkpoint-partial-or-disk-full" if full else None,
        )
    return chosen


EXPORTING = ".export-"  # and the process's id: links of a checkpoint that is being exported


@contextlib.contextmanager
def _steady(run: RunDir, chosen: Checkpoint) -> Iterator[Path]:
    """The checkpoint's folder, safe from retention; as it is in a run directory where nothing may be written."""
    if not os.access(run.root, os.W_OK):
        yield chosen.path
        return
    with tempfile.TemporaryDirectory(dir=run.root, prefix=f"{EXPORTING}{os.getpid()}-") as folder:
        yield pinned(chosen, Path(folder))


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


def own_dtype(run: RunDir) -> str:
    """The dtype in the config.json of the model that the run began with; "bfloat16" if it is not known.

    A checkpoint's own config.json does not tell: verl loads every actor in float32 (``model_dtype``), and transformers
    (``modeling_utils``, "Set it on the config and subconfigs") then writes float32 into its configuration.
    """
    import yaml

    try:
        settings = yaml.safe_load(run.config.read_text(encoding="utf-8"))
        folder = model_folder(settings["actor_rollout_ref"]["model"]["path"])
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return "bfloat16"
    parts = (config, config.get("text_config") or {})
    return next((str(one[key]) for one in parts for key in ("dtype", "torch_dtype") if one.get(key)), "bfloat16")


def _keep_float32() -> None:
    """Make verl's merger write float32, in this process.

    It casts to bfloat16 in two places (``FSDPModelMerger._load_and_merge_state_dicts``: ``.bfloat16()``;
    ``BaseModelMerger.save_hf_model_and_tokenizer``: ``torch_dtype``). Rounded weights give other log-probs
    than the actor's, which computes with a float32 model's own.
    """
    from types import SimpleNamespace

    import torch
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    merger: Any = FSDPModelMerger
    merge, auto_class = merger._load_and_merge_state_dicts, merger.get_transformers_auto_model_class

    def merged(self: Any, *args: Any) -> Any:
        cast = torch.Tensor.bfloat16
        torch.Tensor.bfloat16 = torch.Tensor.float
        try:
            return merge(self, *args)
        finally:
            torch.Tensor.bfloat16 = cast

    def float32_class(self: Any) -> Any:
        base = auto_class(self)
        return SimpleNamespace(
            from_config=lambda config, **given: base.from_config(config, **{**given, "torch_dtype": torch.float32})
        )

    merger._load_and_merge_state_dicts, merger.get_transformers_auto_model_class = merged, float32_class


def _merge(source: str, out: str, dtype: str) -> None:
    """In a process of its own: run verl's merger (it needs no GPU, but some of the cpu backend where there is none)."""
    import runpy

    from agent.training.preflight import installed

    if installed("vllm") is None:
        cpu_backend.install()
    if dtype == "float32":
        _keep_float32()
    sys.argv = ["model_merger", "merge", "--backend", "fsdp", "--local_dir", source, "--target_dir", out]
    runpy.run_module("verl.model_merger", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _merge(*sys.argv[1:4])
