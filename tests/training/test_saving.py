"""Around a save: room, verification, the manifest, and which older checkpoints go."""

import json
import os
import shutil
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from agent.training import checkpoints, saving
from agent.training.rundir import RunDir, append_jsonl
from agent.training.saving import SaveRefused, begin, check_space, expected_bytes, finish, point_tracker, prune

Usage = namedtuple("Usage", "total used free")


def save(run, step, world_size=1, reward=None):
    """What verl leaves after a save, with its tracker."""
    folder = run.checkpoints / f"global_step_{step}"
    (folder / "actor" / "huggingface").mkdir(parents=True, exist_ok=True)
    (folder / "actor" / "huggingface" / "config.json").write_text("{}")
    for name in [*checkpoints.shard_names(world_size), "data.pt"]:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("archive/data.pkl", b"x" * 3000)
            archive.writestr("archive/data/0", bytes(range(256)) * 40)
    (run.checkpoints / saving.TRACKER).write_text(str(step))
    if reward is not None:
        append_jsonl(run.metrics, {"step": step, "val/reward": reward})
    return folder


def saved(run, *steps, attempt=1, rewards=()):
    """Whole checkpoints."""
    for place, step in enumerate(steps):
        save(run, step, reward=rewards[place] if rewards else None)
        finish(run, step, attempt)


def steps(run):
    return sorted(int(one.name.split("_")[-1]) for one in run.checkpoints.glob("global_step_*"))


def tracker(run):
    return (run.checkpoints / saving.TRACKER).read_text()


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.new_attempt()
    return run


def model_folder(folder, tensors, name="model.safetensors"):
    """The header of a safetensors file, which is all that is read."""
    folder.mkdir(exist_ok=True)
    header = {"__metadata__": {"format": "pt"}} | {
        key: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for key, shape in tensors.items()
    }
    text = json.dumps(header).encode()
    (folder / name).write_bytes(len(text).to_bytes(8, "little") + text)
    return folder


# -- room ------------------------------------------------------------------------------------------------------------


def test_expected_bytes(run, tmp_path):
    model = model_folder(tmp_path / "model", {"a": [1000, 50], "b": [50], "scalar": []})
    assert expected_bytes(run, model) == pytest.approx((50_000 + 50 + 1) * 12 * 1.05, abs=1)
    model_folder(model, {"a": [1000, 50]}, "consolidated.safetensors")  # the same weights again, not loaded
    assert expected_bytes(run, model) == pytest.approx((50_000 + 50 + 1) * 12 * 1.05, abs=1)
    parts = model_folder(tmp_path / "parts", {"a": [10]}, "model-1.safetensors")
    model_folder(parts, {"b": [20]}, "model-2.safetensors")
    assert expected_bytes(run, parts) == 378
    index = {"weight_map": {"a": "model-1.safetensors"}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    assert expected_bytes(run, parts) == 126
    assert expected_bytes(run, str(tmp_path / "owner" / "name-at-a-hub")) == 0
    saved(run, 10)
    save(run, 20)
    size = sum(file.stat().st_size for file in (run.checkpoints / "global_step_10").rglob("*") if file.is_file())
    assert expected_bytes(run, model) == size


def test_no_room(run, tmp_path, monkeypatch):
    model = model_folder(tmp_path / "model", {"a": [100_000_000]})
    asked = []

    def usage(place):
        asked.append(Path(place))
        return Usage(10**12, 0, 1_200_000_000)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(SaveRefused) as refused:
        check_space(run, model)
    assert asked == [run.root]  # the nearest that exists
    assert str(refused.value) == (
        f"no room for a checkpoint: it needs 1.33 GB, and {run.root} has 1.20 GB free; nothing was written; "
        "there is no whole checkpoint yet; make room or keep fewer (mmqa.keep_checkpoints), then --resume auto"
    )
    saved(run, 10)
    check_space(run, model)  # a small one by now
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(10**12, 0, 64 << 20))
    with pytest.raises(
        SaveRefused, match=r"needs 0\.\d\d GB, and .*checkpoints has .*; step 10 is kept, whole; make room"
    ):
        check_space(run, model)


def test_a_step_that_is_saved_again_begins_empty(run):
    saved(run, 10)
    save(run, 20, world_size=2)
    finish(run, 20, 1)
    begin(run, 20)
    assert steps(run) == [10] and tracker(run) == "10" and not list(run.checkpoints.glob(".*"))
    begin(run, 30)
    save(run, 20)
    assert finish(run, 20, 2)["world_size"] == 1


