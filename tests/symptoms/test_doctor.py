"""The command: what it reads, what it prints, its exit codes, and what it does not import."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from agent.errors import InputError
from agent.symptoms import doctor, doctor_command
from agent.symptoms.doctor_config import parse, read_config
from agent.symptoms.hazards import Machine

HEALTHY = {"agentlightning": "1.0.2", "verl": "0.8.0", "vllm": "0.22.1", "flash-attn": "2.8.3", "wandb": "0.31.0"}


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command on a machine without faults."""
    monkeypatch.setattr(doctor_command, "installed_versions", lambda: dict(HEALTHY))
    monkeypatch.setattr(doctor_command, "look_at_machine", lambda config: Machine(disk_free=10**12))
    app = typer.Typer()
    app.callback()(lambda: None)
    doctor_command.register(app)
    return app


def run(app: typer.Typer, *args: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["doctor", *args])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def write(folder: Path, text: str | bytes, name: str = "config.yaml") -> str:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(file)


def test_silent_on_a_healthy_machine(app: typer.Typer) -> None:
    assert run(app) == (0, "")
    code, out = run(app, "--json")
    assert code == 0 and json.loads(out) == {"findings": [], "versions": HEALTHY, "dialect": "none"}


def test_a_crash_prints_all_four_parts_and_exits_1(app: typer.Typer, tmp_path: Path) -> None:
    config = write(tmp_path, "agentlightning: {trace_aggregator: {level: trajectory}}")
    code, out = run(app, "--config", config)
    assert code == 1
    assert "agentlightning.trace_aggregator.level is trajectory" in out
    assert "agentlightning.trace_aggregator.level=transition" in out
    assert "mmqa explain trajectory-level-with-images" in out and "/s/trajectory-level-with-images/" in out
    code, out = run(app, "--config", config, "--json")
    found = {one["slug"]: one for one in json.loads(out)["findings"]}
    one = found["trajectory-level-with-images"]
    assert code == 1 and one["severity"] == "crash" and one["page"] == "/s/trajectory-level-with-images/"
    assert one["what"] and one["why"] and one["change"]


def test_findings_that_do_not_stop_a_run_exit_0(app: typer.Typer, tmp_path: Path) -> None:
    code, out = run(app, "--config", write(tmp_path, "mmqa: {}\ntrainer: {save_freq: -1}"))
    assert code == 0 and "nothing-to-resume" in out and out.rstrip().endswith("found: 1 silent")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "empty"),
        (b"\x89PNG\r\n\x1a\n\xff\xff", "not a text file"),
        (b"a\0b", "zero bytes"),
        ("trainer: [1", "line 1: not valid YAML"),
        ("just words", "neither a YAML mapping nor lines of the form key=value"),
        ("- 1\n- 2", "neither a YAML mapping"),
        ("apiVersion: v1\nkind: Pod", "not a training config: its top-level keys are apiVersion, kind"),
    ],
)
def test_bad_config(app: typer.Typer, tmp_path: Path, text: str | bytes, expected: str) -> None:
    with pytest.raises(InputError, match=expected.replace("(", r"\(")) as error:
        run(app, "--config", write(tmp_path, text))
    assert "config.yaml" in str(error.value) and error.value.exit_code == 2


def test_missing_file_folder_and_log(app: typer.Typer, tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "none.yaml", "No such file"), (tmp_path, "is a folder")):
        with pytest.raises(InputError, match=expected):
            run(app, "--config", str(path))
    big = tmp_path / "trainer.log"
    with big.open("wb") as file:
        file.truncate(5 * 1024 * 1024)
    with pytest.raises(InputError, match="for a log: mmqa diagnose"):
        run(app, "--config", str(big))


def test_utf16_config(tmp_path: Path) -> None:
    assert read_config(Path(write(tmp_path, "trainer: {nnodes: 1}".encode("utf-16")))) == {"trainer": {"nnodes": 1}}


