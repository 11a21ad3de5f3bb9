"""Model calls and events over the gateway's addresses, with httpx alone (a rollout process must start fast).

The same client serves any OpenAI-compatible endpoint; without an event address events are dropped.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import Any

import httpx

RETRIES = 8  # further attempts after the first
_BACKOFF = (0.25, 4.0)  # seconds: first wait, longest wait
_RETRY_STATUS = {408, 409, 425, 429}
_FINISHED = {"stop", "length", "tool_calls", "content_filter"}

_shared: httpx.AsyncClient | None = None


def share_client(client: httpx.AsyncClient | None) -> None:
    """Let every ``Chat`` of this process use one connection pool (set by a worker that runs many rollouts)."""
    global _shared
    _shared = client


class ChatError(RuntimeError):
    """A model call that failed for good; the message holds the server's own words."""


@dataclass(frozen=True)
class Reply:
    """One finished model reply. ``attempts`` counts the calls it took."""

    text: str
    finish_reason: str
    attempts: int


def usable(payload: Any) -> tuple[str, str] | None:
    """(text, finish reason) of a chat completion, or None if the engine gave up on it.

    An engine error arrives as HTTP 200 with no choice, with finish reason "error" or "abort", or without a single
    token. A model that ends at once is no error: it spent one token, and training must see that.
    """
    try:
        choice = payload["choices"][0]
        reason = choice["finish_reason"]
        text = choice["message"].get("content") or ""
        tokens = (payload.get("usage") or {}).get("completion_tokens")
    except (KeyError, IndexError, TypeError, AttributeError):
        return None
    if reason not in _FINISHED or not isinstance(text, str) or (tokens == 0 and not text):
        return None
    return text, reason


def _said(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        return response.text[:300]
    if isinstance(body, dict):
        error = body.get("error", body.get("detail", body))
        return str(error.get("message", error) if isinstance(error, dict) else error)[:500]
    return str(body)[:300]


class Chat:
    """A connection to one model behind ``base_url`` (".../v1").

    ``retries``: further attempts after a 5xx, 408, 409, 425 or 429 status, a broken connection, or an unusable reply.
    """

    def __init__(
        self,
        base_url: str,
        key: str = "",
        event_url: str | None = None,
        *,
        model: str = "auto",
        client: httpx.AsyncClient | None = None,
        timeout: float = 300.0,
        retries: int = RETRIES,
    ) -> None:
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._event_url = event_url
        self._model = model  # the gateway puts its own in place of "auto"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        client = client or _shared
        self._client = client or httpx.AsyncClient(timeout=timeout, trust_env=False)
        self._owns_client = client is None
        self._retries = retries

    async def __aenter__(self) -> Chat:
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._owns_client:
            await self._client.aclose()

    async def complete(self, messages: list[dict[str, Any]], **parameters: Any) -> Reply:
        """Ask for one reply. Raises ``ChatError`` on a refusal (4xx) or when the attempts are used up."""
        body = {"model": self._model, "messages": messages, **parameters}
        problem = ""
        for attempt in range(1, self._retries + 2):
            retry_after = None
            try:
                response = await self._client.post(self._url, json=body, headers=self._headers)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code < 400:
                    found = usable(_json(response))
                    if found is not None:
                        return Reply(*found, attempts=attempt)
                    problem = "the engine returned no usable reply (empty, or finish reason error)"
                else:
                    problem = f"HTTP {response.status_code}: {_said(response)}"
                    if response.status_code < 500 and response.status_code not in _RETRY_STATUS:
                        raise ChatError(problem)
                    retry_after = response.headers.get("retry-after")
            if attempt <= self._retries:
                await asyncio.sleep(_wait(attempt, retry_after))
        raise ChatError(f"no reply after {self._retries + 1} attempts; last: {problem}")

    async def event(self, kind: str, data: dict[str, Any]) -> None:
        """Post one event of this rollout. Raises ``ChatError`` if the gateway does not take it."""
        if self._event_url is None:
            return
        problem = ""
        for attempt in range(1, self._retries + 2):
            try:
                response = await self._client.post(
                    self._event_url, json={"event_type": kind, "data": data}, headers=self._headers
                )
                if response.status_code < 400:
                    return
                problem = f"HTTP {response.status_code}: {_said(response)}"
                if response.status_code < 500 and response.status_code not in _RETRY_STATUS:
                    break
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt <= self._retries:
                await asyncio.sleep(_wait(attempt, None))
        raise ChatError(f"the gateway did not take the {kind} event: {problem}")


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        return None


def _wait(attempt: int, retry_after: str | None) -> float:
    """Seconds before the next attempt: what the server asked for (at most 10 s), else exponential with jitter."""
    if retry_after and retry_after.isdigit():
        return min(float(retry_after), 10.0)
    return min(_BACKOFF[0] * 2 ** (attempt - 1), _BACKOFF[1]) * random.uniform(0.75, 1.25)
