"""A checkpoint of N ranks, rewritten for M ranks, goes on as the unsharded computation does.

Run as a program (one process a rank, forked after one import of torch, meeting in a file): ``test_reshard.py N M DIR``.
"""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from agent.errors import InputError
from agent.training.checkpoints import problem_of, read_manifest
from agent.training.reshard import reshard

STEP, RANKS = 4, [(1, 2), (2, 1), (2, 3)]


@pytest.mark.parametrize(("before", "after"), RANKS)
def test_goes_on_as_if_it_had_never_been_sharded(tmp_path, before, after):
    pytest.importorskip("torch")
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    done = subprocess.run(
        [sys.executable, __file__, str(before), str(after), str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    target = tmp_path / "new" / f"global_step_{STEP}"
    assert problem_of(target) is None and not list(target.parent.glob(".*"))
    manifest = read_manifest(target) or {}
    assert manifest["world_size"] == after and manifest["attempt"] == 0 and manifest["step"] == STEP
    assert json.loads((target / "actor" / "fsdp_config.json").read_text()) == {"FSDP_version": 2, "world_size": after}
    assert (target / "actor" / "huggingface" / "config.json").read_text() == "{}"
    assert (target / "data.pt").read_bytes() == (tmp_path / "old" / f"global_step_{STEP}" / "data.pt").read_bytes()
    assert not list(target.glob(f"actor/*_world_size_{before}_*"))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path):
    """A checkpoint of one rank without DTensors, which needs no process group."""
    torch = pytest.importorskip("torch")
    folder = tmp_path / "old" / f"global_step_{STEP}"
    write(
        torch, folder, 0, 1, {"a": torch.arange(3.0)}, {"state": {}, "param_groups": [{"lr": 0.5}]}, {"last_epoch": 4}
    )
    write_common(torch, folder, 1)
    return folder


def test_refuses_what_it_cannot_do(source, tmp_path):
    target = tmp_path / "new" / f"global_step_{STEP}"
    with pytest.raises(InputError, match="for 0 ranks"):
        reshard(source, target, 0)
    with pytest.raises(InputError, match="must be global_step_"):
        reshard(source, tmp_path / "elsewhere", 2)
    with pytest.raises(InputError, match="exists already"):
        reshard(source, source, 2)
    config = source / "actor" / "fsdp_config.json"
    config.write_text('{"FSDP_version": 1, "world_size": 1}')
    with pytest.raises(InputError, match="only FSDP2 checkpoints"):
        reshard(source, target, 2)
    config.unlink()
    with pytest.raises(InputError, match=r"fsdp_config\.json is not readable"):
        reshard(source, target, 2)
    (source / "data.pt").unlink()
    with pytest.raises(InputError, match=r"data\.pt is missing"):
        reshard(source, target, 2)
    assert not target.parent.exists()


def test_an_interruption_leaves_nothing_under_the_name(source, tmp_path, monkeypatch):
    target = tmp_path / "new" / f"global_step_{STEP}"
    torch = pytest.importorskip("torch")
    save = torch.save

    def interrupted(state, file):
        if "optim" in file.name:
            raise KeyboardInterrupt
        save(state, file)

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reshard(source, target, 2)
    assert not target.exists() and [one.name for one in target.parent.iterdir()] == [f".resharding-{target.name}"]
    monkeypatch.setattr(torch, "save", save)
    reshard(source, target, 2)
    assert [one.name for one in target.parent.iterdir()] == [target.name]
    loaded = torch.load(target / "actor" / "extra_state_world_size_2_rank_1.pt", weights_only=False)
    assert loaded["lr_scheduler"] == {"last_epoch": 4} and torch.equal(loaded["rng"]["cpu"], torch.tensor([0.0]))
    loaded = torch.load(target / "actor" / "model_world_size_2_rank_1.pt", weights_only=False)
    assert torch.equal(loaded["a"], torch.arange(3.0))


# -- the program -----------------------------------------------------------------------------------------------------


def write(torch, folder, rank, world_size, model, optimizer, schedule):
    """What verl's FSDPCheckpointManager.save_checkpoint writes for one rank."""
    (folder / "actor").mkdir(parents=True, exist_ok=True)
    rng = {"cpu": torch.tensor([float(rank)]), "random": random.getstate()}
    parts = {"model": model, "optim": optimizer, "extra_state": {"lr_scheduler": schedule, "rng": rng}}
    for kind, state in parts.items():
        torch.save(state, folder / "actor" / f"{kind}_world_size_{world_size}_rank_{rank}.pt")


def write_common(torch, folder, world_size):
    (folder / "actor" / "huggingface").mkdir()
    (folder / "actor" / "huggingface" / "config.json").write_text("{}")
    (folder / "actor" / "fsdp_config.json").write_text(json.dumps({"FSDP_version": 2, "world_size": world_size}))
    torch.save({"place": 17}, folder / "data.pt")


def build(torch, sharded):
    """Tied weights, a buffer, and sizes (7, 5, 3, 1) that neither 2 nor 3 divides."""
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(7, 5)
            self.body = nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3), nn.Linear(3, 1), nn.Linear(1, 5))
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("seen", torch.full((2,), 3.0))

        def forward(self, tokens):
            return self.head(self.body(self.embed(tokens)))

    torch.manual_seed(3)
    model = Model()
    if sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", mesh_shape=(sharded,), mesh_dim_names=("fsdp",))  # as verl makes it
        fully_shard(model.body, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def steps(torch, model, optimizer, schedule, which):
    for number in which:
        tokens = torch.tensor([[number, 1, 6], [2, 5, 0]])
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), (tokens.flatten() + 1) % 7)
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def figures(model, optimizer):
    """Weights and moments, whole."""

    def whole(tensor):
        return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()

    weights = {name: whole(value) for name, value in model.state_dict().items()}
    moments = optimizer.state_dict()["state"]
    return weights | {f"{place}.{name}": whole(value) for place in moments for name, value in moments[place].items()}


