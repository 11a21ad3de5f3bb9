"""Run directory, progress events, display, summary."""

import errno
import io
import json
import os
import signal
from types import SimpleNamespace

import pytest
from rich.console import Console

from agent.training import supervise
from agent.training.display import Display, describe, duration, trend
from agent.training.progress import Follower, Progress
from agent.training.run import clean_up
from agent.training.rundir import RunDir, RunHeld, append_jsonl, read_jsonl, write_json
from agent.training.services import SECRETS
from agent.training.summary import latest_per_step, lines, sparkline, what_rose
from agent.training.supervise import scratch_note


def test_attempts_are_numbered_and_latest_follows(tmp_path):
    run = RunDir(tmp_path / "r")
    assert not run.exists()
    assert [run.new_attempt(), run.new_attempt()] == [1, 2]
    assert run.attempts() == [1, 2] and run.exists()
    assert (run.root / "attempts" / "latest").resolve() == run.attempt(2).resolve()


def test_one_supervisor_at_a_time(tmp_path):
    run = RunDir(tmp_path)
    with run.locked(), pytest.raises(RunHeld, match=f"^{os.getpid()}$"), RunDir(tmp_path).locked():
        pass
    with run.locked():
        pass


def test_what_a_killed_supervisor_left_is_removed(tmp_path):
    run = RunDir(tmp_path / "run")
    folder, scratch = run.attempt(run.new_attempt()), tmp_path / "mmqa-scratch"
    scratch.mkdir()
    for name in SECRETS:
        (folder / name).write_text("secret")
    scratch_note(folder).write_text(str(scratch))
    clean_up(run)
    assert not scratch.exists() and list(folder.iterdir()) == []


def test_a_line_cut_short_is_left_out(tmp_path):
    file = tmp_path / "m.jsonl"
    append_jsonl(file, {"step": 1})
    with file.open("a") as out:
        out.write('{"step": 2, "rew')
    assert read_jsonl(file) == [{"step": 1}] and read_jsonl(tmp_path / "none.jsonl") == []


def test_write_json_replaces_whole(tmp_path):
    write_json(tmp_path / "s.json", {"a": 1})
    write_json(tmp_path / "s.json", {"a": 2})
    assert json.loads((tmp_path / "s.json").read_text()) == {"a": 2}
    assert [one.name for one in tmp_path.iterdir()] == ["s.json"]


def test_a_status_that_cannot_be_written_stops_nothing(tmp_path, monkeypatch):
    status = supervise.Status(RunDir(tmp_path), 1, 9)

    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(supervise, "write_json", full)
        status.write("training", 3)
    assert status.problem == f"{tmp_path / 'status.json'}: No space left on device"
    status.write("training", 3)
    assert json.loads((tmp_path / "status.json").read_text())["step"] == 3


def test_the_follower_waits_for_whole_lines(tmp_path):
    file = tmp_path / "progress.jsonl"
    follower = Follower(file)
    assert list(follower.new()) == []
    Progress(file).emit("rollout", step=1, done=0, total=8)
    with file.open("a") as out:
        out.write('{"phase": "step", ')
    assert [event["phase"] for event in follower.new()] == ["rollout"]
    with file.open("a") as out:
        out.write('"step": 1}\n')
    assert [event["step"] for event in follower.new()] == [1]
    assert list(follower.new()) == []


def test_words_for_times_and_phases():
    assert [duration(s) for s in (0, 59.4, 61, 3599, 7500)] == [
        "0 s",
        "59 s",
        "1 min 01 s",
        "59 min 59 s",
        "2 h 05 min",
    ]
    assert describe({"phase": "rollout", "step": 3, "done": 5, "total": 64}, 40) == "step 3/40: rollouts 5/64"
    assert trend([0.1] * 5 + [0.5] * 5) == "0.10 -> 0.50" and trend([0.1] * 9) == ""


def test_a_log_shows_reward_trend_and_time_left():
    out = io.StringIO()
    display = Display(20, Console(file=out, force_terminal=False, width=200))
    for step in range(1, 11):
        display.event({"phase": "step", "step": step, "reward": step / 20, "seconds": 2.0})
    last = out.getvalue().splitlines()[-1]
    assert "step  10/20" in last and "reward 0.50" in last and "trend 0.15 -> 0.40" in last and "20 s left" in last