def test_nested_dotted_and_script_say_the_same() -> None:
    nested = "trainer: {nnodes: 2, logger: [console, wandb]}\ndata: {train_batch_size: 64}"
    dotted = "trainer.nnodes: 2\ntrainer:\n  logger: [console, wandb]\ndata.train_batch_size: 64"
    script = (
        "#!/bin/bash\nset -x  # a start script\nNAME=run1\npython3 -m verl.trainer.main_ppo \\\n"
        "    trainer.nnodes=2 '+trainer.logger=[console,wandb]' \\\n"
        "    data.train_batch_size=64 $@\n# trainer.nnodes=3\n"
    )
    listed = "- trainer.nnodes=2\n- trainer.logger=[console, wandb]\n- data.train_batch_size=64"
    expected = {"trainer": {"nnodes": 2, "logger": ["console", "wandb"]}, "data": {"train_batch_size": 64}}
    for text in (nested, dotted, script, listed):
        assert parse(text, "x") == expected, text


def test_a_dictionary_in_a_python_file_is_read_and_not_run(tmp_path: Path) -> None:
    text = (
        "raise SystemExit('never run')\n"
        "colours = {'red': 1}\n"
        "def config():\n    return {'trainer': {'nnodes': 2}, 'agentlightning': {'agl_key': 'k'}}\n"
        "other = {'data': {'seed': colours}}\n"
    )
    tree = read_config(Path(write(tmp_path, text, "train.py")))
    assert tree == {"trainer": {"nnodes": 2}, "agentlightning": {"agl_key": "k"}}
    for bad, expected in (("x = {'a': 1}", "no dictionary of constants"), ("x = (", "line 1: not valid Python")):
        with pytest.raises(InputError, match=expected):
            read_config(Path(write(tmp_path, bad, "train.py")))


def test_shell_variables_are_unknown_and_exponents_are_numbers() -> None:
    tree = parse("a.b=1 trainer.save_freq=$FREQ\nactor.optim.lr=1e-6", "x")
    assert tree["trainer"]["save_freq"].startswith("${") and tree["actor"]["optim"]["lr"] == 1e-6


def test_nemo_config_is_read_over_its_parent(tmp_path: Path) -> None:
    write(tmp_path, "policy: {model_name: Qwen2.5-VL, generation: {colocated: {enabled: false}}}", "base.yaml")
    child = write(tmp_path, "defaults: base.yaml\npolicy: {generation: {backend: vllm}}", "child.yaml")
    generation = read_config(Path(child))["policy"]["generation"]
    assert generation == {"colocated": {"enabled": False}, "backend": "vllm"}


NEMO_OVERRIDES = (
    "grpo.async_grpo.enabled=true grpo.async_grpo.in_flight_weight_updates=true policy.generation.backend=vllm "
    "policy.generation.colocated.enabled=false "
)
RESET = "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update=true"


@pytest.mark.parametrize(
    ("name", "more", "slug"),
    [
        ("vlm_grpo_3B.yaml", RESET, "encoder-cache-miss"),
        ("grpo.yaml", RESET, "encoder-cache-miss"),  # the switch is for pictures alone
        ("vlm_grpo_3B.yaml", "", "stale-encoder-output"),
        ("grpo_math_1B.yaml", "", None),
    ],
)
def test_a_script_with_a_config_that_is_not_here_is_checked_and_that_is_said(
    app: typer.Typer, tmp_path: Path, name: str, more: str, slug: str | None
) -> None:
    script = tmp_path / "run.sh"
    script.write_text(f"uv run examples/run_grpo.py --config examples/configs/{name} \\\n  {NEMO_OVERRIDES}{more}\n")
    result = CliRunner().invoke(app, ["doctor", "--config", str(script), "--json"])
    found = {one["slug"]: one for one in json.loads(result.stdout)["findings"] if one["severity"] != "slow"}
    assert (slug in found) if slug else not {"encoder-cache-miss", "stale-encoder-output"} & found.keys()
    assert f"examples/configs/{name}, which" in result.stdout
    (tmp_path / "examples/configs").mkdir(parents=True)
    (tmp_path / f"examples/configs/{name}").write_text("policy: {model_name: meta-llama/Llama-3.1-8B}\n")
    result = CliRunner().invoke(app, ["doctor", "--config", str(script), "--json"])
    assert "which" not in {one["what"] for one in json.loads(result.stdout)["findings"]} and name not in result.stdout


