"""The trainer's process: ``python -m agent.training.trainer_main RUN_DIR GATEWAY_URL`` (started by ``services``)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from agent.training.progress import Progress
from agent.training.rundir import RunDir, read_jsonl
from agent.training.trainer import ATTEMPT_ENV


def prepare(config: Any, run: RunDir, url: str) -> Any:
    """What the run directory and this attempt decide in the configuration."""
    config.agentlightning.agl_base_url = url
    config.agentlightning.agl_key = ""  # kept in its file: verl prints the configuration
    config.trainer.default_local_dir = str(run.checkpoints)
    ray_init = config.ray_kwargs.ray_init
    ray_init.include_dashboard = False
    ray_init.runtime_env = {"worker_process_setup_hook": "agent.training.ray_setup.setup"}
    kwargs = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    kwargs.allowed_local_media_path = str(run.images)
    return config


def main(root: str, url: str) -> None:
    """Run Agent Lightning's ``run_ppo`` on the rows of the run directory."""
    run = RunDir(Path(root))
    progress = Progress(run.attempt(int(os.environ[ATTEMPT_ENV])) / "progress.jsonl")
    progress.emit("starting", what="loading libraries")
    from agent.training import cpu_backend

    if cpu_backend.requested():
        cpu_backend.install()
    from omegaconf import OmegaConf

    config = OmegaConf.load(run.config)
    OmegaConf.set_struct(config, False)
    prepare(config, run, url)
    from agentlightning.verl.entrypoint import run_ppo

    progress.emit("starting", what="Ray")
    run_ppo(config, train_dataset=read_jsonl(run.rows("train")), val_dataset=read_jsonl(run.rows("val")))


if __name__ == "__main__":
    main(*sys.argv[1:3])
