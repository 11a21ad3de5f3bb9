"""The in-process controller against Agent Lightning's real gateway, with agents that misbehave."""

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import httpx
import pytest

from agent.training import dispatch
from agent.training.dispatch import (
    DOORBELL_ENV,
    LOST,
    AlreadyServed,
    Dispatcher,
    ring,
    rollout_environ,
    sole_controller,
)
from agent.training.dispatch_pool import Job, Pool
from agent.training.dispatch_worker import agent_problem, load_class, wants_isolation

needs_gateway = pytest.mark.skipif(
    importlib.util.find_spec("agentlightning") is None, reason="starts the real gateway: needs the cpu or gpu extra"
)
HERE = Path(__file__).parent
KEY = "a-key-for-this-test"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Rig:
    """One gateway and one controller."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30, trust_env=False
        )
        self.env = {**os.environ, "AGL_KEY": KEY, "PYTHONPATH": f"{HERE}:{HERE.parents[1]}", "PYTHONUNBUFFERED": "1"}
        self.processes = []
        self.gateway = self.start_gateway()
        self.controller = None

    def spawn(self, name, *command, env=None):
        log = (self.folder / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, *command], env=self.env | (env or {}), stdout=log, stderr=log, start_new_session=True
        )
        self.processes.append(process)
        return process

    def start_gateway(self):
        process = self.spawn(
            "gateway",
            "-m",
            "agent.training.gateway_main",
            "host=127.0.0.1",
            f"port={self.port}",
            "key=${oc.env:AGL_KEY}",
            "default_proxy.model_name=m",
            f"hydra.run.dir={self.folder}",
            "hydra.output_subdir=null",
        )
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                self.client.get("/healthz")
                return process
            time.sleep(0.1)
        raise AssertionError("the gateway did not answer")

    def start_controller(self, slots=256, env=None, **constants):
        """Start it; ``constants`` replace module constants (shorter waits, smaller limits)."""
        code = "import sys; from agent.training import dispatch, dispatch_pool\n"
        for name, value in constants.items():
            code += f"setattr(dispatch if hasattr(dispatch, {name!r}) else dispatch_pool, {name!r}, {value!r})\n"
        code += f"if __name__ == '__main__': sys.exit(dispatch.main([{self.url!r}, '{slots}']))\n"
        script = self.folder / "controller_under_test.py"
        script.write_text(code)
        self.controller = self.spawn("controller", str(script), env=env)
        return self.controller

    def enqueue(self, agent, rows, timeout=30):
        body = [
            {
                "input": row,
                "rollout_id": uuid.uuid4().hex,
                "config": {
                    "timeout_seconds": timeout,
                    "local": {"agent_class": f"fake_agents.{agent}", "env_map": {"MMQA_ROW": "input"}},
                },
            }
            for row in rows
        ]
        return [one["rollout_id"] for one in self.client.post("/api/rollouts", json=body).json()]

    def status(self, rollout):
        return self.client.get(f"/api/rollouts/{rollout}").json()["rollout"]["status"]

    def wait(self, rollouts, seconds=60):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            states = [self.status(one) for one in rollouts]
            if all(one["state"] in ("succeeded", "failed") for one in states):
                return states
            time.sleep(0.05)
        raise AssertionError(f"not done after {seconds} s: {[one['state'] for one in states]}\n{self.log()}")

    def reward(self, rollout):
        events = self.client.get(f"/api/rollouts/{rollout}/events", params={"event_type": "reward"}).json()
        return events[-1]["data"]["value"] if events else None

    def log(self, name="controller"):
        return (self.folder / f"{name}.log").read_text()

    def close(self):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def rig(tmp_path):
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@needs_gateway
def test_rollouts_run_side_by_side_each_with_its_own_environment(rig):
    rig.start_controller()
    rollouts = rig.enqueue("Good", [{"id": str(i)} for i in range(40)])
    assert {one["state"] for one in rig.wait(rollouts)} == {"succeeded"}
    assert [rig.reward(one) for one in rollouts] == [float(i) for i in range(40)]
    lines = re.findall(r"\[rollout (\w+)\] I am (\d+) still", rig.log())
    assert sorted(lines) == sorted((rollout, str(i)) for i, rollout in enumerate(rollouts))


@needs_gateway
def test_rows_far_larger_than_a_sockets_buffer_arrive_whole(rig):
    rig.start_controller()
    rollouts = rig.enqueue("Good", [{"id": str(i), "picture": "x" * 3_000_000} for i in range(8)])
    assert {one["last_attempt_id"] for one in rig.wait(rollouts)} == {"0"}
    assert [rig.reward(one) for one in rollouts] == [float(i) for i in range(8)]
    assert "is lost" not in rig.log()


@needs_gateway
def test_a_new_rollout_starts_at_once(rig):
    rig.start_controller()
    rig.wait(rig.enqueue("Good", [{"id": "1"}]))
    waits = []
    for _ in range(5):
        rollout = rig.enqueue("Good", [{"id": "2"}])[0]
        enqueued = rig.status(rollout)["created_at"]
        rig.wait([rollout])
        waits.append(rig.status(rollout)["updated_at"] - enqueued)
    assert min(waits) < 0.5  # found, run and reported; the poll alone takes 0.03 s


@needs_gateway
def test_the_doorbell_makes_it_look_at_once(rig):
    bell = str(rig.folder / "bell")
    rig.start_controller(env={DOORBELL_ENV: bell}, QUIET_POLL_SECONDS=600.0)
    deadline = time.monotonic() + 20
    while not Path(bell).exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ring(bell)  # nothing waits: it looks and goes on
    time.sleep(1.0)
    rollouts = rig.enqueue("Good", [{"id": "1"}] * 3)
    ring(bell)
    assert {one["state"] for one in rig.wait(rollouts)} == {"succeeded"}
    rig.controller.terminate()
    assert rig.controller.wait(20) == 0
    assert not Path(bell).exists()
    ring(bell)  # nobody listens: no error


@needs_gateway
def test_errors_and_time_outs_are_told_as_upstream_tells_them(rig):
    rig.start_controller()
    raises, sleeps = rig.enqueue("Raises", [{"id": "1"}])[0], rig.enqueue("Sleeps", [{"id": "1"}], timeout=1)[0]
    odd = rig.client.post("/api/rollouts", json=[{"input": {}, "config": {"timeout_seconds": 5}}]).json()[0]
    told = [one["error_message"] for one in rig.wait([raises, sleeps, odd["rollout_id"]])]
    assert told[0] == "subprocess exited with code 1: ValueError: no such colour"
    assert told[1] == "local subprocess timed out"
    assert told[2].startswith("local subprocess spawn failed: ")
    assert f"[rollout {raises}] ValueError: no such colour" in rig.log()


@needs_gateway
def test_a_killed_worker_costs_nothing_but_one_more_try(rig, tmp_path):
    rig.start_controller()
    rollouts = rig.enqueue("KillsWorkerOnce", [{"id": str(i), "mark": str(tmp_path / "mark")} for i in range(6)])
    states = rig.wait(rollouts)
    assert {one["state"] for one in states} == {"succeeded"}
    assert {one["last_attempt_id"] for one in states} == {"0", "1"}
    assert [rig.reward(one) for one in rollouts] == [1.0] * 6
    failed = rig.wait(rig.enqueue("KillsWorkerAlways", [{"id": "0"}]))[0]
    assert failed["state"] == "failed" and failed["error_message"] == "subprocess exited with code -9"


@needs_gateway
def test_an_agent_that_blocks_its_loop_is_ended_and_others_go_on(rig):
    rig.start_controller(DEAF_SECONDS=3.0, PING_SECONDS=0.5)
    blocked = rig.enqueue("Blocks", [{"id": "0"}], timeout=60)[0]
    assert rig.wait([blocked], 40)[0]["state"] == "failed"
    assert {one["state"] for one in rig.wait(rig.enqueue("Good", [{"id": "1"}] * 4))} == {"succeeded"}


@needs_gateway
def test_a_worker_that_grows_is_recycled(rig):
    rig.start_controller(RECYCLE_BYTES=300_000_000, PING_SECONDS=0.2)
    for _ in range(6):
        rig.wait(rig.enqueue("Leaks", [{"id": "0"}] * 4))
        time.sleep(0.5)
    assert "is recycled: its memory reached" in rig.log()
    assert {one["state"] for one in rig.wait(rig.enqueue("Good", [{"id": "1"}]))} == {"succeeded"}


@needs_gateway
def test_agents_that_are_not_async_get_a_process_each(rig):
    rig.start_controller()
    rollouts = rig.enqueue("NotAsync", [{"id": "1"}, {"id": "2"}, {"id": "bad"}])
    states = rig.wait(rollouts)
    assert [one["state"] for one in states] == ["succeeded", "succeeded", "failed"]
    assert states[2]["error_message"] == "subprocess exited with code 3"
    assert len({rig.reward(one) for one in rollouts}) == 3, "three process ids"
    raised = rig.wait(rig.enqueue("NotAsyncRaises", [{"id": "1"}]))[0]
    assert raised["error_message"] == "subprocess exited with code 1: ValueError: no such shape"
    late = rig.wait(rig.enqueue("NotAsyncSleeps", [{"id": "1"}], timeout=1))[0]
    assert late["error_message"] == "local subprocess timed out"


@needs_gateway
def test_a_thousand_rollouts_at_once_are_taken_as_slots_allow(rig):
    rig.start_controller(slots=64)
    rollouts = rig.enqueue("Good", [{"id": str(i)} for i in range(1000)])
    most, deadline = 0, time.monotonic() + 400
    while time.monotonic() < deadline:
        running = rig.client.get("/api/rollouts", params={"state_in": "running", "limit": 2000}).json()
        most = max(most, len(running))
        if rig.client.get("/api/rollouts/terminal").json()["total_terminal"] == 1000:
            break
        time.sleep(0.2)
    assert 0 < most <= 64
    assert {rig.status(one)["state"] for one in rollouts} == {"succeeded"}


@needs_gateway
def test_a_restarted_gateway_is_noticed(rig):
    rig.start_controller(RECONCILE_SECONDS=0.3)
    rollout = rig.enqueue("Sleeps", [{"id": "0"}])[0]
    deadline = time.monotonic() + 20
    while rig.status(rollout)["state"] != "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(rig.gateway.pid, signal.SIGKILL)
    rig.gateway.wait()
    rig.gateway = rig.start_gateway()
    deadline = time.monotonic() + 20
    while "no longer running at the gateway (deleted, or it restarted)" not in rig.log():
        assert time.monotonic() < deadline, rig.log()
        time.sleep(0.1)
    assert {one["state"] for one in rig.wait(rig.enqueue("Good", [{"id": "1"}]))} == {"succeeded"}


@needs_gateway
def test_a_restarted_gateway_is_told_to_the_trainer(rig, monkeypatch):
    from agentlightning.verl.agl_rollout_manager import AglRolloutManager

    from agent.training import trainer

    monkeypatch.setattr(trainer, "CHECK_SECONDS", 0.3)

    class Owner:
        ended_seen = 0

        def report_rollouts(self, *told):
            if told[:2] == (0, 4):
                os.killpg(rig.gateway.pid, signal.SIGKILL)
                rig.gateway.wait()
                rig.gateway = rig.start_gateway()

        def check_engine(self):
            pass

    manager = trainer.watched_manager(AglRolloutManager, Owner())(
        agl_base_url=rig.url, agl_key=KEY, model="m", step=1, train_rollout_n=4, poll_interval_seconds=0.05
    )
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        manager.enqueue_and_wait_until_completed({"id": ["a"]}, is_train=True)


@needs_gateway
def test_a_stopped_controller_fails_what_runs_and_leaves_no_process(rig):
    controller = rig.start_controller()
    rollouts = rig.enqueue("Sleeps", [{"id": "0"}]) + rig.enqueue("NotAsyncSleeps", [{"id": "0"}])
    deadline = time.monotonic() + 20
    while {rig.status(one)["state"] for one in rollouts} != {"running"}:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    controller.terminate()
    assert controller.wait(20) == 0
    told = [one["error_message"] for one in rig.wait(rollouts)]
    assert told == ["local controller shutdown"] * 2
    psutil = pytest.importorskip("psutil")
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(rig.folder / "controller_under_test.py") in process.cmdline():
                left.append(process)
    assert left == []


@needs_gateway
def test_a_stop_while_rollouts_are_being_started_ends_too(rig):
    controller = rig.start_controller()
    rig.wait(rig.enqueue("Good", [{"id": "1"}]))
    rollouts = rig.enqueue("Sleeps", [{"id": "0"}] * 40) + rig.enqueue("NotAsyncSleeps", [{"id": "0"}] * 10)
    while not rig.client.get("/api/rollouts", params={"state_in": "running"}).json():
        time.sleep(0.01)
    controller.terminate()
    assert controller.wait(20) == 0
    states = [rig.status(one)["state"] for one in rollouts]
    assert "failed" in states and "running" not in states


def test_a_second_controller_refuses(rig_url="http://127.0.0.1:1"):
    with (
        sole_controller(rig_url),
        pytest.raises(AlreadyServed, match="another controller already serves"),
        sole_controller(rig_url),
    ):
        pass
    with sole_controller(rig_url):
        pass


def test_the_environment_is_that_of_agent_lightning():
    rollout = {
        "rollout_id": "r1",
        "is_train": False,
        "input": {"a": {"b": [1, "x"]}},
        "config": {"local": {"env_map": {"ALL": "input", "ONE": "input.a.b.1", "TWO": "input.a.b.0", "FIXED": "word"}}},
    }
    env = rollout_environ(rollout, "http://g", "k", 0)
    assert env["AGL_OPENAI_BASE_URL"] == "http://g/proxy/rollout/r1/attempt/0/mode/val/openai/v1"
    assert env["AGL_EVENT_URL"] == "http://g/api/rollouts/r1/attempt/0/events"
    assert (env["ALL"], env["ONE"], env["TWO"], env["FIXED"]) == ('{"a": {"b": [1, "x"]}}', "x", "1", "word")
    rollout["config"]["local"]["env_map"] = {"X": "input.a.c"}
    with pytest.raises(ValueError, match=r"local\.env_map path not found: input\.a\.c"):
        rollout_environ(rollout, "http://g", "k", 0)


def test_classes_are_found_and_judged():
    assert load_class("agent.loop:MultimodalQAAgent") is load_class("agent.loop.MultimodalQAAgent")
    assert not wants_isolation(load_class("agent.loop.MultimodalQAAgent"))
    with pytest.raises(TypeError, match="is not a class"):
        load_class("agent.loop.sample")


@needs_gateway
def test_a_rollout_that_runs_at_the_gateway_alone_is_ended(rig):
    """As after an answer that was lost, or a controller that was killed: the trainer must not wait for it for ever."""
    rollout = rig.enqueue("Good", [{"id": "1"}])[0]
    rig.client.patch(f"/api/rollouts/{rollout}", json={"status": {"state": "running"}}).raise_for_status()
    rig.start_controller(RECONCILE_SECONDS=0.3)
    others = rig.enqueue("Good", [{"id": "2"}] * 20)
    assert rig.wait([rollout])[0] | {"state": "failed", "error_message": LOST} == rig.status(rollout)
    assert {one["state"] for one in rig.wait(others)} == {"succeeded"}


def patched(answers):
    """What ``Dispatcher._patch`` makes of the gateway's ``answers``: status codes, None for a lost answer."""

    async def act():
        def answer(request):
            code = answers.pop(0)
            if code is None:
                raise httpx.ReadTimeout("lost")
            return httpx.Response(code)

        dispatcher = Dispatcher("http://127.0.0.1:1", "k", 4)
        dispatcher._client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://127.0.0.1:1")
        return await dispatcher._patch("r", "running", attempt=0)

    return asyncio.run(act())