# -- what was written ------------------------------------------------------------------------------------------------


def test_manifest(run):
    folder = save(run, 10, world_size=2)
    (folder / "actor" / ".left-over").write_text("")
    manifest = finish(run, 10, 3)
    assert manifest == checkpoints.read_manifest(folder)
    assert {key: manifest[key] for key in ("schema", "step", "attempt", "world_size")} == {
        "schema": 1,
        "step": 10,
        "attempt": 3,
        "world_size": 2,
    }
    assert set(manifest["files"]) == {*checkpoints.shard_names(2), "data.pt", "actor/huggingface/config.json"}
    assert manifest["bytes"] == sum(manifest["files"].values()) == 7 * (folder / "data.pt").stat().st_size + 2
    assert checkpoints.problem_of(folder, plain=False) is None
    assert finish(run, 10, 4)["files"] == manifest["files"]  # once more: it does not list itself


def test_manifest_is_written_last(run, monkeypatch):
    folder = save(run, 10)
    order = []
    sync, replace = os.fsync, os.replace

    def fsync(handle):
        order.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        sync(handle)

    def replaced(old, new):
        assert not Path(new).exists() and json.loads(Path(old).read_text())["step"] == 10
        order.append(f"-> {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replaced)
    finish(run, 10, 1)
    assert order[-4:] == [".manifest.json.part", "-> manifest.json", "global_step_10", "checkpoints"]
    files = {file.name for file in folder.rglob("*") if file.is_file()} - {"manifest.json"}
    assert files | {"actor", "huggingface"} == set(order[:-4])


def damage(file, what):
    """What a full disk, a kill or a bad disk makes of a file."""
    content = file.read_bytes()
    if what == "missing":
        file.unlink()
    elif what == "cut short":
        file.write_bytes(content[:-30])
    elif what == "empty":
        file.write_bytes(b"")
    elif what == "a hole where a header was":
        place = content.rindex(b"PK\x03\x04")
        file.write_bytes(content[:place] + bytes(30) + content[place + 30 :])
    elif what == "a byte of a member":
        file.write_bytes(content.replace(b"xxxx", b"xxxy", 1))
    elif what == "not accounted for":
        file.write_bytes(bytes(200_000) + content)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("missing", "is missing"),
        ("cut short", r"is cut short or damaged \(File is not a zip file\)"),
        ("empty", "is cut short or damaged"),
        ("a hole where a header was", r"is cut short or damaged \(Bad magic number"),
        ("a byte of a member", r"is damaged: archive/data\.pkl does not have its checksum"),
        ("not accounted for", "members do not account for"),
    ],
)
@pytest.mark.parametrize("name", ["data.pt", *checkpoints.shard_names(2)[1:4:2]])
def test_what_is_not_whole_gets_no_manifest(run, name, what, said):
    saved(run, 10)
    folder = save(run, 20, world_size=2)
    damage(folder / name, what)
    with pytest.raises(SaveRefused, match=rf"^the checkpoint is not whole: {name} .*{said}.*step 10 is kept, whole"):
        finish(run, 20, 1)
    assert not (folder / checkpoints.MANIFEST).exists()
    assert tracker(run) == "10"  # verl had it name 20 already
    assert [one.step for one in checkpoints.by_age(checkpoints.checkpoints(run))] == [10]


def test_the_first_save_of_a_run_is_refused(run):
    """No checkpoint has a manifest then, and this one looks like one of verl's own."""
    folder = save(run, 10)
    whole = (folder / "data.pt").read_bytes()
    damage(folder / "data.pt", "a byte of a member")
    with pytest.raises(SaveRefused, match="there is no whole checkpoint yet"):
        finish(run, 10, 1)
    assert checkpoints.checkpoints(run)[0].problem == "data.pt is damaged: archive/data.pkl does not have its checksum"
    (folder / "data.pt").write_bytes(whole)
    assert "not-whole.txt" not in finish(run, 10, 1)["files"]
    assert checkpoints.checkpoints(run)[0].problem is None


def test_checksums_of_large_ones_are_left_out(run, monkeypatch):
    monkeypatch.setattr(saving, "CRC_LIMIT", 1000)
    damage(save(run, 10) / "data.pt", "a byte of a member")
    finish(run, 10, 1)


