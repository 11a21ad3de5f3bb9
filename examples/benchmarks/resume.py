"""Seconds from the command to the first new step after a kill, and what verifying a checkpoint adds to a save.

    python examples/benchmarks/resume.py [--repeats 3] [key=value ...]

Runs the cpu preset with small steps and a checkpoint at each, kills every process of the run at once, and starts the
same command again; so many times in a row, on one run.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from rigs import SMALL, processes_of, spread

from agent.training.rundir import RunDir, read_jsonl

SAVING = (*SMALL, "trainer.test_freq=1000", "trainer.save_freq=1")
LIMIT_SECONDS = 300.0


def events(run: RunDir, attempt: int, phase: str) -> list[dict[str, Any]]:
    """The events of one phase of an attempt."""
    found = read_jsonl(run.attempt(attempt) / "progress.jsonl")
    return [one for one in found if one["phase"] == phase]


def kill(run: RunDir, training: subprocess.Popen[bytes]) -> None:
    """End every process of this run at once, by its id."""
    training.kill()
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error):
            process.kill()
    training.wait()
    time.sleep(2.0)


def attempt_of(run: RunDir, number: int, overrides: list[str]) -> float:
    """Start the command, wait for two steps, kill everything; seconds from the command to the first step."""
    command = [sys.executable, "-m", "agent.cli", "train", "--run-dir", str(run.root), "--resume", "auto"]
    first = [] if run.exists() else ["--preset", "cpu", "--steps", "100000", *SAVING, *overrides]
    started = time.time()
    training = subprocess.Popen([*command, *first], stdout=subprocess.DEVNULL)
    while len(events(run, number, "saved")) < 2:
        if training.poll() is not None or time.time() - started > LIMIT_SECONDS:
            raise SystemExit(f"attempt {number} made no two steps; see {run.attempt(number)}")
        time.sleep(0.1)
    kill(run, training)
    return events(run, number, "step")[0]["time"] - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name) / "run")
        fresh = attempt_of(run, 1, options.overrides)
        again = [attempt_of(run, 2 + number, options.overrides) for number in range(options.repeats)]
        saves = [one for attempt in run.attempts() for one in events(run, attempt, "saved")]
        size = sum(file.stat().st_size for file in next(run.checkpoints.glob("global_step_*")).rglob("*.pt")) / 1e6
    print(f"first start to first step     {fresh:.1f} s")
    print(f"after a kill, to the new step {spread(again, 1)} s  ({options.repeats} repeats)")
    share = [one["verify_seconds"] / one["seconds"] for one in saves]
    print(f"a save                        {spread([one['seconds'] for one in saves], 3)} s ({size:.0f} MB)")
    print(
        f"of it verifying and pruning   {spread([one['verify_seconds'] for one in saves], 3)} s, {spread(share)} of it"
    )


if __name__ == "__main__":
    main()
