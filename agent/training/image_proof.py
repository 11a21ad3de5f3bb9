"""Proof that the pictures reach the actor, taken from the numbers of the first training step.

Two facts together leave no room for a run that trains on text alone (as Agent Lightning 1.0.0 and 1.0.1 silently do):
the actor's log-probs change when the pixels are blanked, so the vision tensors are in its forward pass; and with the
pixels they agree with the log-probs of the engine, which saw the pictures when it sampled.
"""

from __future__ import annotations

import copy
import math
from typing import Any

_NOT_NUMBERS = "the actor's or the engine's log-probs are not numbers (nan)"
_WHERE_NUMBERS_GO = "the weights are damaged, or overflow in this dtype; load them in float32 or bfloat16"


def _response_mask(batch: Any) -> Any:
    return batch.batch["response_mask"].bool()


def logprob_gap(batch: Any, log_probs: Any) -> dict[str, float]:
    """|actor - engine| over the sampled tokens, in nats: mean and maximum. {} if the engine recorded no log-probs."""
    if "rollout_log_probs" not in batch.batch:
        return {}
    gap = (log_probs - batch.batch["rollout_log_probs"]).abs()[_response_mask(batch)]
    if gap.numel() == 0:
        return {}
    return {"training/logprob_gap_mean": gap.mean().item(), "training/logprob_gap_max": gap.max().item()}


def _inputs(batch: Any) -> list[Any]:
    inputs = batch.non_tensor_batch.get("multi_modal_inputs")
    return [] if inputs is None else list(inputs)


def count_vision_rows(batch: Any) -> dict[str, Any]:
    """How many rows carry ``pixel_values``, and the shapes in the first of them."""
    rows = [one for one in _inputs(batch) if one and "pixel_values" in one]
    shapes = {key: list(value.shape) for key, value in rows[0].items() if hasattr(value, "shape")} if rows else {}
    return {"rows_with_pixels": len(rows), "shapes": shapes}


def without_pixels(batch: Any) -> Any:
    """The same batch with every ``pixel_values`` set to zero (the grid stays, so every shape stays)."""
    import numpy as np

    blank = copy.copy(batch)
    blank.non_tensor_batch = dict(batch.non_tensor_batch)
    rows = [
        {key: value * 0 if key == "pixel_values" else value for key, value in one.items()} if one else one
        for one in _inputs(batch)
    ]
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    blank.non_tensor_batch["multi_modal_inputs"] = array
    return blank


def shift(batch: Any, log_probs: Any, blank_log_probs: Any) -> dict[str, float]:
    """|log-prob with the picture - without| over the sampled tokens, in nats."""
    change = (log_probs - blank_log_probs).abs()[_response_mask(batch)]
    return {"blank_shift_mean": change.mean().item(), "blank_shift_max": change.max().item()}


def problem(proof: dict[str, Any], images_expected: bool, max_gap: float) -> str | None:
    """What is wrong with a proof, in one line, or None."""
    if images_expected:
        missing = proof["rows"] - proof["rows_with_pixels"]
        if missing:
            return (
                f"{missing} of {proof['rows']} rows reached the actor without pixel tensors: the model would be "
                "trained on text alone; look for '[multimodal-patch]' lines in trainer.log"
            )
        if math.isnan(proof["blank_shift_max"]):
            return f"{_NOT_NUMBERS} when the pixels are blanked: {_WHERE_NUMBERS_GO}"
        if proof["blank_shift_max"] < 1e-6:
            return (
                "the actor's log-probs do not change when the pixels are blanked: the vision tensors are not in its "
                "forward pass; check that the model is a vision-language model that verl supports"
            )
    gap = proof.get("training/logprob_gap_mean")
    if gap is None:
        return "the engine returned no log-probs; set default_proxy.include_log_probs=True on the gateway"
    if math.isnan(gap):
        return f"{_NOT_NUMBERS}: {_WHERE_NUMBERS_GO}"
    if gap > max_gap:
        return (
            f"the actor's log-probs differ from the engine's by {gap:.3f} nats a token (limit mmqa.max_logprob_gap = "
            f"{max_gap}): both do not compute the same model; check dtype, image size limit and chat template"
        )
    return None
