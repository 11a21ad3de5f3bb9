"""The in-process controller: speaks the gateway's REST API as ``agl-controller`` does, without a process a rollout.

``agl-controller`` starts a Python process for each rollout (about 1 s of CPU) and looks for new ones every 10 s, 50
at a time. Here the agent's coroutine runs in a few long-lived workers (``dispatch_pool``), and a new rollout starts
within 50 ms. The contract for the agent class, the states, the time-outs and the error messages are the same. An agent
that is not async, or says ``isolation = True``, gets a process of its own, forked from a parent that has imported it.

Whoever enqueues rollouts may ring (``ring``): one datagram to the socket named by ``MMQA_DOORBELL``. The controller
then looks at once, and otherwise rarely. Without a doorbell it looks often.

    python -m agent.training.dispatch GATEWAY_URL SLOTS [AGENT_CLASS]          (the key in AGL_KEY)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import uvloop

from agent.training import pooled_http
from agent.training.dispatch_pool import SPAWN_FAILED, Job, Pool, PoolClosed
from agent.training.dispatch_worker import agent_problem, load_class, wants_isolation

log = logging.getLogger("dispatch")

DOORBELL_ENV = "MMQA_DOORBELL"
POLL_SECONDS = 0.045  # between two looks for new rollouts
QUIET_POLL_SECONDS = 1.0  # the same where new rollouts are announced by the doorbell
RECONCILE_SECONDS = 2.0  # between two looks whether running rollouts still exist at the gateway
SHUTDOWN_SECONDS = 10.0  # for the last reports to the gateway
SHUTDOWN = "local controller shutdown"  # Agent Lightning's words
LOST = "the controller does not run this rollout: it lost it, or was started anew"


def ring(path: str | None = None) -> None:
    """Tell the controller that rollouts were enqueued; nothing happens if it has no doorbell or does not listen."""
    if path := path or os.environ.get(DOORBELL_ENV):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line, contextlib.suppress(OSError):
            line.setblocking(False)
            line.sendto(b"1", path)


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


def lock_path(gateway: str) -> Path:
    """The file whose lock the one controller of a gateway's address holds."""
    parts = urlsplit(gateway)
    return Path(tempfile.gettempdir()) / f"mmqa-controller-{os.getuid()}-{parts.hostname}-{parts.port}.lock"


