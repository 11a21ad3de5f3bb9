"""How the probe plans its engines and reads what happened, without starting one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from agent.caches import _probe_cases as rules
from agent.caches import probe
from agent.errors import InputError

SOUND = {"step": "ask", "tokens": [5, 6], "finish": "length", "logprobs": [-1.0, -2.0]}
MOVED = SOUND | {"logprobs": [-1.004, -2.0]}
EMPTY = {"step": "ask", "tokens": [], "finish": "error", "logprobs": []}
STEPS = ("ask", "pause", "resume", "ask")
REFIT = ("ask", "refit", "reset_prefix", "ask")


def trace(steps: tuple[str, ...], *asks: dict) -> dict:
    answers = iter(asks)
    entries = [next(answers) if step == "ask" else {"step": step} for step in steps]
    return {"engine": "done", "trace": entries}


DESYNC = """
(EngineCore pid=7) ERROR 11-29 18:06:35 [core.py:1566]     assert mm_item, f"Expected a cached item for {mm_hash=}"
(EngineCore pid=7) ERROR 11-29 18:06:35 [core.py:1566] AssertionError: Expected a cached item for mm_hash='%s'
""" % ("ab" * 32)


def test_outcomes() -> None:
    assert rules.classify(STEPS, trace(STEPS, SOUND, SOUND), 0, "")["outcome"] == "ok"
    assert rules.classify(STEPS, trace(STEPS, SOUND, SOUND | {"tokens": [5, 7]}), 0, "")["outcome"] == "differs"
    assert rules.classify(REFIT, trace(REFIT, SOUND, SOUND), 0, "")["outcome"] == "stale"
    assert rules.classify(REFIT, trace(REFIT, SOUND, MOVED), 0, "")["outcome"] == "fresh"
    assert rules.classify(STEPS, trace(STEPS, SOUND, EMPTY), 0, DESYNC) == {
        "outcome": "crash",
        "detail": "AssertionError: Expected a cached item for mm_hash='abababab'",
    }


def test_a_dead_engine_a_hang_and_a_missing_call_are_told_apart() -> None:
    dead = {"engine": "done", "trace": [SOUND, {"step": "ask", "error": "EngineDeadError: see above"}]}
    log = "(Worker pid=9) ERROR 11-29 17:58:31 [x.py:1] AssertionError: Encoder cache miss for abc.\n"
    assert rules.classify(STEPS, dead, 0, log) == {
        "outcome": "engine-dead",
        "detail": "AssertionError: Encoder cache miss for abc.",
    }
    hang = {"engine": "running", "trace": [SOUND, {"step": "pause", "timeout_s": 60.0}]}
    assert rules.classify(STEPS, hang, 0, "")["outcome"] == "hang"
    assert rules.classify(STEPS, {"engine": "running", "trace": [SOUND]}, None, "")["outcome"] == "hang"
    old = {"engine": "done", "trace": [{"step": "drain", "unsupported": "no modes"}]}
    assert rules.classify(("drain", "ask"), old, 0, "") == {"outcome": "unsupported", "detail": "no modes"}


FAILED_START = """
(EngineCore pid=3) ERROR 11-29 17:00:00 [core.py:9] Traceback (most recent call last):
(EngineCore pid=3) ERROR 11-29 17:00:00 [core.py:9]   File "/home/someone/x/core.py", line 9, in f
(EngineCore pid=3) ERROR 11-29 17:00:00 [core.py:9] ValueError: No memory for the cache blocks in /home/someone/x/y.py
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def test_an_engine_that_does_not_start_shows_the_root_cause_without_folders() -> None:
    starting = {"engine": "starting", "trace": []}
    assert rules.classify(STEPS, starting, 1, FAILED_START) == {
        "outcome": "not-started",
        "detail": "ValueError: No memory for the cache blocks in y.py",
    }
    assert "lack of memory" in rules.classify(STEPS, starting, -9, "")["detail"]
    assert "in time" in rules.classify(STEPS, None, None, "")["detail"]


def test_variants_that_come_to_the_same_arguments_share_an_engine() -> None:
    fixed = {case.key: case.same_as for case in rules.cases("0.22.1")}
    assert fixed["pause.safe"] == fixed["pause.plugin"] == "pause.default"
    assert fixed["pause.upstream-example"] is None
    affected = {case.key: case for case in rules.cases("0.21.0")}
    assert affected["pause.safe"].same_as is None
    assert affected["pause.safe"].settings == {"enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    assert affected["pause.plugin"].settings == rules.DEFAULT | {"additional_config": {"mmqa_cache_sync": True}}
    assert affected["sleep2.default"].settings["enable_sleep_mode"] is True


def test_only_limits_the_plan_and_an_unknown_hazard_is_refused() -> None:
    assert {case.hazard for case in rules.cases("0.21.0", ("refit",))} == {"refit"}
    with pytest.raises(InputError, match="no such hazard: nap; there are: drain, pause"):
        probe.run(only=("nap",))


def test_no_vllm_is_one_clear_line(tmp_path: Path) -> None:
    stub = tmp_path / "python"
    stub.write_text(
        f"#!{sys.executable}\nimport sys, importlib.metadata as m\n"
        "def gone(name): raise m.PackageNotFoundError(name)\n"
        "m.version = gone\nexec(sys.argv[2])\n"
    )
    stub.chmod(0o700)
    with pytest.raises(InputError, match="vLLM is not installed here"):
        probe.version_of(str(stub))


def test_hashes_are_cut_everywhere() -> None:
    long = "f0" * 32
    assert rules.short_ids([{"records": {"front_end": [long], "worker": {long: 0.5}}, "count": 1}]) == [
        {"records": {"front_end": [long[:8]], "worker": {long[:8]: 0.5}}, "count": 1}
    ]
