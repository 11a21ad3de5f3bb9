"""Ask one question about a picture: the training loop's own conversation, against any OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from agent.answers import Answer, find
from agent.chat import Chat, ChatError
from agent.errors import InputError, RunFailed
from agent.images import InlineImages
from agent.loop import INLINE, AgentSettings, MultimodalQAAgent, Transcript


@dataclass(frozen=True)
class Asked:
    """The replies of all turns, and the answer found in the last one."""

    replies: list[str]
    answer: Answer


class NoReply(RunFailed):
    """The endpoint gave no reply. There is no run whose logs could say more, so no general page is named."""

    general = None


def check_address(url: str) -> None:
    """Raise ``InputError`` if ``url`` is no http address with a host, and a port below 65536 if there is one."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        why = "" if good else "no http:// or https:// address"
    except ValueError as error:
        why = str(error)
    if why:
        raise InputError(f"--url {url!r}: {why}; write for example http://127.0.0.1:8000/v1")


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

    ``url`` ends in "/v1". Raises ``ImageError`` for a picture that cannot be used, ``InputError`` for a key or a model
    that the endpoint does not know, ``NoReply`` if it does not answer.
    """
    key = key.strip()  # a line end that came along from a file
    if not key.isascii() or not key.isprintable():
        raise InputError("the key in OPENAI_API_KEY has characters that no HTTP header may hold; set it again")
    check_address(url)
    settings = settings or AgentSettings(allow_remote_images=True)
    row = {"question": question, "images": [InlineImages().put(image)]}
    transcript = Transcript()

    async def main() -> None:
        async with Chat(url, key, model=model, retries=2) as chat:
            await MultimodalQAAgent({"MMQA_IMAGE_ROOT": INLINE}).converse(chat, row, settings, transcript)

    try:
        asyncio.run(main())
    except ChatError as error:
        raise _explained(str(error), url, model, key) from None
    return Asked(transcript.replies, find(transcript.replies[-1]))


def _explained(said: str, url: str, model: str, key: str) -> InputError | NoReply:
    """The error to show for what a failed call said."""
    if said.startswith(("HTTP 401", "HTTP 403")):
        change = "the key in OPENAI_API_KEY is not the right one" if key else "set its key in OPENAI_API_KEY"
        return InputError(f"{url}: {said}; {change}")
    if said.startswith("HTTP 404"):
        served = _served(url, key)
        if served and model not in served:
            return InputError(f"--model {model}: not served at {url}; it serves {', '.join(served)}")
        if not served and not url.rstrip("/").endswith("/v1"):
            return NoReply(f"{url}: {said}; should the address end in /v1?")
    return NoReply(f"{url}: {said}")


def _served(url: str, key: str) -> list[str]:
    """Names of the models that the endpoint serves; none if it does not say."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/models", headers=headers, timeout=5.0, trust_env=False)
        return [str(one["id"]) for one in answer.json()["data"]]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return []
