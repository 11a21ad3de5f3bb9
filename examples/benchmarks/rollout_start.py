"""CPU seconds of one rollout process under Agent Lightning's own controller: this project's agent and upstream's way.

    python examples/benchmarks/rollout_start.py [REPEATS]

Both run once a repeat, in turn, as agl-controller runs them, against an instant model server (a stub). What is measured
is the whole process: imports, one model call, its events. Prints the ratio with its spread.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from rigs import HERE, KEY, ratio, spread, stub_model

from agent.images import ImageStore, InlineImages

WORKER = (
    "import sys; from agentlightning.controller.local_reconciler import _run_local_reconciler_worker;"
    "sys.exit(_run_local_reconciler_worker(sys.argv[1]))"
)


def cpu_seconds(agent: str, env: dict[str, str]) -> float:
    """User and system time of one rollout process."""
    child = subprocess.Popen([sys.executable, "-c", WORKER, agent], env={**os.environ, **env})
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{agent} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


def main(repeats: int) -> None:
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as name, stub_model(Path(name)) as url:
        picture = Image.new("RGB", (84, 84), "white")
        reference = ImageStore(Path(name) / "images").put(picture)
        shared = {
            "AGL_OPENAI_BASE_URL": url,
            "AGL_EVENT_URL": url.removesuffix("/v1") + "/events",
            "AGL_KEY": KEY,
            "PYTHONPATH": str(HERE),
        }
        row = f'{{"question": "How many?", "images": ["{reference}"], "answer": "3"}}'
        our_env = shared | {"MMQA_ROW": row, "MMQA_IMAGE_ROOT": str(Path(name) / "images")}
        their_env = shared | {"IMAGE": InlineImages().put(picture), "QUESTION": "How many?", "ANSWER": "3"}
        for repeat in range(repeats + 1):
            pair = (
                cpu_seconds("agent.loop.MultimodalQAAgent", our_env),
                cpu_seconds("upstream_agent.UpstreamAgent", their_env),
            )
            if repeat:  # the first pair fills the file cache
                ours.append(pair[0])
                theirs.append(pair[1])
    print(f"this project's agent  {spread(ours)} s of CPU")
    print(f"upstream's way        {spread(theirs)} s of CPU")
    print(f"ratio                 {ratio(ours, theirs)}  ({repeats} repeats)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
