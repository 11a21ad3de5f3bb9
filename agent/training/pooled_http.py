"""An httpx client for many requests at a time.

httpx's own connection pool goes through all its connections and all waiting requests for each request: with 64 requests
at a time it takes 1.5 ms of CPU each, with some hundreds most of a core (httpx 0.28.1, 2026-11-29). aiohttp's pool does
not; under httpx it takes 0.3 ms each.
"""

from __future__ import annotations

from typing import Any

import httpx
from httpx_aiohttp import AiohttpTransport

KEEP_ALIVE_SECONDS = 60.0  # less than the gateway's 120, so that it never closes a connection under a request


def client(**options: Any) -> httpx.AsyncClient:
    """An ``httpx.AsyncClient`` (``options`` are its own) without a limit of connections, and blind to proxies."""
    limits = httpx.Limits(max_connections=0, keepalive_expiry=KEEP_ALIVE_SECONDS)  # aiohttp: 0 is no limit
    return httpx.AsyncClient(transport=AiohttpTransport(limits=limits, trust_env=False), trust_env=False, **options)
