"""Hazards of a NeMo-RL config (``policy.generation``): what becomes of encoder outputs when the weights change.

Source: nemo_rl/models/generation/vllm (config.py, vllm_worker_async.py) and docs/guides/async-grpo.md of
https://github.com/NVIDIA-NeMo/RL, and https://github.com/NVIDIA-NeMo/RL/pull/3430.
"""

from __future__ import annotations

from collections.abc import Iterator

from agent.symptoms.hazards_facts import NEMO_RESET as RESET
from agent.symptoms.hazards_facts import Facts, Finding

GENERATION = "policy.generation"


def _applies(facts: Facts) -> bool:
    backend = facts.settings.explicit(f"{GENERATION}.backend") or "vllm"
    return facts.images and backend == "vllm"


def _async(facts: Facts) -> bool:
    return any(facts.settings.on(f"grpo.{name}.enabled") for name in ("async_grpo", "async_ppo"))


def _in_flight(facts: Facts) -> bool:
    return _async(facts) and facts.settings.on("grpo.async_grpo.in_flight_weight_updates")


def encoder_outputs(facts: Facts) -> Iterator[Finding]:
    """Encoder outputs after a weight update: kept too long, or thrown away under running requests."""
    if not _applies(facts):
        return
    settings = facts.settings
    reset = settings.on(RESET)
    colocated = settings.explicit(f"{GENERATION}.colocated.enabled")
    if reset and _in_flight(facts):
        yield Finding(
            f"{RESET} is on together with grpo.async_grpo.in_flight_weight_updates",
            "the encoder cache is emptied while requests are under way; one that still needs its image finds nothing "
            'and the engine stops with "Encoder cache miss". NeMo-RL itself asks for generation at rest here',
            "grpo.async_grpo.in_flight_weight_updates=false",
            "encoder-cache-miss",
            "crash",
        )
    elif not reset and colocated is False:
        change = f"{RESET}=true"
        if _in_flight(facts):
            change += " together with grpo.async_grpo.in_flight_weight_updates=false"
        yield Finding(
            f"generation runs apart from training (colocated.enabled is false) and {RESET.rsplit('.', 1)[-1]} is off",
            "an engine that never sleeps keeps the encoder outputs of the old weights: pictures seen before are "
            "answered from a vision tower that no longer exists. Harmless only if the vision tower is frozen",
            change,
            "stale-encoder-output",
            "silent",
        )


def reset_without_effect(facts: Facts) -> Iterator[Finding]:
    """The reset switch where nothing reads it."""
    settings = facts.settings
    if not settings.on(RESET):
        return
    if settings.explicit(f"{GENERATION}.vllm_cfg.async_engine") is False:
        yield Finding(
            f"{RESET} is on and async_engine is off",
            "only the asynchronous worker reads the switch; with the synchronous engine it changes nothing",
            f"{GENERATION}.vllm_cfg.async_engine=true, or remove the switch",
            "stale-encoder-output",
            "silent",
        )
    transport = settings.explicit(f"{GENERATION}.refit_transport")
    if transport not in (None, "nccl_reshard"):
        yield Finding(
            f"{RESET} is on with refit_transport {transport!r}",
            "the reset exists on the default and the nccl_reshard transports alone; newer NeMo-RL refuses to start, "
            "older ones keep the stale outputs",
            f"{GENERATION}.refit_transport=null",
            "stale-encoder-output",
            "silent",
        )


CHECKS = (encoder_outputs, reset_without_effect)