def test_a_script_that_only_hands_over_a_config_is_checked(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("policy: {model_name: m}\n")
    (tmp_path / "run.sh").write_text("uv run examples/run_grpo.py --config own.yaml\n")
    assert read_config(tmp_path / "run.sh") == {"policy": {"model_name": "m"}}


def test_a_parent_that_is_not_here_is_named(app: typer.Typer, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("defaults: gone.yaml\n" + "policy: {model_name: Qwen/Qwen2.5-VL-3B-Instruct}\n")
    assert "gone.yaml, which" in CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "a.yaml")]).stdout


def test_an_anchor_that_holds_itself_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("trainer: &a\n  b: *a\n")
    with pytest.raises(InputError, match="an anchor in it holds itself"):
        read_config(tmp_path / "a.yaml")


def test_machine_reads_model_disk_and_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("WANDB_API_KEY", "NETRC", "HF_HOME", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    write(tmp_path, '{"model_type": "qwen3_5", "vision_config": {}, "dtype": "bfloat16"}', "config.json")
    write(tmp_path, b"x" * 4000, "model.safetensors")
    config = {"actor_rollout_ref": {"model": {"path": str(tmp_path)}}}
    machine = doctor.look_at_machine(config, tmp_path / "runs" / "new")
    assert machine.checkpoint_dir == str(tmp_path) and machine.disk_free and machine.memory_total
    assert machine.model is not None
    assert (machine.model.model_type, machine.model.vision, machine.model.parameters) == ("qwen3_5", True, 2000)
    assert not machine.wandb_login
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    (tmp_path / ".netrc").chmod(0o600)
    assert doctor.look_at_machine(config).wandb_login
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    machine = doctor.look_at_machine(config)
    assert machine.wandb_login and "secret" not in repr(machine)


def test_model_is_found_in_the_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen2.5-VL-3B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    write(snapshot, '{"model_type": "qwen2_5_vl", "vision_config": {}}', "config.json")
    model = doctor.read_model("Qwen/Qwen2.5-VL-3B")
    assert model is not None and model.vision and model.parameters is None
    assert doctor.read_model("Qwen/Other") is None
    write(snapshot, "not json", "config.json")
    assert doctor.read_model("Qwen/Qwen2.5-VL-3B") is None


def test_a_ray_cluster_counts_only_if_it_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    config = {"agentlightning": {}}
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        write(tmp_path, address, "ray_current_cluster")
        assert doctor.look_at_machine(config).live_ray_address == address
    assert doctor.look_at_machine(config).live_ray_address == ""


def test_gpus_from_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, 143771, 143000'\necho 'NVIDIA H200, 143771, 20'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu.free // 2**20 for gpu in doctor.look_at_machine({}).gpus] == [143000, 20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.free // 2**20 for gpu in doctor.look_at_machine({}).gpus] == [20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor.look_at_machine({}).gpus == ()
    program.write_text("#!/bin/sh\nexec sleep 30\n")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    started = time.monotonic()
    assert doctor.look_at_machine({}).gpus == ()
    assert time.monotonic() - started < 2


def test_no_heavy_import_and_under_a_second(tmp_path: Path) -> None:
    """The whole program with a config, in a process of its own; the machine may be busy, so CPU time is what counts."""
    config = write(tmp_path, "agentlightning: {}\nactor_rollout_ref: {model: {path: Qwen/Qwen3.5-2B}}")
    code = (
        "import sys, time\n"
        "from agent.cli import app\n"
        "try:\n    app(['doctor', '--config', sys.argv[1], '--json'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'verl', 'vllm', 'ray', 'transformers', 'numpy'} & set(sys.modules)\n"
        "print(time.process_time(), *heavy, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, config], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["dialect"] == "verl", done.stderr
    seconds, *heavy = done.stderr.split()
    assert heavy == [] and float(seconds) < 1
