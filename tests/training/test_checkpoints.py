"""Which checkpoints are whole, and which one is chosen."""

import json
import zipfile

import pytest

from agent.errors import InputError
from agent.training.checkpoints import as_json, checkpoints, choose, open_run
from agent.training.rundir import RunDir, append_jsonl


def save(run, step, world_size=1, reward=None):
    """A checkpoint in verl's layout (torch.save writes zip files)."""
    folder = run.checkpoints / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    names = [
        f"actor/{k}_world_size_{world_size}_rank_{r}.pt"
        for k in ("model", "optim", "extra_state")
        for r in range(world_size)
    ]
    for name in [*names, "data.pt"]:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("data", b"x" * 1000)
    if reward is not None:
        append_jsonl(run.metrics, {"step": step, "val/reward": reward})
    return folder


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.new_attempt()
    return run


def test_whole_and_torn(run):
    save(run, 10, reward=0.9)
    save(run, 20, world_size=2, reward=0.5)
    torn = save(run, 30) / "actor" / "model_world_size_1_rank_0.pt"
    torn.write_bytes(torn.read_bytes()[:-30])
    (save(run, 40) / "data.pt").unlink()
    (run.checkpoints / "global_step_5" / "actor").mkdir(parents=True)
    found = {one.step: one for one in checkpoints(run)}
    assert list(found) == [5, 10, 20, 30, 40]
    assert found[10].problem is None and found[20].problem is None and found[20].world_size == 2
    assert found[30].problem == "actor/model_world_size_1_rank_0.pt is cut short"
    assert found[40].problem == "data.pt is missing" and str(found[5].problem).startswith("no model shard")
    assert choose(run, None).step == 20 and choose(run, "best").step == 10 and choose(run, "20").step == 20
    assert [one["step"] for one in json.loads(as_json(checkpoints(run)))] == [5, 10, 20, 30, 40]
    with pytest.raises(InputError, match=r"step 30: actor/model_world_size_1_rank_0\.pt is cut short"):
        choose(run, "30")
    with pytest.raises(InputError, match=r"no checkpoint of step 7; there are 10, 20, and best"):
        choose(run, "7")


def test_nothing_to_choose_from(run, tmp_path):
    with pytest.raises(InputError, match="no whole checkpoint"):
        choose(run, None)
    with pytest.raises(InputError, match="no run here"):
        open_run(tmp_path / "elsewhere")
    save(run, 3)
    with pytest.raises(InputError, match="no whole checkpoint has a validation reward"):
        choose(run, "best")
