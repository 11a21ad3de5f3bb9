"""What the README promises: the reward rises because the model sees better, and on blank pictures it does not."""

import json
import subprocess

import pytest
import small_run
from small_run import needs_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    needs_engine,
]
STEPS = 36


def train(root, *overrides, steps=STEPS):
    command = small_run.train(root, "--preset", "cpu", "--steps", str(steps))
    command += ["trainer.save_freq=1000", f"trainer.test_freq={steps}", "mmqa.val_samples=192"]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(line) for line in (root / "metrics.jsonl").read_text().splitlines()]
    rewards = [one["training/reward"] for one in metrics if "training/reward" in one]
    assert len(rewards) == steps
    return rewards, metrics[0], metrics[-1], done.stdout


def test_the_reward_rises_because_the_model_sees_better(tmp_path):
    rewards, first, last, out = train(tmp_path / "run")
    third = STEPS // 3
    assert sum(rewards[-third:]) / third - sum(rewards[:third]) / third > 0.1, rewards
    assert last["val/accuracy_any_form"] - first["val/accuracy_any_form"] > 0.05
    assert "what rose: the seeing" in out


def test_on_blank_pictures_it_stays_at_chance(tmp_path):
    _, _, last, _ = train(tmp_path / "blank", "mmqa.blank_images=true", steps=12)
    assert last["val/accuracy_any_form"] < 0.2, "ten digits: a constant answer is right one time in ten"
