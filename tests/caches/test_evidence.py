"""The gate held against what the real engines did: every recorded release, and the page drawn from the records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.version import Version

from agent.caches import _probe_cases as rules
from agent.caches import stepper
from agent.caches.cache_safe_rollout import cache_safe_rollout, is_affected

REPORTS = stepper.reports()
RAN = [report for report in REPORTS if "cannot_run" not in report]
PATHS = ("pause", "sleep-caches")


def outcomes(report: dict[str, Any]) -> dict[tuple[str, str], str]:
    return {(case["hazard"], case["variant"]): case["outcome"] for case in report["cases"]}


def name(report: dict[str, Any]) -> str:
    return report["version"]


def test_releases_on_both_sides_of_both_edges_ran() -> None:
    ran = {report["version"] for report in RAN}
    assert {"0.16.0", "0.17.0", "0.20.2", "0.21.0", "0.22.0", "0.22.1", "0.28.0", "0.32.0"} <= ran
    assert len(ran) >= 10, sorted(ran)


@pytest.mark.parametrize("report", REPORTS, ids=name)
def test_a_file_is_whole_and_names_no_machine(report: dict[str, Any]) -> None:
    file = stepper.EVIDENCE / f"{report['version']}.json"
    text = file.read_text()
    assert not re.search(r"/(tmp|work|home|root|usr|var)/|localhost|\b\d+\.\d+\.\d+\.\d+\b", text)
    assert len(report.get("cannot_run", "a reason is needed")) > 10


@pytest.mark.parametrize("report", RAN, ids=name)
def test_gate_says_affected_exactly_where_the_defaults_crashed(report: dict[str, Any]) -> None:
    seen = outcomes(report)
    affected = is_affected(report["version"])
    assert report["source_says_affected"] is affected
    for path in PATHS:
        assert seen[path, "default"] == ("crash" if affected else "ok")
        assert seen[path, "safe"] == "ok"
    assert seen["pause", "safe-keep-prefix"] == "ok"
    assert seen["pause", "upstream-example"] == ("crash" if affected else "ok"), "prefix caching off alone is no cure"


@pytest.mark.parametrize("report", RAN, ids=name)
def test_the_arguments_tried_are_those_the_function_returns(report: dict[str, Any]) -> None:
    tried = {(case["hazard"], case["variant"]): case.get("engine_args") for case in report["cases"]}
    if is_affected(report["version"]):
        assert tried["pause", "safe"] == rules.engine_args(cache_safe_rollout(report["version"]))
    else:
        assert tried["pause", "safe"] is None, "the same engine served, because nothing is returned"


@pytest.mark.parametrize("report", RAN, ids=name)
def test_clearing_the_worker_alone_was_fatal_and_keeping_encoder_outputs_was_stale(report: dict[str, Any]) -> None:
    seen = outcomes(report)
    assert seen["worker-clear", "default"] == "engine-dead"
    assert seen["refit", "default"] == "stale"
    if is_affected(report["version"]):
        assert seen["refit", "safe"] == "fresh"
        assert seen.get(("refit", "safe-keep-prefix"), "stale") == "stale"


def test_the_plugin_held_on_three_affected_releases() -> None:
    held = [
        report["version"]
        for report in RAN
        if all(
            case["outcome"] == "ok" and case["plugin_active"]
            for case in report["cases"]
            if case["variant"] == "plugin" and case["hazard"] in PATHS and is_affected(report["version"])
        )
        and is_affected(report["version"])
    ]
    assert len(held) >= 3, held


def test_crashes_show_in_the_trace_as_a_list_that_outlived_its_copy() -> None:
    for report in RAN:
        for case in report["cases"]:
            if case["outcome"] == "crash" and case["hazard"] in PATHS:
                records = case["trace"][-1]["records"]
                assert records["front_end"] and not records["engine_core"], (report["version"], case["hazard"])


def test_the_page_is_drawn_from_the_evidence() -> None:
    assert stepper.TARGET.read_text() == stepper.text(REPORTS), "run: python -m agent.caches.stepper"
    script = Path(stepper.TARGET.with_name("four-records.js")).read_text()
    assert "http" not in script


def cleared(report: dict[str, Any], hazard: str, step: str) -> set[str]:
    """Which records were empty right after the step, of those that held the image before it."""
    trace = next(case["trace"] for case in report["cases"] if case["hazard"] == hazard and case["variant"] == "default")
    records = next(entry["records"] for entry in trace if entry["step"] == step)
    return {record for record in ("front_end", "engine_core", "scheduler", "worker") if not records[record]}


@pytest.mark.parametrize("report", RAN, ids=name)
def test_the_table_of_what_clears_what_is_what_the_traces_show(report: dict[str, Any]) -> None:
    """The table in docs/caches/four-records.md."""
    version = Version(report["version"])
    pixels, encoder = {"front_end", "engine_core"}, {"scheduler", "worker"}
    if version < Version("0.16.0"):
        paused, slept = pixels, set()
    elif version < Version("0.17.0"):
        paused, slept = pixels | encoder, set()
    elif version < Version("0.22.0"):
        paused = slept = {"engine_core"} | encoder
    else:
        paused = slept = pixels | encoder
    assert cleared(report, "pause", "pause") == paused
    assert cleared(report, "sleep-caches", "sleep1") == slept


def test_the_yaml_to_paste_is_what_the_function_returns() -> None:
    page = (stepper.TARGET.parents[1] / "caches" / "copy-safe-settings.md").read_text()
    block = page.split("```yaml\n")[1].split("```")[0]
    assert yaml.safe_load(block) == {"actor_rollout_ref": {"rollout": cache_safe_rollout("0.21.0")}}
