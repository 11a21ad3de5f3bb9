"""A second run beside the first: own ports, key, Ray and engine; the end of one does not touch the other."""

import importlib.util
import json
import subprocess
import sys

import pytest

from agent.training.rundir import RunDir, read_jsonl

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="trains for real: needs the cpu extra"),
]
SMALL = (
    "mmqa.train_samples=32",
    "mmqa.val_samples=4",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "trainer.test_freq=1000",
    "trainer.save_freq=1000",
)


def begin(root, steps):
    command = [sys.executable, "-m", "agent.cli", "train", "--preset", "cpu", "--steps", str(steps)]
    return subprocess.Popen(
        [*command, "--run-dir", str(root), *SMALL], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_two_runs_side_by_side_do_not_notice_each_other(tmp_path):
    first, second = begin(tmp_path / "first", 12), begin(tmp_path / "second", 2)
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 0, said
    said = first.communicate(timeout=600)[0]
    assert first.returncode == 0, said
    for name, steps in (("first", 12), ("second", 2)):
        run = RunDir(tmp_path / name)
        assert json.loads(run.status.read_text())["state"] == "finished"
        assert [one["step"] for one in read_jsonl(run.metrics)] == list(range(steps + 1))
    urls = {(tmp_path / name / "attempts/1/gateway.url").read_text() for name in ("first", "second")}
    assert len(urls) == 2
