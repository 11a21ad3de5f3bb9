"""The supervisor of the probe against a stand-in for the interpreter with vLLM: events, outcomes, one clear line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agent.caches import commands, probe
from agent.cli import app
from agent.errors import InputError, RunFailed

HOST = """#!{python}
import json, sys
from pathlib import Path
if sys.argv[1] == "-c":
    print("{version}"); raise SystemExit
plan = json.loads(Path(sys.argv[3]).read_text())
folder = Path(plan["folder"])
print("INFO 11-29 vLLM talks on this stream too", flush=True)
print(json.dumps(dict(event="hello", versions=dict(vllm="{version}"), device="cpu", can_sleep=False,
                      affected=False, source_says_affected=False)), flush=True)
answer = dict(step="ask", tokens=[1], finish="length", logprobs=[-1.0], records=None)
for case in plan["cases"]:
    if case["needs_sleep"]:
        print(json.dumps(dict(event="end", key=case["key"], skipped=True)), flush=True)
        continue
    trace = [answer if step == "ask" else dict(step=step, records=None) for step in case["steps"]]
    {before}
    run = dict(engine="{engine}", trace=trace if "{engine}" == "done" else [])
    (folder / (case["key"] + ".json")).write_text(json.dumps(run))
    (folder / (case["key"] + ".log")).write_text({log!r})
    print(json.dumps(dict(event="end", key=case["key"], code={code}, seconds=1.0)), flush=True)
    {after}
"""


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., str]:
    def make(**chosen: object) -> str:
        plain = {"version": "0.22.1", "engine": "done", "log": "", "code": 0, "before": "pass", "after": "pass"}
        file = tmp_path / "python"
        file.write_text(HOST.format(python=sys.executable, **(plain | chosen)))
        file.chmod(0o700)
        return str(file)

    return make


def test_a_sound_run_is_reported_with_progress_and_total_time_first(host: Callable[..., str]) -> None:
    lines: list[str] = []
    report = probe.run(python=host(), only=("pause", "sleep1"), report=lines.append)
    assert lines[0] == "vLLM 0.22.1: 2 engines one after the other, about 1 minutes"
    assert lines[1] == "[1/3] pause with default: ok"
    assert report["verdict"] == {
        "gate_says_affected": False,
        "default_crashed": False,
        "safe_settings_passed": True,
    }
    rows = {(row["hazard"], row["variant"]): row for row in report["cases"]}
    assert rows["pause", "plugin"]["same_as"] == "pause.default"
    assert rows["sleep1", "default"]["detail"] == "not supported on this platform (cannot sleep)"
    assert commands.conclusion(report) == [
        "cache_safe_rollout() calls this version not affected; with vLLM's defaults it held, with its settings it held."
    ]


def test_settings_that_do_not_hold_end_in_exit_code_1(
    host: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe.run
    broken = host(version="0.21.0", before='trace[-1] = dict(answer, tokens=[], finish="error")')

    def run_on_stand_in(**kwargs: Any) -> dict[str, Any]:
        kwargs["python"] = broken
        return real(**kwargs)

    monkeypatch.setattr(commands.probe, "run", run_on_stand_in)
    done = CliRunner().invoke(app, ["probe-engine", "--only", "pause"])
    assert done.exit_code == 1
    assert "affected; with vLLM's defaults it crashed, with its settings it did NOT hold" in done.output


def test_an_engine_that_does_not_start_gives_the_root_cause(host: Callable[..., str]) -> None:
    log = "ERROR 11-29 17:00:00 [a.py:1] OSError: no space left\nRuntimeError: Engine core initialization failed.\n"
    with pytest.raises(RunFailed, match=r"the engine of vLLM 0\.22\.1 does not start: OSError: no space left"):
        probe.run(python=host(engine="starting", log=log, code=1), only=("pause",))


def test_a_host_that_dies_is_a_failed_run(host: Callable[..., str]) -> None:
    dying = host(after='sys.stderr.write("ImportError: libfoo.so\\n"); raise SystemExit(3)')
    with pytest.raises(RunFailed, match=r"vLLM 0\.22\.1 cannot be probed: ImportError: libfoo\.so"):
        probe.run(python=dying, only=("pause",))


def test_too_little_memory_is_said_before_anything_starts(
    host: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "NEEDED_GB", 1e6)
    with pytest.raises(InputError, match="of memory free, 1000000 needed: end other work first"):
        probe.run(python=host(), only=("pause",))


def test_a_development_build_that_cannot_be_parsed(host: Callable[..., str]) -> None:
    with pytest.raises(InputError, match="not a vLLM version: 'main'"):
        probe.run(python=host(version="main"), only=("pause",))


def test_out_in_a_missing_folder_is_refused_at_once(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["probe-engine", "--out", str(tmp_path / "no" / "report.json")])
    assert isinstance(done.exception, InputError) and "no such folder" in str(done.exception)
