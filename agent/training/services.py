"""Start, check and end the processes of a run: gateway, controller, trainer. Each leads a process group of its own."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import RunFailed
from agent.training import cpu_backend, dispatch, upstream_fixes, warm
from agent.training.rundir import RunDir
from agent.training.trainer import ATTEMPT_ENV, KEY_ENV, RUN_ENV

HOST = "127.0.0.1"
SHARED_MEMORY = Path("/dev/shm")
SECRETS = ("gateway.key", "ray.token")  # in an attempt's folder while it runs
SCRATCH_ENV = upstream_fixes.SCRATCH_ENV
TOKEN_ENV = "MMQA_RUN_TOKEN"  # marks every process of one attempt, to find what is left at the end
_LIBC = ctypes.CDLL(None)
START_SECONDS = 60.0  # gateway: from start to the first answer


def _hydra(value: Any) -> str:
    """A text as hydra's command line reads it: quoted, and no letter written as an escape."""
    return json.dumps(str(value), ensure_ascii=False)


def free_port() -> int:
    """A port on the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _secret_file(path: Path, secret: str) -> Path:
    """Write a secret that the user alone can read."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
    return path


def loopback_without_proxy(env: Mapping[str, str]) -> dict[str, str]:
    """``NO_PROXY`` in both spellings, so that no call to the gateway, with its key, goes through a proxy.

    The lower-case one wins where it is set (``urllib.request.getproxies_environment``, which httpx asks too).
    """
    names = ("NO_PROXY", "no_proxy")
    given = [part for name in names for one in env.get(name, "").split(",") if (part := one.strip())]
    return dict.fromkeys(names, ",".join(dict.fromkeys([*given, HOST, "localhost"])))


def _end_with_parent() -> None:
    """In the new process: be sent SIGTERM when the supervisor dies, however it dies (Linux, prctl(2))."""
    _LIBC.prctl(1, signal.SIGTERM)  # 1 = PR_SET_PDEATHSIG


@dataclass
class Service:
    """One started process, leader of its own group; its output goes to ``log``."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]) -> Service:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        return cls(name, process, log)

    @property
    def exit_code(self) -> int | None:
        return self.process.poll()

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)


def shared_memory_note(attempt: Path) -> Path:
    """Where an attempt notes its processes' ids and shared memory while it runs, one a line."""
    return attempt / "shared-memory"


