"""A real run on the CPU: gateway, controller, trainer, verl's actor, vLLM's engine, and the tiny model.

One training run of two steps serves all tests of this file; one of its rollouts fails on purpose.
"""

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from PIL import Image
from small_run import ENV, HERE, ROLLOUTS, SMALL, needs_engine, processes_of, train

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1800),
    needs_engine,
]


class Watch(threading.Thread):
    """Looks at a run from outside while it goes on: keys, processes, listening sockets, states."""

    def __init__(self, root):
        super().__init__(daemon=True)
        self.root, self.stop = root, threading.Event()
        self.keys, self.modes, self.hosts, self.pids, self.states = set(), set(), set(), set(), []

    def run(self):
        while not self.stop.wait(0.5):
            for secret in self.root.glob("attempts/*/*.key"):
                with contextlib.suppress(OSError):
                    self.keys.add(secret.read_text())
                    self.modes.add(secret.stat().st_mode & 0o777)
            with contextlib.suppress(OSError, ValueError):
                state = json.loads((self.root / "status.json").read_text())["state"]
                if self.states[-1:] != [state]:
                    self.states.append(state)
            for process in processes_of(self.root):
                self.pids.add(process.pid)
                with contextlib.suppress(Exception):
                    found = process.net_connections(kind="tcp")
                    self.hosts |= {(process.name(), one.laddr.ip) for one in found if one.status == "LISTEN"}


