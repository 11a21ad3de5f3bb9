"""What the benchmarks share: processes on free ports that end with the script, and ratios with their spread."""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from agent.training.rundir import RunDir
from agent.training.services import HOST, free_port
from agent.training.trainer import RUN_ENV

HERE = Path(__file__).parent
KEY = "a-key-for-this-benchmark"
SMALL = (  # a step of 16 rollouts
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "mmqa.train_samples=64",
    "mmqa.val_samples=4",
)


@contextlib.contextmanager
def process(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own, ended (by its id) when the block ends."""
    with log.open("ab") as output:
        started = subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "AGL_KEY": KEY, "PYTHONPATH": str(HERE), **(env or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield started
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(5)


def wait_for(url: str, seconds: float = 60.0) -> None:
    """Until a server answers anything at all."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(url, trust_env=False)
            return
        time.sleep(0.05)
    raise TimeoutError(f"{url} does not answer")


@contextlib.contextmanager
def stub_model(folder: Path) -> Iterator[str]:
    """The instant model server (a stub); yields its address, ending in /v1."""
    port = free_port()
    with process([str(HERE / "stub_server.py"), str(port)], folder / "stub.log"):
        wait_for(f"http://{HOST}:{port}/")
        yield f"http://{HOST}:{port}/v1"


@contextlib.contextmanager
def gateway(folder: Path, model_url: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[bytes]]]:
    """Agent Lightning's real gateway in front of ``model_url``; yields a client with the key, and the process."""
    port = free_port()
    command = ["-m", "agent.training.gateway_main", f"host={HOST}", f"port={port}"]
    command += ["key=${oc.env:AGL_KEY}", "default_proxy.model_name=m", f"hydra.run.dir={folder}"]
    command += ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]  # as a run starts it
    with process(command, folder / "gateway.log") as started:
        url = f"http://{HOST}:{port}"
        wait_for(f"{url}/healthz")
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, headers=headers, timeout=300.0, trust_env=False) as client:
            client.post("/api/models", json=[{"model": "m", "endpoint": model_url}]).raise_for_status()
            yield client, started


def processes_of(run: RunDir) -> Iterator[psutil.Process]:
    """The processes of a run, by the run directory in their environment; one that ends meanwhile is left out."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(RUN_ENV) == str(run.root):
                yield process


def spread(values: Sequence[float], digits: int = 2) -> str:
    """ "1.23 (1.10 .. 1.31)": median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} .. {max(values):.{digits}f})"


def ratio(ours: Sequence[float], theirs: Sequence[float], digits: int = 3) -> str:
    """The ratio of each pair of repeats, as ``spread`` shows it."""
    return spread([one / other for one, other in zip(ours, theirs, strict=True)], digits)
