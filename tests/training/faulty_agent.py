"""An agent that does everything wrong that an agent can do, each fault once in a run (in a training rollout).

What happened is noted in ``<run>/faults/<name>``, whose creation is also what makes a fault strike only once.
"""

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path

import httpx

from agent import prompts
from agent.chat import Chat, ChatError
from agent.loop import MultimodalQAAgent
from agent.rewards import Score

ODD_REWARDS = {"nan": float("nan"), "text": "high", "none": None}


def once(name):
    """True for the first caller in the run."""
    folder = Path(os.environ["MMQA_RUN_DIR"]) / "faults"
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(folder / name, os.O_CREAT | os.O_EXCL))
        return True
    return False


def note(name, text):
    (Path(os.environ["MMQA_RUN_DIR"]) / "faults" / name).write_text(text)


class TenthFails:
    """A client whose every tenth model call answers 503, without a choice, or with finish reason "error"."""

    calls = 0

    def __init__(self, client):
        self._client = client

    async def post(self, url, **options):
        if url.endswith("/chat/completions"):
            TenthFails.calls += 1
            if TenthFails.calls % 10 == 0:
                kind = next((one for one in range(3) if once(f"tenth-{one}")), TenthFails.calls % 3)
                choice = {"index": 0, "finish_reason": "error", "message": {"role": "assistant", "content": ""}}
                body = {"choices": [choice] if kind == 2 else []}
                return httpx.Response(503 if kind == 0 else 200, json=body)
        return await self._client.post(url, **options)

    async def aclose(self):
        await self._client.aclose()


class FaultyAgent(MultimodalQAAgent):
    async def run(self):
        if self.training:
            if once("worker-killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            if once("raises-before"):
                raise RuntimeError("broken before its first call")
            if once("never-returns"):
                await asyncio.sleep(3600)
        await super().run()

    @property
    def training(self):
        return "/mode/train/" in self.environ["AGL_OPENAI_BASE_URL"]

    async def converse(self, chat, row, settings, transcript):
        if self.training:
            store = row["images"][0].rsplit("/", 1)[0]
            for name, question, image in (
                ("image-outside", row["question"], "file:///etc/hostname"),
                ("image-by-dots", row["question"], f"{store}/../config.yaml"),
                ("image-by-link", row["question"], f"{store}/link.png"),
                ("too-long", "digit " * 400, row["images"][0]),
            ):
                if once(name):
                    if name == "image-by-link":
                        Path(image.removeprefix("file://")).symlink_to("/etc/hostname")
                    note(name, await self.refused(question, image))
        chat._client = TenthFails(chat._client)
        await super().converse(chat, row, settings, transcript)

    async def refused(self, question, image):
        """Ask the engine for what it must not answer, past the agent's own checks; returns what it says."""
        env = self.environ
        async with Chat(env["AGL_OPENAI_BASE_URL"], env["AGL_KEY"], None, retries=0) as chat:
            try:
                reply = await chat.complete([prompts.question_message(question, [image], "")], max_tokens=2)
            except ChatError as error:
                return json.dumps({"refused": str(error)})
            return json.dumps({"answered": reply.text})

    def score(self, row, reply, settings):
        if self.training:
            if once("raises-after"):
                raise ZeroDivisionError("the scoring bug")
            for name, value in ODD_REWARDS.items():
                if once(f"reward-{name}"):
                    return Score(value, True, "tagged", reply)
            if once("reward-bool"):
                return Score(True, True, "tagged", reply)
        return super().score(row, reply, settings)
