"""Which attempts' steps make up a run: those from which its newest attempt goes on, and its own.

An attempt that is resumed from an earlier step (``--resume 20``) begins a new course there. What the old one made after
that step lies in the run directory until retention takes it, but the run does not go on from it by itself.
"""

from __future__ import annotations

import math

from agent.training.rundir import RunDir, read_json, write_json

_BEGAN = "began.json"  # in an attempt's folder: {"step": k, "attempt": that wrote the checkpoint of step k}


def note_beginning(run: RunDir, attempt: int, step: int, writer: int) -> None:
    """Record that ``attempt`` goes on after ``step``, from attempt ``writer``'s checkpoint (0, 0: from the model)."""
    write_json(run.attempt(attempt) / _BEGAN, {"step": step, "attempt": writer})


def _beginning(run: RunDir, attempt: int) -> tuple[int, int] | None:
    found = read_json(run.attempt(attempt) / _BEGAN)
    step, writer = found.get("step"), found.get("attempt")
    return (step, writer) if isinstance(step, int) and isinstance(writer, int) else None


def course(run: RunDir) -> dict[int, float]:
    """The last step that each attempt contributes to the run as it stands now; attempts left out contribute none.

    An attempt without a note (killed before it began, or older than the notes) is passed over: those before it count.
    """
    last: dict[int, float] = {}
    attempts = run.attempts()
    attempt, limit = (attempts[-1] if attempts else 0), math.inf
    while attempt > 0:
        last[attempt] = limit
        step, writer = _beginning(run, attempt) or (limit, attempt - 1)
        limit, attempt = min(limit, step), min(writer, attempt - 1)
    last[0] = limit  # of verl alone: a checkpoint without a manifest
    return last


def belongs(last: dict[int, float], attempt: int, step: int) -> bool:
    """Whether ``step``, made by ``attempt``, is part of the course ``last``. Newer attempts than it knows are."""
    return attempt > max(last) or step <= last.get(attempt, -1)
