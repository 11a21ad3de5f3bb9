"""The trainer's process: ``python -m agent.training.trainer_main RUN_DIR`` (started by ``services``)."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from agent.training import cpu_backend, warm
from agent.training.progress import Progress
from agent.training.rundir import RunDir, read_jsonl
from agent.training.trainer import ATTEMPT_ENV


def prepare(config: Any, run: RunDir) -> None:
    """What the run directory and this attempt decide in the configuration."""
    config.agentlightning.agl_key = ""  # kept in its file: verl prints the configuration
    config.trainer.default_local_dir = str(run.checkpoints)
    ray_init = config.ray_kwargs.ray_init
    ray_init.include_dashboard = False
    ray_init.runtime_env = {"worker_process_setup_hook": "agent.training.ray_setup.setup"}
    kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    kwargs.allowed_local_media_path = str(run.images.resolve())  # vLLM resolves a reference before it compares


def gateway_url(run: RunDir, attempt: int) -> str:
    """The gateway's address, as soon as the supervisor has found it healthy (it ends this process if it never is)."""
    file = run.attempt(attempt) / "gateway.url"
    while not file.exists() or not (url := file.read_text()):
        time.sleep(0.1)
    return url


def start_ray(config: Any) -> None:
    """Start Ray now, with what ``run_ppo`` would pass, so that it comes up while the stack is still being imported."""
    import ray
    from omegaconf import OmegaConf

    arguments: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    arguments["runtime_env"]["py_executable"] = os.environ[warm.PYTHON_ENV]
    try:
        ray.init(_temp_dir=os.environ["RAY_TMPDIR"], **arguments)
    except Exception as error:  # Ray gives its node 30 s, which a machine busy with other work can miss
        if "timed out during startup" not in str(error):
            raise
        print("mmqa: Ray's node did not come up in time; once more", flush=True)
        ray.shutdown()
        ray.init(_temp_dir=os.environ["RAY_TMPDIR"], **arguments)
    warm.tell_ray(warm.address(Path(os.environ["RAY_TMPDIR"])))


def main(root: str) -> None:
    """Run Agent Lightning's ``run_ppo`` on the rows of the run directory."""
    run, attempt = RunDir(Path(root)), int(os.environ[ATTEMPT_ENV])
    progress = Progress(run.attempt(attempt) / "progress.jsonl")
    progress.emit("starting", what="loading libraries, Ray")
    from omegaconf import OmegaConf

    config = OmegaConf.load(run.attempt(attempt) / "config.yaml")
    OmegaConf.set_struct(config, False)
    prepare(config, run)
    if cpu_backend.requested():
        cpu_backend.install()
    if os.environ.get(warm.PYTHON_ENV):
        start_ray(config)
    from agentlightning.verl.entrypoint import run_ppo

    config.agentlightning.agl_base_url = gateway_url(run, attempt)
    progress.emit("starting", what="the task runner")
    run_ppo(config, train_dataset=read_jsonl(run.rows("train")), val_dataset=read_jsonl(run.rows("val")))


if __name__ == "__main__":
    main(sys.argv[1])
