"""From the command to the first rollout and the first trained step, phase by phase, and the memory it takes.

    python examples/benchmarks/startup.py [--cold] [key=value ...]

Runs the cpu preset for two steps. ``--cold`` starts every process with imports of its own instead of forking it from a
warm one, for comparison. Memory is the sum of the proportional set sizes (PSS) of all processes of the run.
"""

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from rigs import processes_of

from agent.training.rundir import RunDir, read_jsonl

SHOWN = ("starting", "validating", "rollout", "step", "finished")


def memory_of(run: RunDir) -> float:
    """PSS of all processes of a run, GB."""
    total = 0
    for process in processes_of(run):
        with contextlib.suppress(psutil.Error, OSError):
            total += process.memory_full_info().pss
    return total / 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name) / "run")
        command = [sys.executable, "-m", "agent.cli", "train", "--preset", "cpu", "--steps", "2"]
        command += ["--run-dir", str(run.root), "trainer.save_freq=1000", f"mmqa.warm_start={not options.cold}"]
        started, peak = time.time(), 0.0
        training = subprocess.Popen([*command, *options.overrides], stdout=subprocess.DEVNULL)
        while training.poll() is None:
            peak = max(peak, memory_of(run))
            time.sleep(2.0)
        if training.returncode:
            raise SystemExit(f"the run ended with code {training.returncode}")
        last = ""
        for event in read_jsonl(run.attempt(1) / "progress.jsonl"):
            text = " ".join(str(event[key]) for key in ("phase", "what", "step") if event.get(key) is not None)
            if event["phase"] in SHOWN and text != last:
                print(f"{event['time'] - started:7.1f} s  {text}")
                last = text
        print(f"peak memory {peak:.1f} GB")


if __name__ == "__main__":
    main()
