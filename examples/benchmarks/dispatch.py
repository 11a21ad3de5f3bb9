"""Rollouts per second and CPU per rollout: this project's controller and agl-controller, with the real gateway.

    python examples/benchmarks/dispatch.py [--repeats 5] [--ours 2000] [--theirs 100]

The model is an instant server (a stub), so that what is measured is dispatch alone. Both controllers run the same
agent, in turn, each repeat with a fresh gateway; agl-controller has its own defaults (50 processes, looks every 10 s).
Also measured: bytes through the gateway for a rollout with a photo of one megapixel, and the gateway's memory while
2,000 rollouts come and go.
"""

import argparse
import asyncio
import contextlib
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from PIL import Image
from rigs import gateway, process, ratio, spread, stub_model

from agent.images import ImageStore
from agent.training.services import HOST, free_port

LIMIT_SECONDS = 600.0
AGENT = '{"max_tokens": 6, "allow_remote_images": true}'


def cpu_of(pids: list[int]) -> float:
    """CPU seconds of processes and their children, living and reaped."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(pid)
            times = root.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
            for child in root.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    own = child.cpu_times()
                    total += own.user + own.system + own.children_user + own.children_system
    return total


def enqueue(client: httpx.Client, picture: str, count: int) -> list[str]:
    """Queue ``count`` rollouts; returns their ids."""
    body = [
        {
            "rollout_id": uuid.uuid4().hex,
            "input": {"id": str(n), "task": "b", "question": "How many?", "images": [picture], "answer": "3"},
            "config": {
                "timeout_seconds": 300,
                "local": {"agent_class": "agent.loop.MultimodalQAAgent", "env_map": {"MMQA_ROW": "input"}},
            },
        }
        for n in range(count)
    ]
    return [one["rollout_id"] for one in client.post("/api/rollouts", json=body).raise_for_status().json()]


def wait_ended(client: httpx.Client, count: int) -> None:
    """Until ``count`` rollouts have ended well; ``SystemExit`` if one failed or it takes too long."""
    deadline = time.monotonic() + LIMIT_SECONDS
    seen, ended = 0, 0
    while ended < count:
        page = client.get("/api/rollouts/terminal", params={"after": seen, "limit": 10_000}).json()
        for item in page["items"]:
            if item["state"] != "succeeded":
                status = client.get(f"/api/rollouts/{item['rollout_id']}").json()["rollout"]["status"]
                raise SystemExit(f"a rollout failed: {status['error_message']}")
        seen, ended = page["next_after"], ended + len(page["items"])
        if time.monotonic() > deadline:
            raise SystemExit(f"only {ended} of {count} rollouts ended within {LIMIT_SECONDS:.0f} s")
        time.sleep(0.02)


@contextlib.contextmanager
def controller(kind: str, url: str, folder: Path) -> Iterator[int]:
    """Start "ours" or "theirs" against a gateway; yields its process id when it serves."""
    env = {"MMQA_IMAGE_ROOT": str(folder / "images"), "MMQA_AGENT": AGENT}
    if kind == "ours":
        command, ready = ["-m", "agent.training.dispatch", url, "512"], "serving"
    else:
        code = "from agentlightning.controller.__main__ import main; main()"
        command = ["-c", code, "runner_type=local", f"agl_server.url={url}", "agl_server.key=${oc.env:AGL_KEY}"]
        command += [f"hydra.run.dir={folder}", "hydra.output_subdir=null"]
        ready = "LocalReconciler starting"
    log = folder / f"{kind}-{uuid.uuid4().hex[:6]}.log"
    with process(command, log, env) as started:
        while not log.exists() or ready not in log.read_text():
            time.sleep(0.05)
        time.sleep(3.0)  # its workers come up
        yield started.pid


def one_repeat(kind: str, count: int, folder: Path, model: str, picture: str) -> tuple[float, float]:
    """(rollouts per second, CPU seconds of controller and agents per rollout)."""
    with gateway(folder, model) as (client, _), controller(kind, str(client.base_url).rstrip("/"), folder) as pid:
        before, started = cpu_of([pid]), time.monotonic()
        enqueue(client, picture, count)
        wait_ended(client, count)
        seconds = time.monotonic() - started
        return count / seconds, (cpu_of([pid]) - before) / count


class Counter:
    """A forwarder on loopback that counts the bytes of both directions."""

    def __init__(self, target_port: int) -> None:
        self.bytes, self.port, self._target = 0, free_port(), target_port
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connection, HOST, self.port)
        async with server:
            await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(HOST, self._target)
        await asyncio.gather(self._pump(reader, other_writer), self._pump(other_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.bytes += len(data)
            writer.write(data)
            await writer.drain()
        writer.close()


def traffic(folder: Path, model: str, photo: str, count: int = 200) -> float:
    """Bytes through the gateway per rollout: all that controller and agents exchange with it."""
    with gateway(folder, model) as (client, _):
        counter = Counter(client.base_url.port or 0)
        time.sleep(0.5)
        with controller("ours", f"http://{HOST}:{counter.port}", folder):
            enqueue(client, photo, 1)
            wait_ended(client, 1)
            idle_bytes, idle_from = counter.bytes, time.monotonic()
            time.sleep(2.0)
            per_second = (counter.bytes - idle_bytes) / (time.monotonic() - idle_from)  # its looking for work
            before, started = counter.bytes, time.monotonic()
            enqueue(client, photo, count)
            wait_ended(client, count + 1)
            seconds = time.monotonic() - started
            return (counter.bytes - before - per_second * seconds) / count


def memory(folder: Path, model: str, picture: str, rounds: int = 20, size: int = 100) -> list[float]:
    """The gateway's resident memory (MB) after each round of rollouts; they are deleted as the trainer does it."""
    sizes = []
    with (
        gateway(folder, model) as (client, started),
        controller("ours", str(client.base_url).rstrip("/"), folder),
    ):
        for number in range(1, rounds + 1):
            rollouts = enqueue(client, picture, size)
            deadline = time.monotonic() + LIMIT_SECONDS
            while client.get("/api/rollouts/terminal").json()["total_terminal"] < number * size:
                if time.monotonic() > deadline:
                    raise SystemExit("the rollouts did not end")
                time.sleep(0.05)
            for rollout in rollouts:
                client.delete(f"/api/rollouts/{rollout}")
            sizes.append(psutil.Process(started.pid).memory_info().rss / 1e6)
    return sizes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ours", type=int, default=2000)
    parser.add_argument("--theirs", type=int, default=100)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, stub_model(Path(name)) as model:
        folder = Path(name)
        store = ImageStore(folder / "images")
        picture = store.put(Image.new("RGB", (84, 84), "white"))
        photo = store.put(Image.effect_noise((1000, 1000), 80))
        rates: dict[str, list[float]] = {"ours": [], "theirs": []}
        costs: dict[str, list[float]] = {"ours": [], "theirs": []}
        for repeat in range(options.repeats):
            for kind, count in (("ours", options.ours), ("theirs", options.theirs)):
                rate, cost = one_repeat(kind, count, folder, model, picture)
                rates[kind].append(rate)
                costs[kind].append(cost)
                print(f"repeat {repeat + 1} {kind:<6} {rate:8.1f} rollouts/s  {cost:.4f} s of CPU each", flush=True)
        for kind, label in (("ours", "in-process controller"), ("theirs", "agl-controller")):
            print(f"{label:<22} {spread(rates[kind], 1)} rollouts/s, {spread(costs[kind], 4)} s of CPU a rollout")
        print(f"rate, ours / theirs    {ratio(rates['ours'], rates['theirs'], 1)}")
        print(f"bytes a rollout        {traffic(folder, model, photo):,.0f} (photo of 1 megapixel)")
        sizes = memory(folder, model, picture)
        print(f"gateway's memory       {sizes[1]:.0f} MB after 200 rollouts, {sizes[-1]:.0f} MB after 2,000")


if __name__ == "__main__":
    main()
