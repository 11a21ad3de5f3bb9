"""vLLM plugin ``mmqa_cache_sync``: the front end forgets its images whenever the engine core forgets its own.

That is what vLLM does by itself from 0.22.0 on. On the affected releases it lets prefix caching and the processor cache
stay on. It acts only on an engine whose ``additional_config`` carries ``{"mmqa_cache_sync": true}``, which is what
``cache_safe_rollout(strategy="plugin")`` returns; that key travels with the engine's arguments into whichever process
builds the engine, so no environment variable has to reach a remote worker.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import logging
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from agent.caches.cache_safe_rollout import PLUGIN, UnknownVersion, is_affected

# vLLM gives handlers to the loggers below "vllm" only.
log = logging.getLogger("vllm.plugins.mmqa_cache_sync")

#: Code this plugin was written against: the same in every release from 0.17.0 to 0.21.0.
KNOWN = {
    "AsyncLLM.sleep": "fb973491a79d",
    "AsyncLLM.pause_generation": "18594ec5cf89",
    "LLMEngine.sleep": "88805dafa038",
}


def register() -> None:
    """Entry point, called by vLLM in each of its processes; does nothing where the installed vLLM needs nothing."""
    if "vllm.engine.arg_utils" not in sys.modules:
        return  # a helper process of vLLM (model inspection) that can hold no front end
    try:
        if not is_affected():
            return
    except UnknownVersion:
        return
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine

    patch(AsyncLLM, LLMEngine)


def patch(async_llm: type, llm_engine: type) -> None:
    """Wrap both front ends once. Code that is not the known one is left alone and refused at engine start."""
    for front_end, methods in ((async_llm, ("sleep", "pause_generation")), (llm_engine, ("sleep",))):
        if getattr(front_end, "_mmqa_cache_sync", False):
            continue
        front_end._mmqa_cache_sync = True  # type: ignore[attr-defined]
        unknown = [name for name in methods if fingerprint(getattr(front_end, name)) != KNOWN[key(front_end, name)]]
        _announce(front_end, unknown)
        if not unknown:
            for name in methods:
                original = getattr(front_end, name)
                wrap = _synced if inspect.iscoroutinefunction(original) else _synced_blocking
                setattr(front_end, name, wrap(original))


def key(front_end: type, method: str) -> str:
    """How ``KNOWN`` names a method."""
    return f"{front_end.__name__}.{method}"


def fingerprint(function: Callable[..., Any]) -> str:
    """Hash of a function's code without comments, layout and docstring."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if ast.get_docstring(node) is not None:
        node.body = node.body[1:]
    return hashlib.sha256(ast.unparse(node).encode()).hexdigest()[:12]


def _asked(vllm_config: Any) -> bool:
    extra = getattr(vllm_config, "additional_config", None)
    return isinstance(extra, dict) and bool(extra.get(PLUGIN))


def _announce(front_end: type, unknown: list[str]) -> None:
    """Say at engine start that the sync is on, or refuse to start: an engine without it would break later, mid-run."""
    original = front_end.__init__

    @functools.wraps(original)
    def start(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        if _asked(vllm_config):
            if unknown:
                raise RuntimeError(
                    f"{PLUGIN}: this vLLM's {', '.join(key(front_end, name) for name in unknown)} is not code I know, "
                    "so I do not patch it; use cache_safe_rollout(strategy='settings')"
                )
            log.info("%s is active: %s clears its image cache with the engine core's", PLUGIN, front_end.__name__)
        original(self, vllm_config, *args, **kwargs)

    front_end.__init__ = start  # type: ignore[method-assign]


def _clears(arguments: dict[str, Any]) -> bool:
    """Whether this call of ``sleep`` or ``pause_generation`` empties the engine core's image cache."""
    return arguments["level"] >= 1 if "level" in arguments else bool(arguments["clear_cache"])


def _arguments(original: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _synced(original: Callable[..., Any]) -> Callable[..., Any]:
    """Clear before and after: a request between the two clears could make either side the fuller one.

    After the second clear the engine core may hold more than the front end, which is the harmless way round.
    """

    @functools.wraps(original)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not (_asked(self.vllm_config) and _clears(_arguments(original, self, *args, **kwargs))):
            return await original(self, *args, **kwargs)
        await _clear_front(self)
        try:
            return await original(self, *args, **kwargs)
        finally:
            await _clear_front(self)

    return call


def _synced_blocking(original: Callable[..., Any]) -> Callable[..., Any]:
    """The same for the blocking front end, where no request can come between."""

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _asked(self.vllm_config) and _clears(_arguments(original, self, *args, **kwargs)):
            self.renderer.clear_mm_cache()
        return original(self, *args, **kwargs)

    return call


async def _clear_front(engine: Any) -> None:
    """0.19.0 on serialises the clear with the renderer's own work; before that there is only the plain call."""
    clear = getattr(engine.renderer, "clear_mm_cache_async", None)
    if clear is None:
        engine.renderer.clear_mm_cache()
    else:
        await clear()
