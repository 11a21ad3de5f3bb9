"""The plugin's wrapping, on stand-ins with exactly the code of the affected releases. The real engine: evidence."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.caches import vllm_plugin
from agent.caches.encoder import EngineBusy, NoEncoderClear, clear_encoder_records

# AsyncLLM.sleep and LLMEngine.sleep as in vLLM 0.17.0 to 0.21.0; pause_generation without its docstring.
SOURCE = """
import asyncio
import warnings
PauseMode = str

class AsyncLLM:
    def __init__(self, vllm_config, log):
        self.vllm_config, self.logger_manager = vllm_config, None
        self.renderer, self.engine_core = log.front(), log.core()

    async def pause_generation(
        self,
        *,
        mode: PauseMode = "abort",
        wait_for_inflight_requests: bool | None = None,
        clear_cache: bool = True,
    ) -> None:
        if wait_for_inflight_requests:
            warnings.warn(
                "The `wait_for_inflight_requests` parameter in "
                "`AsyncLLM.pause_generation()` is deprecated. "
                "Please use `mode` argument instead.",
                DeprecationWarning,
                stacklevel=2,
            )
            mode = "wait"
        await self.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
        await asyncio.sleep(0.02)

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        await self.engine_core.sleep_async(level, mode)

        if self.logger_manager is not None:
            self.logger_manager.record_sleep_state(1, level)

class LLMEngine:
    def __init__(self, vllm_config, log):
        self.vllm_config, self.logger_manager = vllm_config, None
        self.renderer, self.engine_core = log.front(), log.core()

    def sleep(self, level: int = 1, mode: PauseMode = "abort"):
        self.engine_core.sleep(level, mode)

        if self.logger_manager is not None:
            self.logger_manager.record_sleep_state(1, level)
"""


class Log(list):
    def front(self) -> Any:
        return SimpleNamespace(clear_mm_cache=lambda: self.append("front"))

    def core(self) -> Any:
        async def call(*args: Any, **kwargs: Any) -> None:
            self.append("core")

        return SimpleNamespace(pause_scheduler_async=call, sleep_async=call, sleep=lambda *a: self.append("core"))


@pytest.fixture
def front_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def load(source: str = SOURCE) -> Any:
        (tmp_path / "mmqa_stand_in.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "mmqa_stand_in", raising=False)
        importlib.invalidate_caches()
        return importlib.import_module("mmqa_stand_in")

    return load


ASKED = SimpleNamespace(additional_config={"mmqa_cache_sync": True})
NOT_ASKED = SimpleNamespace(additional_config={})


def test_known_code_is_wrapped_on_both_sides_of_the_engine_core(front_ends: Any) -> None:
    module = front_ends()
    vllm_plugin.patch(module.AsyncLLM, module.LLMEngine)
    vllm_plugin.patch(module.AsyncLLM, module.LLMEngine)  # vLLM may load plugins again
    log = Log()
    engine = module.AsyncLLM(ASKED, log)
    asyncio.run(engine.sleep(level=1))
    assert log == ["front", "core", "front"]
    log.clear()
    asyncio.run(engine.pause_generation(mode="abort", clear_cache=True))
    assert log == ["front", "core", "front"]
    log.clear()
    asyncio.run(engine.pause_generation(clear_cache=False))
    asyncio.run(engine.sleep(0))
    assert log == ["core", "core"]
    log.clear()
    module.LLMEngine(ASKED, log).sleep()
    assert log == ["front", "core"]


def test_an_engine_that_did_not_ask_is_left_alone(front_ends: Any) -> None:
    module = front_ends()
    vllm_plugin.patch(module.AsyncLLM, module.LLMEngine)
    log = Log()
    asyncio.run(module.AsyncLLM(NOT_ASKED, log).sleep(1))
    module.LLMEngine(NOT_ASKED, log).sleep(1)
    assert log == ["core", "core"]


def test_active_is_said_in_the_log(front_ends: Any, caplog: pytest.LogCaptureFixture) -> None:
    module = front_ends()
    vllm_plugin.patch(module.AsyncLLM, module.LLMEngine)
    with caplog.at_level("INFO", logger="vllm.plugins.mmqa_cache_sync"):
        module.AsyncLLM(NOT_ASKED, Log())
        assert not caplog.messages
        module.AsyncLLM(ASKED, Log())
    assert caplog.messages == ["mmqa_cache_sync is active: AsyncLLM clears its image cache with the engine core's"]


def test_unknown_code_is_not_patched_and_refused_at_start(front_ends: Any) -> None:
    module = front_ends(SOURCE.replace("await self.engine_core.sleep_async(level, mode)", "await self.other(level)"))
    before = module.AsyncLLM.sleep, module.AsyncLLM.pause_generation
    vllm_plugin.patch(module.AsyncLLM, module.LLMEngine)
    assert (module.AsyncLLM.sleep, module.AsyncLLM.pause_generation) == before
    with pytest.raises(RuntimeError, match=r"AsyncLLM\.sleep is not code I know.*strategy='settings'"):
        module.AsyncLLM(ASKED, Log())
    module.AsyncLLM(NOT_ASKED, Log())


def test_other_versions_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", SimpleNamespace())
    monkeypatch.setattr(vllm_plugin, "is_affected", lambda: False)
    monkeypatch.setattr(vllm_plugin, "patch", lambda *a: pytest.fail("patched"))
    vllm_plugin.register()


class FakeEngine:
    def __init__(self, running: int = 0) -> None:
        self.calls: list[str] = []
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: running)

    async def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")

    async def reset_prefix_cache(self) -> bool:
        self.calls.append("prefix")
        return True


def test_encoder_records_are_cleared_with_the_prefix_cache() -> None:
    engine = FakeEngine()
    asyncio.run(clear_encoder_records(engine))
    asyncio.run(clear_encoder_records(engine, prefix_cache=False))
    assert engine.calls == ["encoder", "prefix", "encoder"]


def test_encoder_records_stay_while_requests_run() -> None:
    engine = FakeEngine(running=2)
    with pytest.raises(EngineBusy, match="2 request"):
        asyncio.run(clear_encoder_records(engine))
    assert engine.calls == []


def test_blocking_engine_and_old_engine() -> None:
    calls: list[str] = []
    blocking = SimpleNamespace(
        output_processor=SimpleNamespace(get_num_unfinished_requests=lambda: 0),
        reset_encoder_cache=lambda: calls.append("encoder"),
        reset_prefix_cache=lambda: calls.append("prefix"),
    )
    asyncio.run(clear_encoder_records(SimpleNamespace(llm_engine=blocking)))
    assert calls == ["encoder", "prefix"]
    with pytest.raises(NoEncoderClear, match=r"0\.16\.0"):
        asyncio.run(clear_encoder_records(SimpleNamespace()))
