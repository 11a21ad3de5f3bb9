"""A warm Python: the stack is imported once, and every process of a run is forked from it.

A run has six Python processes that import torch, verl or vLLM: driver, task runner, actor, engine server, engine core,
engine worker. Each import takes 10 to 30 s of CPU, about 130 s in all. Here one server process imports everything
and then forks on request. What asks for a Python gets a small stand-in (``warm_client.py``): it hands its arguments,
environment, folder and open files to the server, stays until the fork ends, and ends as it ended. If no server answers,
it becomes an ordinary Python, only slower.

Ray's core reads its job and its raylet from the environment when it is imported, once for all forks. So Ray is started
first, and the server imports it (and what imports it) after the driver has told both in ``SOCKET.ray``.

    python -m agent.training.warm SOCKET

Used by the ``cpu`` preset: a process that has touched CUDA cannot be forked.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import select
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

PYTHON_ENV = "MMQA_WARM_PYTHON"  # path of the stand-in
PID_ENV = "MMQA_WARM_PID"  # process id of the server
RESERVED = 64  # file descriptors below are kept for the forks
RAY_WAIT_SECONDS = 60.0
FIRST = (
    "torch.distributed.fsdp",
    "transformers.models.qwen2_vl.modeling_qwen2_vl",
    "transformers.models.qwen2_vl.processing_qwen2_vl",
    "transformers.models.qwen2_vl.image_processing_qwen2_vl",
)
WITH_RAY = (
    "ray._private.workers.default_worker",
    "verl.trainer.main_ppo",
    "verl.workers.engine_workers",
    "verl.checkpoint_engine",
    "agentlightning.verl.entrypoint",
    "agentlightning.verl.trainer",
    "agentlightning.verl.per_rollout_loss",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.entrypoints.openai.api_server",
    "verl.workers.rollout.vllm_rollout.vllm_async_server",
    "verl.workers.rollout.vllm_rollout.vllm_rollout",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2_vl",
)


def address(folder: Path) -> Path:
    """The server's socket in an attempt's temporary folder."""
    return folder / "warm.sock"


def write_stand_in(path: Path, socket_path: Path) -> Path:
    """Write the executable that acts as a Python forked from the server at ``socket_path``."""
    client = Path(__file__).with_name("warm_client.py")
    words = [sys.executable, "-I", "-S", str(client), str(socket_path), sys.executable]
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o700)
    return path


def tell_ray(socket_path: Path) -> None:
    """In the driver, after ``ray.init``: let the server import Ray."""
    import ray
    from ray._private import worker

    node: Any = worker._global_node
    raylet = node.all_processes["raylet"][0].process.pid
    facts = {"RAY_JOB_ID": ray.get_runtime_context().get_job_id(), "RAY_RAYLET_PID": str(raylet)}
    scratch = socket_path.with_suffix(".part")
    scratch.write_text(json.dumps(facts))
    scratch.rename(ray_facts(socket_path))


def ray_facts(socket_path: Path) -> Path:
    """Where the driver tells the server about Ray."""
    return socket_path.with_suffix(".ray")


def _wait_for_ray(socket_path: Path) -> None:
    deadline = time.monotonic() + RAY_WAIT_SECONDS
    while not ray_facts(socket_path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the driver did not start Ray within {RAY_WAIT_SECONDS:.0f} s")
        time.sleep(0.05)
    os.environ.update(json.loads(ray_facts(socket_path).read_text()))


def _preload(modules: tuple[str, ...]) -> None:
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a fork then imports it itself and shows the error where it belongs
            print(f"warm: {name} not preloaded: {type(error).__name__}: {error}", flush=True)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request: a JSON line, its files as ancillary data."""
    data, files = b"", array.array("i")
    while not data.endswith(b"\n"):
        part, ancillary, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(256 * files.itemsize))
        if not part:
            raise ConnectionError("the request ended early")
        data += part
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return json.loads(data), list(files)


