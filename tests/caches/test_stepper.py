"""The stepper in a real browser, opened from disk: choose a crashing path, step to its end, see the records."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agent.caches import stepper

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

DRIVE = """
addEventListener("load", () => {
  const seen = [];
  const next = [...document.querySelectorAll("button")].find((button) => button.textContent.startsWith("Next"));
  const look = () => seen.push(document.querySelector(".four-records-status").textContent + " | " +
    [...document.querySelectorAll("td")].map((cell) => cell.textContent).join(" | "));
  look();
  while (!next.disabled) { next.click(); look(); }
  const release = document.getElementById("four-records-version");
  seen.push("START " + release.value, document.querySelector(".four-records-outcome").textContent);
  release.value = "0.22.1"; release.dispatchEvent(new Event("change"));
  while (!next.disabled) next.click();
  seen.push("THEN " + release.value + " " + document.querySelector(".four-records-outcome").textContent);
  document.body.append(Object.assign(document.createElement("pre"), {id: "seen", textContent: seen.join("\\n")}));
});
"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_stepper_walks_a_crash_and_the_same_path_on_a_fixed_release(tmp_path: Path) -> None:
    assets = stepper.TARGET.parent
    scripts = "".join(
        f"<script>{text}</script>"
        for text in (
            stepper.text(stepper.reports()),
            (assets / "four-records.js").read_text(),
            DRIVE,
        )
    )
    page = tmp_path / "page.html"
    page.write_text(
        f'<!doctype html><meta charset="utf-8"><body><div id="four-records">no script</div>{scripts}</body>'
    )
    done = subprocess.run(
        [
            str(CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--virtual-time-budget=2000",
            "--dump-dom",
            str(page),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    seen = done.stdout.split('<pre id="seen">')[1].split("</pre>")[0].splitlines()
    assert seen[0].startswith("Step 1 of 5: A request asks about the image")
    crash = next(line for line in seen if line.startswith("Step 5"))
    assert "empty answer, finish reason error" in crash
    front, core = crash.split(" | ")[1:3]
    assert front != "empty" and core == "empty"
    assert "Outcome: crash" in seen[-2]
    assert seen[-1].startswith("THEN 0.22.1 Outcome: ok")
