"""Agents for the tests of the controller: each misbehaves in one way. They read the contract's environment."""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import httpx


async def reward(value):
    headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
    async with httpx.AsyncClient(trust_env=False) as client:
        event = {"event_type": "reward", "data": {"value": value}}
        (await client.post(os.environ["AGL_EVENT_URL"], json=event, headers=headers)).raise_for_status()


def row():
    return json.loads(os.environ["MMQA_ROW"])


class Good:
    """Prints its row's id in two pieces, with a pause between, so that rollouts interleave."""

    async def run(self):
        print(f"I am {row()['id']}", end="")
        await asyncio.sleep(0.02)
        print(" still")
        await reward(float(row()["id"]))


class Raises:
    async def run(self):
        raise ValueError("no such colour")


class Sleeps:
    async def run(self):
        await asyncio.sleep(3600)


class Blocks:
    async def run(self):
        time.sleep(3600)


class KillsWorkerOnce:
    """The first attempt kills its whole worker; the second one is well."""

    async def run(self):
        mark = Path(row()["mark"])
        if row()["id"] == "0" and not mark.exists():
            mark.touch()
            await asyncio.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.5)
        await reward(1.0)


class KillsWorkerAlways:
    async def run(self):
        os.kill(os.getpid(), signal.SIGKILL)


class Leaks:
    kept: list[bytes] = []  # noqa: RUF012

    async def run(self):
        Leaks.kept.append(os.urandom(40_000_000))
        await reward(1.0)


class NotAsync:
    def run(self):
        headers = {"Authorization": f"Bearer {os.environ['AGL_KEY']}"}
        event = {"event_type": "reward", "data": {"value": float(os.getpid())}}
        httpx.post(os.environ["AGL_EVENT_URL"], json=event, headers=headers, trust_env=False).raise_for_status()
        if row()["id"] == "bad":
            sys.exit(3)


class NotAsyncRaises:
    def run(self):
        raise ValueError("no such shape")


class NotAsyncSleeps:
    def run(self):
        time.sleep(3600)
