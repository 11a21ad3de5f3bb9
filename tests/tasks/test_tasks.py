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
from agent.training import picture_tokens
from agent.training.config import STOCK_AGENT
from agent.training.data import build_rows, images_in_a_row, write_rows
from agent.training.picture_tokens import PictureTokens, PromptRoom
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
        ('{"question": "q", "images": ["../x.png"], "answer": "1"}', r"train\.jsonl line 1: .*outside the data root"),
        (
            '{"question": "q", "images": ["/etc/passwd"], "answer": "1"}',
            r"train\.jsonl line 1: image /etc/passwd: outs",
        ),
        ('{"question": "q", "images": ["loop.png"], "answer": "1"}', r"train\.jsonl line 1: image 'loop\.png': .*loop"),
        ('{"question": "q", "images": ["out.png"], "answer": "1"}', r"train\.jsonl line 1: image out\.png: outside"),
        ('{"question": "q", "images": ["a\\ud800.png"], "answer": "1"}', r"line 1: \\ud800 is half a letter"),
        ('{"question": "q\\ud800", "images": ["a.png"], "answer": "1"}', r"line 1: \\ud800 is half a letter"),
        ('{"question": "q", "images": ["a.png"], "answer": ' + "1" * 5000 + "}", r"line 1: not valid JSON \(Exceeds"),
        ("[" * 200_000, r"line 1: lists or objects nested too deeply"),
        ('{"question": "q", "images": ["a.png"], "answer": NaN}', r"line 1: not valid JSON \(NaN is no JSON value"),
        ('{"question": "q", "images": ["a.png"], "answer": -Infinity}', "-Infinity is no JSON value"),
        ('{"question": "q", "images": ["a.png"], "answer": 1e999}', "key 'answer'"),
        ('{"question": "q", "images": ["thin.png"], "answer": "1"}', r"row train-1: image .*thin\.png: 1 x 60000 px"),
        ('{"question": "q", "images": ["a.png"], "answer": "1", "allowed": "yes"}', "key 'allowed' must be a list"),
        ('{"question": "q", "images": ["a.png"], "answer": "1", "allowed": 5}', "key 'allowed' must be a list"),
        ('{"question": "q", "images": ["a\\u0000.png"], "answer": "1"}', "line 1: image .*embedded null byte"),
        ('{"question": "' + "x" * 120_000 + '", "images": ["a.png"], "answer": "1"}', "bytes of JSON"),
        ("", "split of task 'folder' is empty"),
    ],
)
def test_wrong_rows_are_named(tmp_path, line, message):
    from PIL import Image

    (tmp_path / "d").mkdir()
    make_folder(tmp_path / "d", [line])
    (tmp_path / "d/loop.png").symlink_to("loop.png")
    (tmp_path / "d/out.png").symlink_to("/etc/passwd")
    if "thin" in line:
        Image.new("L", (1, 60_000)).save(tmp_path / "d/thin.png")
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
        actor_rollout_ref=SimpleNamespace(
            rollout=SimpleNamespace(engine_kwargs=engine), model=SimpleNamespace(path=tmp_path / "no model")
        ),
        data={"max_prompt_length": 64},
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


def model_files(folder, **processor):
    """What of a model's folder says how many tokens a picture costs."""
    folder.mkdir()
    kind = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 14, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(kind | processor))
    return folder


@pytest.mark.parametrize(
    "size", [{"min_pixels": 3136, "max_pixels": 10**7}, {"size": {"shortest_edge": 3136, "longest_edge": 10**7}}]
)
def test_a_row_whose_pictures_do_not_fit_into_the_prompt_is_refused(tmp_path, size):
    (tmp_path / "d").mkdir()
    row = {"question": "Which?", "images": ["a.png", "b.png"], "answer": "a"}
    make_folder(tmp_path / "d", [json.dumps(row)], pictures=())
    from PIL import Image

    for name in ("a.png", "b.png"):
        Image.new("RGB", (1024, 1024)).save(tmp_path / "d" / name)
    pictures = picture_tokens.of_model(str(model_files(tmp_path / "m", **size)))
    assert pictures is not None and pictures == PictureTokens(28, 3136, 10**7)

    def rows(tokens, max_pixels=2**20, **more):
        room = PromptRoom(tokens, pictures, len, **more)
        store = ImageStore(tmp_path / "s", max_pixels)
        return build_rows("folder", "train", 1, 1, store, data_root=str(tmp_path / "d"), room=room)

    with pytest.raises(InputError, match=r"train row train-1: its pictures \(1024 x 1024, 1024 x 1024 px\)") as caught:
        rows(2048)
    assert "are 2,742 tokens and 7 of text, data.max_prompt_length=2048 holds less; raise it" in str(caught.value)
    assert caught.value.slug == "image-prompt-truncated"
    assert rows(2749) and rows(2048, max_pixels=2**19)
    with pytest.raises(InputError, match="are 2,742 tokens and 8 of text"):
        rows(2749, instruction="!")
    with pytest.raises(InputError, match=r"1 closer look\(s\)\) are 4,113 tokens"):
        rows(2749, looks=1)


def test_picture_tokens_are_those_of_the_models_own_code():
    smart_resize = pytest.importorskip("transformers.models.qwen2_vl.image_processing_qwen2_vl").smart_resize
    for side, least, most in ((28, 56 * 56, 28 * 28 * 1280), (32, 65536, 16777216), (28, 7056, 7056)):
        pictures = PictureTokens(side, least, most)
        for width, height in (
            (1, 1),
            (20, 10),
            (84, 84),
            (1024, 1024),
            (73, 14000),
            (3000, 16),
            (1000, 1500),
            (70, 42),
        ):
            high, wide = smart_resize(height, width, side, least, most)
            assert pictures.count(width, height) == high * wide // side**2 + 2, (side, width, height)


def test_what_cannot_be_told_of_a_model_is_not_checked(tmp_path):
    assert picture_tokens.of_model(str(tmp_path / "nowhere")) is None
    assert picture_tokens.of_model("no-such-owner/no-such-model") is None
    other = model_files(tmp_path / "other", image_processor_type="SiglipImageProcessor")
    assert picture_tokens.of_model(str(other)) is None
    (other / "preprocessor_config.json").write_text("[")
    assert picture_tokens.of_model(str(other)) is None
    assert picture_tokens.of_model(str(model_files(tmp_path / "half", size=5))) is None


class Settings(dict):
    __getattr__ = dict.__getitem__


def test_missing_data_root_and_unknown_task(tmp_path):
    with pytest.raises(InputError, match=r"needs mmqa\.data_root"):
        build_rows("folder", "train", 1, 1, ImageStore(tmp_path / "s"))
    with pytest.raises(InputError, match=r"train\.jsonl: not found"):
        build_rows("folder", "train", 1, 1, ImageStore(tmp_path / "s"), data_root=str(tmp_path))
    with pytest.raises(InputError, match=r"data_root=.*/gone: no such folder"):
        build_rows("folder", "train", 1, 1, ImageStore(tmp_path / "s"), data_root=str(tmp_path / "gone"))
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