def same(torch, left, right):
    assert left.keys() == right.keys() and len(left) > 20
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def rank_saves(torch, rank, world_size, folder):
    model, optimizer, schedule = build(torch, world_size)
    steps(torch, model, optimizer, schedule, (0, 1))
    write(torch, folder, rank, world_size, model.state_dict(), optimizer.state_dict(), schedule.state_dict())


def rank_goes_on(torch, rank, world_size, folder, old_ranks):
    """Load as verl's FSDPCheckpointManager.load_checkpoint does, compare, make one more step, compare."""
    plain = build(torch, 0)
    steps(torch, *plain, (0, 1))
    model, optimizer, schedule = build(torch, world_size)
    suffix = f"world_size_{world_size}_rank_{rank}.pt"
    model.load_state_dict(torch.load(folder / "actor" / f"model_{suffix}", weights_only=False))
    state = torch.load(folder / "actor" / f"optim_{suffix}", weights_only=False)
    one = state["state"][0]["exp_avg"]
    mine = next(model.parameters())
    assert one.device_mesh == mine.device_mesh and one.placements == mine.placements
    assert one.to_local().untyped_storage().nbytes() == one.to_local().numel() * 4
    optimizer.load_state_dict(state)
    extra = torch.load(folder / "actor" / f"extra_state_{suffix}", weights_only=False)
    schedule.load_state_dict(extra["lr_scheduler"])
    assert int(extra["rng"]["cpu"].item()) == rank % old_ranks
    assert schedule.get_last_lr() == plain[2].get_last_lr()
    same(torch, figures(model, optimizer), figures(*plain[:2]))
    steps(torch, *plain, (3,))
    steps(torch, model, optimizer, schedule, (3,))
    same(torch, figures(model, optimizer), figures(*plain[:2]))
    saved = model.state_dict()
    again = torch.load(folder / "actor" / f"model_{suffix}", weights_only=False)
    assert list(again) == list(saved) and again._metadata == saved._metadata
    local = [again[name].to_local() for name in ("embed.weight", "head.weight")]
    assert local[0].data_ptr() == local[1].data_ptr()


def main(old_ranks, new_ranks, root):
    import torch
    import torch.distributed as dist
    import torch.distributed.fsdp

    torch.set_num_threads(1)

    def rank_main(rank, world_size, meet, work, *args):
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size)
        work(torch, rank, world_size, *args)
        dist.destroy_process_group()

    def on_ranks(world_size, work, *args):
        fork = multiprocessing.get_context("fork")
        meet = root / f"meet-{work.__name__}"
        ranks = [
            fork.Process(target=rank_main, args=(rank, world_size, meet, work, *args)) for rank in range(world_size)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        assert [one.exitcode for one in ranks] == [0] * world_size

    source, target = (root / name / f"global_step_{STEP}" for name in ("old", "new"))
    on_ranks(old_ranks, rank_saves, source)
    write_common(torch, source, old_ranks)
    target.parent.mkdir()
    reshard(source, target, new_ranks)
    on_ranks(new_ranks, rank_goes_on, target, old_ranks)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
