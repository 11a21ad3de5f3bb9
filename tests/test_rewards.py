"""agent.rewards: always a finite float; form and correctness kept apart."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.rewards import RewardError, as_reward, score


@pytest.mark.parametrize(
    ("reply", "reward", "correct", "form"),
    [
        ("<answer>3</answer>", 1.0, True, "tagged"),
        ("3", 0.5, True, "fallback"),
        ("<answer>4</answer> or 3", 0.0, False, "tagged"),
        ("4", 0.0, False, "fallback"),
        ("hm", 0.0, False, "none"),
    ],
)
def test_score(reply, reward, correct, form):
    got = score(reply, "3")
    assert (got.reward, got.correct, got.form) == (reward, correct, form)


def test_an_empty_truth_is_not_matched_by_no_answer():
    assert score("hm", "").reward == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1.0", None, [1]])
def test_what_is_no_reward_is_refused(value):
    with pytest.raises(RewardError):
        as_reward(value)


def test_bool_and_numpy_count_as_numbers():
    numpy = pytest.importorskip("numpy")
    assert as_reward(True) == 1.0 and type(as_reward(True)) is float
    assert as_reward(numpy.float32(0.5)) == 0.5
    assert as_reward(numpy.int64(1)) == 1.0


@given(st.text(max_size=200), st.text(max_size=20))
def test_every_reply_gets_a_finite_reward_in_range(reply, truth):
    got = score(reply, truth)
    assert type(got.reward) is float and math.isfinite(got.reward) and 0.0 <= got.reward <= 1.0
    assert got.correct == (got.reward > 0)