@contextlib.contextmanager
def sole_controller(gateway: str) -> Any:
    """Hold the lock of a gateway's address; ``AlreadyServed`` if another process holds it."""
    path = lock_path(gateway)
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
    """Takes queued rollouts from the gateway, has them run, reports how they ended.

    ``slots``: rollouts in work at a time; more wait at the gateway. ``doorbell``: path of the socket to listen on.
    """

    def __init__(
        self, gateway: str, key: str, slots: int, *, workers: int | None = None, doorbell: str | None = None
    ) -> None:
        self._gateway, self._key, self._slots = gateway.rstrip("/"), key, slots
        self._pool = Pool(workers or max(1, min(4, os.cpu_count() or 1)), self._ended)
        self._doorbell = doorbell
        self._isolation: dict[str, bool] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._claimed: set[str] = set()  # taken from the gateway and not yet reported back
        self._beginning: set[str] = set()  # those of them that the gateway still lists as queuing
        self._reconciling: asyncio.Task[None] | None = None
        self._unknown: set[str] = set()  # running at the gateway and not here, at the last look
        self._waiting = False  # whether more wait at the gateway than there were slots
        self._look = asyncio.Event()  # look for rollouts now
        self._stop = asyncio.Event()
        headers = {"Authorization": f"Bearer {key}"}
        self._client = pooled_http.client(
            pooled_http.GATEWAY_IDLE_SECONDS, base_url=self._gateway, headers=headers, timeout=30.0
        )

    # -- life -------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until ``stop``; then cancel what runs and report it FAILED. Raises what ends one of its loops."""
        self._pool.open()
        log.info("serving %s with %d workers, %d slots", self._gateway, self._pool.count, self._slots)
        tasks = [asyncio.create_task(one) for one in (self._poll_loop(), self._care_loop())]
        stop = asyncio.create_task(self._stop.wait())
        with self._listening():
            try:
                await asyncio.wait([stop, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:  # neither ends by itself; without one of them rollouts would wait for ever
                    if task.done():
                        task.result()
            finally:
                for task in (stop, *tasks):
                    task.cancel()
                await asyncio.gather(stop, *tasks, return_exceptions=True)
                await self._shutdown()

    def stop(self) -> None:
        self._stop.set()

    @contextlib.contextmanager
    def _listening(self) -> Any:
        if self._doorbell is None:
            yield
            return
        Path(self._doorbell).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
            bell.bind(self._doorbell)
            bell.setblocking(False)

            def on_ring() -> None:
                with contextlib.suppress(BlockingIOError):
                    while bell.recv(16):
                        self._look.set()

            asyncio.get_running_loop().add_reader(bell, on_ring)
            try:
                yield
            finally:
                asyncio.get_running_loop().remove_reader(bell)
                Path(self._doorbell).unlink(missing_ok=True)

    async def _shutdown(self) -> None:
        if self._reconciling is not None:
            self._reconciling.cancel()
        for job in self._pool.close():
            self._spawn(self._report(job, SHUTDOWN))
        if self._background:
            await asyncio.wait(self._background, timeout=SHUTDOWN_SECONDS)
        await self._client.aclose()

    # -- the gateway ------------------------------------------------------------------------------------------------

    async def _poll_loop(self) -> None:
        pause = POLL_SECONDS if self._doorbell is None else QUIET_POLL_SECONDS
        while True:
            self._look.clear()
            free = self._slots - len(self._claimed)
            if free > 0:
                try:
                    await self._take(free)
                except (httpx.HTTPError, ValueError) as error:
                    log.warning("cannot list rollouts: %s: %s", type(error).__name__, error)
                    await asyncio.sleep(0.5)
            with contextlib.suppress(TimeoutError):
                # where more wait, a freed slot rings: looking in between would list again what is just being begun
                await asyncio.wait_for(self._look.wait(), QUIET_POLL_SECONDS if self._waiting else pause)

    async def _take(self, free: int) -> None:
        limit = free + len(self._beginning)
        params = {"state_in": "queuing", "limit": str(limit)}
        response = await self._client.get("/api/rollouts", params=params)
        response.raise_for_status()
        listed = response.json()
        self._waiting = len(listed) >= limit
        for rollout in [one for one in listed if one["rollout_id"] not in self._claimed][:free]:
            self._claimed.add(rollout["rollout_id"])
            self._beginning.add(rollout["rollout_id"])
            self._spawn(self._begin(rollout))

    async def _begin(self, rollout: dict[str, Any]) -> None:
        name = rollout["rollout_id"]
        timeout = float(rollout["config"].get("timeout_seconds") or 3600)
        local = rollout["config"].get("local") or {}
        try:
            if not local.get("agent_class"):
                raise ValueError("invalid rollout config: missing config.local.agent_class")
            environ = rollout_environ(rollout, self._gateway, self._key, 0)
            isolated = self._needs_isolation(local["agent_class"])
        except Exception as error:
            await self._patch(name, "failed", f"{SPAWN_FAILED}: {error}")
            self._release(name)
            return
        running = await self._patch(name, "running", attempt=0)
        self._beginning.discard(name)
        if not running:
            self._release(name)
            return
        job = Job(name, local["agent_class"], environ, time.monotonic() + timeout)
        try:
            self._pool.start(job, isolated=isolated)
        except PoolClosed:  # stopped meanwhile
            await self._report(job, SHUTDOWN)
        except Exception as error:
            await self._report(job, f"{SPAWN_FAILED}: {type(error).__name__}: {error}")

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
        tried, problem = False, ""
        for wait in (0.1, 0.5, 2.0, None):
            try:
                response = await self._client.patch(f"/api/rollouts/{rollout}", json={"status": status})
                problem = f"HTTP {response.status_code}" if response.status_code >= 500 else ""
            except httpx.TransportError as trouble:
                response, problem = None, f"{type(trouble).__name__}: {trouble}"
            if response is None or problem:
                if wait is None:
                    log.warning("[rollout %s] cannot report %s: %s", rollout, state, problem)
                    return False
                tried = True
                await asyncio.sleep(wait)
                continue
            if response.status_code == 409 and tried:  # the first report had arrived, its answer had not
                return True
            if response.status_code == 404:
                log.warning("[rollout %s] unknown to the gateway: it was deleted, or the gateway restarted", rollout)
                return False
            if response.status_code >= 400:
                log.warning("[rollout %s] the gateway refuses %s: %s", rollout, state, response.text[:200])
                return False
            return True
        return False

    def _ended(self, job: Job, error: str | None) -> None:
        self._spawn(self._report(job, error))

    async def _report(self, job: Job, error: str | None) -> None:
        if error is None:
            await self._patch(job.rollout, "succeeded", attempt=job.attempt)
        else:
            # where it was tried again, what is known of it lies under the second attempt
            await self._patch(job.rollout, "failed", error, attempt=job.attempt or None)
        self._release(job.rollout)

    def _release(self, rollout: str) -> None:
        self._claimed.discard(rollout)
        self._beginning.discard(rollout)
        if self._waiting and self._slots - len(self._claimed) >= max(1, self._slots // 4):
            self._look.set()

    def _spawn(self, coroutine: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # -- time-outs, hung workers, rollouts that are gone ------------------------------------------------------------

    async def _care_loop(self) -> None:
        reconciled = time.monotonic()
        while True:
            await asyncio.sleep(0.2)
            now = time.monotonic()
            self._pool.care(now)
            if now - reconciled > RECONCILE_SECONDS and (self._reconciling is None or self._reconciling.done()):
                reconciled = now
                self._reconciling = self._spawn(self._reconcile())  # beside the pings: a slow gateway deafens no worker

    async def _reconcile(self) -> None:
        """Cancel rollouts that the gateway no longer has or has ended; fail those that run at the gateway alone.

        The trainer waits for each rollout until the gateway calls it ended. One that this controller does not know, in
        two looks one after the other, will never end by itself.
        """
        before = {job.rollout for job in self._pool.jobs()}
        params = {"state_in": "running", "limit": "1000000"}
        try:
            response = await self._client.get("/api/rollouts", params=params)
            response.raise_for_status()
            known = {one["rollout_id"] for one in response.json()}
        except (httpx.HTTPError, ValueError):
            return
        for job in self._pool.jobs():  # what ended meanwhile is no longer among them
            if job.rollout in before - known:
                log.warning("[rollout %s] no longer running at the gateway (deleted, or it restarted)", job.rollout)
                self._pool.cancel(job, "the rollout is gone from the gateway")
        unknown = known - self._claimed
        for rollout in unknown & self._unknown:
            log.warning("[rollout %s] running at the gateway alone; it is reported as failed", rollout)
            await self._patch(rollout, "failed", LOST)
        self._unknown = unknown


async def serve(gateway: str, key: str, slots: int) -> None:
    """Run a dispatcher until SIGTERM or SIGINT."""
    dispatcher = Dispatcher(gateway, key, slots, doorbell=os.environ.get(DOORBELL_ENV))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, dispatcher.stop)
    await dispatcher.run()


def main(arguments: list[str]) -> int:
    """Command-line entry; returns the exit code."""
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO, stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    gateway, slots = arguments[0], int(arguments[1])
    for path in arguments[2:]:
        if problem := agent_problem(path):
            log.error("AgentClassError: mmqa.agent_class=%s: %s", path, problem)
            return 2
    try:
        with sole_controller(gateway):
            uvloop.run(serve(gateway, os.environ.get("AGL_KEY", ""), slots))
    except AlreadyServed as error:
        log.error("%s", error)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
