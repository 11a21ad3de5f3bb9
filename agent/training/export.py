"""A Hugging Face folder out of a checkpoint, with verl's own merger. What is read is safe from retention meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent.errors import InputError, RunFailed
from agent.training import cpu_backend
from agent.training.checkpoints import Checkpoint, choose, problem_of
from agent.training.model_folder import model_folder
from agent.training.rundir import RunDir

EXPORTING = ".export-"  # and the process's id: links of a checkpoint that is being exported


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
            [sys.executable, "-m", "agent.training.export", str(folder / "actor"), str(out), dtype],
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


@contextlib.contextmanager
def _steady(run: RunDir, chosen: Checkpoint) -> Iterator[Path]:
    """The checkpoint's folder, safe from retention; as it is in a run directory where nothing may be written."""
    if not os.access(run.root, os.W_OK):
        yield chosen.path
        return
    with tempfile.TemporaryDirectory(dir=run.root, prefix=f"{EXPORTING}{os.getpid()}-") as folder:
        yield pinned(chosen, Path(folder))


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
