"""Watch one attempt: show what happens, keep ``status.json`` true, end everything when one process ends."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.errors import RunFailed, page
from agent.training.display import Display
from agent.training.progress import Follower
from agent.training.rundir import RunDir, stop_file, write_json
from agent.training.services import Service, Services
from agent.training.watchdog import Watchdog

SCRATCH_PREFIX = "mmqa-"
NOTE_SECONDS = 15.0  # between two looks at the shared memory of the run's processes
SAME_PRESS_SECONDS = 0.3
PATIENT_SECONDS, HURRIED_SECONDS = 15.0, 3.0  # that the trainer has to end; the latter after Ctrl-C
SHORT_STEP_SECONDS = 120.0  # a step that takes no longer is finished when the user asks to stop
_STATE = {
    "starting": "starting",
    "rollout": "rollout",
    "validating": "rollout",
    "validated": "rollout",
    "training": "training",
    "step": "training",
    "saving": "saving",
    "saved": "training",
}


@dataclass
class Outcome:
    """How an attempt ended: ``state`` is "finished", "failed" or "stopped"."""

    state: str
    step: int
    reason: str | None = None
    symptom: str | None = None


@dataclass
class Status:
    """Mirrors the events into ``status.json``."""

    run: RunDir
    attempt: int
    total_steps: int
    values: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None  # why the file is behind

    def write(self, state: str, step: int, **more: Any) -> None:
        new = {
            "state": state,
            "step": step,
            "total_steps": self.total_steps,
            "attempt": self.attempt,
            "reason": None,
            "symptom": None,
            **more,
        }
        if new != self.values:
            try:
                write_json(self.run.status, {**new, "updated": round(time.time(), 3)}, lasting=False)
            except OSError as error:  # a full disk must not keep the run from being ended in order
                self.problem = f"{self.run.status}: {error.strerror}"
                return
            self.values = new


class _Interrupt:
    """Counts Ctrl-C, SIGTERM and SIGHUP (the terminal is gone) instead of raising in the middle of something."""

    def __init__(self) -> None:
        self.count, self._last = 0, 0.0

    def __enter__(self) -> _Interrupt:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the run is to outlive its terminal
            numbers.append(signal.SIGHUP)
        self._old = {number: signal.signal(number, self._on) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _on(self, *args: object) -> None:
        now = time.monotonic()
        if now - self._last > SAME_PRESS_SECONDS:  # a wrapper such as "uv run" may pass on what the terminal sent too
            self.count += 1
        self._last = now


def supervise(run: RunDir, attempt: int, config: Any, display: Display, began: int = 0) -> Outcome:
    """Run one attempt, which goes on after step ``began``, to its end.

    Every process that it started is gone when it returns. An error of the supervisor itself is noted in
    ``status.json`` before it is raised.
    """
    total = int(config.trainer.total_training_steps)
    status = Status(run, attempt, total)
    status.write("starting", began)
    scratch = Path(tempfile.mkdtemp(prefix=SCRATCH_PREFIX))
    scratch_note(run.attempt(attempt)).write_text(str(scratch))
    services = Services(run, attempt, config, scratch)
    with _Interrupt() as interrupt:
        try:
            if config.mmqa.backend == "cpu" and config.mmqa.warm_start:
                services.start_warm()
            services.start_trainer()  # first: it takes the longest, and needs the gateway only when it rolls out
            display.waiting("the gateway")
            if services.start_gateway(lambda: interrupt.count > 0):
                services.start_controller()
            outcome = _watch(services, status, display, interrupt, began)
        except RunFailed as error:
            outcome = Outcome("failed", began, str(error), error.slug)
        except BaseException as error:
            made = max(began, newest_step(run.attempt(attempt)))
            status.write("failed", made, reason=f"mmqa itself: {type(error).__name__}: {error}")
            raise
        finally:
            display.waiting("the processes to end")
            services.stop(HURRIED_SECONDS if interrupt.count else PATIENT_SECONDS)
            shutil.rmtree(scratch, ignore_errors=True)
            scratch_note(run.attempt(attempt)).unlink(missing_ok=True)
    outcome.step = max(outcome.step, newest_step(run.attempt(attempt)))
    status.write(outcome.state, outcome.step, reason=outcome.reason, symptom=outcome.symptom)
    if outcome.state == "failed":
        outcome.symptom = symptom_of(run, outcome.symptom)
        status.write(outcome.state, outcome.step, reason=outcome.reason, symptom=outcome.symptom)
    return outcome


def newest_step(attempt: Path) -> int:
    """The last step that an attempt has made, also one that it finished while it was being ended; 0 if none."""
    made = (one["step"] for one in Follower(attempt / "progress.jsonl").new() if one["phase"] == "step")
    return max(made, default=0)


def scratch_note(attempt: Path) -> Path:
    """Where an attempt notes its folder of sockets while it runs."""
    return attempt / "scratch"


def symptom_of(run: RunDir, told: str | None = None) -> str | None:
    """The first real cause that ``mmqa diagnose`` finds in the failed attempt's logs, else what the run told itself."""
    from agent.symptoms.diagnose import diagnose

    try:
        found = diagnose(str(run.root))
    except Exception as error:  # the run's own failure must be told, whatever happens here
        print(f"mmqa: the logs could not be searched: {type(error).__name__}: {error}")
        return told
    return found.first.entry.slug if found.first else told or found.slug


