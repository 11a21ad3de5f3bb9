"""Twenty faults against the real stack on the CPU: one run that is broken again and again, and goes on each time.

The tests of this file follow each other: each breaks the run in another way, looks at how it ended, leaves it to the
next one, which continues it with the same command. After each, no committed step is lost and nothing is left behind.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from small_run import ENV, HERE, ROLLOUTS, SMALL, needs_engine, processes_of, train

from agent.training.checkpoints import checkpoints
from agent.training.rundir import RunDir, read_jsonl

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    needs_engine,
]
SAVE_FREQ = 2
SETTINGS = (
    "mmqa.agent_class=faulty_agent.FaultyAgent",
    *SMALL,
    "actor_rollout_ref.actor.optim.lr=1e-5",
    f"trainer.save_freq={SAVE_FREQ}",
    "agentlightning.rollout_timeout_seconds=15",
)


class Broken:
    """The run under test; one attempt at a time."""

    def __init__(self, root):
        self.run, self.root, self.process = RunDir(root), root, None
        self.before = self.traces()

    @staticmethod
    def traces():
        """What runs could leave on the machine beside processes: shared memory, and files below /tmp."""
        temporary = {str(one) for one in Path(tempfile.gettempdir()).glob("mmqa-*")}
        sockets = {str(one) for one in Path("/tmp").glob("rl-colocate*")}
        return temporary | sockets | {str(one) for one in Path("/dev/shm").glob("*")}

    def start(self, *arguments):
        """The same command each time (``arguments``: further ones)."""
        command = train(self.root, "--resume", "auto")
        first = () if self.run.exists() else ("--preset", "cpu", "--steps", "60", *SETTINGS)
        env = {**ENV, "PYTHONPATH": f"{HERE}:{HERE / 'faulty_site'}"}
        self.out = self.root.parent / "out.txt"
        self.process = subprocess.Popen(
            [*command, *first, *arguments],
            stdout=self.out.open("w"),
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )
        self.attempt = (self.run.attempts() or [0])[-1] + 1

    def events(self):
        return read_jsonl(self.run.attempt(self.attempt) / "progress.jsonl")

    def until(self, found, seconds=240.0):
        deadline = time.monotonic() + seconds
        while not found():
            assert self.process.poll() is None and time.monotonic() < deadline, self.said() + str(self.events()[-5:])
            time.sleep(0.1)

    def until_step(self, more):
        """Until this attempt has made ``more`` steps."""
        self.until(lambda: sum(one["phase"] == "step" for one in self.events()) >= more)

    def until_phase(self, phase, what=None):
        last = lambda: (self.events() or [{"phase": None}])[-1]  # noqa: E731
        self.until(lambda: last()["phase"] == phase and what in (None, last().get("what")))

    def processes(self):
        return processes_of(self.root)

    def signal(self, part, number):
        """Send a signal to the processes whose command line or title holds ``part``."""
        found = [one for one in self.processes() if part in " ".join(one.cmdline())]
        assert found, [one.cmdline() for one in self.processes()]
        for one in found:
            with contextlib.suppress(psutil.Error):
                one.send_signal(number)

    def kill(self, part):
        self.signal(part, signal.SIGKILL)

    def ended(self, seconds=30.0):
        """Wait for the end; returns the exit code. Nothing may be left behind."""
        started = time.monotonic()
        code = self.process.wait(seconds + 60)
        took = time.monotonic() - started
        assert took < seconds, f"{took:.0f} s\n{self.said()}"
        assert self.processes() == []
        assert self.traces() - self.before == set()
        assert list(self.root.glob("attempts/*/*.key")) == [] and list(self.root.glob("attempts/*/*.token")) == []
        return code

    def said(self):
        return self.out.read_text()

    def status(self):
        return json.loads(self.run.status.read_text())

    def whole(self):
        return [one.step for one in checkpoints(self.run) if one.problem is None]

    def check_failed(self, *texts):
        """It failed, said why, and names the command and the step to go on from."""
        assert self.ended() == 1
        assert self.status()["state"] == "failed", self.said()
        said = self.said()
        for text in (*texts, f"go on from step {self.whole()[-1]}", "--resume auto", "/s/"):
            assert text in said, said
        assert "Traceback" not in said

    def check_going_on(self):
        """The attempt in progress began where the newest whole checkpoint was, and no step is lost or doubled."""
        began = next(one["resumed_from"] for one in self.events() if one.get("resumed_from"))
        steps = [one["step"] for one in read_jsonl(self.run.metrics)]
        assert steps == list(range(len(steps))), steps
        assert f"it goes on after step {began}" in self.said()
        return began


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    broken = Broken(tmp_path_factory.mktemp("faults") / "run")
    yield broken
    if broken.process and broken.process.poll() is None:
        os.killpg(broken.process.pid, signal.SIGTERM)
        broken.process.wait(60)


def test_agents_that_fail_in_every_way_cost_their_own_rollout(broken):
    """Faults 1-4, 17-20: agents, model calls, rewards, pictures. Then fault 5: the gateway is killed."""
    broken.start()
    broken.until_step(3)
    broken.kill("gateway_main")
    broken.check_failed("the gateway ended by signal 9")
    samples = [one for one in read_jsonl(broken.run.samples) if one["split"] == "train" and one["step"] <= 3]
    assert len(samples) == 3 * ROLLOUTS
    faults = broken.root / "faults"
    failed = " | ".join(str(one["error"]) for one in samples if one["state"] != "succeeded")
    for error in ("RewardError", "ZeroDivisionError", "subprocess timed out", "broken before its first call"):
        assert error in failed
    assert (faults / "worker-killed").exists() and "tried once more" in broken_log(broken, "controller")
    for name in ("image-outside", "image-by-dots", "image-by-link", "too-long"):
        assert "refused" in json.loads((faults / name).read_text()), (faults / name).read_text()
    assert {one.name for one in faults.glob("tenth-*")} == {"tenth-0", "tenth-1", "tenth-2"}
    assert any(one.get("calls", 0) > 1 for one in samples), "a call that failed was made again"
    metrics = [one for one in read_jsonl(broken.run.metrics) if one["step"] >= 1]
    assert sum(one["train/n_rollouts_failed"] for one in metrics) >= 6
    assert all(one["training/n_sample_trained"] == ROLLOUTS for one in metrics), "missing rows are filled"


def broken_log(broken, name, attempt="1"):
    return (broken.root / "attempts" / attempt / f"{name}.log").read_text()


def test_the_controller_is_killed(broken):
    """Fault 6."""
    broken.start()
    broken.until_step(1)
    assert broken.check_going_on() == 2
    broken.until_phase("rollout")
    broken.kill("agent.training.dispatch")
    broken.check_failed("the controller ended by signal 9")


def test_the_trainer_is_killed_in_an_update(broken):
    """Fault 7."""
    broken.start()
    broken.until_step(2)
    broken.check_going_on()
    broken.until_phase("training", "update")
    broken.kill("trainer_main")
    broken.check_failed("the trainer ended by signal 9")


def test_the_trainer_is_killed_in_a_save(broken):
    """Fault 8: what it leaves is torn, is named, and is not chosen."""
    (broken.root / "slow-save").touch()
    whole = broken.whole()
    broken.start()
    broken.until((broken.root / "saving-now").exists)
    (broken.root / "slow-save").unlink()
    broken.kill("trainer_main")
    assert broken.ended() == 1
    torn = [one for one in checkpoints(broken.run) if one.problem]
    assert [one.step for one in torn] == [whole[-1] + SAVE_FREQ] and broken.whole() == whole
    assert f"go on from step {whole[-1]}" in broken.said()


def test_the_engine_is_killed(broken):
    """Fault 9."""
    broken.start()
    broken.until_step(1)
    assert "is not whole and is left alone" in broken.said()
    broken.until_phase("rollout")
    number = re.findall(r"EngineCore pid=(\d+)", broken_log(broken, "trainer", "latest"))[-1]
    os.kill(int(number), signal.SIGKILL)
    broken.check_failed("the engine")
    assert broken.status()["symptom"] == "vllm-engine-dead"


def test_the_disk_is_full_in_a_save(broken):
    """Fault 12: the half-written checkpoint is named, and the last whole one stays."""
    (broken.root / "disk-full").touch()
    whole = broken.whole()
    broken.start()
    broken.until(lambda: broken.process.poll() is not None or any(one["phase"] == "failed" for one in broken.events()))
    (broken.root / "disk-full").unlink()
    broken.check_failed("No space left on device")
    assert broken.status()["symptom"] == "checkpoint-partial-or-disk-full" and broken.whole() == whole


def test_a_phase_that_hangs_is_named_and_everything_is_killed_at_once(broken):
    """The actor stands still for a minute. Then fault 10: the same command goes on."""
    broken.start()
    broken.until_step(SAVE_FREQ)
    broken.check_going_on()
    broken.until_phase("training", "update")
    broken.signal("WorkerDict", signal.SIGSTOP)
    try:
        broken.until(lambda: "no progress for" in broken.said())
    finally:
        broken.signal("WorkerDict", signal.SIGCONT)
    assert "it waits for the actor, see trainer.log" in broken.said() and "/s/no-progress/" in broken.said()
    assert "no progress for" in broken.status()["reason"]
    broken.until_step(SAVE_FREQ + 2)
    assert broken.status()["reason"] is None
    for process in [*broken.processes()]:
        with contextlib.suppress(Exception):
            process.kill()
    broken.process.kill()
    broken.process.wait()
    time.sleep(2.0)
    assert broken.processes() == []


def test_ctrl_c_once_finishes_the_step_and_saves(broken):
    """Fault 11."""
    broken.start()
    broken.until_step(1)
    broken.check_going_on()
    broken.until_phase("rollout")
    broken.process.send_signal(signal.SIGINT)
    assert broken.ended(60.0) == 1
    made = [one["step"] for one in broken.events() if one["phase"] == "step"]
    assert len(made) == 2 and broken.whole()[-1] == made[-1], broken.said()
    assert broken.status() | {"state": "stopped", "step": made[-1]} == broken.status()
    assert f"stopped after step {made[-1]}; go on from step {made[-1]}" in broken.said()


def test_a_torn_newest_checkpoint_is_passed_over_and_ctrl_c_twice_ends_at_once(broken):
    """Faults 13 and 11."""
    newest, before = broken.whole()[-1], broken.whole()[-2]
    shard = broken.run.checkpoints / f"global_step_{newest}" / "actor" / "optim_world_size_1_rank_0.pt"
    shard.write_bytes(shard.read_bytes()[:-1000])
    broken.start()
    broken.until_step(1)
    assert broken.check_going_on() == before and f"checkpoint of step {newest} is not whole" in broken.said()
    broken.until_phase("rollout")
    broken.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    broken.process.send_signal(signal.SIGINT)
    assert broken.ended() == 1 and broken.status()["state"] == "stopped"


def test_it_finishes_in_the_end_and_says_so_when_asked_again(broken):
    """The last attempt; then the command on a finished run, and one that asks for what cannot change."""
    target = broken.whole()[-1] + 2
    broken.start("--steps", str(target))
    broken.until_step(1)
    assert "changed: trainer.total_training_steps: 60 ->" in broken.said()
    assert broken.process.wait(200) == 0, broken.said()
    assert broken.processes() == [] and broken.status()["state"] == "finished"
    metrics = read_jsonl(broken.run.metrics)
    assert [one["step"] for one in metrics] == list(range(target + 1))
    attempts = [one["attempt"] for one in metrics]
    assert attempts == sorted(attempts) and len(set(attempts)) > 2
    rates = [one["actor/lr"] for one in metrics[1:6]]
    assert rates == pytest.approx([2e-6 * step for step in range(1, 6)]), "the warm-up went on where it was"
    samples = [one for one in read_jsonl(broken.run.samples) if one["split"] == "train"]
    assert len(samples) == target * ROLLOUTS
    broken.start("--steps", str(target))
    assert broken.process.wait(60) == 0 and "this run has finished" in broken.said()
    broken.start("mmqa.seed=7")
    assert broken.process.wait(60) == 2 and "mmqa.seed: 1 -> 7 cannot change" in broken.said()
