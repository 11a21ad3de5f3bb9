"""A run that goes on with another number of workers: 1, then 2, then 1 again, with the real stack on the CPU."""

import math
import subprocess

import pytest
from small_run import SMALL, needs_engine, train

from agent.training.checkpoints import checkpoints
from agent.training.rundir import RunDir, read_jsonl

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    needs_engine,
]
FIRST = (
    "--preset",
    "cpu",
    *SMALL,
    "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
    "trainer.save_freq=2",
)


def go_on(root, *arguments):
    command = train(root, "--resume", "auto", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def adam_steps(checkpoint):
    """How many updates the optimizer's state has seen, from its first shard."""
    import torch

    shard = next(checkpoint.path.glob("actor/optim_*_rank_0.pt"))
    state = torch.load(shard, weights_only=False)["state"]
    return {int(one["step"]) for one in state.values()}


def test_a_run_goes_on_with_two_workers_and_with_one_again(tmp_path):
    run = RunDir(tmp_path / "run")
    go_on(run.root, *FIRST, "--steps", "2")
    said = go_on(run.root, "--steps", "4", "trainer.n_gpus_per_node=2")
    assert "changed: trainer.n_gpus_per_node: 1 -> 2" in said
    assert "the checkpoint of 1 GPU(s) is rewritten for 2: weights, optimizer and schedule are kept" in said
    said = go_on(run.root, "--steps", "6", "trainer.n_gpus_per_node=1", "actor_rollout_ref.actor.optim.lr=3e-5")
    assert "the checkpoint of 2 GPU(s) is rewritten for 1" in said
    found = {one.step: one for one in checkpoints(run)}
    assert {step: one.world_size for step, one in found.items() if step >= 4} == {4: 2, 6: 1}
    assert adam_steps(found[4]) == {4} and adam_steps(found[6]) == {6}, "the optimizer's state was carried over"
    metrics = read_jsonl(run.metrics)
    assert [one["step"] for one in metrics] == list(range(7))
    assert [one["attempt"] for one in metrics] == [1, 1, 1, 2, 2, 3, 3]
    assert [one["actor/lr"] for one in metrics[1:]] == [6e-4] * 4 + [3e-5] * 2
    for one in metrics[1:]:
        assert one["training/logprob_gap_mean"] < 0.01 and math.isfinite(one["actor/grad_norm"])
