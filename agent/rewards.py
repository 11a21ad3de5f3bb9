"""From an answer to a reward. Pure; the reward is always a finite float.

A right answer earns 1.0 in the wanted form and ``fallback_reward`` (0.5) in any other, a wrong one 0.0. So a rising
reward can mean two things, better form or better seeing; ``Score`` keeps them apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from agent.answers import Answer, Form, find, normalise


class RewardError(ValueError):
    """A scoring function returned something that is no reward (NaN, infinity, text, nothing)."""


@dataclass(frozen=True)
class Score:
    """``reward`` in 0..1; ``correct`` in whatever form; ``form`` as in ``agent.answers``."""

    reward: float
    correct: bool
    form: Form
    answer: str


def as_reward(value: Any) -> float:
    """Return ``value`` as a finite float.

    A bool counts as 1.0 or 0.0: Agent Lightning would take it for "no reward".
    Raises ``RewardError`` for NaN, infinity and everything that is no number.
    """
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, Real) and hasattr(value, "item"):  # a numpy or torch scalar
        value = value.item()
    if not isinstance(value, Real):
        raise RewardError(f"the reward must be a number, not {type(value).__name__} ({str(value)[:40]!r})")
    number = float(value)
    if not math.isfinite(number):
        raise RewardError(f"the reward must be finite, not {number}")
    return number


def score(reply: str, truth: str, *, allowed: Sequence[str] = (), fallback_reward: float = 0.5) -> Score:
    """Score a model's reply against the true answer."""
    found: Answer = find(reply, allowed)
    correct = found.form != "none" and found.value == normalise(truth)
    reward = (1.0 if found.form == "tagged" else fallback_reward) if correct else 0.0
    return Score(as_reward(reward), correct, found.form, found.value)
