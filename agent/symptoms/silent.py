"""Symptoms that no log line shows: found in a run's ``metrics.jsonl`` and on its disk. Pure but for ``look``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from agent import yaml_dialect
from agent.symptoms.hazards import check

GAP = 0.1  # nats a token between engine and actor above which they do not compute the same model
RUN_OF_STEPS = 3  # steps in a row before a state counts as one
DROPPED = 0.1  # share of a run's rows that may be dropped before it is worth a word

Row = dict[str, Any]


@dataclass(frozen=True)
class Sign:
    """A silent symptom, where it begins (line of ``metrics.jsonl``, from 1) and the figures that show it."""

    slug: str
    line: int
    text: str
    file: str = "metrics.jsonl"
    attempt: int = 0


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _tail(rows: list[tuple[int, Row]], holds: Any) -> list[tuple[int, Row]]:
    """The last rows for which ``holds``, as many as there are without a break."""
    kept: list[tuple[int, Row]] = []
    for pair in reversed(rows):
        if not holds(pair[1]):
            break
        kept.insert(0, pair)
    return kept


def signs(rows: list[Row], gap: float = GAP) -> list[Sign]:
    """Silent symptoms in the metrics of a run; ``rows`` as ``metrics.jsonl`` holds them."""
    numbered = [(line, row) for line, row in enumerate(rows, 1) if isinstance(row, dict)]
    train = [(line, row) for line, row in numbered if "training/n_rollouts" in row or "training/reward" in row]
    found = [*_equal(train), *_unrewarded(numbered), *_dropped(train), *_empty(train)]
    found += [*_gap(train, gap), *_skipped(train), *_not_finite(train)]
    return found


def _equal(rows: list[tuple[int, Row]]) -> Iterable[Sign]:
    def all_equal(row: Row) -> bool:
        groups = _number(row, "training/n_groups")
        return bool(groups) and _number(row, "training/n_zero_adv_groups") == groups

    tail = _tail(rows, all_equal)
    if len(tail) >= RUN_OF_STEPS:
        rewards = sorted({round(_number(row, "training/reward") or 0.0, 3) for _, row in tail})
        yield Sign(
            "zero-advantage-groups",
            tail[0][0],
            f"all groups had equal rewards in the last {len(tail)} steps (reward {rewards[0]} to {rewards[-1]})",
        )


def _unrewarded(rows: list[tuple[int, Row]]) -> Iterable[Sign]:
    for part in ("training", "val"):
        for line, row in rows:
            total, rewarded = _number(row, f"{part}/n_rollouts"), _number(row, f"{part}/n_rollouts_w_reward")
            failed = _number(row, "val/n_rollouts_failed") or 0.0 if part == "val" else 0.0
            if total is not None and rewarded is not None and rewarded + failed < total:
                yield Sign(
                    "reward-missing-is-zero",
                    line,
                    f"step {row.get('step')}: {part}/n_rollouts_w_reward {rewarded:g} of {part}/n_rollouts {total:g}",
                )
                return


def _dropped(rows: list[tuple[int, Row]]) -> Iterable[Sign]:
    def lost(row: Row) -> float:
        marked = _number(row, "training/n_sample_dropped/marked") or 0.0
        return max(marked, _number(row, "training/n_rows_dropped") or 0.0)

    with_loss = [(line, row) for line, row in rows if lost(row) > 0]
    total = sum(
        _number(row, "training/n_sample_collected") or _number(row, "training/n_sample") or 0.0 for _, row in rows
    )
    dropped = sum(lost(row) for _, row in rows)
    if with_loss and dropped > DROPPED * total:
        yield Sign(
            "rows-dropped",
            with_loss[0][0],
            f"{dropped:g} of {total:g} rows were dropped before the update, in {len(with_loss)} of {len(rows)} steps",
        )


def _empty(rows: list[tuple[int, Row]]) -> Iterable[Sign]:
    for line, row in rows:
        longest = _number(row, "response_length/training/max_by_turn")
        skipped = _number(row, "training/n_skipped_empty_rows") or 0.0
        if (longest is not None and longest <= 1) or skipped > 0:
            text = f"{skipped:g} rows had no reply" if skipped else f"the longest reply has {longest:g} tokens"
            yield Sign("empty-replies", line, f"step {row.get('step')}: {text}")
            return


def _gap(rows: list[tuple[int, Row]], limit: float) -> Iterable[Sign]:
    for key in ("training/logprob_gap_mean", "training/rollout_probs_diff_mean"):
        over = [(line, row) for line, row in rows if (_number(row, key) or 0.0) > limit]
        if over:
            line, row = over[0]
            text = f"step {row.get('step')}: {key} {_number(row, key):.3g} (limit {limit:g}), in {len(over)} steps"
            yield Sign("logprob-mismatch-unwatched", line, text)
            return


def _skipped(rows: list[tuple[int, Row]]) -> Iterable[Sign]:
    steps = [(line, int(row["step"])) for line, row in rows if isinstance(row.get("step"), int)]
    known = {step for _, step in steps}
    for (_, before), (line, after) in pairwise(steps):
        missing = [step for step in range(before + 1, after) if step not in known]
        if missing:
            yield Sign("step-skipped-one-bad-row", line, f"no metrics for step {', '.join(map(str, missing[:5]))}")
            return


def _not_finite(rows: list[tuple[int, Row]]) -> Iterable[Sign]:
    def broken(row: Row) -> bool:
        norm = _number(row, "actor/grad_norm")
        return norm is not None and not math.isfinite(norm)

    tail = _tail(rows, broken)
    if len(tail) >= RUN_OF_STEPS:
        yield Sign("grad-norm-not-finite", tail[0][0], f"actor/grad_norm is not finite in the last {len(tail)} steps")


def read_rows(path: Path) -> list[Row]:
    """The objects of a JSON-lines file; a line that is none becomes ``{}``, so that line numbers stay right."""
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n"):
        try:
            row = json.loads(line)
        except ValueError:
            row = {}
        rows.append(row if isinstance(row, dict) else {})
    return rows


def read_config(path: Path) -> dict[str, Any]:
    """A run's ``config.yaml``, or ``{}`` if there is none that can be read."""
    try:
        value = yaml_dialect.load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return value if isinstance(value, dict) else {}


def look(run: Path, versions: dict[str, str]) -> list[Sign]:
    """Silent symptoms of a run directory: metrics, then the hazards of its config that end in no log line."""
    config = read_config(run / "config.yaml")
    project = config.get("mmqa")
    gap = project.get("max_logprob_gap") if isinstance(project, dict) else None
    gap = gap if isinstance(gap, int | float) else GAP
    rows = read_rows(run / "metrics.jsonl")
    found = [Sign(one.slug, one.line, one.text, attempt=_attempt(rows, one.line)) for one in signs(rows, gap)]
    if config:
        hazards = [one for one in check(config, versions) if one.severity in ("silent", "slow") and one.slug]
        found += [Sign(one.slug, 0, one.what, file="config.yaml") for one in hazards]
    return found


def _attempt(rows: list[Row], line: int) -> int:
    attempt = rows[line - 1].get("attempt")
    return attempt if isinstance(attempt, int) else 0
