"""Notices that nothing happens for longer than it should. Pure: fed with events and times, asked for a sentence."""

from __future__ import annotations

from typing import Any

from agent.training.display import describe, duration

# seconds without an event after which a phase is called silent, before anything was learned about its usual length
FIRST_LIMITS = {"starting": 900.0, "rollout": 300.0, "validating": 300.0, "training": 600.0, "saving": 600.0}
TIMES_USUAL, LEAST_LIMIT = 10.0, 60.0  # later: so many times the longest pause that phase has had, but not less
WAITS_FOR = {
    "starting": "the trainer's start, see trainer.log",
    "rollout": "the engine's and the agents' answers, see controller.log and trainer.log",
    "validating": "the engine's and the agents' answers, see controller.log and trainer.log",
    "training": "the actor, see trainer.log",
    "saving": "the disk, see trainer.log",
}


class Watchdog:
    """``total``: the run's steps. Times are ``time.monotonic`` values, in seconds."""

    def __init__(self, total: int, now: float) -> None:
        self._total, self._since, self._told = total, now, 0.0
        self._event: dict[str, Any] = {"phase": "starting", "what": "the processes"}
        self._longest: dict[str, float] = {}

    def feed(self, event: dict[str, Any], now: float) -> None:
        """An event of the run happened."""
        phase = self._event["phase"]
        if phase in FIRST_LIMITS:
            self._longest[phase] = max(self._longest.get(phase, 0.0), now - self._since)
        self._event, self._since, self._told = event, now, 0.0

    def limit(self) -> float:
        """Seconds that the present phase may be silent."""
        phase = self._event["phase"]
        first = FIRST_LIMITS.get(phase, 600.0)
        if phase == "starting" or phase not in self._longest:
            return first
        return min(first, max(LEAST_LIMIT, TIMES_USUAL * self._longest[phase]))

    def overdue(self, now: float) -> str | None:
        """A sentence if the silence is too long, again each time it has doubled; None otherwise."""
        silent = now - self._since
        if silent < max(self.limit(), 2 * self._told):
            return None
        self._told = silent
        where = describe(self._event, self._total) or str(self._event["phase"])
        waits = WAITS_FOR.get(self._event["phase"], "the trainer, see trainer.log")
        return f"no progress for {duration(silent)} ({where}); it waits for {waits}"
