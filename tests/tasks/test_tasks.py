"""Tasks are pure: the same arguments give the same samples, splits share nothing, answers are true."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent import tasks
from agent.errors import InputError
from agent.images import ImageStore
from agent.tasks import circles, folder
from agent.training.config import STOCK_AGENT
from agent.training.data import build_rows, images_in_a_row, write_rows
from agent.training.rundir import RunDir, read_jsonl


def test_circles_are_what_the_answer_says():
    for sample in circles.samples("train", 60, 7):
        colour = circles.COLOURS[sample.question.split()[2]]
        image = sample.images[0]
        # one circle at most in a cell, and it covers the cell's middle
        middles = [(c * 28 + 14, r * 28 + 14) for r in range(3) for c in range(3)]
        assert str(sum(image.getpixel(middle) == colour for middle in middles)) == sample.answer


@pytest.mark.parametrize("name", ["circles", "digits"])
def test_samples_are_repeatable_and_splits_disjoint(name):
    if name == "digits":
        pytest.importorskip("sklearn")
    task = tasks.load(name)
    first, again = (list(task.samples("train", 40, 3)) for _ in range(2))
    assert [(s.id, s.answer, s.images[0].tobytes()) for s in first] == [
        (s.id, s.answer, s.images[0].tobytes()) for s in again
    ]
    held_out = {s.images[0].tobytes() for s in task.samples("val", 40, 3)}
    assert not held_out & {s.images[0].tobytes() for s in first}
    assert {s.answer for s in first} <= set(task.ANSWERS)


def test_digits_keep_a_fifth_of_each_class_out():
    pytest.importorskip("sklearn")
    from agent.tasks import digits

    train, val = digits.split_indices("train"), digits.split_indices("val")
    assert len(train) + len(val) == 1797 and not set(train) & set(val)
    assert 0.19 < len(val) / 1797 < 0.21


def make_folder(root, lines, pictures=("a.png",)):
    from PIL import Image

    for name in pictures:
        Image.new("RGB", (20, 10), "red").save(root / name)
    for split in ("train", "val"):
        (root / f"{split}.jsonl").write_text("".join(f"{line}\n" for line in lines))


def test_own_data_becomes_rows(tmp_path):
    (tmp_path / "d").mkdir()
    row = {"question": "Colour?", "images": ["a.png"], "answer": "red", "allowed": ["red", "blue"]}
    make_folder(tmp_path / "d", [json.dumps(row), "", json.dumps({**row, "id": "x", "answer": 3})])
    store = ImageStore(tmp_path / "s")
    rows = build_rows("folder", "train", 10, 1, store, data_root=str(tmp_path / "d"))
    assert [one["id"] for one in rows] == ["train-1", "x"] and rows[0]["allowed"] == ["red", "blue"]
    assert store.open(rows[0]["images"][0]).size == (20, 10) and rows[1]["answer"] == "3"
    blank = build_rows("folder", "train", 1, 1, store, blank=True, data_root=str(tmp_path / "d"))
    assert store.open(blank[0]["images"][0]).getcolors() == [(200, (255, 255, 255))]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"train\.jsonl line 1: not valid JSON"),
        ("[]", "expected an object"),
        ('{"images": ["a.png"], "answer": "1"}', "key 'question'"),
        ('{"question": "q", "images": ["a.png"], "answer": ""}', "key 'answer'"),
        ('{"question": "q", "images": "a.png", "answer": "1"}', "key 'images'"),
        ('{"question": "q", "images": ["b.png"], "answer": "1"}', r"row train-1: image .*b\.png: No such file"),
        ('{"question": "q", "images": ["../x.png"], "answer": "1"}', "outside the data root"),
        ('{"question": "q", "images": ["a.png"], "answer": "1", "allowed": "yes"}', "key 'allowed' must be a list"),
        ('{"question": "q", "images": ["a.png"], "answer": "1", "allowed": 5}', "key 'allowed' must be a list"),
        ('{"question": "q", "images": ["a\\u0000.png"], "answer": "1"}', "cannot hold a NUL character"),
        ('{"question": "' + "x" * 120_000 + '", "images": ["a.png"], "answer": "1"}', "bytes of JSON"),
        ("", "split of task 'folder' is empty"),
    ],
)
def test_wrong_rows_are_named(tmp_path, line, message):
    (tmp_path / "d").mkdir()
    make_folder(tmp_path / "d", [line])
    with pytest.raises(InputError, match=message):
        build_rows("folder", "train", 10, 1, ImageStore(tmp_path / "s"), data_root=str(tmp_path / "d"))


def test_odd_texts_are_kept_or_named(tmp_path):
    (tmp_path / "2024").mkdir()
    row = {"question": "One\u2028line?", "images": ["a.png"], "answer": "1"}
    make_folder(tmp_path / "2024", [json.dumps(row, ensure_ascii=False)] * 2)
    run = RunDir(tmp_path / "run")
    keys = {"task": "folder", "data_root": tmp_path / "2024", "train_samples": 9, "val_samples": 9, "seed": 1}
    engine = SimpleNamespace(vllm={"limit_mm_per_prompt": {"image": 2}})
    own = SimpleNamespace(
        mmqa=Settings(
            keys, blank_images=False, max_pixels=1000, agent=SimpleNamespace(max_turns=1), agent_class=STOCK_AGENT
        ),
        actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(engine_kwargs=engine)),
    )
    assert write_rows(run, own) == {"train": 2, "val": 2}
    assert [one["question"] for one in read_jsonl(run.rows("train"))] == ["One\u2028line?"] * 2
    own.mmqa["agent"].max_turns = 3
    with pytest.raises(InputError, match=r"row train-1: 1 pictures, the engine takes 0 from a row; raise .*image"):
        write_rows(run, own)
    own.mmqa["agent_class"] = "own.Agent"
    assert images_in_a_row(own) == 2, "an agent of one's own may not zoom"
    for limit, number in (({"count": 4, "width": 64}, 4), (3, 3), (None, None)):
        engine.vllm["limit_mm_per_prompt"] = {"image": limit}
        assert images_in_a_row(own) == number
    for limits in ('{"image": 2}', None):
        engine.vllm["limit_mm_per_prompt"] = limits
        assert images_in_a_row(own) is None
    (tmp_path / "2024" / "val.jsonl").write_bytes('{"question": "größe"}'.encode("latin-1"))
    with pytest.raises(InputError, match=r"val\.jsonl: not a text in UTF-8"):
        write_rows(run, own)


class Settings(dict):
    __getattr__ = dict.__getitem__


def test_missing_data_root_and_unknown_task(tmp_path):
    with pytest.raises(InputError, match=r"needs mmqa\.data_root"):
        build_rows("folder", "train", 1, 1, ImageStore(tmp_path / "s"))
    with pytest.raises(InputError, match=r"train\.jsonl: not found"):
        build_rows("folder", "train", 1, 1, ImageStore(tmp_path / "s"), data_root=str(tmp_path))
    with pytest.raises(InputError, match="did you mean digits"):
        tasks.load("digit")


@settings(max_examples=60)
@given(st.text(max_size=80))
def test_any_line_is_a_row_or_an_input_error(line):
    try:
        row = folder.parse(line, "x line 1")
    except InputError as error:
        assert "x line 1" in str(error)
    else:
        assert row["question"].strip() and row["images"]
