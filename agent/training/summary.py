"""What a run learned, in words. Pure but for reading the run directory's figures."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from agent.training.rundir import RunDir, read_jsonl

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 40) -> str:
    """A curve in one line of text; neighbours are averaged if there are more values than ``width``."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((one - low) * scale)] for one in means)


def latest_per_step(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One object a step, in the order of the steps; where a step has several, the newest figures win.

    Objects without a whole number as step are left out: the file may have been written to by something else.
    """
    merged: dict[int, dict[str, Any]] = {}
    for one in metrics:
        step = one.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            merged[step] = merged.get(step, {}) | one
    return [merged[step] for step in sorted(merged)]


def figure(one: dict[str, Any], key: str) -> float | None:
    """The finite number behind a key; None if there is none."""
    value = one.get(key)
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else None


def what_rose(first: dict[str, Any], last: dict[str, Any]) -> str:
    """Name what improved on held-out pictures between two validations: the seeing, the form, both, or neither.

    Seeing is accuracy in any form; form is the share of answers in the wanted form. A change counts from 0.05.
    """
    seeing = last["val/accuracy_any_form"] - first["val/accuracy_any_form"]
    form = last["val/wanted_form"] - first["val/wanted_form"]
    rose = [name for name, change in (("the seeing", seeing), ("the form of the answer", form)) if change >= 0.05]
    figures = (
        f"right in any form {first['val/accuracy_any_form']:.2f} -> {last['val/accuracy_any_form']:.2f}, "
        f"in the wanted form {first['val/wanted_form']:.2f} -> {last['val/wanted_form']:.2f}"
    )
    return f"what rose: {' and '.join(rose) or 'nothing clearly'}  ({figures}; held-out pictures)"


def lines(run: RunDir) -> list[str]:
    """The closing lines of a run: the curve, first and last third, what rose."""
    steps = latest_per_step(read_jsonl(run.metrics))
    rewards = [value for one in steps if (value := figure(one, "training/reward")) is not None]
    shown = []
    if len(rewards) >= 3:
        third = len(rewards) // 3
        before, after = sum(rewards[:third]) / third, sum(rewards[-third:]) / third
        shown.append(f"reward {sparkline(rewards)}  first third {before:.2f}, last third {after:.2f}")
    needed = ("val/accuracy_any_form", "val/wanted_form")
    checked = [one for one in steps if all(figure(one, key) is not None for key in needed)]
    if len(checked) >= 2:
        shown.append(what_rose(checked[0], checked[-1]))
    return shown