def test_shards_of_two_numbers_of_ranks(run):
    save(run, 10, world_size=2)
    save(run, 10, world_size=1)
    with pytest.raises(SaveRefused, match="has shards of 1 and 2 ranks; there is no whole checkpoint yet"):
        finish(run, 10, 1)
    assert not (run.checkpoints / saving.TRACKER).exists()
    with pytest.raises(SaveRefused, match="has shards of no ranks"):
        finish(run, 20, 1)


def test_disk_full_or_broken_at_the_end(run, monkeypatch):
    saved(run, 10)
    folder = save(run, 20)
    sync = os.fsync

    def full(handle):
        if os.readlink(f"/proc/self/fd/{handle}").endswith("optim_world_size_1_rank_0.pt"):
            raise OSError(28, "No space left on device")
        sync(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SaveRefused, match=r"optim_world_size_1_rank_0\.pt: No space left on device; step 10 is kept"):
        finish(run, 20, 1)
    assert not (folder / checkpoints.MANIFEST).exists()


# -- older ones ------------------------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_best(run):
    saved(run, 10, 20, 30, 40, rewards=(0.2, 0.9, 0.4, 0.5))
    assert prune(run, None, True) == [] and prune(run, 0, False) == []
    assert prune(run, 2, True) == [10] and steps(run) == [20, 30, 40]
    assert prune(run, 1, True) == [30] and steps(run) == [20, 40]
    assert prune(run, 1, False) == [20] and steps(run) == [40]
    assert prune(run, 1, False) == [] and tracker(run) == "40"


def test_of_equal_rewards_the_newest_is_best(run):
    saved(run, 10, 20, 30, rewards=(0.9, 0.9, 0.1))
    append_jsonl(run.metrics, {"step": 30, "val/reward": float("nan")})
    assert prune(run, 1, True) == [10]


def test_prune_across_restarts(run):
    """Each save is a new process: nothing but the folder is known."""
    for attempt, step in enumerate((10, 20, 30, 40, 50), start=1):
        saved(run, step, attempt=attempt, rewards=(0.9 if step == 20 else 0.1,))
        prune(run, 2, True)
    assert steps(run) == [20, 40, 50]


def test_a_run_resumed_from_an_earlier_step(run):
    """Attempt 2 goes on from 10: 20 is newer than 30, which is what attempt 1 left."""
    saved(run, 10, 20, 30)
    begin(run, 20)
    saved(run, 20, attempt=2)
    assert tracker(run) == "20"
    assert prune(run, 2, False) == [10] and steps(run) == [20, 30] and tracker(run) == "20"
    begin(run, 30)
    saved(run, 30, attempt=2)
    assert prune(run, 1, False) == [20] and tracker(run) == "30"


def test_torn_ones(run, capsys):
    saved(run, 10)
    save(run, 20)  # killed before it was finished
    saved(run, 30)
    save(run, 40)
    assert prune(run, 5, False) == [20] and steps(run) == [10, 30, 40]
    assert capsys.readouterr().out == (
        "mmqa: the checkpoint of step 40 is left as it is: no manifest: the save did not finish\n"
    )
    assert tracker(run) == "30"  # it named 40


def test_nothing_whole_nothing_deleted(run):
    (save(run, 10) / "data.pt").unlink()
    assert prune(run, 1, True) == [] and steps(run) == [10]
    assert point_tracker(run) is None and not (run.checkpoints / saving.TRACKER).exists()


def test_interrupted_delete(run, monkeypatch):
    saved(run, 10, 20, 30)
    remove = shutil.rmtree

    def killed(folder, **options):
        if Path(folder).exists():
            next(Path(folder).rglob("model_*")).unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(run, 1, False)
    assert steps(run) == [20, 30] and (run.checkpoints / ".deleting-global_step_10").is_dir()
    assert all(one.problem is None for one in checkpoints.checkpoints(run))
    monkeypatch.setattr(shutil, "rmtree", remove)
    assert prune(run, 1, False) == [20] and steps(run) == [30]
    assert not list(run.checkpoints.glob(".deleting-*"))


def test_tracker_is_right_before_anything_is_deleted(run, monkeypatch):
    saved(run, 10, 20)
    (run.checkpoints / saving.TRACKER).write_text("10")

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        prune(run, 1, False)
    assert tracker(run) == "20"
