"""What the first step's numbers prove, and what they do not."""

import math
import re

import pytest

from agent.training.image_proof import problem

GOOD = {"rows": 8, "rows_with_pixels": 8, "blank_shift_max": 0.5, "training/logprob_gap_mean": 0.001}


def test_pictures_in_every_row_and_numbers_that_agree_are_a_proof():
    assert problem(GOOD, True, 0.1) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows_with_pixels": 7}, "1 of 8 rows reached the actor without pixel tensors"),
        ({"blank_shift_max": 0.0}, "do not change when the pixels are blanked"),
        ({"blank_shift_max": math.nan}, r"not numbers \(nan\) when the pixels are blanked"),
        ({"training/logprob_gap_mean": 0.2}, r"differ from the engine's by 0\.200 nats a token"),
        ({"training/logprob_gap_mean": math.nan}, r"not numbers \(nan\)"),
        ({"training/logprob_gap_mean": math.inf}, "differ from the engine's by inf"),
        ({"training/logprob_gap_mean": None}, "the engine returned no log-probs"),
    ],
)
def test_anything_else_is_named(change, said):
    found = problem(GOOD | change, True, 0.1)
    assert found is not None and re.search(said, found)