def jsonl(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs") / "two-steps"
    shm = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    watch = Watch(root)
    watch.start()
    command = [
        *train(root, "--preset", "cpu", "--steps", "2", *SMALL),
        "mmqa.agent_class=flaky_agent.FlakyAgent",
        "mmqa.train_samples=32",
        "mmqa.val_samples=8",
        # a large step, so that an engine which kept the old weights would disagree with the actor afterwards
        "actor_rollout_ref.actor.optim.lr=1.5e-3",
        "actor_rollout_ref.actor.optim.lr_warmup_steps=0",
        "actor_rollout_ref.actor.optim.lr_scheduler_type=constant",
        "trainer.test_freq=2",
        "trainer.save_freq=1",
    ]
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=ENV)
    seconds = time.monotonic() - started
    watch.stop.set()
    watch.join(5)
    logs = "".join(f"\n== {log}\n{log.read_text()[-3000:]}" for log in root.glob("attempts/1/*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    left = set(os.listdir("/dev/shm")) - shm if shm else set()
    return {"root": root, "out": done.stdout, "err": done.stderr, "watch": watch, "seconds": seconds, "shm": left}


def test_it_finishes_and_says_what_happened(run):
    status = json.loads((run["root"] / "status.json").read_text())
    assert (status["state"], status["step"], status["attempt"], status["reason"]) == ("finished", 2, 1, None)
    assert {"starting", "rollout", "training"} <= set(run["watch"].states)
    phases = [one["phase"] for one in jsonl(run["root"] / "attempts" / "1" / "progress.jsonl")]
    assert phases.count("saving") == phases.count("saved") == 2 and phases[-1] == "finished"
    assert re.search(r"step +2/2 +reward \d\.\d\d", run["out"]) and "what rose:" in run["out"]
    assert "Traceback" not in run["out"] + run["err"]
    assert json.loads((run["root"] / "versions.json").read_text())["agentlightning"] == "1.0.2"
    assert (run["root"] / "attempts" / "latest" / "trainer.log").exists()


def test_the_pictures_reach_the_actor(run):
    proof = json.loads((run["root"] / "attempts" / "1" / "image_proof.json").read_text())
    assert proof["rows_with_pixels"] == proof["rows"] == ROLLOUTS
    assert proof["shapes"] == {"pixel_values": [36, 1176], "image_grid_thw": [1, 3]}
    assert proof["blank_shift_mean"] > 0.1, "blanking the pixels must change the log-probs"
    assert proof["training/logprob_gap_mean"] < 0.01


def test_every_step_has_its_metrics(run):
    metrics = jsonl(run["root"] / "metrics.jsonl")
    assert [one["step"] for one in metrics] == [0, 1, 2] and {one["attempt"] for one in metrics} == {1}
    for one in metrics[1:]:
        assert one["training/logprob_gap_mean"] < 0.01 and math.isfinite(one["actor/grad_norm"])
        assert 0 <= one["training/reward"] <= 1 and one["timing_s/step"] > 0
    assert metrics[1]["actor/grad_norm"] > 0
    assert {"val/accuracy_any_form", "val/wanted_form"} <= set(metrics[0]) & set(metrics[2])


def test_every_rollout_leaves_a_sample(run):
    samples = jsonl(run["root"] / "samples.jsonl")
    for step in (1, 2):
        assert len([one for one in samples if one["split"] == "train" and one["step"] == step]) == ROLLOUTS
    assert len([one for one in samples if one["split"] == "val"]) == 16
    for one in samples:
        assert math.isfinite(one["reward"]) and one["replies"]
        assert all(Path(url.removeprefix("file://")).parent == run["root"] / "images" for url in one["images"])


def test_the_failed_rollout_is_not_trained_on_and_the_step_is_not_lost(run):
    samples = jsonl(run["root"] / "samples.jsonl")
    failed = [one for one in samples if one["state"] != "succeeded"]
    assert len(failed) == 1 and failed[0]["error"] == "ZeroDivisionError: the scoring bug"
    first = next(one for one in jsonl(run["root"] / "metrics.jsonl") if one["step"] == failed[0]["step"])
    assert first["train/n_rollouts_failed"] == 1
    assert first["training/n_rows_filled"] == 1 and first["training/n_sample_trained"] == ROLLOUTS


def log_probs(model, processor, samples):
    """Log-probs of the tokens of each sample's reply, one flat tensor."""
    import torch
    from PIL import Image

    from agent.training.tiny_vlm import prompt_text

    found = []
    for one in samples:
        prompt, reply = prompt_text(one["question"]), one["replies"][-1]
        image = Image.open(one["images"][0].removeprefix("file://"))
        inputs = processor(text=[prompt + reply], images=[[image]], return_tensors="pt")
        count = len(processor.tokenizer(reply, add_special_tokens=False)["input_ids"])
        with torch.no_grad():
            logits = model(**inputs).logits[0, -count - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, inputs["input_ids"][0, -count:, None])[:, 0])
    return torch.cat(found)


def test_the_refit_puts_the_new_weights_into_the_engine(run):
    """The engine sampled step 2 with log-probs that only the weights after step 1 explain, not those before."""
    import torch
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    tiny = re.search(r"path: (\S*tiny-vlm\S*)", (run["root"] / "config.yaml").read_text()).group(1)
    processor = AutoProcessor.from_pretrained(tiny)
    model = Qwen2VLForConditionalGeneration.from_pretrained(tiny, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    samples = [one for one in jsonl(run["root"] / "samples.jsonl") if one["step"] == 2 and one["split"] == "train"]
    old = log_probs(model, processor, samples)
    state = torch.load(run["root"] / "checkpoints/global_step_1/actor/model_world_size_1_rank_0.pt", weights_only=False)
    state = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    model.load_state_dict(state)
    moved = {name: (value - before[name]).abs().max().item() for name, value in model.state_dict().items()}
    assert any("visual" in name and change > 1e-4 for name, change in moved.items()), "the vision tower is trained too"
    difference = (log_probs(model, processor, samples) - old).abs().mean().item()
    gap = next(one for one in jsonl(run["root"] / "metrics.jsonl") if one["step"] == 2)["training/logprob_gap_mean"]
    assert gap < 0.01 < 0.1 < difference, (gap, difference)


def test_nothing_is_left_behind(run):
    assert processes_of(run["root"]) == [] and len(run["watch"].pids) > 5
    assert run["shm"] == set(), "shared memory"
    assert list((run["root"] / "attempts" / "1").glob("*.key")) == []


def test_servers_listen_on_loopback_alone(run):
    loopback = ("127.0.0.1", "::1", "::ffff:127.0.0.1")
    assert run["watch"].hosts and [one for one in run["watch"].hosts if one[1] not in loopback] == []


def test_the_key_is_the_users_alone_and_in_no_file(run):
    assert len(run["watch"].keys) == 1 and run["watch"].modes == {0o600}
    key = run["watch"].keys.pop()
    holders = [file for file in run["root"].rglob("*") if file.is_file() and key.encode() in file.read_bytes()]
    assert holders == []


VLLM_LOG_PROBS = """
import json, sys
from agent.training import cpu_backend
cpu_backend.install()
from PIL import Image

def main(folder, requests, out):
    from vllm import LLM, SamplingParams

    llm = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, gpu_memory_utilization=0.1)
    found = []
    for one in json.load(open(requests)):
        prompt = {"prompt": one["text"], "multi_modal_data": {"image": Image.open(one["image"])}}
        done = llm.generate(prompt, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)[0]
        found += [next(iter(one.values())).logprob for one in done.prompt_logprobs[-one["count"]:]]
    json.dump(found, open(out, "w"))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    """The Hugging Face folder of step 2."""
    out = tmp_path_factory.mktemp("export") / "hf"
    command = [sys.executable, "-m", "agent.cli", "export", str(run["root"]), "--step", "2", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out


def test_an_export_gives_the_actors_log_probs_in_transformers_and_in_vllm(run, exported, tmp_path):
    import torch
    from transformers import AutoProcessor, Qwen2VLForConditionalGeneration

    from agent.training.tiny_vlm import prompt_text

    processor = AutoProcessor.from_pretrained(exported)
    model = Qwen2VLForConditionalGeneration.from_pretrained(exported, dtype=torch.float32)
    assert model.config.text_config.vocab_size == len(processor.tokenizer) and processor.chat_template
    samples = [one for one in jsonl(run["root"] / "samples.jsonl") if one["step"] == 2 and one["split"] == "train"][:6]
    loaded = log_probs(model, processor, samples)
    state = torch.load(run["root"] / "checkpoints/global_step_2/actor/model_world_size_1_rank_0.pt", weights_only=False)
    model.load_state_dict(
        {name: value.to_local() if hasattr(value, "to_local") else value for name, value in state.items()}
    )
    assert torch.allclose(loaded, log_probs(model, processor, samples), atol=1e-5), "as the actor's own shard"
    requests = [
        {
            "text": prompt_text(one["question"]) + one["replies"][-1],
            "image": one["images"][0].removeprefix("file://"),
            "count": len(processor.tokenizer(one["replies"][-1], add_special_tokens=False)["input_ids"]),
        }
        for one in samples
    ]
    (tmp_path / "requests.json").write_text(json.dumps(requests))
    (tmp_path / "engine.py").write_text(VLLM_LOG_PROBS)
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    env = {**os.environ, **settings, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, "engine.py", str(exported), "requests.json", "found.json"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = torch.tensor(json.loads((tmp_path / "found.json").read_text()))
    assert (found - loaded).abs().max().item() < 0.01


def evaluated(target, *arguments, cwd):
    """What ``mmqa eval`` prints, as an object."""
    command = [sys.executable, "-m", "agent.cli", "eval", str(target), "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=ENV, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_an_evaluation_finds_what_the_runs_own_validation_found(run, tmp_path):
    metrics = (run["root"] / "metrics.jsonl").read_text()
    found = evaluated(run["root"], "--step", "2", cwd=tmp_path)
    last = json.loads(metrics.splitlines()[-1])
    assert (found["step"], found["scored"], found["failed"], found["blank_images"]) == (2, 8, 0, False)
    assert found["reward"] == pytest.approx(last["val/reward"]), "greedy answers of the same weights"
    assert found["right"] == pytest.approx(last["val/accuracy_any_form"])
    assert 0 <= found["low"] <= found["right"] <= found["high"] <= 1
    assert (run["root"] / "metrics.jsonl").read_text() == metrics
    assert Path(found["folder"]) == run["root"] / "evals/1" and processes_of(found["folder"]) == []


def test_a_model_is_evaluated_without_its_pictures(exported, tmp_path):
    found = evaluated(exported, "--blank-images", "mmqa.val_samples=6", cwd=tmp_path)
    assert (found["step"], found["scored"], found["blank_images"]) == (0, 6, True)
    folder = Path(found["folder"])
    assert folder.parent == tmp_path / "runs"
    (picture,) = {url for one in jsonl(folder / "samples.jsonl") for url in one["images"]}
    assert Image.open(picture.removeprefix("file://")).convert("RGB").getextrema() == ((255, 255),) * 3


def test_the_commands_of_the_resuming_guide(run, tmp_path):
    """Those of docs/howto/resuming.md; going on after a fault and with two workers are tests of their own."""
    guide = (HERE.parents[1] / "docs/howto/resuming.md").read_text().split("# In projects that call verl")[0]
    shown = [line.strip() for line in re.findall(r"^mmqa .+$", guide, flags=re.MULTILINE)]
    assert len(shown) >= 8
    root = str(run["root"])
    changes = {"runs/first": root, "my-model": str(tmp_path / "hf"), "--resume 20": "--resume 1 --steps 2"}
    wanted = {"checkpoints": "whole", "export": "step ", "diagnose": "", "--resume auto$": "this run has finished"}
    wanted["--resume 20 "] = "it goes on after step 1"
    for pattern, said in wanted.items():
        line = next(one for one in shown if re.search(pattern, one))
        for old, new in changes.items():
            line = line.replace(old, new)
        command = [sys.executable, "-m", "agent.cli", *line.split()[1:]]
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=ENV)
        assert done.returncode == 0 and said in done.stdout, (line, done.stdout, done.stderr)
    metrics = jsonl(run["root"] / "metrics.jsonl")
    assert [(one["step"], one["attempt"]) for one in metrics] == [(0, 1), (1, 1), (2, 2)]
