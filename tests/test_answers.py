"""agent.answers: the last tag, one clear fallback, never an exception."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.answers import Answer, find, normalise


@pytest.mark.parametrize(
    ("text", "allowed", "expected"),
    [
        ("<answer>5</answer>", (), Answer("5", "tagged")),
        ("I write <answer>X</answer>. So: <answer> Five. </answer>", (), Answer("5", "tagged")),
        ("<ANSWER>red</ANSWER>", (), Answer("red", "tagged")),
        ("<answer>2<answer>3</answer>", (), Answer("3", "tagged")),
        ("<answer></answer>", (), Answer("", "tagged")),
        ("1. I see 5 circles", (), Answer("5", "fallback")),
        ("The answer is 4. There are 7 shapes.", (), Answer("4", "fallback")),
        ("Answer: three", (), Answer("3", "fallback")),
        ("I count seven of them", (), Answer("7", "fallback")),
        ("5 of 12", ("1", "2", "3", "4", "5"), Answer("5", "fallback")),
        ("it is green, not red", ("red", "green"), Answer("red", "fallback")),
        ("greenish", ("red", "green"), Answer("", "none")),
        ("no idea", (), Answer("", "none")),
        ("", (), Answer("", "none")),
        ("<answer>5", (), Answer("5", "fallback")),
    ],
)
def test_find(text, allowed, expected):
    assert find(text, allowed) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [(" Five. ", "5"), ("1,000", "1000"), ("5.0", "5"), ("+5", "5"), ("007", "7"), ("2.50", "2.50"), ("Red!", "red")],
)
def test_normalise(text, expected):
    assert normalise(text) == expected


@given(st.text(max_size=300), st.lists(st.text(max_size=8), max_size=4))
def test_any_text_gives_an_answer_object(text, allowed):
    found = find(text, allowed)
    assert found.form in ("tagged", "fallback", "none")
    assert found.form != "none" or found.value == ""


@given(st.text(max_size=60), st.integers(0, 10**9), st.text(max_size=60))
def test_the_last_tag_wins_whatever_stands_around_it(before, number, after):
    text = f"{before}<answer>{number}</answer>{after.replace('<', '')}"
    assert find(text) == Answer(str(number), "tagged")


@given(st.text(max_size=100))
def test_normalise_is_idempotent(text):
    assert normalise(normalise(text)) == normalise(text)
