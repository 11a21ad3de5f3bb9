"""The probe on the installed engine, end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from agent.caches.cache_safe_rollout import UnknownVersion, installed_version, is_affected


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_probe_engine_finds_on_the_real_engine_what_the_gate_says(tmp_path: Path) -> None:
    try:
        installed_version()
    except UnknownVersion:
        pytest.skip("vLLM is not installed")
    out = tmp_path / "report.json"
    only = [
        part for hazard in ("pause", "sleep-caches", "worker-clear", "refit-cleared") for part in ("--only", hazard)
    ]
    command = [sys.executable, "-m", "agent.cli", "probe-engine", *only, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engines one after the other, about" in done.stderr
    report = json.loads(out.read_text())
    seen = {(case["hazard"], case["variant"]): case for case in report["cases"]}
    assert report["verdict"]["default_crashed"] is is_affected()
    assert report["verdict"]["safe_settings_passed"] is True
    assert seen["worker-clear", "default"]["outcome"] == "engine-dead"
    assert seen["refit-cleared", "default"]["outcome"] == "fresh"
    first, *_, last = seen["refit-cleared", "default"]["trace"]
    assert first["records"]["front_end"] == first["records"]["engine_core"] == first["records"]["scheduler"] != []
    assert first["records"]["worker"] != last["records"]["worker"], "the encoder output was made anew"
