"""The in-process controller: speaks the gateway's REST API as ``agl-controller`` does, without a process a rollout.

``agl-controller`` starts a Python process for each rollout (about 1 s of CPU) and looks for new ones every 10 s, 50
at a time. Here the agent's coroutine runs in a few long-lived workers, and a new rollout starts within 50 ms. The
contract
for the agent class, the states, the time-outs and the error messages are the same. An agent that is not async, or says
``isolation = True``, gets a process of its own, forked from a parent that has imported it already.

    python -m agent.training.dispatch GATEWAY_URL SLOTS          (the key in AGL_KEY)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from agent.training import dispatch_worker
from agent.training.dispatch_worker import load_class, wants_isolation

log = logging.getLogger("dispatch")

POLL_SECONDS = 0.045  # between two looks for new rollouts
RECYCLE_ROLLOUTS = 5_000  # a worker ends after so many
RECYCLE_BYTES = 1_500_000_000  # or when its memory has grown to this
PING_SECONDS, DEAF_SECONDS = 2.0, 30.0  # a worker that has not answered a ping for so long is taken for hung
RECONCILE_SECONDS = 2.0  # between two looks whether running rollouts still exist at the gateway


@dataclass
class Job:
    """One rollout in work."""

    rollout: str
    path: str
    environ: dict[str, str]
    deadline: float
    attempt: int = 0
    cancelled: str | None = None  # why it was cancelled


@dataclass
class WorkerHandle:
    """The controller's side of one worker process."""

    process: Any
    connection: Connection
    jobs: dict[str, Job] = field(default_factory=dict)
    taken: int = 0
    heard: float = field(default_factory=time.monotonic)
    retiring: bool = False


def rollout_environ(rollout: dict[str, Any], gateway: str, key: str, attempt: int) -> dict[str, str]:
    """The variables that Agent Lightning's controller sets for a rollout.

    Raises ``ValueError`` with its message for an ``env_map`` path that the input does not have.
    """
    mode = "train" if rollout["is_train"] else "val"
    base = f"{gateway}/proxy/rollout/{rollout['rollout_id']}/attempt/{attempt}/mode/{mode}/openai/v1"
    environ = {
        "AGL_KEY": key,
        "AGL_OPENAI_BASE_URL": base,
        "AGL_EVENT_URL": f"{gateway}/api/rollouts/{rollout['rollout_id']}/attempt/{attempt}/events",
    }
    for name, path in (rollout["config"]["local"].get("env_map") or {}).items():
        value = _resolve(rollout["input"], path)
        environ[name] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return environ


def _resolve(task_input: Any, path: str) -> Any:
    if path == "input":
        return task_input
    if not path.startswith("input."):
        return path
    value = task_input
    for part in path.split(".")[1:]:
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise ValueError(f"local.env_map path not found: {path}")
    return value


class AlreadyServed(RuntimeError):
    """Another controller on this machine serves the same gateway."""


@contextlib.contextmanager
def sole_controller(gateway: str) -> Any:
    """Hold the lock of a gateway's address; ``AlreadyServed`` if another process holds it."""
    parts = urlsplit(gateway)
    path = Path(tempfile.gettempdir()) / f"mmqa-controller-{os.getuid()}-{parts.hostname}-{parts.port}.lock"
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AlreadyServed(f"another controller already serves the gateway at {gateway}") from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