def mapped_shared_memory(pid: int) -> set[str]:
    """Names in /dev/shm that a process has mapped."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[-1].removesuffix(" (deleted)") for line in lines if f" {SHARED_MEMORY}/" in line}
    return {Path(path).name for path in paths}


def remove_traces(attempt: Path, noted: Iterable[str] = ()) -> None:
    """Remove what an attempt's ended processes could not: keys, shared memory, semaphores, the controller's lock.

    ``noted``: what the note should hold, if it could not be written (disk full). A semaphore that its process has
    closed is no longer mapped, but carries the process id in its name.
    """
    for secret in SECRETS:
        (attempt / secret).unlink(missing_ok=True)
    note = shared_memory_note(attempt)
    for one in {*noted, *(note.read_text().split() if note.exists() else ())}:
        for path in SHARED_MEMORY.glob(f"sem.*-{one}-*") if one.isdigit() else [SHARED_MEMORY / one]:
            path.unlink(missing_ok=True)
    note.unlink(missing_ok=True)
    if (url := attempt / "gateway.url").exists():
        dispatch.lock_path(url.read_text()).unlink(missing_ok=True)


class Services:
    """The processes of one attempt. ``key`` and ``token`` are made here, for this attempt alone.

    ``scratch``: a folder with a short path, for sockets (their paths are limited to 107 bytes), deleted by the caller.
    """

    def __init__(self, run: RunDir, attempt: int, config: Any, scratch: Path) -> None:
        self.run, self.attempt, self.config, self.scratch = run, attempt, config, scratch
        self.folder = run.attempt(attempt)
        self.token = uuid.uuid4().hex
        self.key = secrets.token_urlsafe(32)
        self.key_file = _secret_file(self.folder / SECRETS[0], self.key)
        self.ray_token_file = _secret_file(self.folder / SECRETS[1], secrets.token_hex(32))
        self.started: dict[str, Service] = {}
        self.url = ""
        self._noted: set[str] = set()

    def environment(self) -> dict[str, str]:
        """What every process of the attempt gets beside the caller's environment."""
        cpu = self.config.mmqa.backend == "cpu"
        # join no other Ray cluster; Ray would count the cpu preset's pretended GPU against CUDA_VISIBLE_DEVICES
        dropped = {"RAY_ADDRESS"} | ({"CUDA_VISIBLE_DEVICES"} if cpu else set())
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        env |= {
            RUN_ENV: str(self.run.root),
            ATTEMPT_ENV: str(self.attempt),
            KEY_ENV: str(self.key_file),
            TOKEN_ENV: self.token,
            SCRATCH_ENV: str(self.scratch),
            "RAY_AUTH_MODE": "token",  # a token of this attempt's own, instead of one in the home folder for all runs
            "RAY_AUTH_TOKEN_PATH": str(self.ray_token_file),
            "PYTHONUNBUFFERED": "1",
            "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # under "uv run" Ray would build an environment for each worker
            "RAY_worker_niceness": "0",  # Ray would run the trainer and the engine at 15, behind everything else
            "TOKENIZERS_PARALLELISM": "false",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        env |= loopback_without_proxy(env)
        if self.config.mmqa.controller == "local":
            env[dispatch.DOORBELL_ENV] = str(self.scratch / "bell.sock")
        if self.config.trainer.nnodes == 1:
            # Ray then takes 127.0.0.1 for this node's address, and with it verl's vLLM server (Ray replaces a loopback
            # address that it is given in any other way)
            env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
            env["VLLM_HOST_IP"] = HOST  # where the engine's own process group meets
        if cpu:
            env |= {
                cpu_backend.ENV: "1",
                "HF_HUB_OFFLINE": "1",
                "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": "1",
            }
        return env

    def start_warm(self) -> None:
        """Start the server that the cpu preset's Python processes are forked from; see ``warm``."""
        address = warm.address(self.scratch)
        command = [sys.executable, "-m", "agent.training.warm", str(address)]
        env = (
            self.environment()
            | self.own_temporary_files()
            | {warm.PYTHON_ENV: str(warm.write_stand_in(self.scratch / "python", address))}
        )
        self.started["warm"] = Service.start("warm", command, self.folder / "warm.log", env)

    def start_gateway(self, given_up: Callable[[], bool] = lambda: False) -> bool:
        """Start the gateway on a free port and wait until it answers to this attempt's key and to no other.

        False if it was ``given_up`` before. Raises ``RunFailed`` if it ends or does not answer in time. Another server
        on the port cannot be mistaken for it: it would not know the key.
        """
        rollout = self.config.actor_rollout_ref.rollout
        for _ in range(5):  # another program may take the port between the look and the bind
            port = free_port()
            self.url = f"http://{HOST}:{port}"
            service = self._start(
                "gateway",
                ["-m", "agent.training.gateway_main"],
                f"host={HOST}",
                f"port={port}",
                "key=${oc.env:AGL_KEY}",  # resolved inside: no key on a command line or in a saved configuration
                f"default_proxy.model_name={_hydra(self.config.actor_rollout_ref.model.path)}",
                f"default_proxy.train.temperature={rollout.temperature}",
                f"default_proxy.val.temperature={rollout.val_kwargs.temperature}",
            )
            if self._answers(service, given_up):
                (self.folder / "gateway.url").write_text(self.url)
                return True
            if given_up():
                return False
            if b"address already in use" not in service.log.read_bytes()[-20_000:].lower():
                raise RunFailed(
                    f"the gateway ended with code {service.exit_code} before it answered; see {service.log}"
                )
        raise RunFailed("five ports in a row were taken before the gateway could bind one", slug="gateway-port-taken")

    def start_controller(self) -> None:
        """Start the in-process controller, or (``mmqa.controller=agl``) Agent Lightning's, a process a rollout."""
        if self.config.mmqa.controller == "local":
            env = self.environment() | self.agent_environment() | {"AGL_KEY": self.key}
            command = [
                sys.executable,
                "-m",
                "agent.training.dispatch",
                self.url,
                str(self.config.mmqa.controller_slots),
                str(self.config.mmqa.agent_class),
            ]
            self.started["controller"] = Service.start("controller", command, self.folder / "controller.log", env)
            return
        self._start(
            "controller",
            ["-c", "from agentlightning.controller.__main__ import main; main()"],
            "runner_type=local",
            f"agl_server.url={self.url}",
            "agl_server.key=${oc.env:AGL_KEY}",
            f"local_runner.maximum_size={self.config.mmqa.controller_slots}",
            f"local_runner.poll_interval={self.config.mmqa.agl_poll_seconds}",
        )

    def start_trainer(self) -> None:
        """Start the process that runs ``run_ppo``."""
        env = self.environment() | self.own_temporary_files() | {"RAY_TMPDIR": str(self.scratch)}
        if "warm" in self.started:
            env |= {warm.PYTHON_ENV: str(self.scratch / "python"), warm.PID_ENV: str(self.started["warm"].process.pid)}
        command = [sys.executable, "-m", "agent.training.trainer_main", str(self.run.root)]
        self.started["trainer"] = Service.start("trainer", command, self.folder / "trainer.log", env)

    def own_temporary_files(self) -> dict[str, str]:
        """vLLM's sockets, verl's lock files, wandb's folders: they lie in the scratch folder, and go with it."""
        kept = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"  # compiled code, for the next run too
        return {
            "TMPDIR": str(self.scratch),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(kept)),
        }

    def agent_environment(self) -> dict[str, str]:
        """What each agent gets beside what the controller sets for its rollout."""
        settings = {name: value for name, value in self.config.mmqa.agent.items() if value is not None}
        return {"MMQA_IMAGE_ROOT": str(self.run.images), "MMQA_AGENT": json.dumps(settings)}

    def _start(self, name: str, program: list[str], *arguments: str) -> Service:
        env = self.environment() | self.agent_environment() | {"AGL_KEY": self.key}
        command = [sys.executable, *program, *arguments, f"hydra.run.dir={_hydra(self.folder)}"]
        command += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
        service = Service.start(name, command, self.folder / f"{name}.log", env)
        self.started[name] = service
        return service

    def _answers(self, service: Service, given_up: Callable[[], bool]) -> bool:
        import httpx

        deadline = time.monotonic() + START_SECONDS
        path = f"{self.url}/api/rollouts?state_in=queuing"
        with httpx.Client(timeout=2.0, trust_env=False) as client:
            while time.monotonic() < deadline and service.exit_code is None and not given_up():
                with contextlib.suppress(httpx.TransportError):
                    known = client.get(path, headers={"Authorization": f"Bearer {self.key}"}).status_code
                    stranger = client.get(path).status_code
                    if known == 200 and stranger == 401 and service.exit_code is None:
                        return True
                time.sleep(0.1)
        service.signal_group(signal.SIGKILL)
        service.process.wait()
        return False

    def dead(self) -> Service | None:
        """A process that has ended, the trainer last (it ends by itself when training is done)."""
        for name in ("gateway", "controller", "trainer"):  # a warm server that ends only makes things slower
            service = self.started.get(name)
            if service is not None and service.exit_code is not None:
                return service
        return None

    def stop(self, seconds: float = 15.0) -> None:
        """End every process of the attempt: politely, then by force, then whatever still carries the token.

        The trainer has ``seconds`` to end by itself, the others 6 together; with 15 s all are gone within 30. Then
        remove what ended processes cannot remove themselves: keys, shared memory, the controller's lock.
        """
        self.note_shared_memory()
        services = [self.started[name] for name in ("trainer", "warm", "controller", "gateway") if name in self.started]
        end = time.monotonic() + seconds + 6.0

        def left(most: float) -> float:
            return min(most, max(0.5, end - time.monotonic()))

        for service in services:
            if service.exit_code is None:
                service.signal_group(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    service.process.wait(timeout=seconds if service.name == "trainer" else left(5.0))
            service.signal_group(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.process.wait(timeout=left(2.0))
        self._end_leftovers()
        remove_traces(self.folder, self._noted)

    def note_shared_memory(self) -> None:
        """Write down the attempt's processes and the shared memory they hold: it outlives a process that is killed.

        On a full disk what is known stays in memory: the end of the run must not depend on it.
        """
        pids = [process.pid for process in self.leftovers()]
        found = {str(pid) for pid in pids}.union(*(mapped_shared_memory(pid) for pid in pids))
        if new := found - self._noted:
            self._noted |= new
            with contextlib.suppress(OSError), shared_memory_note(self.folder).open("a") as file:
                file.writelines(f"{one}\n" for one in sorted(new))

    def leftovers(self) -> list[Any]:
        """Processes of this attempt: those that carry its token, and those in its process groups.

        Ray's children leave their parent's group; vLLM's engine overwrites its environment when it sets its title.
        """
        import psutil

        groups = {service.process.pid for service in self.started.values()}
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.pid != os.getpid() and (
                    os.getpgid(process.pid) in groups or process.environ().get(TOKEN_ENV) == self.token
                ):
                    found.append(process)
        return found

    def _end_leftovers(self) -> None:
        import psutil

        for send in ("terminate", "kill"):
            processes = self.leftovers()
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    getattr(process, send)()
            psutil.wait_procs(processes, timeout=3.0)
