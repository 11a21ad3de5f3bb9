"""Agent Lightning's gateway as a run starts it: ``agl-server``, with two changes around it.

* Requests that succeed leave no line in the log: controller and trainer ask several times a second, and two days of
  that are a gigabyte of access log. Refused and failed requests (status 400 and above) are logged as before.
* Its client to the engine has no limit of connections. httpx's default lets 100 model calls through at a time, however
  many sequences the engine could take (``create_app`` of agentlightning 1.0.2), and is slow at it: see ``pooled_http``.

    python -m agent.training.gateway_main host=127.0.0.1 port=8000 ...      (agl-server's own options)
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

ENGINE_SECONDS = 300.0  # a model call; Agent Lightning's own value


class RefusedOnly(logging.Filter):
    """Lets access lines of uvicorn pass whose last argument, the status, is at least 400."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not isinstance(record.args, tuple) or not record.args or int(str(record.args[-1])) >= 400


def with_pooled_client(app: Any) -> Any:
    """Give the gateway's FastAPI application the client of ``pooled_http`` for its calls to the engine."""
    original = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        from agent.training import pooled_http

        async with (
            original(app) as state,
            pooled_http.client(pooled_http.ENGINE_IDLE_SECONDS, timeout=ENGINE_SECONDS) as client,
        ):
            app.state.http_client = client
            yield state

    app.router.lifespan_context = lifespan
    return app


def main() -> None:
    """Run ``agl-server`` with the command line's options."""
    import structlog
    from agentlightning.server import __main__ as server
    from uvicorn.config import LOGGING_CONFIG

    create_app = server.create_app
    server.create_app = lambda config: with_pooled_client(create_app(config))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))  # a line for each model call
    LOGGING_CONFIG["filters"] = {"refused": {"()": RefusedOnly}}
    LOGGING_CONFIG["loggers"]["uvicorn.access"]["filters"] = ["refused"]
    server.main()


if __name__ == "__main__":
    main()
