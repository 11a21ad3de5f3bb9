"""Turns the recorded traces into the data of the page "Four records of one image".

``python -m agent.caches.stepper`` rewrites ``docs/assets/four-records-data.js``; a test holds the two together.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from packaging.version import Version

from agent.caches import _probe_cases as rules

EVIDENCE = Path(__file__).with_name("evidence")
TARGET = Path(__file__).resolve().parents[2] / "docs" / "assets" / "four-records-data.js"

STEPS = {
    "ask": "A request asks about the image",
    "pause": "pause_generation(clear_cache=True)",
    "resume": "resume_generation()",
    "sleep1": "sleep(level=1)",
    "wake": "wake_up()",
    "refit": "New vision weights are loaded",
    "reset_prefix": "reset_prefix_cache()",
    "clear_worker": "The worker alone clears its encoder outputs",
    "clear_both": "clear_encoder_records(engine)",
    "drain": 'pause_generation(mode="wait", clear_cache=True), and a first request for the image arrives meanwhile',
}


def reports() -> list[dict[str, Any]]:
    """Every evidence file, oldest release first."""
    found = [json.loads(file.read_text()) for file in EVIDENCE.glob("*.json")]
    return sorted(found, key=lambda report: Version(report["version"]))


def data(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry per release that ran, each with the paths that left a trace."""
    titles = {hazard.key: hazard.title for hazard in rules.HAZARDS}
    releases = []
    for report in found:
        if "cannot_run" in report:
            continue
        paths = [
            {
                "title": titles[case["hazard"]],
                "settings": case["variant"],
                "outcome": case["outcome"],
                "detail": case.get("detail", ""),
                "steps": [_step(entry) for entry in case["trace"]],
            }
            for case in report["cases"]
            if case.get("trace")
        ]
        releases.append({"version": report["version"], "device": report["device"], "paths": paths})
    return releases


def _step(entry: dict[str, Any]) -> dict[str, Any]:
    """A step's label, what came of it, and the four records after it (``null``: could not be read any more)."""
    result = ""
    if entry["step"] == "ask" and "finish" in entry:
        result = (
            f"answered, log-probability of the first token {entry['logprobs'][0]:.5f}"
            if entry["tokens"]
            else (f"empty answer, finish reason {entry['finish']}")
        )
    elif "error" in entry:
        result = entry["error"].split(":")[0]
    elif "timeout_s" in entry:
        result = "no answer"
    records = entry.get("records") or {}
    kept = {name: records.get(name) for name in ("front_end", "engine_core", "scheduler", "worker")}
    return {"label": STEPS.get(entry["step"], entry["step"]), "result": result, "records": kept}


def text(found: list[dict[str, Any]]) -> str:
    """The generated file: a script, so that the page also works when opened from disk."""
    return "window.FOUR_RECORDS = " + json.dumps(data(found), separators=(",", ":")) + ";\n"


if __name__ == "__main__":
    TARGET.write_text(text(reports()))
