"""A second run beside the first: own ports, key, Ray and engine; the end of one does not touch the other."""

import json
import subprocess

import pytest
from small_run import SMALL, needs_engine, train

from agent.training.rundir import RunDir, read_jsonl

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    needs_engine,
]


def begin(root, steps):
    command = train(root, "--preset", "cpu", "--steps", str(steps), *SMALL)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_runs_side_by_side_do_not_notice_each_other(tmp_path):
    first, second = begin(tmp_path / "first", 12), begin(tmp_path / "second", 2)
    said = second.communicate(timeout=600)[0]
    assert second.returncode == 0, said
    said = first.communicate(timeout=600)[0]
    assert first.returncode == 0, said
    for name, steps in (("first", 12), ("second", 2)):
        run = RunDir(tmp_path / name)
        assert json.loads(run.status.read_text())["state"] == "finished"
        assert [one["step"] for one in read_jsonl(run.metrics)] == list(range(steps + 1))
    urls = {(tmp_path / name / "attempts/1/gateway.url").read_text() for name in ("first", "second")}
    assert len(urls) == 2