def _become(request: dict[str, Any], files: list[int], connection: socket.socket) -> None:
    """In the fork: take over the stand-in's files, folder, environment and arguments, then run its program."""
    import fcntl

    line = fcntl.fcntl(connection.fileno(), fcntl.F_DUPFD_CLOEXEC, 1000)
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 1000) for one in files]
    connection.detach()
    os.closerange(3, RESERVED)
    for one, target in zip(high, request["files"], strict=True):
        os.dup2(one, target)
        os.close(one)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    if stand_in := os.environ.get(PYTHON_ENV):
        multiprocessing.set_executable(stand_in)  # vLLM spawns its engine core and workers
    threading.Thread(target=_end_with, args=(line,), daemon=True, name="warm-line").start()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.stderr.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _end_with(line: int) -> None:
    """Pass on the signals that the stand-in was sent (one byte each); if it was killed, end as well."""
    with contextlib.suppress(OSError):
        while got := os.read(line, 1):
            os.kill(os.getpid(), got[0])
    os.kill(os.getpid(), signal.SIGKILL)


def run_program(arguments: list[str]) -> None:
    """What ``python ARGUMENTS`` would run: ``-c CODE``, ``-m MODULE`` or a script, after options that are ignored."""
    rest = list(arguments)
    while rest and rest[0].startswith("-") and rest[0] not in ("-c", "-m"):
        option = rest.pop(0)
        if option in ("-X", "-W"):
            rest.pop(0)
    if rest[:1] == ["-c"]:
        sys.argv = ["-c", *rest[2:]]
        sys.path.insert(0, "")
        exec(compile(rest[1], "<string>", "exec"), {"__name__": "__main__"})
    elif rest[:1] == ["-m"]:
        sys.argv = rest[1:]
        sys.path.insert(0, "")
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = rest
        sys.path.insert(0, str(Path(rest[0]).parent))
        runpy.run_path(rest[0], run_name="__main__")


class Server:
    """Accepts requests and forks; one thread, so that a fork is safe."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        os.chmod(address, 0o600)
        self._listener.listen(64)
        self._children: dict[int, socket.socket] = {}

    def serve(self) -> None:
        """Returns only in a fork, which then runs the requested program."""
        wake, on_child = os.pipe()
        os.set_blocking(on_child, False)
        signal.set_wakeup_fd(on_child)
        signal.signal(signal.SIGCHLD, lambda *args: None)
        while True:
            ready, _, _ = select.select([self._listener, wake], [], [])
            if wake in ready:
                os.read(wake, 4096)
                self._reap()
            if self._listener in ready:
                connection, _ = self._listener.accept()
                if program := self._fork(connection):
                    signal.set_wakeup_fd(-1)
                    run_program(program)
                    return

    def _fork(self, connection: socket.socket) -> list[str] | None:
        try:
            request, files = _receive(connection)
        except (OSError, ValueError) as error:
            print(f"warm: bad request: {error}", flush=True)
            connection.close()
            return None
        pid = os.fork()
        if pid == 0:
            self._listener.close()
            for other in self._children.values():
                other.close()
            try:
                _become(request, files, connection)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            return request["argv"]
        for one in files:
            os.close(one)
        self._children[pid] = connection
        return None

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if connection := self._children.pop(pid, None):
                with contextlib.suppress(OSError):
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                connection.close()


def main(arguments: list[str]) -> None:
    """Import, then serve. Announces itself by making the socket, so a stand-in that comes early waits for it."""
    from agent.training import cpu_backend, upstream_fixes

    socket_path = Path(arguments[0])
    for _ in range(3, RESERVED):
        os.open(os.devnull, os.O_RDWR)
    if cpu_backend.requested():
        cpu_backend.install()
    upstream_fixes.install()
    _preload(FIRST)
    _wait_for_ray(socket_path)
    _preload(WITH_RAY)
    gc.collect()
    gc.freeze()  # the collector would touch, and so copy, every page that the forks share
    print(f"warm: ready, {threading.active_count()} thread(s)", flush=True)
    Server(str(socket_path)).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
