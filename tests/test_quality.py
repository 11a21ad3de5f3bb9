"""The code stays clean: ruff and pyright, and the rules of the project that they do not know."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PURE = ["agent/answers.py", "agent/rewards.py", "agent/prompts.py", "agent/tools.py", "agent/loop.py", "agent/chat.py"]


@pytest.mark.parametrize("command", [["ruff", "check"], ["ruff", "format", "--check"], ["pyright"]])
@pytest.mark.timeout(1200)
def test_linters_are_silent(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def tracked():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


def test_nothing_ends_processes_by_name():
    wrong = [
        file
        for file in tracked()
        if file.suffix in (".py", ".sh") and file != Path(__file__)
        if re.search(r"\b(pkill|killall)\b|ray stop", file.read_text(encoding="utf-8")) and "symptoms" not in file.parts
    ]
    assert wrong == []


def test_light_modules_import_no_heavy_package():
    code = (
        "import sys; import agent.loop, agent.symptoms, agent.caches.cache_safe_rollout, agent.answers, agent.rewards;"
        "heavy = {'torch', 'verl', 'vllm', 'ray', 'transformers', 'openai', 'numpy'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
