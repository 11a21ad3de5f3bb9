"""Batch sizes and lengths of a verl config that do not fit together (verl 0.8.0, Agent Lightning 1.0.2)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from agent.symptoms.hazards_facts import Facts, Finding

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
MICRO = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
LOG_PROB_MICRO = f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"
REFERENCE_MICRO = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
AT_LEAST_ONE = (
    "data.train_batch_size",
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ROLLOUT}.n",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
)


def _crash(what: str, why: str, change: str) -> Finding:
    return Finding(what, why, change, "batch-size-assertions", "crash")


def batches(facts: Facts) -> Iterator[Finding]:
    """What verl and Agent Lightning assert before the first step."""
    settings = facts.settings
    train, samples = settings.number("data.train_batch_size"), settings.number(f"{ROLLOUT}.n")
    mini = settings.number(f"{ACTOR}.ppo_mini_batch_size")
    per_node, nodes = settings.number("trainer.n_gpus_per_node"), settings.number("trainer.nnodes")
    dynamic = settings.on(f"{ACTOR}.use_dynamic_bsz")
    for key in AT_LEAST_ONE:
        if (value := settings.number(key)) is not None and value < 1:
            yield _crash(f"{key}={value:g}", "it must be at least 1", f"{key}=1")
    if train and mini and train < mini and not dynamic:
        yield _crash(
            f"data.train_batch_size={train:g} is smaller than {ACTOR}.ppo_mini_batch_size={mini:g}",
            "verl refuses to start",
            f"{ACTOR}.ppo_mini_batch_size={_divisor(train)}",
        )
    if train and samples and per_node and nodes and not dynamic:
        gpus = per_node * nodes
        if settings.get(f"{ACTOR}.strategy") != "megatron" and (train * samples) % gpus:
            yield _crash(
                f"data.train_batch_size * rollout.n = {train * samples:g} is not a multiple of the {gpus:g} GPUs "
                "(trainer.n_gpus_per_node * trainer.nnodes)",
                "verl refuses to start",
                f"data.train_batch_size={-(-train // gpus) * gpus:g}, or the number of GPUs this machine has",
            )
    world = per_node * nodes if per_node and nodes else None
    parts = [
        settings.number(f"{ROLLOUT}.{name}_size") or 1
        for name in ("tensor_model_parallel", "data_parallel", "pipeline_model_parallel")
    ]
    engine = parts[0] * parts[1] * parts[2]
    if world and world % engine:
        yield _crash(
            f"one engine takes {engine:g} GPUs (rollout.tensor_model_parallel_size={parts[0]:g}, 2 if not given) and "
            f"the run has {world:g}",
            "the number of GPUs must be a multiple of it",
            f"{ROLLOUT}.tensor_model_parallel_size=1",
        )
    if settings.on("agentlightning.async_rollout.enabled"):
        more = settings.number("agentlightning.async_rollout.async_train_batch_size")
        if train and (more is None or more <= train):
            yield _crash(
                f"agentlightning.async_rollout.async_train_batch_size={more} with data.train_batch_size={train:g}",
                "asynchronous rollouts need the larger of the two there",
                f"agentlightning.async_rollout.async_train_batch_size={train * 2:g}",
            )


def micro_batches(facts: Facts) -> Iterator[Finding]:
    """Micro-batch sizes that verl wants to be given, and only once."""
    settings = facts.settings
    if settings.on(f"{ACTOR}.use_dynamic_bsz") or "actor_rollout_ref" not in settings.tree:
        return
    reference = settings.on(f"{ACTOR}.use_kl_loss") or settings.on("algorithm.use_kl_in_reward")
    for key in (MICRO, LOG_PROB_MICRO, *([REFERENCE_MICRO] if reference else [])):
        given, old = settings.explicit(key), settings.explicit(key.removesuffix("_per_gpu"))
        if given is not None and old is not None:
            yield _crash(f"{key} and {key.removesuffix('_per_gpu')} are both set", "verl refuses both", f"keep {key}")
        elif given is None and old is None and (settings.dialect == "verl" or settings.complete):
            yield _crash(f"{key} is not set", "verl has no default for it and refuses to start", f"{key}=1")


def divisions(facts: Facts) -> Iterator[Finding]:
    """Rows that must split evenly over GPUs and micro-batches (``train_mini_batch``, ``prepare_micro_batches``)."""
    settings = facts.settings
    needed = [f"{ACTOR}.ppo_mini_batch_size", f"{ROLLOUT}.n", "trainer.n_gpus_per_node", "trainer.nnodes"]
    mini, samples, per_node, nodes = (int(settings.number(key) or 0) for key in needed)
    train = int(settings.number("data.train_batch_size") or 0)
    if (
        not (mini and samples and per_node and nodes and train >= mini)
        or settings.get(f"{ACTOR}.strategy") == "megatron"
    ):
        return
    gpus = per_node * nodes // int(settings.number(f"{ACTOR}.ulysses_sequence_parallel_size") or 1) or 1
    rows = mini * samples
    if rows % gpus:
        yield _crash(
            f"a mini-batch has {rows} rows (ppo_mini_batch_size * rollout.n), which {gpus} GPUs cannot share evenly",
            "verl stops at the first update",
            f"{ACTOR}.ppo_mini_batch_size={_common_multiple(mini, gpus)}",
        )
    elif not settings.on(f"{ACTOR}.use_dynamic_bsz"):
        whole = (train // mini) * rows if facts.agent_lightning else train * samples
        for key, size in ((MICRO, rows // gpus), (LOG_PROB_MICRO, whole // gpus)):
            micro = int(settings.number(key) or 0)
            if micro and size % micro:
                yield _crash(
                    f"{key}={micro} does not divide the {size} rows of one GPU",
                    "verl stops there: data size must be divisible by the micro-batch size",
                    f"{key}={math.gcd(size, micro)}",
                )
    if train % mini and facts.agent_lightning and settings.dialect == "verl":
        yield Finding(
            f"data.train_batch_size={train} is not a multiple of {ACTOR}.ppo_mini_batch_size={mini}",
            f"the rows of {train % mini} prompts a step are generated and then dropped, to come to whole mini-batches",
            f"data.train_batch_size={train // mini * mini}",
            "rows-dropped",
            "silent",
        )


def _common_multiple(size: int, gpus: int) -> int:
    """The smallest multiple of ``gpus`` from ``size`` on."""
    return -(-size // gpus) * gpus


def one_row_away(facts: Facts) -> Iterator[Finding]:
    """Agent Lightning: rows are rounded down to whole mini-batches (this project's trainer fills them up)."""
    settings = facts.settings
    if settings.dialect != "verl":
        return
    train, mini = settings.number("data.train_batch_size"), settings.number(f"{ACTOR}.ppo_mini_batch_size")
    if facts.agent_lightning and train and train == mini and train > 1:
        yield Finding(
            f"{ACTOR}.ppo_mini_batch_size equals data.train_batch_size ({train:g})",
            "the rows of a step are rounded down to whole mini-batches: one failed or dropped rollout leaves none, and "
            "the step passes without an update, metrics or a checkpoint",
            f"{ACTOR}.ppo_mini_batch_size={_divisor(train)}",
            "step-skipped-one-bad-row",
            "silent",
        )


def prompt_length(facts: Facts) -> Iterator[Finding]:
    """Image tokens count as prompt; verl's default leaves no room for a photo."""
    settings = facts.settings
    given = settings.explicit("data.max_prompt_length") is not None
    if settings.dialect == "verl" and facts.agent_lightning and facts.images and not given:
        yield Finding(
            "data.max_prompt_length is not set: 512 tokens, verl's default",
            "a picture of 1024 x 1024 pixels is about 1,000 tokens for Qwen3-VL and 1,300 for Qwen2.5-VL; rows with a "
            "longer prompt are left out of the update while rollouts look fine",
            "data.max_prompt_length=4096 (and actor_rollout_ref.rollout.max_model_len at least that plus the answer)",
            "image-prompt-truncated",
            "silent",
        )


def engine_length(facts: Facts) -> Iterator[Finding]:
    """The engine's longest request must hold the longest prompt and the longest reply."""
    settings = facts.settings
    prompt, reply = settings.explicit("data.max_prompt_length"), settings.explicit("data.max_response_length")
    longest = settings.number(f"{ROLLOUT}.max_model_len")
    if longest and isinstance(prompt, int) and isinstance(reply, int) and longest < prompt + reply:
        yield Finding(
            f"{ROLLOUT}.max_model_len={longest:g} is smaller than data.max_prompt_length + data.max_response_length = "
            f"{prompt + reply}",
            "the engine refuses longer prompts (HTTP 400), and their rollouts fail",
            f"{ROLLOUT}.max_model_len={prompt + reply}",
            "vllm-prompt-too-long-for-images",
            "silent",
        )


def _divisor(value: float) -> int:
    """The largest divisor of ``value`` that is at most a quarter of it; 1 for small or prime values."""
    whole = int(value)
    return next((size for size in range(max(1, whole // 4), 0, -1) if whole % size == 0), 1)


SIZE_CHECKS = (batches, micro_batches, divisions, one_row_away, prompt_length, engine_length)
