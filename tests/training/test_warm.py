"""The warm Python: what a fork does is what an ordinary Python would do, as its starter sees it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from agent.training import warm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def python(tmp_path_factory):
    """Path of a stand-in whose server has imported nothing but itself (and needs no Ray)."""
    folder = tmp_path_factory.mktemp("w")
    socket_path = warm.address(folder)
    code = "import sys; from agent.training import warm; warm.FIRST = warm.WITH_RAY = ()\n"
    code += "warm._wait_for_ray = lambda path: None\nsys.modules['warm_mark'] = warm\nwarm.main([sys.argv[1]])"
    log = (folder / "log").open("wb")
    server = subprocess.Popen([sys.executable, "-c", code, str(socket_path)], cwd=ROOT, stdout=log, stderr=log)
    os.environ[warm.PID_ENV] = str(server.pid)
    stand_in = warm.write_stand_in(folder / "python", socket_path)
    yield str(stand_in), server
    os.environ.pop(warm.PID_ENV)
    server.kill()
    server.wait()


def run(python, *arguments, **options):
    return subprocess.run([python[0], *arguments], capture_output=True, text=True, timeout=30, **options)


def test_arguments_folder_input_and_exit_code(python, tmp_path):
    code = "import sys, os; print(sys.argv, os.getcwd(), sys.stdin.read(), 'warm_mark' in sys.modules); sys.exit(7)"
    done = run(python, "-u", "-c", code, "a", "b", input="hello", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    assert done.stdout == f"['-c', 'a', 'b'] {tmp_path} hello True\n"


def test_environment_is_the_starters(python, monkeypatch):
    monkeypatch.setenv("ONLY_HERE", "yes")
    assert run(python, "-c", "import os; print(os.environ['ONLY_HERE'])").stdout == "yes\n"


def test_scripts_and_modules(python, tmp_path):
    script = tmp_path / "s.py"
    script.write_text("import sys\nif __name__ == '__main__': print('script', sys.argv[1:])\n")
    assert run(python, str(script), "x").stdout == "script ['x']\n"
    assert "usage" in run(python, "-m", "json.tool", "--help").stdout.lower()


def test_a_traceback_reaches_stderr(python):
    done = run(python, "-c", "1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_a_fork_that_is_killed_looks_killed(python):
    assert run(python, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)").returncode == -signal.SIGKILL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signals_to_the_stand_in_end_the_fork(python, number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    started = subprocess.Popen([python[0], "-c", code], stdout=subprocess.PIPE, text=True)
    fork = int(started.stdout.readline())
    assert fork != started.pid
    started.send_signal(number)
    assert started.wait(10) == -number
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            os.kill(fork, 0)
            time.sleep(0.05)
            continue
        return
    raise AssertionError("the fork outlived its stand-in")


def test_multiprocessing_spawn_goes_through_it(python, tmp_path):
    script = tmp_path / "spawn.py"
    script.write_text(
        "import multiprocessing as mp, sys\n"
        "def work(queue): queue.put('warm_mark' in sys.modules)\n"
        "if __name__ == '__main__':\n"
        "    mp.set_executable(sys.argv[1])\n"
        "    context = mp.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(queue,))\n"
        "    child.start(); print(queue.get(timeout=20)); child.join(); print(child.exitcode)\n"
    )
    done = subprocess.run([sys.executable, str(script), python[0]], capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n0\n", done.stderr


def test_without_a_server_it_is_an_ordinary_python(python):
    python[1].kill()
    python[1].wait()
    done = run(python, "-c", "import sys; print('warm_mark' in sys.modules)")
    assert done.stdout == "False\n" and done.returncode == 0
