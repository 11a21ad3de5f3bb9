"""Which rows of a step are trained: 31 of 32 never become none, a group of one is no group."""

from hypothesis import given
from hypothesis import strategies as st

from agent.training.rows import plan


def rows(groups, size):
    return [f"g{i // size}" for i in range(groups * size)], [f"r{i}" for i in range(groups * size)]


def test_a_full_step_is_left_alone():
    groups, rollouts = rows(8, 4)
    got = plan(groups, rollouts, [False] * 32, 32)
    assert got.keep == list(range(32)) and got.fill == [] and got.dropped == got.lonely == 0


def test_one_missing_row_is_filled_not_floored_to_none():
    groups, rollouts = rows(8, 4)
    got = plan(groups, rollouts, [False] * 31 + [True], 32)
    assert len(got.keep) == 31 and len(got.fill) == 1 and got.dropped == 1


def test_a_group_of_one_is_dropped():
    groups, rollouts = rows(2, 4)
    got = plan(groups, rollouts, [False] * 5 + [True] * 3, 8)
    assert got.keep == [0, 1, 2, 3] and got.lonely == 1 and len(got.fill) == 4


def test_several_turns_of_one_rollout_are_no_group():
    got = plan(["a", "a", "a"], ["r1", "r1", "r1"], [False] * 3, 2)
    assert got.keep == [] and got.lonely == 3


def test_a_small_surplus_is_left_to_the_trainer():
    groups, rollouts = rows(9, 4)
    got = plan(groups, rollouts, [False] * 36, 32)
    assert len(got.keep) == 36 and got.fill == []


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=60),
    st.integers(1, 40),
)
def test_whatever_comes_something_is_trained_if_any_group_is_left(items, multiple):
    groups = [g for g, _, _ in items]
    rollouts = [(g, r) for g, r, _ in items]
    got = plan(groups, rollouts, [d for _, _, d in items], multiple)
    assert set(got.fill) <= set(got.keep)
    assert not any(items[i][2] for i in got.keep)
    if got.keep:
        assert (len(got.keep) + len(got.fill)) // multiple * multiple > 0
        assert len(got.fill) < multiple or len(got.keep) < multiple
    members = {}
    for index in got.keep:
        members.setdefault(groups[index], set()).add(rollouts[index])
    assert all(len(one) > 1 for one in members.values())
