"""Where a step's seconds go, from the figures of a run.

    python examples/benchmarks/step_time.py RUN_DIR [RUN_DIR ...]

Prints for each run the mean seconds of each phase over its steps (the first step of an attempt, which also proves that
the pictures reach the actor, apart), and each phase's share.
"""

import sys
from pathlib import Path
from statistics import mean

from agent.training.rundir import RunDir, read_jsonl
from agent.training.summary import latest_per_step

PHASES = {
    "rollouts": "timing_s/gen",
    "log-probs": "timing_s/old_log_prob",
    "reference log-probs": "timing_s/ref",
    "advantages": "timing_s/adv",
    "update": "timing_s/update_actor",
    "refit": "timing_s/update_weights",
}


def table(run: RunDir) -> list[str]:
    """Lines of text for one run; raises ``SystemExit`` if it has no steps."""
    steps = [one for one in latest_per_step(read_jsonl(run.metrics)) if "timing_s/step" in one]
    if not steps:
        raise SystemExit(f"{run.root}: no finished step in metrics.jsonl")
    later = [
        one
        for before, one in zip([None, *steps], steps, strict=False)
        if before and one["attempt"] == before["attempt"]
    ]
    shown = later or steps
    total = mean(one["timing_s/step"] for one in shown)
    lines = [f"{run.root}: {len(shown)} steps, {shown[0]['training/n_rollouts']} rollouts each, {total:.2f} s a step"]
    known = 0.0
    for name, key in PHASES.items():
        values = [one[key] for one in shown if key in one]
        if values:
            known += mean(values)
            lines.append(f"  {name:<20} {mean(values):6.2f} s  {mean(values) / total:5.0%}")
    lines.append(f"  {'other':<20} {total - known:6.2f} s  {(total - known) / total:5.0%}")
    return lines


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for argument in sys.argv[1:]:
        print("\n".join(table(RunDir(Path(argument)))))
