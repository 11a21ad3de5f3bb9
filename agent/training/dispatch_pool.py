"""The processes of the in-process controller: long-lived workers for async agents, a fork each for the others.

The pool knows nothing of the gateway: it is handed a ``Job``, and says once how it ended. A worker that dies fails only
its own jobs, each of which is tried once more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent.training import dispatch_worker

log = logging.getLogger("dispatch")

RECYCLE_ROLLOUTS = 5_000  # a worker ends after so many
RECYCLE_BYTES = 1_500_000_000  # or when its memory has grown to this
PING_SECONDS, DEAF_SECONDS = 2.0, 30.0  # a worker that has not answered a ping for so long is taken for hung
CANCEL_SECONDS = 5.0  # how long a cancelled agent may take to end
TIMED_OUT = "local subprocess timed out"  # Agent Lightning's words
SPAWN_FAILED = "local subprocess spawn failed"  # likewise


class PoolClosed(RuntimeError):
    """The pool has ended its processes and takes no more jobs."""


@dataclass
class Job:
    """One rollout in work. ``deadline`` is a ``time.monotonic`` value."""

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
    line: socket.socket
    writer: asyncio.StreamWriter | None = None  # once the connection is open
    waiting: list[bytes] = field(default_factory=list)  # messages until then
    serving: asyncio.Task[None] | None = None
    jobs: dict[str, Job] = field(default_factory=dict)
    taken: int = 0
    heard: float = field(default_factory=time.monotonic)
    retiring: bool = False

    def send(self, *message: Any) -> None:
        """Send without ever blocking: what does not fit into the socket waits in memory."""
        frame = dispatch_worker.pack(*message)
        if self.writer is None:
            self.waiting.append(frame)
        elif not self.writer.is_closing():
            self.writer.write(frame)


class Pool:
    """Runs jobs. ``ended(job, error)`` is called once for each, with ``None`` or the error message."""

    def __init__(self, count: int, ended: Callable[[Job, str | None], None]) -> None:
        self.count, self._ended = count, ended
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[WorkerHandle] = []
        self._isolated: dict[str, tuple[Job, Any, Any]] = {}  # job, process, where its agent's error arrives
        self._pinged = 0.0
        self._closed = False

    def open(self) -> None:
        """Start the workers."""
        self._context.set_forkserver_preload(["agent.training.dispatch_worker", "agent.loop"])
        for _ in range(self.count):
            self._start_worker()

    def close(self) -> list[Job]:
        """End every process; returns the jobs that had not ended. No job can be started afterwards."""
        self._closed = True
        jobs = self.jobs()
        for worker in list(self._workers):
            self._kill(worker)
        for _, process, line in self._isolated.values():
            asyncio.get_running_loop().remove_reader(process.sentinel)
            _kill_group(process)
            process.join(5)
            line.close()
        self._isolated.clear()
        return jobs

    def jobs(self) -> list[Job]:
        """The jobs in work."""
        shared = [job for worker in self._workers for job in worker.jobs.values()]
        return shared + [job for job, *_ in self._isolated.values()]

    def start(self, job: Job, *, isolated: bool) -> None:
        """Run a job. Raises ``PoolClosed``, and what keeps the system from starting a process (``OSError`` ...)."""
        if self._closed:
            raise PoolClosed("the controller is stopping")
        if isolated:
            self._start_isolated(job)
        else:
            self._assign(job)

    def cancel(self, job: Job, why: str) -> None:
        """End a job; it is then reported with ``why`` as its error."""
        if job.cancelled is not None:
            return
        job.cancelled = why
        if job.rollout in self._isolated:
            _kill_group(self._isolated[job.rollout][1])
        for worker in self._workers:
            if job.rollout in worker.jobs:
                worker.send("cancel", job.rollout)

    def care(self, now: float) -> None:
        """Look after time-outs and hung workers; call it a few times a second."""
        for job in self.jobs():
            if now > job.deadline:
                self.cancel(job, TIMED_OUT)
        for worker in list(self._workers):
            if any(now > job.deadline + CANCEL_SECONDS for job in worker.jobs.values()):
                self._lost(worker, "a rollout cannot be cancelled")
        if now - self._pinged > PING_SECONDS:
            self._pinged = now
            for worker in list(self._workers):
                self._ping(worker, now)

    def _process(self, target: Callable[..., None], ours: Any, theirs: Any, *arguments: Any) -> Any:
        """A started process that has the other end of a line, ``theirs``, as its last argument."""
        process = self._context.Process(target=target, args=(*arguments, theirs), daemon=True)
        try:
            process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return process

    # -- workers ----------------------------------------------------------------------------------------------------

    def _start_worker(self) -> WorkerHandle:
        ours, theirs = socket.socketpair()
        worker = WorkerHandle(self._process(dispatch_worker.worker_main, ours, theirs), ours)
        self._workers.append(worker)
        worker.serving = asyncio.get_running_loop().create_task(self._serve(worker))
        return worker

    def _replace_worker(self) -> None:
        """Start a worker in place of one that ends; where the system cannot now, the next job tries again."""
        try:
            self._start_worker()
        except Exception as error:  # no process or no descriptor to be had
            log.error("no new worker: %s: %s", type(error).__name__, error)

    def _assign(self, job: Job) -> None:
        open_workers = [worker for worker in self._workers if not worker.retiring]
        worker = min(open_workers, key=lambda one: len(one.jobs)) if open_workers else self._start_worker()
        worker.jobs[job.rollout] = job
        worker.taken += 1
        worker.send("run", job.rollout, job.path, job.environ)
        if worker.taken >= RECYCLE_ROLLOUTS:
            self._retire(worker, f"it has run {worker.taken} rollouts")

    async def _serve(self, worker: WorkerHandle) -> None:
        """Read what a worker says until it is gone."""
        reader, worker.writer = await asyncio.open_connection(sock=worker.line)
        worker.writer.writelines(worker.waiting)
        worker.waiting.clear()
        with contextlib.suppress(EOFError):
            while True:
                self._handle(worker, await dispatch_worker.unpack(reader))
        worker.writer.close()
        if worker in self._workers:
            self._lost(worker)

    def _handle(self, worker: WorkerHandle, message: tuple[Any, ...]) -> None:
        match message:
            case ("done", rollout, error):
                if job := worker.jobs.pop(rollout, None):
                    self._end(job, None if error is None else f"subprocess exited with code 1: {error}")
            case ("pong", peak):
                worker.heard = time.monotonic()
                if peak > RECYCLE_BYTES and not worker.retiring:
                    self._retire(worker, f"its memory reached {peak / 1e6:.0f} MB")
        if worker.retiring and not worker.jobs:
            self._kill(worker)

    def _end(self, job: Job, error: str | None) -> None:
        self._ended(job, job.cancelled if job.cancelled is not None else error)

    def _ping(self, worker: WorkerHandle, now: float) -> None:
        if now - worker.heard > DEAF_SECONDS:
            self._lost(worker, f"no answer for {DEAF_SECONDS:.0f} s: an agent blocks its event loop")
            return
        worker.send("ping")

    def _retire(self, worker: WorkerHandle, why: str) -> None:
        log.info("worker %d is recycled: %s", worker.process.pid, why)
        worker.retiring = True
        self._replace_worker()
        if not worker.jobs:
            self._kill(worker)

    def _kill(self, worker: WorkerHandle) -> None:
        if worker in self._workers:
            self._workers.remove(worker)
        worker.process.kill()
        worker.process.join(5)
        if worker.writer is not None:  # its reader then ends
            worker.writer.close()

    def _lost(self, worker: WorkerHandle, why: str | None = None) -> None:
        """A worker crashed or was killed: each of its rollouts is tried once more, then FAILED."""
        jobs, worker.jobs = list(worker.jobs.values()), {}
        self._kill(worker)
        code = worker.process.exitcode
        log.warning("worker %d is lost (%s); %d rollouts with it", worker.process.pid, why or f"code {code}", len(jobs))
        if not worker.retiring:
            self._replace_worker()
        for job in jobs:
            if job.cancelled is None and job.attempt == 0:
                self._again(job)
            else:
                self._end(job, f"subprocess exited with code {code}")

    def _again(self, job: Job) -> None:
        """Second attempt, under an attempt id of its own: what the first one left at the gateway is not read."""
        job.attempt = 1
        for name in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL"):
            job.environ[name] = job.environ[name].replace("/attempt/0/", "/attempt/1/")
        log.info("[rollout %s] tried once more", job.rollout)
        try:
            self._assign(job)
        except Exception as error:
            self._end(job, f"{SPAWN_FAILED}: {type(error).__name__}: {error}")

    # -- agents in a process of their own ---------------------------------------------------------------------------

    def _start_isolated(self, job: Job) -> None:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = self._process(dispatch_worker.isolated_main, ours, theirs, job.path, job.environ, job.rollout)
        self._isolated[job.rollout] = (job, process, ours)
        asyncio.get_running_loop().add_reader(process.sentinel, self._isolated_ended, job.rollout)

    def _isolated_ended(self, rollout: str) -> None:
        job, process, line = self._isolated.pop(rollout)
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join(5)
        error = f"subprocess exited with code {process.exitcode}"
        with contextlib.suppress(EOFError, OSError):
            if line.poll():
                error += f": {line.recv_bytes().decode()}"
        line.close()
        self._end(job, None if process.exitcode == 0 else error)


def _kill_group(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
