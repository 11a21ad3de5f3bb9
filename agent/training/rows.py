"""Which training rows a step keeps. Pure planning; ``settle`` applies a plan to verl's batch.

Agent Lightning 1.0.2 floors the rows of a step to a multiple of ``ppo_mini_batch_size * n``, so 31 of 32 rows become
none and the step is skipped. Here missing rows are filled up instead with copies of advantage zero: the mean is still
taken over the planned number of rows, a missing row counts as zero gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """Row indices: ``keep`` are trained, ``fill`` are copied without loss. ``lonely``: rows without a group."""

    keep: list[int]
    fill: list[int]
    dropped: int
    lonely: int


def plan(groups: Sequence[Any], rollouts: Sequence[Any], drop: Sequence[bool], multiple: int) -> Plan:
    """Plan a step.

    ``groups[i]`` and ``rollouts[i]`` name the GRPO group and the rollout of row i, ``drop[i]`` marks rows that must not
    be trained. Rows whose group has one rollout left go too: verl takes the bare reward of a group of one as its
    advantage (``compute_grpo_outcome_advantage``). The rest is filled up to the nearest multiple of ``multiple``,
    never down to none; what is over it the trainer itself drops, rows without a signal first.
    """
    kept = [index for index, dropped in enumerate(drop) if not dropped]
    members: dict[Any, set[Any]] = {}
    for index in kept:
        members.setdefault(groups[index], set()).add(rollouts[index])
    keep = [index for index in kept if len(members[groups[index]]) > 1]
    if not keep:
        return Plan([], [], len(drop) - len(kept), len(kept))
    target = max(1, int(len(keep) / multiple + 0.5)) * multiple
    fill = [keep[index % len(keep)] for index in range(max(0, target - len(keep)))]
    return Plan(keep, fill, len(drop) - len(kept), len(kept) - len(keep))


def settle(batch: Any, multiple: int, group_size: int) -> tuple[Any, dict[str, int]]:
    """Apply ``plan`` to the ``DataProto`` that Agent Lightning's adapter built; returns it and the counts as metrics.

    With a group size of 1 there are no groups to compare in, so none is dropped as lonely.
    """
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import compute_response_mask

    rollouts = batch.non_tensor_batch["rollout_id_list"]
    groups = batch.non_tensor_batch["data_id_list"]
    drop = batch.batch["is_drop_mask"].bool().tolist()
    if group_size < 2:
        groups = [0] * len(rollouts)
    chosen = plan(list(groups), list(rollouts), drop, multiple)
    metrics = {
        "training/n_rows_dropped": chosen.dropped,
        "training/n_rows_without_group": chosen.lonely,
        "training/n_rows_filled": len(chosen.fill),
    }
    if not chosen.keep:
        return batch[[]] if len(batch) else batch, metrics
    if "response_mask" not in batch.batch:
        batch.batch["response_mask"] = compute_response_mask(batch)
    kept = batch[chosen.keep]
    if not chosen.fill:
        return kept, metrics
    return DataProto.concat([kept, _without_gradient(batch[chosen.fill])]), metrics


def _without_gradient(rows: Any) -> Any:
    """Copies whose advantage is zero: each is a group of its own with score 0 (verl: advantage = score).

    One response token stays in the mask: verl cannot take the mean over none.
    """
    import numpy as np

    rows.batch["token_level_scores"] = rows.batch["token_level_scores"] * 0
    mask = rows.batch["response_mask"]
    rows.batch["response_mask"] = mask * (mask.cumsum(-1) == 1)
    names = np.array([f"filler-{number}" for number in range(len(rows))])
    rows.non_tensor_batch["rollout_id_list"] = names
    rows.non_tensor_batch["data_id_list"] = names
    return rows
