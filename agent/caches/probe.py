"""Tries every cache hazard on the real engine of the installed vLLM, and reports what happened and what it saw.

One host process imports vLLM once; each case runs in a process of its own with its own engine, so a crash or a hang is
an outcome and not the end of the probe.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.caches import _probe_cases as rules
from agent.caches.cache_safe_rollout import UnknownVersion
from agent.errors import InputError, RunFailed

CASE_S = 240.0  # limit for one engine: start, steps, end
HOST_S = 600.0  # limit for importing vLLM and making the tiny model
NEEDED_GB = 3.0
SECONDS_PER_ENGINE = 15  # two loaded cores, 2026-11-29; 6 on the idle machine

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One thread: a forked engine must not inherit a pool of threads that it does not have.
    "OMP_NUM_THREADS": "1",
    # The tiny model's sampler would be compiled for 45 s in every engine.
    "TORCHDYNAMO_DISABLE": "1",
}


def environment(version: str) -> dict[str, str]:
    """What the host process gets on top of this one's environment."""
    if version.startswith("0.20."):  # "nobind" ends its worker with an IndexError
        return ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": "0"}
    return ENVIRONMENT


def version_of(python: str) -> str:
    """vLLM's version in that environment, without importing it. Raises ``InputError`` if there is none."""
    code = "from agent.caches.cache_safe_rollout import installed_version as v; print(v())"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise InputError(last.split(": ", 1)[-1])
    return done.stdout.strip()


def run(
    *,
    python: str = sys.executable,
    only: tuple[str, ...] = (),
    report: Callable[[str], None] = lambda line: None,
    keep_logs: Path | None = None,
) -> dict[str, Any]:
    """Probe the vLLM of ``python`` and return the report (see ``docs/caches/four-records.md`` for its fields).

    Args:
        python: interpreter of the environment to probe; this package must be installed there too.
        only: keys of hazards to try; all by default.
        report: called with one line of progress at a time.
        keep_logs: folder that gets each engine's log.

    Raises:
        InputError: no vLLM there, an unknown hazard, or too little memory.
        RunFailed: the first engine did not start; the message is the root cause.
    """
    known = {hazard.key for hazard in rules.HAZARDS}
    if wrong := set(only) - known:
        raise InputError(f"no such hazard: {', '.join(sorted(wrong))}; there are: {', '.join(sorted(known))}")
    version = version_of(python)
    _check_memory()
    try:
        cases = rules.cases(version, only)
    except UnknownVersion as error:
        raise InputError(str(error)) from None
    except ValueError as error:  # the plugin would not be loaded
        raise InputError(str(error)) from None
    own = [case for case in cases if case.same_as is None and case.needs_sleep is not True]
    minutes = (30 + SECONDS_PER_ENGINE * len(own)) / 60
    report(f"vLLM {version}: {len(own)} engines one after the other, about {minutes:.0f} minutes")
    with tempfile.TemporaryDirectory(prefix="mmqa-probe-") as scratch:
        folder = keep_logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        return _supervise(python, version, cases, folder, scratch, report)


def _check_memory() -> None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) / 1024**2
                if free < NEEDED_GB:
                    raise InputError(f"only {free:.1f} GB of memory free, {NEEDED_GB:.0f} needed: end other work first")


def _supervise(
    python: str, version: str, cases: list[rules.Case], folder: Path, scratch: str, report: Callable[[str], None]
) -> dict[str, Any]:
    own = [case for case in cases if case.same_as is None]
    plan = folder / "plan.json"
    plan.write_text(json.dumps({"folder": str(folder), "model": None, "cases": [case.order(CASE_S) for case in own]}))
    results: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {}
    host_log = folder / "host.log"
    with host_log.open("w") as errors:
        host = subprocess.Popen(
            [python, "-m", "agent.caches._probe_host", str(plan)],
            env=os.environ | environment(version) | {"TMPDIR": scratch},  # vLLM leaves its sockets there
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert host.stdout is not None
            for line in host.stdout:
                event = _event(line)
                if event is None:
                    continue
                if event["event"] == "hello":
                    about = event
                elif event["event"] == "failed":
                    log = Path(event["log"]).read_text(errors="replace")
                    raise RunFailed(f"{event['what']}: {rules.root_cause(log) or 'see its log'}")
                elif event["event"] == "end":
                    case = next(case for case in own if case.key == event["key"])
                    results[case.key] = _result(case, event, folder)
                    report(_progress(len(results), len(own), results[case.key]))
                    if len(results) == 1 and results[case.key]["outcome"] == "not-started":
                        raise RunFailed(f"the engine of vLLM {version} does not start: {results[case.key]['detail']}")
            host.wait()
        finally:
            _end(host)
    if len(results) < len(own):
        cause = rules.killed(host.returncode) or rules.root_cause(host_log.read_text(errors="replace"))
        raise RunFailed(f"vLLM {version} cannot be probed: {cause or f'exit code {host.returncode}'}")
    return _document(version, about, cases, results)


def _event(line: str) -> dict[str, Any] | None:
    """vLLM writes log lines to the same stream while it is imported."""
    if not line.startswith("{"):
        return None
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(line)
    return None


def _end(host: subprocess.Popen[str]) -> None:
    if host.poll() is None:
        host.send_signal(signal.SIGTERM)  # it ends the running case's session too
        try:
            host.wait(10)
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait()


def _result(case: rules.Case, event: dict[str, Any], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"hazard": case.hazard, "variant": case.variant, "engine_args": case.settings}
    if event.get("skipped"):
        other = "cannot sleep" if case.needs_sleep else "can sleep: see sleep1"
        return found | {"outcome": "unsupported", "detail": f"not supported on this platform ({other})", "trace": []}
    file = folder / f"{case.key}.json"
    run = None
    with contextlib.suppress(OSError, json.JSONDecodeError):
        run = json.loads(file.read_text())
    log = (folder / f"{case.key}.log").read_text(errors="replace")
    found |= rules.classify(case.steps, run, event["code"], log)
    if "mmqa_cache_sync is active" in log:
        found["plugin_active"] = True
    return found | {"seconds": event["seconds"], "trace": rules.short_ids(run["trace"]) if run else []}


def _progress(done: int, total: int, result: dict[str, Any]) -> str:
    detail = f"  {result['detail']}" if result.get("detail") else ""
    return f"[{done}/{total}] {result['hazard']} with {result['variant']}: {result['outcome']}{detail}"


def _document(
    version: str, about: dict[str, Any], cases: list[rules.Case], results: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    rows = []
    for case in cases:
        if case.same_as is None:
            rows.append(results[case.key])
        else:
            twin = results[case.same_as]
            rows.append({key: twin[key] for key in ("outcome", "detail") if key in twin})
            rows[-1] |= {"hazard": case.hazard, "variant": case.variant, "same_as": case.same_as}
    return {
        "schema": 1,
        "version": version,
        "date": datetime.date.today().isoformat(),
        **{key: about[key] for key in ("versions", "device", "can_sleep", "source_says_affected")},
        "verdict": rules.verdict(version, rows),
        "cases": rows,
    }