class _Stop:
    """What Ctrl-C asks for: once, the end of the present step if it is short; twice, the end.

    Each phase of that step gets its time anew, and a save that has begun all it needs: half of it would be worth
    nothing.
    """

    def __init__(self, folder: Path, display: Display) -> None:
        self._folder, self._display = folder, display
        self._phase: str | None = None
        self._deadline, self._long = 0.0, False

    def now(self, count: int, phase: str, last_step_seconds: float | None) -> bool:
        """Whether to end everything at once. ``count``: how often Ctrl-C was pressed."""
        if count == 0:
            return False
        if self._phase is None:
            self._phase = ""
            self._long = last_step_seconds is not None and last_step_seconds > SHORT_STEP_SECONDS
            if phase == "starting" or (self._long and phase != "saving"):
                self._display.say(
                    "stopping at once: " + ("no step has begun" if phase == "starting" else "steps are long")
                )
                return True
            with contextlib.suppress(OSError):
                stop_file(self._folder).touch()
            self._display.say("stopping after this step (Ctrl-C again: at once)")
        if phase != self._phase:
            self._phase, self._deadline = phase, time.monotonic() + SHORT_STEP_SECONDS
        if count > 1:
            self._display.say("stopping at once")
            return True
        return phase != "saving" and (self._long or time.monotonic() > self._deadline)


def _watch(services: Services, status: Status, display: Display, interrupt: _Interrupt, began: int) -> Outcome:
    follower = Follower(services.folder / "progress.jsonl")
    watchdog = Watchdog(status.total_steps, time.monotonic())
    stop = _Stop(services.folder, display)
    noted, told = time.monotonic(), False
    step, phase, seconds, end = began, "starting", None, Outcome("failed", began)
    while True:
        ended = services.dead()  # before the events: what the trainer wrote last is then still read
        for event in follower.new():
            display.event(event)
            watchdog.feed(event, time.monotonic())
            phase = event["phase"]
            if phase == "step" or (phase == "starting" and event.get("resumed_from")):
                step, seconds = event["step"], event.get("seconds")
            if phase in ("failed", "finished", "stopped"):
                end = Outcome(phase, event.get("step", step), event.get("reason"), event.get("symptom"))
            if phase in _STATE:
                status.write(_STATE[phase], event.get("step") or step)
        if ended is not None:
            if ended.name == "trainer" and ended.exit_code == 0 and end.state != "failed":
                return Outcome(end.state, end.step, "stopped by the user" if end.state == "stopped" else None)
            return _failure(ended, step, end.reason, end.symptom)
        if stop.now(interrupt.count, phase, seconds):
            return Outcome("stopped", step, "stopped by the user")
        if silence := watchdog.overdue(time.monotonic()):
            display.say(f"{silence}  -> {page('no-progress')}")
            status.write(_STATE.get(phase, "starting"), step, reason=silence)
        if time.monotonic() - noted > NOTE_SECONDS:
            noted = time.monotonic()
            services.note_shared_memory()
        if status.problem and not told:
            told = True
            display.say(f"warning: {status.problem}")
        display.tick()
        time.sleep(0.2)


def _failure(ended: Service, step: int, reason: str | None, symptom: str | None) -> Outcome:
    code = ended.exit_code
    how = f"by signal {-code}" if code is not None and code < 0 else f"with code {code}"
    text = f"the {ended.name} ended {how}"
    cause = reason or last_error(ended.log)
    return Outcome("failed", step, f"{text}: {cause}" if cause else f"{text}; its log is {ended.log}", symptom)


def last_error(log: Path) -> str | None:
    """The last line of a log that reads like an exception, without Ray's prefix; None if there is none."""
    import re

    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 200_000))
        lines = file.read().decode("utf-8", "replace").splitlines()
    shape = re.compile(r"^(?:\(.*?pid=\d+.*?\)\s*)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt|Stopped)\b:?.*)$")
    found = [match.group(1) for line in lines if (match := shape.match(re.sub(r"\x1b\[[0-9;]*m", "", line).strip()))]
    return found[-1][:500] if found else None
