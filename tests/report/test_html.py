"""The report of a run: what it shows, and that nothing a model said can act in it."""

import re
import subprocess
import sys

import pytest
from PIL import Image

from agent.images import ImageStore
from agent.report.html import SHOWN_SAMPLES, chosen_samples, curve, render
from agent.training.rundir import RunDir, append_jsonl, read_jsonl, write_json
from agent.training.summary import latest_per_step

EVIL = "<script>alert(1)</script>\"><img src=x onerror=alert(2)> & 'quoted'"


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.root.mkdir()
    picture = ImageStore(run.images).put(Image.new("RGB", (84, 84), "red"))
    write_json(
        run.status, {"state": "failed", "step": 2, "total_steps": 4, "attempt": 1, "reason": EVIL, "symptom": EVIL}
    )
    for step in range(3):
        row = {
            "step": step,
            "attempt": 1,
            "training/reward": step / 4,
            "val/accuracy_any_form": 0.5,
            "val/wanted_form": 1,
        }
        append_jsonl(run.metrics, row)
        sample = {"step": step, "split": "train", "state": "succeeded", "images": [picture, EVIL], "question": EVIL}
        append_jsonl(run.samples, sample | {"replies": [EVIL, None], "truth": EVIL, "reward": EVIL, "error": EVIL})
    return run


def test_what_a_model_said_is_text_and_nothing_else(run):
    text = render(run)
    assert "&lt;script&gt;" in text and not re.search(r"<script|<img src=x|onerror=alert\(2\)>", text)
    tags = set(re.findall(r"<([a-z0-9]+)", text))
    allowed = {"html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "svg", "polyline", "text"}
    assert tags <= allowed | {"table", "tr", "th", "td", "img", "br", "code", "div"}
    assert "default-src 'none'" in text and "http://" not in text and "https://" not in text
    assert text.count("data:image/png;base64,") == 3, "stored pictures are shown, other references are text"


def test_pictures_are_found_where_a_moved_run_has_them(run):
    lines = run.samples.read_text().replace(str(run.images), "/runs/before/images")
    run.samples.write_text(lines)
    assert "/runs/before/images/" in lines and render(run).count("data:image/png;base64,") == 3


def test_the_command_writes_the_file(run):
    done = subprocess.run([sys.executable, "-m", "agent.cli", "report", str(run.root)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == str(run.report) and "<svg" in run.report.read_text()
    done = subprocess.run([sys.executable, "-m", "agent.cli", "report", "nowhere"], capture_output=True, text=True)
    assert done.returncode == 2 and "no run here" in done.stderr


def test_lines_that_no_run_wrote_are_left_out(run):
    before = render(run)
    with run.metrics.open("ab") as file:
        file.write(
            b'{"training/reward": 1}\n{"step": "two"}\n{"step": true}\n{"step": [1]}\n[1]\n7\n\xff\xfe\n{"step":\n'
        )
        file.write(b'{"step": 2, "training/reward": "high", "val/accuracy_any_form": null, "timing_s/step": NaN}\n')
    assert [one["step"] for one in latest_per_step(read_jsonl(run.metrics))] == [0, 1, 2]
    assert "nan" not in render(run)
    with run.samples.open("ab") as file:
        file.write(bytes(range(256)) + b'\n{"step": null, "images": 5, "replies": "x", "reward": {}}\n')
    assert len(render(run)) > len(before) / 2 and "<svg" in render(run)
    for command in ("report", "checkpoints"):
        done = subprocess.run(
            [sys.executable, "-m", "agent.cli", command, str(run.root)], capture_output=True, text=True
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr


def test_curves_and_samples_are_chosen():
    assert curve([(1, 0.5)], "x") == "" and 'points="40.0,15.0' in curve([(0, 1), (1, 0)], "x")
    assert "nan" not in curve([(0, 1), (1, 1)], "x")
    samples = [{"split": "val", "n": n} for n in range(50)] + [{"split": "train", "n": n} for n in range(50)]
    samples.append({"split": "train", "state": "failed", "n": -1})
    chosen = chosen_samples(samples)
    assert len(chosen) == SHOWN_SAMPLES and chosen[0]["n"] == -1 and chosen[1] == {"split": "val", "n": 49}