@pytest.mark.parametrize("terminal", [True, False])
def test_when_the_output_is_gone_the_run_goes_on_in_silence(terminal):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    display = Display(20, Console(file=Gone(), force_terminal=terminal, width=200))
    display.say("a line")
    display.event({"phase": "step", "step": 1, "reward": 0.5, "seconds": 2.0})
    display.waiting("the gateway")
    display.close()
    assert display.gone and display.rewards == [0.5]


def test_an_event_that_a_full_disk_cut_short_is_left_out(tmp_path):
    follower, progress = Follower(tmp_path / "p"), Progress(tmp_path / "p")
    progress.emit("step", step=1)
    with (tmp_path / "p").open("a") as file:
        file.write('{"phase": "sa')
    progress.emit("saved", step=1)  # it lands behind the half line, and is lost with it
    progress.emit("step", step=2)
    assert [(one["phase"], one["step"]) for one in follower.new()] == [("step", 1), ("step", 2)]


def test_an_error_of_the_supervisor_itself_is_noted_and_everything_is_ended(tmp_path, monkeypatch):
    run, stopped = RunDir(tmp_path), []
    services = SimpleNamespace(
        start_trainer=lambda: (_ for _ in ()).throw(BlockingIOError(errno.EAGAIN, "no process to be had")),
        stop=stopped.append,
    )
    monkeypatch.setattr(supervise, "Services", lambda *arguments: services)
    config = SimpleNamespace(
        trainer=SimpleNamespace(total_training_steps=40), mmqa=SimpleNamespace(backend="gpu", warm_start=False)
    )
    with pytest.raises(BlockingIOError):
        supervise.supervise(run, run.new_attempt(), config, Display(40, Console(file=io.StringIO())), 20)
    status = json.loads(run.status.read_text())
    assert (status["state"], status["step"]) == ("failed", 20) and "no process to be had" in status["reason"]
    assert stopped == [supervise.PATIENT_SECONDS] and not scratch_note(run.attempt(1)).exists()


@pytest.mark.parametrize(("before", "counted"), [(signal.SIG_DFL, 1), (signal.SIG_IGN, 0)])
def test_a_terminal_that_closes_asks_to_stop_unless_nohup_was_used(monkeypatch, before, counted):
    old = signal.signal(signal.SIGHUP, before)
    try:
        with supervise._Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert interrupt.count == counted
        assert signal.getsignal(signal.SIGHUP) == before
    finally:
        signal.signal(signal.SIGHUP, old)


def test_links_that_a_killed_export_or_evaluation_left_are_removed(tmp_path):
    run = RunDir(tmp_path)
    gone, here = run.root / ".export-999999999-a", run.root / f".export-{os.getpid()}-b"
    ended, held = RunDir(run.root / "evals/1"), RunDir(run.root / "evals/2")
    for folder in (gone, here, ended.root / "resharded", held.root / "resharded"):
        folder.mkdir(parents=True)
    with held.locked():
        clean_up(run)
    assert not gone.exists() and here.exists()
    assert not (ended.root / "resharded").exists() and (held.root / "resharded").exists()


def test_summary_takes_the_newest_attempt_of_a_step(tmp_path):
    run = RunDir(tmp_path)
    for step, attempt, reward in [(1, 1, 0.1), (2, 1, 0.2), (2, 2, 0.4), (3, 2, 0.9)]:
        append_jsonl(run.metrics, {"step": step, "attempt": attempt, "training/reward": reward})
    steps = latest_per_step(read_jsonl(run.metrics))
    assert [one["training/reward"] for one in steps] == [0.1, 0.4, 0.9]
    assert "first third 0.10, last third 0.90" in lines(run)[0]


def test_what_rose_keeps_form_and_seeing_apart():
    def at(seeing, form):
        return {"val/accuracy_any_form": seeing, "val/wanted_form": form}

    assert "what rose: the form of the answer  (" in what_rose(at(0.9, 0.5), at(0.91, 1.0))
    assert "what rose: the seeing  (" in what_rose(at(0.5, 1.0), at(0.8, 1.0))
    assert "the seeing and the form" in what_rose(at(0.5, 0.5), at(0.8, 1.0))
    assert "nothing clearly" in what_rose(at(0.5, 0.5), at(0.5, 0.5))


def test_sparkline():
    assert sparkline([]) == "" and sparkline([1, 1]) == "▁▁" and sparkline([0, 1]) == "▁█"
    assert len(sparkline(list(range(1000)), width=40)) == 40