class Dispatcher:
    """Takes queued rollouts from the gateway, runs them in workers, reports how they ended.

    ``slots``: rollouts in work at a time; more wait at the gateway.
    """

    def __init__(self, gateway: str, key: str, slots: int, *, workers: int | None = None) -> None:
        self._gateway, self._key, self._slots = gateway.rstrip("/"), key, slots
        self._count = workers or max(1, min(4, os.cpu_count() or 1))
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[WorkerHandle] = []
        self._isolated: dict[str, tuple[Job, Any]] = {}
        self._isolation: dict[str, bool] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._claimed: set[str] = set()  # taken from the gateway and not yet reported back
        self._stop = asyncio.Event()
        self._client = httpx.AsyncClient(
            base_url=self._gateway,
            headers={"Authorization": f"Bearer {key}"},
            timeout=30.0,
            trust_env=False,
        )

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until ``stop``; then cancel what runs and report it FAILED."""
        self._context.set_forkserver_preload(["agent.training.dispatch_worker", "agent.loop"])
        for _ in range(self._count):
            self._start_worker()
        log.info("serving %s with %d workers, %d slots", self._gateway, self._count, self._slots)
        tasks = [asyncio.create_task(one) for one in (self._poll_loop(), self._care_loop())]
        try:
            await self._stop.wait()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._shutdown()

    def stop(self) -> None:
        self._stop.set()

    async def _shutdown(self) -> None:
        jobs = [job for worker in self._workers for job in worker.jobs.values()]
        jobs += [job for job, _ in self._isolated.values()]
        for worker in self._workers:
            self._kill(worker)
        for _, process in self._isolated.values():
            _kill_group(process)
        await asyncio.gather(*(self._report(job, "failed", "local controller shutdown") for job in jobs))
        await self._client.aclose()

    # -- the gateway ------------------------------------------------------------------------------------------------

    async def _poll_loop(self) -> None:
        while True:
            free = self._slots - len(self._claimed)
            if free > 0:
                try:
                    await self._take(free)
                except (httpx.HTTPError, ValueError) as error:
                    log.warning("cannot list rollouts: %s: %s", type(error).__name__, error)
                    await asyncio.sleep(0.5)
            await asyncio.sleep(POLL_SECONDS)

    async def _take(self, free: int) -> None:
        params = {"state_in": "queuing", "limit": str(free + len(self._claimed))}
        response = await self._client.get("/api/rollouts", params=params)
        response.raise_for_status()
        new = [one for one in response.json() if one["rollout_id"] not in self._claimed][:free]
        for rollout in new:
            self._claimed.add(rollout["rollout_id"])
            self._spawn(self._begin(rollout))

    async def _begin(self, rollout: dict[str, Any]) -> None:
        name = rollout["rollout_id"]
        try:
            local = rollout["config"].get("local") or {}
            if not local.get("agent_class"):
                raise ValueError("invalid rollout config: missing config.local.agent_class")
            environ = rollout_environ(rollout, self._gateway, self._key, 0)
            isolated = self._needs_isolation(local["agent_class"])
        except Exception as error:
            await self._patch(name, "failed", f"local subprocess spawn failed: {error}")
            self._claimed.discard(name)
            return
        if not await self._patch(name, "running", attempt=0):
            self._claimed.discard(name)
            return
        timeout = float(rollout["config"].get("timeout_seconds") or 3600)
        job = Job(name, local["agent_class"], environ, time.monotonic() + timeout)
        if isolated:
            self._start_isolated(job)
        else:
            self._assign(job)

    def _needs_isolation(self, path: str) -> bool:
        if path not in self._isolation:
            self._isolation[path] = wants_isolation(load_class(path))
        return self._isolation[path]

    async def _patch(self, rollout: str, state: str, error: str | None = None, *, attempt: int | None = None) -> bool:
        status: dict[str, Any] = {"state": state}
        if error is not None:
            status["error_message"] = error
        if attempt is not None:
            status["last_attempt_id"] = str(attempt)
        for wait in (0.1, 0.5, 2.0, None):
            try:
                response = await self._client.patch(f"/api/rollouts/{rollout}", json={"status": status})
            except httpx.TransportError as problem:
                if wait is None:
                    log.warning("[rollout %s] cannot report %s: %s", rollout, state, problem)
                    return False
                await asyncio.sleep(wait)
                continue
            if response.status_code == 404:
                log.warning("[rollout %s] unknown to the gateway: it was deleted, or the gateway restarted", rollout)
                return False
            if response.status_code >= 400:
                log.warning("[rollout %s] the gateway refuses %s: %s", rollout, state, response.text[:200])
                return False
            return True
        return False

    async def _report(self, job: Job, state: str, error: str | None = None) -> None:
        attempt = job.attempt if state == "succeeded" else None
        await self._patch(job.rollout, state, error, attempt=attempt)
        self._claimed.discard(job.rollout)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # -- workers ----------------------------------------------------------------------------------------------------

    def _start_worker(self) -> WorkerHandle:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=dispatch_worker.worker_main, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        worker = WorkerHandle(process, ours)
        self._workers.append(worker)
        asyncio.get_running_loop().add_reader(ours.fileno(), self._receive, worker)
        return worker

    def _assign(self, job: Job) -> None:
        open_workers = [worker for worker in self._workers if not worker.retiring]
        worker = min(open_workers, key=lambda one: len(one.jobs)) if open_workers else self._start_worker()
        worker.jobs[job.rollout] = job
        worker.taken += 1
        try:
            worker.connection.send(("run", job.rollout, job.path, job.environ))
        except OSError:
            self._lost(worker)
            return
        if worker.taken >= RECYCLE_ROLLOUTS:
            self._retire(worker, f"it has run {worker.taken} rollouts")

    def _receive(self, worker: WorkerHandle) -> None:
        try:
            while worker.connection.poll():
                match worker.connection.recv():
                    case ("done", rollout, error):
                        if job := worker.jobs.pop(rollout, None):
                            self._spawn(self._finished(job, error))
                    case ("pong", _, peak):
                        worker.heard = time.monotonic()
                        if peak > RECYCLE_BYTES and not worker.retiring:
                            self._retire(worker, f"its memory reached {peak / 1e6:.0f} MB")
        except (EOFError, OSError):
            self._lost(worker)
            return
        if worker.retiring and not worker.jobs:
            self._kill(worker)

    async def _finished(self, job: Job, error: str | None) -> None:
        if job.cancelled is not None:
            await self._report(job, "failed", job.cancelled)
        elif error is None:
            await self._report(job, "succeeded")
        else:
            await self._report(job, "failed", f"subprocess exited with code 1: {error}")

    def _retire(self, worker: WorkerHandle, why: str) -> None:
        log.info("worker %d is recycled: %s", worker.process.pid, why)
        worker.retiring = True
        self._start_worker()
        if not worker.jobs:
            self._kill(worker)

    def _kill(self, worker: WorkerHandle) -> None:
        with contextlib.suppress(ValueError, OSError):
            asyncio.get_running_loop().remove_reader(worker.connection.fileno())
        if worker in self._workers:
            self._workers.remove(worker)
        worker.process.kill()
        worker.process.join(5)
        worker.connection.close()

    def _lost(self, worker: WorkerHandle, why: str | None = None) -> None:
        """A worker crashed or was killed: each of its rollouts is tried once more, then FAILED."""
        jobs, worker.jobs = list(worker.jobs.values()), {}
        self._kill(worker)
        code = worker.process.exitcode
        log.warning("worker %d is lost (%s); %d rollouts with it", worker.process.pid, why or f"code {code}", len(jobs))
        if not worker.retiring:
            self._start_worker()
        for job in jobs:
            if job.cancelled is not None:
                self._spawn(self._report(job, "failed", job.cancelled))
            elif job.attempt == 0:
                self._spawn(self._again(job))
            else:
                self._spawn(self._report(job, "failed", f"subprocess exited with code {code}"))

    async def _again(self, job: Job) -> None:
        """Second attempt, under an attempt id of its own: what the first one left at the gateway is not read."""
        job.attempt = 1
        for name in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"):
            job.environ[name] = job.environ[name].replace("/attempt/0/", "/attempt/1/")
        log.info("[rollout %s] tried once more", job.rollout)
        self._assign(job)

    # -- agents in a process of their own ---------------------------------------------------------------------------

    def _start_isolated(self, job: Job) -> None:
        process = self._context.Process(
            target=dispatch_worker.isolated_main, args=(job.path, job.environ, job.rollout), daemon=True
        )
        process.start()
        self._isolated[job.rollout] = (job, process)
        asyncio.get_running_loop().add_reader(process.sentinel, self._isolated_ended, job.rollout)

    def _isolated_ended(self, rollout: str) -> None:
        job, process = self._isolated.pop(rollout)
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join(5)
        code = process.exitcode
        if job.cancelled is not None:
            self._spawn(self._report(job, "failed", job.cancelled))
        elif code == 0:
            self._spawn(self._report(job, "succeeded"))
        else:
            self._spawn(self._report(job, "failed", f"subprocess exited with code {code}"))

    # -- time-outs, hung workers, rollouts that are gone ------------------------------------------------------------

    async def _care_loop(self) -> None:
        pinged = reconciled = time.monotonic()
        number = 0
        while True:
            await asyncio.sleep(0.1)
            now = time.monotonic()
            self._expire(now)
            if now - pinged > PING_SECONDS:
                pinged, number = now, number + 1
                for worker in list(self._workers):
                    self._ping(worker, number, now)
            if now - reconciled > RECONCILE_SECONDS:
                reconciled = now
                with contextlib.suppress(httpx.HTTPError, ValueError):
                    await self._reconcile()

    def _ping(self, worker: WorkerHandle, number: int, now: float) -> None:
        if now - worker.heard > DEAF_SECONDS:
            self._lost(worker, f"no answer for {DEAF_SECONDS:.0f} s: an agent blocks its event loop")
            return
        with contextlib.suppress(OSError):
            worker.connection.send(("ping", number))

    def _expire(self, now: float) -> None:
        for worker in list(self._workers):
            late = [job for job in worker.jobs.values() if now > job.deadline]
            for job in late:
                self._cancel(worker, job, "local subprocess timed out")
            if any(now > job.deadline + 5.0 for job in late):  # it does not let itself be cancelled
                self._lost(worker, "a rollout cannot be cancelled")
        for job, process in list(self._isolated.values()):
            if now > job.deadline and job.cancelled is None:
                job.cancelled = "local subprocess timed out"
                _kill_group(process)

    def _cancel(self, worker: WorkerHandle, job: Job, why: str) -> None:
        if job.cancelled is None:
            job.cancelled = why
            with contextlib.suppress(OSError):
                worker.connection.send(("cancel", job.rollout))

    async def _reconcile(self) -> None:
        """Cancel rollouts that the gateway no longer has, or has ended itself."""
        running = {job.rollout: (worker, job) for worker in self._workers for job in worker.jobs.values()}
        if not running:
            return
        params = {"state_in": "running", "limit": "1000000"}
        response = await self._client.get("/api/rollouts", params=params)
        response.raise_for_status()
        known = {one["rollout_id"] for one in response.json()}
        for rollout, (worker, job) in running.items():
            if rollout not in known and rollout in worker.jobs:
                log.warning("[rollout %s] no longer running at the gateway (deleted, or it restarted)", rollout)
                self._cancel(worker, job, "the rollout is gone from the gateway")


def _kill_group(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


async def serve(gateway: str, key: str, slots: int) -> None:
    """Run a dispatcher until SIGTERM or SIGINT."""
    dispatcher = Dispatcher(gateway, key, slots)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, dispatcher.stop)
    await dispatcher.run()


def main(arguments: list[str]) -> int:
    """Command-line entry; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    gateway, slots = arguments[0], int(arguments[1])
    try:
        with sole_controller(gateway):
            asyncio.run(serve(gateway, os.environ.get("AGL_KEY", ""), slots))
    except AlreadyServed as error:
        log.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
