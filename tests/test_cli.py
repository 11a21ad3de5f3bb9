"""mmqa from the shell: one clear line and exit code 2 for wrong input, no traceback."""

import importlib.util
import json
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from PIL import Image

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
    for command in (
        "train",
        "config",
        "ask",
        "eval",
        "checkpoints",
        "export",
        "doctor",
        "diagnose",
        "explain",
        "probe-engine",
    ):
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
        (["eval", "gone", "--split", "test"], "must be val (held out) or train"),
        (["eval", "gone", "--step", "3"], "gone is no run directory, so it has no checkpoints"),
        (["eval", "."], "neither a run directory nor a model's folder"),
        (["eval", "./gone"], "no run directory and no model's folder here"),
        (["eval", "runs/moved"], "for a model of the hub give its owner/name and --preset"),
        (["eval", "a/b/c", "--preset", "qwen3_vl_2b"], "no run directory and no model's folder here"),
        (
            ["ask", "gone.png", "What?", "--url", "http://127.0.0.1:9/v1", "--model", "m"],
            "gone.png: No such file or directory; check the path\n",
        ),
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


@pytest.mark.parametrize(
    ("url", "key", "text"),
    [
        ("foo", "", "no http:// or https:// address"),
        ("127.0.0.1:8000/v1", "", "no http:// or https:// address"),
        ("ftp://x/v1", "", "no http:// or https:// address"),
        ("http://[::1", "", "Invalid IPv6 URL"),
        ("http://127.0.0.1:99999/v1", "", "Port out of range"),
        ("http://localhost:abc/v1", "", "Port could not be cast"),
        ("http://127.0.0.1:9/v1", "schlüssel", "the key in OPENAI_API_KEY has characters"),
        ("http://127.0.0.1:9/v1", "sk-SECRET\x7f1", "the key in OPENAI_API_KEY has characters"),
    ],
)
def test_a_wrong_address_or_key_is_one_line_without_the_key(url, key, text, tmp_path, monkeypatch):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    done = mmqa("ask", "a.png", "What?", "--url", url, "--model", "m", cwd=tmp_path)
    assert done.returncode == 2 and text in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and "SECRET" not in done.stderr + done.stdout


def test_a_line_end_behind_the_key_does_no_harm_and_a_missing_v1_is_guessed(tmp_path, monkeypatch):
    keys = []

    class NotHere(BaseHTTPRequestHandler):
        def do_POST(self):
            keys.append(self.headers["Authorization"])
            self.send_error(404)

        def log_message(self, *arguments):
            pass

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\r\n")
    server = ThreadingHTTPServer(("127.0.0.1", 0), NotHere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    done = mmqa("ask", "a.png", "What?", "--url", url, "--model", "m", cwd=tmp_path)
    server.shutdown()
    assert done.returncode == 1 and "should the address end in /v1?" in done.stderr
    assert keys == ["Bearer sk-1"]


@pytest.mark.parametrize(
    ("model", "key", "text"),
    [
        ("m", "sk-1", "--model m: not served at {url}; it serves qwen, other"),
        ("qwen", "", "set its key in OPENAI_API_KEY"),
        ("qwen", "sk-2", "the key in OPENAI_API_KEY is not the right one"),
    ],
)
def test_a_model_or_a_key_that_the_endpoint_does_not_know_is_wrong_input(model, key, text, tmp_path, monkeypatch):
    class Endpoint(BaseHTTPRequestHandler):
        def answer(self, status, value):
            body = json.dumps(value if self.headers["Authorization"] == "Bearer sk-1" else {"error": "no"}).encode()
            self.send_response(status if self.headers["Authorization"] == "Bearer sk-1" else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.answer(404, {"error": {"message": "The model `m` does not exist."}})

        def do_GET(self):
            self.answer(200 if self.path == "/v1/models" else 404, {"data": [{"id": "qwen"}, {"id": "other"}]})

        def log_message(self, *arguments):
            pass

    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    done = mmqa("ask", "a.png", "What?", "--url", url, "--model", model, cwd=tmp_path)
    server.shutdown()
    assert done.returncode == 2 and text.format(url=url) in done.stderr, done.stderr
    assert "mmqa diagnose" not in done.stderr and "unknown-failure" not in done.stderr


@needs_stack
def test_places_that_cannot_be_written_are_named_before_the_work(tmp_path):
    done = mmqa("probe-engine", "--out", str(tmp_path))
    assert done.returncode == 2 and "not a file that can be written" in done.stderr
    (tmp_path / "file").touch()
    whole = tmp_path / "r/checkpoints/global_step_1"
    (whole / "actor").mkdir(parents=True)
    (tmp_path / "r/config.yaml").write_text("a: 1\n")
    for name in ("actor/model", "actor/optim", "actor/extra_state"):
        with zipfile.ZipFile(whole / f"{name}_world_size_1_rank_0.pt", "w") as file:
            file.writestr("x", "x")
    with zipfile.ZipFile(whole / "data.pt", "w") as file:
        file.writestr("x", "x")
    done = mmqa("export", str(tmp_path / "r"), "--out", str(tmp_path / "file"))
    assert done.returncode == 2 and "a file; choose a folder for --out" in done.stderr, done.stderr


@needs_stack
def test_dry_run_on_a_run_shows_what_would_change(tmp_path):
    first = mmqa("train", "--dry-run", "mmqa.train_samples=64")
    (tmp_path / "r").mkdir()
    (tmp_path / "r/config.yaml").write_text(first.stdout)
    done = mmqa("train", "--dry-run", "--run-dir", str(tmp_path / "r"), "--steps", "7")
    assert done.returncode == 0 and "train_samples: 64" in done.stdout
    assert "# changed: trainer.total_training_steps: 40 -> 7" in done.stdout
    done = mmqa("train", "--dry-run", "--run-dir", str(tmp_path / "r"), "mmqa.seed=3")
    assert done.returncode == 2 and "cannot change in a run that goes on" in done.stderr


def test_an_endpoint_that_does_not_answer_is_a_failed_run(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    done = mmqa("ask", "a.png", "What?", "--url", "http://127.0.0.1:9/v1", "--model", "m", cwd=tmp_path)
    assert done.returncode == 1 and "ConnectError" in done.stderr and "Traceback" not in done.stderr
    assert "unknown-failure" not in done.stderr, "there is no run to look into"
