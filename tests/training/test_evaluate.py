"""The figures of an evaluation; the evaluation itself is in test_end_to_end."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agent.errors import InputError
from agent.images import ImageStore
from agent.training import evaluate as module
from agent.training.evaluate import Evaluated, take_rows, wilson
from agent.training.rundir import RunDir, read_jsonl, write_jsonl


def test_wilsons_interval_against_known_values():
    assert wilson(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    assert wilson(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson(0.0, 0) == (0.0, 1.0)


@given(st.integers(1, 5000), st.data())
def test_an_interval_holds_its_share_and_narrows(count, data):
    right = data.draw(st.integers(0, count))
    low, high = wilson(right / count, count)
    assert 0 <= low <= right / count + 1e-12 and right / count - 1e-12 <= high <= 1
    assert wilson(right / count, 4 * count)[1] - wilson(right / count, 4 * count)[0] < high - low


def test_the_line_says_what_was_asked():
    values = {"target": "r", "step": 2, "scored": 8, "failed": 1, "right": 0.5, "right_in_wanted_form": 0.25}
    values |= {"wanted_form": 0.5, "low": 0.2, "high": 0.8, "reward": 0.4, "chance": 0.1, "folder": "f"}
    line = Evaluated(split="val", blank_images=True, **values).line()
    assert line.startswith("pictures blanked, 8 questions: right 0.50 (95 %: 0.20 .. 0.80)")
    assert line.endswith("a constant answer: 0.10; 1 rollouts failed")


def test_a_run_is_evaluated_on_its_own_rows(tmp_path):
    """Also after it was moved; blanked, each picture is a white one of its size."""
    trained = RunDir(tmp_path / "trained")
    picture = Image.new("RGB", (30, 20), "red")
    reference = ImageStore(trained.images).put(picture)
    for split, rows in (("train", "ab"), ("val", "c")):
        write_jsonl(trained.rows(split), [{"id": one, "images": [reference], "question": "?"} for one in rows])
    moved = RunDir(tmp_path / "moved")
    trained.root.rename(moved.root)
    for blank, colour in ((False, (255, 0, 0)), (True, (255, 255, 255))):
        own = RunDir(tmp_path / f"own-{blank}")
        take_rows(own, moved, blank)
        assert [one["id"] for one in read_jsonl(own.rows("train"))] == ["a", "b"]
        (row,) = read_jsonl(own.rows("val"))
        found = ImageStore(own.images).open(row["images"][0])
        assert found.size == (30, 20) and found.getpixel((5, 5)) == colour


def test_evaluations_are_numbered(tmp_path):
    assert module._next(tmp_path / "evals") == tmp_path / "evals/1"
    for name in ("1", "7", "notes"):
        (tmp_path / "evals" / name).mkdir(parents=True)
    assert module._next(tmp_path / "evals") == tmp_path / "evals/8"


def test_a_run_has_its_own_configuration(tmp_path):
    RunDir(tmp_path).new_attempt()
    with pytest.raises(InputError, match="is a run and has its own configuration; leave it out"):
        module.evaluate(str(Path(tmp_path)), preset="cpu")
    with pytest.raises(InputError, match="no whole checkpoint"):
        module.evaluate(str(Path(tmp_path)))
