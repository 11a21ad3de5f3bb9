"""Reads the four records of one image out of a running vLLM engine, whatever its release.

| record | where | process |
|---|---|---|
| front end's list | renderer (0.17.0 on) or input processor, ``mm_processor_cache`` | front end |
| engine core's copy | ``EngineCore.mm_receiver_cache`` | engine core |
| scheduler's list | ``EncoderCacheManager.cached`` | engine core |
| worker's tensors | ``encoder_cache`` of the model runner | worker |

The last three are reached through ``EngineCore.mmqa_records``, a method that ``install`` adds before the engine starts.
"""

from __future__ import annotations

import json
from typing import Any

FRONT, CORE, SCHEDULER, WORKER = "front_end", "engine_core", "scheduler", "worker"


def install() -> None:
    """Give ``EngineCore`` the methods that the probe calls by name. Must run in the process that becomes it."""
    from vllm.v1.engine.core import EngineCore

    EngineCore.mmqa_records = _core_records  # type: ignore[attr-defined]
    EngineCore.mmqa_worker = _worker_call  # type: ignore[attr-defined]


async def read(engine: Any) -> dict[str, Any]:
    """The four records now: ids of images, and for the worker a checksum of each tensor (``None``: not readable)."""
    records: dict[str, Any] = {FRONT: front_end(engine), CORE: None, SCHEDULER: None, WORKER: None}
    try:
        records |= json.loads(await engine.engine_core.call_utility_async("mmqa_records"))
    except Exception as error:  # the engine is dead: only the front end's own list can still be read
        records["unreadable"] = type(error).__name__
    return records


def front_end(engine: Any) -> list[str] | None:
    """Ids in the front end's list; ``[]`` where the processor cache is switched off."""
    for holder in ("renderer", "input_processor", "processor"):
        owner = getattr(engine, holder, None)
        if owner is not None and hasattr(owner, "mm_processor_cache"):
            return _keys(owner.mm_processor_cache)
    return None


def _core_records(core: Any) -> str:
    worker = core.model_executor.collective_rpc(worker_encoder)[0]
    manager = getattr(core.scheduler, "encoder_cache_manager", None)
    return json.dumps(
        {
            CORE: _keys(getattr(core, "mm_receiver_cache", None)),
            SCHEDULER: sorted(manager.cached) if manager is not None else None,
            WORKER: worker,
        }
    )


def _worker_call(core: Any, name: str) -> str:
    return json.dumps(core.model_executor.collective_rpc({"clear": worker_clear, "refit": worker_refit}[name])[0])


def _keys(cache: Any) -> list[str] | None:
    if cache is None:
        return []
    items = getattr(cache, "_cache", None)
    return None if items is None else sorted(str(name) for name in items)


def _encoder_dict(worker: Any) -> dict[str, Any]:
    """The dict of tensors: the first model runner keeps it itself, the second inside an ``EncoderCache``."""
    runner = getattr(worker, "worker", worker).model_runner
    cache = getattr(runner, "encoder_cache", None)
    return getattr(cache, "encoder_outputs", cache) if cache is not None else {}


def worker_encoder(worker: Any) -> dict[str, float]:
    """Runs in the worker: id -> mean absolute value of the encoder output (changes when the vision weights do)."""
    return {str(name): round(float(value.float().abs().mean()), 6) for name, value in _encoder_dict(worker).items()}


def worker_clear(worker: Any) -> int:
    """Runs in the worker: forget the tensors, as a worker-side hook of a trainer would. Returns how many."""
    held = _encoder_dict(worker)
    count = len(held)
    held.clear()
    return count


def worker_refit(worker: Any) -> int:
    """Runs in the worker: load new scales into the vision tower's norms, through the model's own weight loader.

    Norms only: the CPU backend packs the linear layers once and drops the originals. Returns how many were loaded.
    """
    model = getattr(worker, "worker", worker).model_runner.get_model()
    new = [
        (f"visual.{name}", value.detach() * 1.5 + 0.25)
        for name, value in model.visual.named_parameters()
        if "norm" in name or "ln_q" in name
    ]
    model.load_weights(iter(new))
    return len(new)
