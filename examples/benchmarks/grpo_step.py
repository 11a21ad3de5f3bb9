"""Seconds of a GRPO step: this project's agent and controller, and the upstream example's way, on the same stack.

    python examples/benchmarks/grpo_step.py [--steps 6]

Both train the tiny model on the same digits with 16 rollouts a step (4 prompts x 4), with the same trainer, actor and
engine. "upstream" is an agent as its multimodal example writes it (openai's client, the picture in the environment)
under agl-controller with its defaults (50 processes, looks every 10 s). The first step of each run is left out.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rigs import HERE, SMALL, ratio, spread

from agent.training import tiny_vlm
from agent.training.rundir import RunDir, read_jsonl

SAME = (*SMALL, "trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=1000")
UPSTREAM = (
    "mmqa.task=upstream_task",
    "mmqa.controller=agl",
    "mmqa.controller_slots=50",
    "mmqa.agl_poll_seconds=10",
    "mmqa.poll_interval_seconds=1",
    "mmqa.agent_class=upstream_agent.UpstreamAgent",
    'agentlightning.local.env_map={"IMAGE": "input.image", "QUESTION": "input.question", "ANSWER": "input.answer"}',
)


def steps_of(folder: Path, steps: int, *overrides: str) -> list[dict[str, float]]:
    """Train and return the metrics of every step but the first."""
    command = [sys.executable, "-m", "agent.cli", "train", "--steps", str(steps), "--run-dir", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(HERE)}
    subprocess.run([*command, *SAME, *overrides], check=True, env=env, stdout=subprocess.DEVNULL)
    return [one for one in read_jsonl(RunDir(folder).metrics) if one["step"] > 1 and "timing_s/step" in one]


def main(steps: int) -> None:
    model = tiny_vlm.ensure(tiny_vlm.recipe("digits"))
    with tempfile.TemporaryDirectory() as name:
        path = f"actor_rollout_ref.model.path={model}"
        theirs = steps_of(Path(name) / "upstream", steps, path, *UPSTREAM)
        ours = steps_of(Path(name) / "ours", steps, path)
    for label, found in (("this project", ours), ("upstream", theirs)):
        whole = spread([one["timing_s/step"] for one in found])
        rollouts = spread([one["timing_s/gen"] for one in found])
        print(f"{label:<13} {whole} s a step, {rollouts} s of it rollouts  ({len(found)} steps)")
    print("ratio        ", ratio([one["timing_s/step"] for one in ours], [one["timing_s/step"] for one in theirs]))
    print(
        json.dumps(
            {"ours": [one["timing_s/step"] for one in ours], "upstream": [one["timing_s/step"] for one in theirs]}
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    main(parser.parse_args().steps)
