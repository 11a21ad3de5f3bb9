"""mmqa from the shell: one clear line and exit code 2 for wrong input, no traceback."""

import importlib.util
import subprocess
import sys

import pytest

needs_stack = pytest.mark.skipif(
    importlib.util.find_spec("verl") is None, reason="composes the stack's configuration: needs the cpu or gpu extra"
)


def mmqa(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "agent.cli", *arguments], capture_output=True, text=True, timeout=60, cwd=cwd
    )


def test_every_command_has_help():
    top = mmqa("--help")
    assert top.returncode == 0
    for command in ("train", "config", "ask", "checkpoints", "export", "doctor", "diagnose", "explain", "probe-engine"):
        done = mmqa(command, "--help")
        assert done.returncode == 0 and "Usage" in done.stdout


@needs_stack
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["train", "--preset", "gpu9"], "unknown preset 'gpu9'"),
        (["train", "data.trian_batch_size=3"], "unknown key data.trian_batch_size"),
        (["train", "--task", "circle"], "did you mean circles?"),
        (["train", "--steps", "0"], "must be a whole number of at least 1"),
        (["train", "--task", "folder"], "the tiny model is made for the tasks digits, circles"),
        (["ask", "gone.png", "What?", "--url", "http://127.0.0.1:9/v1", "--model", "m"], "gone.png: No such file"),
    ],
)
def test_wrong_input_is_one_line(arguments, text, tmp_path):
    done = mmqa(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr and "Traceback" not in done.stderr + done.stdout
    assert done.stderr.startswith("error: ")


@needs_stack
def test_an_existing_run_is_not_overwritten(tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "config.yaml").write_text("a: 1\n")
    done = mmqa("train", "--run-dir", str(tmp_path / "r"))
    assert done.returncode == 2 and "--resume auto" in done.stderr
    assert (tmp_path / "r" / "config.yaml").read_text() == "a: 1\n"


@needs_stack
def test_dry_run_starts_nothing_and_prints_the_configuration(tmp_path):
    done = mmqa("train", "--dry-run", "--run-dir", str(tmp_path / "r"), "data.seed=7")
    assert done.returncode == 0 and "seed: 7" in done.stdout and not (tmp_path / "r").exists()


def test_an_endpoint_that_does_not_answer_is_a_failed_run(tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    done = mmqa("ask", "a.png", "What?", "--url", "http://127.0.0.1:9/v1", "--model", "m", cwd=tmp_path)
    assert done.returncode == 1 and "ConnectError" in done.stderr and "Traceback" not in done.stderr
