"""A run that goes back to an earlier step: which checkpoints, figures and samples are the run's from then on."""

import pytest
from test_saving import saved, steps

from agent.training import checkpoints, resume, saving
from agent.training.course import belongs, course, note_beginning
from agent.training.rundir import STEP_METRICS, RunDir, append_jsonl, read_jsonl, write_json


@pytest.fixture
def run(tmp_path):
    return RunDir(tmp_path)


def attempt(run, step=0, writer=0):
    number = run.new_attempt()
    note_beginning(run, number, step, writer)
    resume.supersede(run, step, number)
    return number


def train(run, number, *made, save=(), rewards=None):
    """Steps of an attempt, each with a line and a sample; those of ``save`` are saved with their reward."""
    for step in made:
        reward = (rewards or {}).get(step)
        line = {"step": step, "attempt": number, **({"val/reward": reward} if reward is not None else {})}
        append_jsonl(run.metrics, line)
        append_jsonl(run.samples, {"step": step, "attempt": number, "rollout_id": f"{number}-{step}"})
        if step in save:
            saving.begin(run, step)
            saved(run, step, attempt=number)
            write_json(run.checkpoints / f"global_step_{step}" / STEP_METRICS, line)
            saving.finish(run, step, number)


def made_by(run, file):
    return [(row["step"], row["attempt"]) for row in read_jsonl(file)]


@pytest.fixture
def gone_back(run):
    """Attempt 1 saved 20, 30 (its best) and 40; attempt 2 goes back to 20, and dies at 22."""
    train(run, attempt(run), *range(0, 41, 2), save=(20, 30, 40), rewards={20: 0.2, 30: 0.9, 40: 0.1})
    train(run, attempt(run, 20, writer=1), 21, 22)
    return run


def test_the_next_attempt_goes_on_from_where_the_run_went_back_to(gone_back):
    assert resume.choose(gone_back, None).step == 20
    assert {one.step: one.left for one in checkpoints.checkpoints(gone_back)} == {20: False, 30: True, 40: True}
    assert saving.point_tracker(gone_back) == 20
    assert made_by(gone_back, gone_back.metrics)[-3:] == [(20, 1), (21, 2), (22, 2)]


def test_the_best_of_the_course_that_was_left_is_not_lost(gone_back):
    assert checkpoints.choose(gone_back, "best").step == 30
    train(gone_back, 2, 23, 24, save=(24,), rewards={24: 0.3})
    assert saving.prune(gone_back, 2, True) == [40] and steps(gone_back) == [20, 24, 30]
    assert resume.choose(gone_back, None).step == 24


def test_a_step_that_is_saved_again_counts_with_its_new_reward(gone_back):
    train(gone_back, 2, *range(23, 31), save=(30,), rewards={30: 0.4})
    assert {one.step: (one.reward, one.left) for one in checkpoints.checkpoints(gone_back)} == {
        20: (0.2, False),
        30: (0.4, False),
        40: (0.1, True),
    }


def test_a_run_returns_to_a_course_that_it_had_left(gone_back):
    number = attempt(gone_back, 40, writer=1)
    assert made_by(gone_back, gone_back.metrics) == [(step, 1) for step in range(0, 41, 2)]
    assert made_by(gone_back, gone_back.samples) == [(step, 1) for step in range(0, 41, 2)]
    assert made_by(gone_back, gone_back.attempt(number) / "superseded-metrics.jsonl") == [(21, 2), (22, 2)]
    assert resume.choose(gone_back, None).step == 40


def test_going_back_says_what_is_left_behind(run):
    train(run, attempt(run), *range(0, 41, 2), save=(20, 30, 40))
    notes = resume.choose(run, "20").notes
    assert "the checkpoints of step 30, 40 are left behind" in notes[0] and "goes on after step 20" in notes[-1]
    assert len(resume.choose(run, None).notes) == 1


def test_a_run_that_begins_again_at_step_1_has_one_step_0(run):
    train(run, attempt(run), 0, 1, 2)
    train(run, attempt(run), 0, 1)
    assert made_by(run, run.metrics) == [(0, 2), (1, 2)]
    assert made_by(run, run.attempt(2) / "superseded-metrics.jsonl") == [(0, 1), (1, 1), (2, 1)]


def test_an_attempt_without_a_note_is_passed_over(run):
    attempt(run)
    attempt(run, 10, writer=1)
    run.new_attempt()  # killed before it began
    last = course(run)
    assert [belongs(last, *one) for one in ((1, 10), (1, 11), (2, 11), (3, 1), (9, 1))] == [
        True,
        False,
        True,
        True,
        True,
    ]


def test_a_note_that_names_itself_does_not_go_round(run):
    note_beginning(run, run.new_attempt(), 5, 7)
    assert course(run) == {1: float("inf"), 0: 5}
