"""A worker of the in-process controller: one process, one event loop, many rollouts at a time.

Each rollout is one asyncio task with an environment of its own: ``os.environ`` shows it the variables that Agent
Lightning's controller would set, so an agent class needs no change. Lines it prints carry its rollout id.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib
import inspect
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Iterator, MutableMapping
from typing import Any

import uvloop

from agent import chat
from agent.training import pooled_http

_rollout: contextvars.ContextVar[str] = contextvars.ContextVar("rollout", default="-")
_overlay: contextvars.ContextVar[dict[str, str] | None] = contextvars.ContextVar("overlay", default=None)


class TaskEnviron(MutableMapping[str, str]):
    """``os.environ`` with an overlay for the current asyncio task; writes in a task stay in that task."""

    def __init__(self, base: MutableMapping[str, str]) -> None:
        self._base = base

    def _merged(self) -> MutableMapping[str, str]:
        overlay = _overlay.get()
        return self._base if overlay is None else {**self._base, **overlay}

    def __getitem__(self, key: str) -> str:
        overlay = _overlay.get()
        return overlay[key] if overlay is not None and key in overlay else self._base[key]

    def __setitem__(self, key: str, value: str) -> None:
        overlay = _overlay.get()
        (self._base if overlay is None else overlay)[key] = value

    def __delitem__(self, key: str) -> None:
        overlay = _overlay.get()
        del (self._base if overlay is None else overlay)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._merged())

    def __len__(self) -> int:
        return len(self._merged())

    def copy(self) -> dict[str, str]:
        """As ``os.environ.copy()``."""
        return dict(self._merged())


class TaggedOutput:
    """A text stream that writes whole lines, each with the id of the rollout that printed it."""

    encoding, errors = "utf-8", "replace"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._parts: dict[str, str] = {}

    def write(self, text: str) -> int:
        rollout = _rollout.get()
        *lines, rest = (self._parts.pop(rollout, "") + text).split("\n")
        if rest:
            self._parts[rollout] = rest
        if lines:
            tagged = "".join(f"[rollout {rollout}] {line}\n" for line in lines)
            os.write(self._descriptor, tagged.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Lines are written as they end; a line not yet ended waits."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self._descriptor


def load_class(path: str) -> type:
    """The agent class named "module:Class" or "module.Class"; raises ``TypeError`` if it is no class."""
    module, name = path.split(":", 1) if ":" in path else path.rsplit(".", 1)
    loaded = getattr(importlib.import_module(module), name)
    if not isinstance(loaded, type):
        raise TypeError(f"{path} is not a class")
    return loaded


def agent_problem(path: str) -> str | None:
    """Why no rollout could be made with this class, or None; what its module wants from a rollout is not known here."""
    try:
        cls = load_class(path)
    except (ImportError, AttributeError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return None
    return None if callable(getattr(cls, "run", None)) else "it has no method run, so it is no agent"


def wants_isolation(cls: type) -> bool:
    """Whether the agent needs a process to itself: it says so (``isolation = True``) or its ``run`` is not async."""
    return bool(getattr(cls, "isolation", False)) or not inspect.iscoroutinefunction(getattr(cls, "run", None))


def memory() -> int:
    """Peak resident memory of this process, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def pack(*message: Any) -> bytes:
    """A message as a frame: its length in four bytes, then JSON."""
    body = json.dumps(message).encode()
    return struct.pack("!I", len(body)) + body


async def unpack(reader: asyncio.StreamReader) -> tuple[Any, ...]:
    """The next message; ``EOFError`` when the other side is gone."""
    try:
        (size,) = struct.unpack("!I", await reader.readexactly(4))
        return tuple(json.loads(await reader.readexactly(size)))
    except (asyncio.IncompleteReadError, OSError):
        raise EOFError from None


class Worker:
    """The loop behind one connection to the controller.

    Receives ``("run", id, class path, environment)``, ``("cancel", id)``, ``("ping",)``; sends
    ``("done", id, error or None)`` and ``("pong", peak bytes)``. It ends when the controller is gone.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def main(self) -> None:
        reader, self._writer = await asyncio.open_connection(sock=self._line)
        async with pooled_http.client(pooled_http.GATEWAY_IDLE_SECONDS, timeout=300.0) as client:
            chat.share_client(client)
            with contextlib.suppress(EOFError):
                while True:
                    self._handle(await unpack(reader))
            for task in self._tasks.values():  # nobody waits for these rollouts any more
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _handle(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("run", rollout, path, environ):
                task = asyncio.get_running_loop().create_task(self._run(rollout, path, environ))
                self._tasks[rollout] = task
            case ("cancel", rollout):
                if task := self._tasks.get(rollout):
                    task.cancel()
            case ("ping",):
                self._writer.write(pack("pong", memory()))

    async def _run(self, rollout: str, path: str, environ: dict[str, str]) -> None:
        _rollout.set(rollout)
        _overlay.set(dict(environ))
        error = None
        try:
            await load_class(path)().run()
        except asyncio.CancelledError:
            error = "cancelled"
        except BaseException as problem:
            traceback.print_exc()
            error = _in_words(problem)
        finally:
            self._tasks.pop(rollout, None)
            self._writer.write(pack("done", rollout, error))


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the controller decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout = sys.stderr = TaggedOutput(1)  # type: ignore[assignment]


def worker_main(line: socket.socket) -> None:
    """Entry point of a worker process."""
    _begin()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the controller, which ends its workers itself
    os.environ = TaskEnviron(os.environ)  # type: ignore[assignment]  # noqa: B003 - it is wrapped, not cleared

    async def main() -> None:
        await Worker(line).main()

    uvloop.run(main())


def _in_words(problem: BaseException) -> str:
    return f"{type(problem).__name__}: {problem}"[:1000]


def isolated_main(path: str, environ: dict[str, str], rollout: str, line: Any) -> None:
    """Entry point of a process that runs one rollout and ends: exit code 0 or 1, as Agent Lightning's own.

    What the agent raised is sent over ``line`` (a ``multiprocessing`` connection) before.
    """
    os.setsid()  # its children end with it
    _begin()
    _rollout.set(rollout)
    os.environ.update(environ)
    try:
        result = load_class(path)().run()
        if inspect.isawaitable(result):

            async def wait() -> None:
                await result

            asyncio.run(wait())
    except SystemExit:
        raise
    except BaseException as problem:
        traceback.print_exc()
        line.send_bytes(_in_words(problem).encode("utf-8", "replace"))
        sys.exit(1)
