"""What a person sees of a run: one line a step, and a live line that says where it is and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.status import Status

WINDOW = 5  # steps in the recent trend


def trend(rewards: Sequence[float]) -> str:
    """ "0.44 -> 0.61": mean of the window before and of the last one; "" while there are too few steps."""
    if len(rewards) < 2 * WINDOW:
        return ""
    before, now = rewards[-2 * WINDOW : -WINDOW], rewards[-WINDOW:]
    return f"{sum(before) / WINDOW:.2f} -> {sum(now) / WINDOW:.2f}"


def duration(seconds: float) -> str:
    """ "45 s", "3 min 20 s", "2 h 05 min"."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def describe(event: dict[str, Any], total: int) -> str:
    """The phase of an event in words."""
    phase = event["phase"]
    if phase == "starting":
        return f"starting: {event.get('what', '')}"
    if phase in ("rollout", "validating"):
        name = "rollouts" if phase == "rollout" else "validation rollouts"
        return f"step {event['step']}/{total}: {name} {event['done']}/{event['total']}"
    if phase == "training":
        return f"step {event['step']}/{total}: {event.get('what', 'training')}"
    if phase == "saving":
        return f"step {event['step']}/{total}: saving the checkpoint"
    return ""


class Display:
    """Prints to a terminal (live line) or a log (plain lines; a phase that lasts is repeated every 15 s).

    If its output is gone (the terminal closed, ``| head``, a full disk) it falls silent: the run goes on, and
    ``status.json`` tells where it is.
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        self.total = total
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.rewards: list[float] = []
        self._seconds: list[float] = []
        self._phase, self._since, self._printed = "", time.monotonic(), 0.0
        self.gone = False
        self._live: Status | None = self.console.status("") if self.console.is_terminal else None
        if self._live:
            self._show(self._live.start)

    def close(self) -> None:
        if self._live:
            self._show(self._live.stop)

    def say(self, line: str) -> None:
        self._show(self.console.print, line, markup=False)

    def _show(self, show: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        if self.gone:
            return
        try:
            show(*args, **kwargs)
        except (OSError, SystemExit):  # rich turns a broken pipe into SystemExit
            self.gone = True

    def waiting(self, what: str) -> None:
        self._set(f"waiting for {what}")

    def event(self, event: dict[str, Any]) -> None:
        """Show one event of the run."""
        if event["phase"] == "step":
            self._step(event)
        elif event["phase"] == "validated":
            seen, form = event.get("val/accuracy_any_form"), event.get("val/accuracy_wanted_form")
            detail = f"  right {seen:.2f}, right and in the wanted form {form:.2f}" if seen is not None else ""
            self.say(f"  held-out pictures after step {event['step']}: reward {event['reward']:.2f}{detail}")
        elif event["phase"] == "saved":
            self.say(f"  checkpoint of step {event['step']} saved in {event['seconds']:.1f} s")
        elif text := describe(event, self.total):
            self._set(text)

    def _step(self, event: dict[str, Any]) -> None:
        self.rewards.append(event["reward"])
        self._seconds.append(event["seconds"])
        recent = self._seconds[-WINDOW:]
        left = (self.total - event["step"]) * sum(recent) / len(recent)
        parts = [f"step {event['step']:>3}/{self.total}", f"reward {event['reward']:.2f}"]
        if moved := trend(self.rewards):
            parts.append(f"trend {moved}")
        parts += [f"{event['seconds']:.1f} s", f"{duration(left)} left"]
        self.say("  ".join(parts))

    def _set(self, phase: str) -> None:
        if phase.split(":")[0] != self._phase.split(":")[0] or "/" not in phase:
            self._since = time.monotonic()
        changed, self._phase = phase != self._phase, phase
        if self._live is None and changed and phase.startswith(("starting", "waiting")):
            self._print()
        self.tick()

    def _print(self) -> None:
        self._printed = time.monotonic()
        self.say(f"  {self._phase}")

    def tick(self) -> None:
        """Refresh the live line; in a log, repeat what has been waited for if nothing was said for 15 s."""
        waited = time.monotonic() - self._since
        if self._live:
            self._show(self._live.update, f"{self._phase} ({duration(waited)})")
        elif waited > 15 and time.monotonic() - self._printed > 15 and self._phase:
            self._printed = time.monotonic()
            self.say(f"  {self._phase} ({duration(waited)})")
