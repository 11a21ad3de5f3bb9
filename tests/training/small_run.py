"""What the tests that train for real share: a cpu preset with small steps, its command, and its processes."""

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
PROMPTS, GROUP = 4, 4
ROLLOUTS = PROMPTS * GROUP  # in a step
SMALL = (
    "mmqa.train_samples=64",
    "mmqa.val_samples=4",
    f"data.train_batch_size={PROMPTS}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    f"actor_rollout_ref.rollout.n={GROUP}",
    "trainer.test_freq=1000",
    "trainer.save_freq=1000",
)  # later overrides of the same key win
ENV = {**os.environ, "PYTHONPATH": str(HERE)}  # the test agents lie beside this file
needs_engine = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="trains for real: needs cpu extra")


def train(root, *arguments):
    """The command line that trains in ``root``; ``arguments`` further ones."""
    return [sys.executable, "-m", "agent.cli", "train", "--run-dir", str(root), *arguments]


def processes_of(root):
    """The run's processes, by the run directory in their environment; one that ends meanwhile is left out."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("MMQA_RUN_DIR") == str(root):
                found.append(process)
    return found
