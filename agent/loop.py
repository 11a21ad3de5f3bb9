"""One rollout: ask about the images, look closer if the task allows it, answer, score, report.

``MultimodalQAAgent`` runs under Agent Lightning's controller: named by class path, made without arguments, everything
it needs in the environment:

* ``AGL_OPENAI_BASE_URL``, ``AGL_EVENT_URL``, ``AGL_KEY`` — set by the controller for each rollout
* ``MMQA_ROW`` — the row, plain JSON (``agentlightning.local.env_map: {MMQA_ROW: input}``)
* ``MMQA_IMAGE_ROOT`` — the run's image store; ``MMQA_AGENT`` — ``AgentSettings`` as JSON

To change the reward, subclass, override ``score``, and name the class in ``mmqa.agent_class``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from agent import prompts, tools
from agent.chat import Chat
from agent.images import ImageError, ImageStore, InlineImages
from agent.rewards import Score, as_reward, score

INLINE = "inline"  # as MMQA_IMAGE_ROOT: there is no store, pictures travel inside the messages


@dataclass(frozen=True)
class AgentSettings:
    """What may be set under ``mmqa.agent`` in a preset."""

    instruction: str = prompts.INSTRUCTION
    max_tokens: int = 512  # for each reply
    max_turns: int = 1  # model calls in one rollout; more than 1 lets the model use the zoom tool
    fallback_reward: float = 0.5
    allow_remote_images: bool = False  # data: and http(s): references beside those of the image store

    @classmethod
    def from_json(cls, text: str | None) -> AgentSettings:
        """Settings from a JSON object; unknown keys raise ``ValueError``."""
        values = json.loads(text) if text else {}
        if unknown := set(values) - {one.name for one in fields(cls)}:
            raise ValueError(f"unknown agent setting {sorted(unknown)[0]!r}")
        return cls(**values)


@dataclass
class Transcript:
    """What happened in one rollout, for the sample event."""

    replies: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    attempts: int = 0


class MultimodalQAAgent:
    """The agent; see the module's text. ``environ`` replaces ``os.environ`` where many agents share a process."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = os.environ if environ is None else environ

    async def run(self) -> None:
        """Run the rollout. Always posts one reward (a finite float) and one sample event.

        An error is raised again after that: the rollout is then FAILED and is left out of training, so that a broken
        server or a bug in the scoring is not taken for a wrong answer.
        """
        env = self.environ
        async with Chat(env["AGL_OPENAI_BASE_URL"], env.get("AGL_KEY", ""), env["AGL_EVENT_URL"]) as chat:
            transcript, result, error = Transcript(), None, None
            row: dict[str, Any] = {}
            try:
                row = json.loads(env["MMQA_ROW"])
                settings = AgentSettings.from_json(env.get("MMQA_AGENT"))
                await self.converse(chat, row, settings, transcript)
                result = self.score(row, transcript.replies[-1], settings)
                as_reward(result.reward)
            except Exception as problem:
                error = problem
            reward = as_reward(result.reward) if result is not None and error is None else 0.0
            await chat.event("sample", sample(row, transcript, result, reward, error))
            await chat.event("reward", {"value": reward})
            if error is not None:
                raise error

    async def converse(
        self, chat: Chat, row: Mapping[str, Any], settings: AgentSettings, transcript: Transcript
    ) -> None:
        """Ask until the model answers or ``max_turns`` is reached; fills ``transcript`` as it goes."""
        root = self.environ.get("MMQA_IMAGE_ROOT")
        store = InlineImages() if root == INLINE else ImageStore(root) if root else None
        images = check_references(row.get("images") or [], store, settings.allow_remote_images)
        transcript.images.extend(images)
        may_zoom = settings.max_turns > 1 and store is not None and bool(images)
        instruction = "\n".join(filter(None, [settings.instruction, prompts.ZOOM_INSTRUCTION if may_zoom else ""]))
        messages = [prompts.question_message(row["question"], images, instruction)]
        for turn in range(1, settings.max_turns + 1):
            reply = await chat.complete(messages, max_tokens=settings.max_tokens)
            transcript.replies.append(reply.text)
            transcript.attempts += reply.attempts
            box = tools.zoom_request(reply.text) if may_zoom and turn < settings.max_turns else None
            if box is None or store is None:
                return
            closer = store.put(tools.zoom(store.open(images[0]), box))
            transcript.images.append(closer)
            messages += [{"role": "assistant", "content": reply.text}, prompts.closer_message(closer)]

    def score(self, row: Mapping[str, Any], reply: str, settings: AgentSettings) -> Score:
        """Score the last reply; override for another reward."""
        return score(
            reply, str(row["answer"]), allowed=row.get("allowed") or (), fallback_reward=settings.fallback_reward
        )


def check_references(images: list[str], store: ImageStore | InlineImages | None, allow_remote: bool) -> list[str]:
    """Return ``images``; raises ``ImageError`` (an ``InputError``) for a reference that this run must not load."""
    for reference in images:
        remote = reference.startswith(("data:", "http://", "https://"))
        if remote and allow_remote:
            continue
        if store is None:
            raise ImageError(f"image {reference[:80]}: MMQA_IMAGE_ROOT is not set, so no file may be read")
        store.path(reference)
    return images


def sample(
    row: Mapping[str, Any], transcript: Transcript, result: Score | None, reward: float, error: Exception | None
) -> dict[str, Any]:
    """The sample event: what a person wants to see of a rollout later (references, never pixels)."""
    return {
        "id": row.get("id"),
        "task": row.get("task"),
        "question": row.get("question"),
        "images": [one if len(one) < 300 else one[:80] + "…" for one in transcript.images],
        "truth": row.get("answer"),
        "replies": transcript.replies,
        "answer": result.answer if result else None,
        "form": result.form if result else None,
        "correct": result.correct if result else None,
        "reward": reward,
        "calls": transcript.attempts,
        "error": f"{type(error).__name__}: {error}" if error else None,
    }
