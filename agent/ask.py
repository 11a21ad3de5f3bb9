"""Ask one question about a picture: the training loop's own conversation, against any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

from agent.answers import Answer, find
from agent.chat import Chat, ChatError
from agent.errors import RunFailed
from agent.images import InlineImages
from agent.loop import INLINE, AgentSettings, MultimodalQAAgent, Transcript


@dataclass(frozen=True)
class Asked:
    """The replies of all turns, and the answer found in the last one."""

    replies: list[str]
    answer: Answer


def ask(
    image: str | Path,
    question: str,
    *,
    url: str,
    model: str,
    key: str = "",
    settings: AgentSettings | None = None,
) -> Asked:
    """Ask ``question`` about the picture in ``image``.

    ``url`` ends in "/v1". Raises ``ImageError`` for a picture that cannot be used, ``RunFailed`` if the endpoint does
    not answer.
    """
    settings = settings or AgentSettings(allow_remote_images=True)
    row = {"question": question, "images": [InlineImages().put(image)]}
    transcript = Transcript()

    async def main() -> None:
        async with Chat(url, key, model=model, retries=2) as chat:
            await MultimodalQAAgent({"MMQA_IMAGE_ROOT": INLINE}).converse(chat, row, settings, transcript)

    try:
        asyncio.run(main())
    except ChatError as error:
        raise RunFailed(f"{url}: {error}") from None
    return Asked(transcript.replies, find(transcript.replies[-1]))