@pytest.mark.parametrize(
    ("answers", "told"),
    [([200], True), ([None, 409], True), ([503, 200], True), ([409], False), ([404], False), ([500] * 4, False)],
)
def test_a_report_arrives_once_whatever_happens_to_its_answer(answers, told, monkeypatch):
    sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(0))
    assert patched(answers) is told and answers == []


def test_where_no_process_can_be_started_each_rollout_is_failed_and_the_pool_recovers(monkeypatch):
    async def act():
        ended = []
        pool = Pool(1, lambda job, error: ended.append((job.rollout, error)))
        pool.open()
        worker = pool._workers[0]
        environ = {name: "http://g/attempt/0/x" for name in ("AGL_OPENAI_BASE_URL", "AGL_EVENT_URL")}
        pool.start(Job("a", "fake_agents.Sleeps", environ, time.monotonic() + 60), isolated=False)

        def no_more(*arguments, **options):
            raise BlockingIOError(11, "Resource temporarily unavailable")

        with monkeypatch.context() as patch:
            patch.setattr(pool._context.Process, "start", no_more)
            worker.process.kill()
            while not ended:
                await asyncio.sleep(0.05)
            with pytest.raises(BlockingIOError):
                pool.start(Job("b", "fake_agents.Good", {}, 0.0), isolated=True)
        assert ended[0][0] == "a" and ended[0][1].startswith("local subprocess spawn failed: BlockingIOError")
        pool.start(Job("c", "no_such_module.Agent", {}, time.monotonic() + 60), isolated=False)
        while len(ended) < 2:
            await asyncio.sleep(0.05)
        assert ended[1][0] == "c" and "no_such_module" in ended[1][1]
        assert pool.close() == []

    asyncio.run(asyncio.wait_for(act(), 60))


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("agent.loop.MultimodalQAAgent", None),
        ("agent.rewards.Score", "it has no method run, so it is no agent"),
        ("agent.loop.sample", "TypeError: agent.loop.sample is not a class"),
        ("no_such_module.A", "ModuleNotFoundError"),
    ],
)
def test_a_controller_refuses_what_is_no_agent(path, problem, capsys):
    assert (agent_problem(path) or "").startswith(problem or "") and bool(agent_problem(path)) == bool(problem)
    if problem:
        assert dispatch.main(["http://127.0.0.1:1", "4", path]) == 2


def test_a_controller_whose_loop_fails_ends_instead_of_leaving_rollouts_waiting(monkeypatch):
    async def broken(self):
        raise RuntimeError("a bug")

    monkeypatch.setattr(Dispatcher, "_care_loop", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        asyncio.run(asyncio.wait_for(Dispatcher("http://127.0.0.1:1", "k", 4, workers=1).run(), 60))
