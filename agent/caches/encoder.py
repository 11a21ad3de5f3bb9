"""One call that clears both encoder records of a vLLM engine: the scheduler's list and the worker's tensors.

Clearing the worker's alone ends the engine at the next known image ("Encoder cache miss for ..."), on every release
measured; clearing neither after a refit of vision weights goes on with outputs of the old weights, silently.
"""

from __future__ import annotations

import inspect
from typing import Any


class EngineBusy(RuntimeError):
    """Requests are running: clearing now would take encoder outputs away from under them."""


class NoEncoderClear(RuntimeError):
    """This engine has no call that clears both records (vLLM before 0.16.0)."""


async def clear_encoder_records(engine: Any, *, prefix_cache: bool = True) -> None:
    """Clear the scheduler's and the worker's encoder records, and by default the prefix cache.

    The prefix cache holds keys and values computed from the same encoder outputs, so after a refit it is as stale.

    Args:
        engine: ``AsyncLLM``, ``LLMEngine`` or ``LLM``. Only requests of this front end can be seen; with several API
            server processes pause the engine first.
        prefix_cache: also reset the prefix cache.

    Raises:
        EngineBusy: a request is unfinished; wait for it, or ``pause_generation(mode="wait", clear_cache=False)``.
        NoEncoderClear: vLLM before 0.16.0.
    """
    engine = getattr(engine, "llm_engine", engine)
    clear = getattr(engine, "reset_encoder_cache", None)
    if clear is None:
        raise NoEncoderClear("this vLLM cannot clear both encoder records; 0.16.0 is the first that can")
    if running := engine.output_processor.get_num_unfinished_requests():
        raise EngineBusy(f"{running} request(s) still running: wait for them before clearing the encoder records")
    for call in (clear, engine.reset_prefix_cache) if prefix_cache else (clear,):
        result = call()
        if inspect.isawaitable(result):
            await result
