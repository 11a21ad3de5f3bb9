"""What single values of the configuration may be: one table for numbers, one for names, one for texts.

How values must fit together is in ``preflight``. Without these checks a wrong value ends a run after minutes, in a
worker's traceback, or never.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.errors import InputError
from agent.training import schema


@dataclass(frozen=True)
class Range:
    """The numbers that a key takes, always finite."""

    least: float = -math.inf
    most: float = math.inf
    above: bool = False  # ``least`` itself is too little
    whole: bool = False
    null: bool = False  # null is a value too
    hint: str = ""

    def holds(self, value: Any) -> bool:
        """Whether ``value`` is one of these numbers; a bool is none."""
        if value is None:
            return self.null
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return abs(value) < math.inf and self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a finite number"
        least = "" if self.least == -math.inf else f"{'above' if self.above else 'of at least'} {self.least:g}"
        most = "" if self.most == math.inf else f"at most {self.most:g}"
        between = " and ".join(filter(None, (least, most)))
        if least and most and not self.above:
            between = f"from {self.least:g} to {self.most:g}"
        return f"{kind} {between}".rstrip() + (", or null" if self.null else "") + self.hint


COUNT = Range(1, whole=True)
COUNT_OR_NULL = Range(1, whole=True, null=True)
NOT_NEGATIVE = Range(0)
SHARE = Range(0, 1)
POSITIVE_SHARE = Range(0, 1, above=True)
SECONDS = Range(0, 3600)
STEPS = Range(whole=True, hint=" of steps; -1 for never")
TOP_K = Range(-1, whole=True, hint="; -1 for all tokens")

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
RANGES: dict[str, Range] = {
    "data.train_batch_size": COUNT,
    f"{ACTOR}.ppo_mini_batch_size": COUNT,
    f"{ROLLOUT}.n": COUNT,
    "trainer.total_training_steps": COUNT,
    "mmqa.train_samples": COUNT,
    "mmqa.val_samples": COUNT,
    "trainer.n_gpus_per_node": COUNT,
    "trainer.nnodes": COUNT,
    "data.max_prompt_length": COUNT,
    "data.max_response_length": COUNT,
    "mmqa.max_pixels": COUNT,
    "mmqa.controller_slots": COUNT,
    "mmqa.agent.max_tokens": COUNT,
    "mmqa.agent.max_turns": COUNT,
    "mmqa.seed": Range(whole=True),
    "mmqa.keep_checkpoints": Range(0, whole=True, null=True, hint="; 0 for all"),
    "mmqa.agent.fallback_reward": Range(),
    "mmqa.max_logprob_gap": NOT_NEGATIVE,
    "mmqa.max_failed_rollouts": SHARE,
    "mmqa.poll_interval_seconds": SECONDS,
    "mmqa.agl_poll_seconds": SECONDS,
    "agentlightning.rollout_timeout_seconds": Range(1),
    "data.seed": Range(0, whole=True, null=True),
    "trainer.save_freq": STEPS,
    "trainer.test_freq": STEPS,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": COUNT_OR_NULL,
    f"{ACTOR}.ppo_epochs": COUNT,
    f"{ACTOR}.clip_ratio": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_low": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_high": NOT_NEGATIVE,
    f"{ACTOR}.clip_ratio_c": Range(1, above=True),
    f"{ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{ACTOR}.entropy_coeff": Range(),
    f"{ACTOR}.optim.lr": NOT_NEGATIVE,
    f"{ACTOR}.optim.weight_decay": NOT_NEGATIVE,
    f"{ACTOR}.optim.clip_grad": Range(0, above=True),
    f"{ACTOR}.optim.lr_warmup_steps": Range(-1, whole=True),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": SHARE,
    f"{ACTOR}.optim.min_lr_ratio": Range(0, 1, null=True),
    f"{ROLLOUT}.temperature": Range(0, above=True, hint=": without chance all rollouts of a prompt are the same"),
    f"{ROLLOUT}.top_p": POSITIVE_SHARE,
    f"{ROLLOUT}.top_k": TOP_K,
    f"{ROLLOUT}.val_kwargs.temperature": NOT_NEGATIVE,
    f"{ROLLOUT}.val_kwargs.top_p": POSITIVE_SHARE,
    f"{ROLLOUT}.val_kwargs.top_k": TOP_K,
    f"{ROLLOUT}.gpu_memory_utilization": POSITIVE_SHARE,
    f"{ROLLOUT}.tensor_model_parallel_size": COUNT,
    f"{ROLLOUT}.max_model_len": COUNT_OR_NULL,
    f"{ROLLOUT}.max_num_seqs": COUNT_OR_NULL,
    f"{ROLLOUT}.max_num_batched_tokens": COUNT_OR_NULL,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": COUNT_OR_NULL,
}
CHOICES: dict[str, Callable[[], tuple[str, ...]]] = {  # an empty tuple: cannot be told here
    "mmqa.controller": lambda: ("local", "agl"),
    "algorithm.adv_estimator": schema.advantage_estimators,
    f"{ACTOR}.strategy": lambda: ("fsdp2", "fsdp"),
    f"{ACTOR}.optim.lr_scheduler_type": lambda: ("constant", "cosine"),  # what verl's FSDP engine knows
    f"{ROLLOUT}.name": lambda: ("vllm",),
    f"{ROLLOUT}.dtype": schema.engine_dtypes,
    "trainer.logger": schema.trackers,  # a name or a list of them
}
TEXTS = {"mmqa.agent.instruction": True, "mmqa.agent_class": False}  # whether null is a value too


def check(config: Mapping[str, Any]) -> None:
    """Raise ``InputError`` for the first value outside its range; ``config`` is plain and resolved."""
    for key, span in RANGES.items():
        if (found := _at(config, key)) and not span.holds(found[0]):
            raise InputError(f"{key}={found[0]}: must be {span}")
    for key, names in CHOICES.items():
        values = [one for found in _at(config, key) for one in (found if isinstance(found, list) else [found])]
        for value in values:
            if (known := names()) and value not in known:
                near = difflib.get_close_matches(str(value), known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise InputError(f"{key}={value}: must be {' or '.join(known)}{hint}")
    for key, null in TEXTS.items():
        if (found := _at(config, key)) and not (isinstance(found[0], str) or (null and found[0] is None)):
            raise InputError(f"{key}={found[0]}: must be a text{', or null' if null else ''}")


def _at(config: Mapping[str, Any], key: str) -> list[Any]:
    """The value behind a dotted key as a list of one; empty if there is no such key."""
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return []
        node = node[part]
    return [node]
