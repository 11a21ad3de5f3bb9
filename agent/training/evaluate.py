"""``mmqa eval``: how well a run's checkpoint, or a model folder, answers held-out questions. Nothing is trained.

The same gateway, controller, agent and engine as in training, with verl's ``trainer.val_only``: greedy answers, scored
by the run's own agent. What it writes is a run directory of its own (``RUN/evals/<n>``); the run itself is left alone.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image

from agent import tasks
from agent.errors import InputError, RunFailed, RunStopped
from agent.images import ImageStore, open_image
from agent.training import preflight, run
from agent.training import resume as resuming
from agent.training.checkpoints import choose
from agent.training.display import Display
from agent.training.export import pinned
from agent.training.resume import Start
from agent.training.rundir import RunDir, read_jsonl, write_json, write_jsonl, write_text
from agent.training.saving import SaveRefused
from agent.training.supervise import supervise
from agent.training.trainer import accuracy_metrics

SPLITS = ("val", "train")
_ROW_KEYS = tuple(f"mmqa.{key}=" for key in ("task", "data_root", "train_samples", "val_samples", "seed", "max_pixels"))
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
NOTHING_TRAINED = (
    "trainer.val_only=true",
    "trainer.val_before_train=true",
    "trainer.save_freq=-1",
    "trainer.test_freq=-1",
)


@dataclass(frozen=True)
class Evaluated:
    """What was measured. Shares are of the scored answers; ``low`` and ``high`` enclose ``right`` with 95 %."""

    target: str
    step: int  # of the checkpoint; 0: the model as it is
    split: str
    blank_images: bool
    scored: int
    failed: int  # rollouts without a score
    right: float  # in any form
    right_in_wanted_form: float
    wanted_form: float
    low: float
    high: float
    reward: float
    chance: float  # of the best constant answer; 0 if it is not known
    folder: str

    def line(self) -> str:
        """The result in one line for a person."""
        what = (
            "pictures blanked"
            if self.blank_images
            else "held-out pictures"
            if self.split == "val"
            else "train pictures"
        )
        chance = f"; a constant answer: {self.chance:.2f}" if self.chance else ""
        failed = f"; {self.failed} rollouts failed" if self.failed else ""
        return (
            f"{what}, {self.scored} questions: right {self.right:.2f} (95 %: {self.low:.2f} .. {self.high:.2f}), "
            f"right and in the wanted form {self.right_in_wanted_form:.2f}, reward {self.reward:.2f}{chance}{failed}"
        )


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """The score interval of a share of ``count`` trials, for z standard deviations (Wilson, JASA 22, 1927)."""
    if count == 0:
        return 0.0, 1.0
    middle = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, (middle - half) / (1 + z * z / count)), min(1.0, (middle + half) / (1 + z * z / count))


def evaluate(
    target: str,
    overrides: Sequence[str] = (),
    *,
    preset: str | None = None,
    step: str | None = None,
    split: str = "val",
    blank_images: bool = False,
    display: Display | None = None,
) -> Evaluated:
    """Evaluate a run directory (checkpoint ``step``, or "best"; the newest whole one if None) or a model.

    A model is a folder or a name of the hub, loaded with ``preset`` ("cpu" if None). Raises ``InputError`` before
    anything is started, ``RunFailed`` if the evaluation fails.
    """
    if split not in SPLITS:
        raise InputError(f"--split {split}: must be val (held out) or train")
    given = [*overrides, *NOTHING_TRAINED, *(["mmqa.blank_images=true"] if blank_images else [])]
    trained = RunDir(Path(target).absolute())
    if trained.exists():
        if preset is not None:
            raise InputError(f"--preset {preset}: {target} is a run and has its own configuration; leave it out")
        checkpoint = choose(trained, step)
        start, root = Start(checkpoint.step, checkpoint), _place(trained)
        config = run.plan("", given, saved=trained.config)
    else:
        if step is not None:
            raise InputError(f"--step {step}: {target} is no run directory, so it has no checkpoints")
        if Path(target).exists() and not (Path(target) / "config.json").is_file():
            raise InputError(f"{target}: neither a run directory nor a model's folder (no config.json in it)")
        if not Path(target).exists() and (preset is None or not _HUB_NAME.fullmatch(target)):
            raise InputError(
                f"{target}: no run directory and no model's folder here; for a model of the hub give its owner/name "
                "and --preset"
            )
        name = str(Path(target).absolute()) if Path(target).exists() else target
        start = Start()
        root = Path("runs").absolute() / f"eval-{Path(target).name}-{time.strftime('%Y%m%d-%H%M%S')}"
        config = run.plan(preset or "cpu", [*given, f"actor_rollout_ref.model.path={name}"])
    own = RunDir(root)
    kept = all(trained.rows(one).exists() for one in SPLITS) and not any(_decides_rows(one) for one in overrides)
    rows_of = trained if kept else None
    display = display or Display(int(config.trainer.total_training_steps))
    try:
        _measure(own, config, start, split, rows_of, display)
    except SaveRefused as error:  # the checkpoint of another number of GPUs could not be rewritten
        raise RunFailed(str(error), slug="checkpoint-partial-or-disk-full") from None
    finally:
        display.close()
    return _result(own, target, start.step, split, config)


def _place(trained: RunDir) -> Path:
    """Where an evaluation of a run writes: inside it, or below ``runs`` if nothing may be written there."""
    if os.access(trained.root, os.W_OK):
        return _next(trained.root / "evals")
    return _next(Path("runs").absolute() / f"eval-{trained.root.name}")


def _decides_rows(override: str) -> bool:
    return override.lstrip("+").startswith(_ROW_KEYS)


def take_rows(own: RunDir, trained: RunDir, blank: bool) -> None:
    """The rows that ``trained`` has, with its pictures (``blank``: white ones of their sizes) in ``own``'s store.

    Made anew they could be others: the folder they came from goes on living.
    """
    store = ImageStore(own.images)

    def taken(reference: str) -> str:
        source = trained.images / Path(reference).name  # the run may have been moved
        if blank:
            return store.put(Image.new("RGB", open_image(source).size, "white"))
        target = store.root / source.name
        if not target.exists():
            shutil.copyfile(source, target)
        return f"file://{target}"

    for split in SPLITS:
        rows = read_jsonl(trained.rows(split))
        write_jsonl(own.rows(split), [{**row, "images": [taken(one) for one in row["images"]]} for row in rows])


def _next(folder: Path) -> Path:
    """The first number that is free below ``folder``."""
    taken = [int(one.name) for one in folder.iterdir() if one.name.isdigit()] if folder.is_dir() else []
    return folder / str(max(taken, default=0) + 1)


def _measure(own: RunDir, config: Any, start: Start, split: str, rows_of: RunDir | None, display: Display) -> None:
    from omegaconf import OmegaConf

    preflight.check_machine(config, own.root)
    preflight.hazards(config, own.root)
    own.root.mkdir(parents=True)
    display.say(f"evaluating {f'step {start.step}' if start.checkpoint else config.actor_rollout_ref.model.path}")
    with own.locked():
        if start.checkpoint is not None:
            pin = pinned(start.checkpoint, own.root / "resharded" / "pinned")
            start = replace(start, checkpoint=replace(start.checkpoint, path=pin))
        if rows_of is not None:
            take_rows(own, rows_of, config.mmqa.blank_images)
        run.prepare(own, config, display)
        if split == "train":
            write_jsonl(own.rows("val"), read_jsonl(own.rows("train"))[: config.mmqa.val_samples])
        attempt = own.new_attempt()
        resuming.point_at(own, config, start, display.say)
        for place in (own.attempt(attempt) / "config.yaml", own.config):
            write_text(place, OmegaConf.to_yaml(config))
        write_json(own.versions, run.versions())
        outcome = supervise(own, attempt, config, display, start.step)
        run.clean_up(own)
    if outcome.state == "failed":
        logs = own.root / "attempts" / "latest"
        raise RunFailed(f"{outcome.reason}\n  logs: {logs}", slug=outcome.symptom)
    if outcome.state == "stopped":
        raise RunStopped("stopped before the evaluation was done")


def _result(own: RunDir, target: str, step: int, split: str, config: Any) -> Evaluated:
    samples = [one for one in read_jsonl(own.samples) if one["split"] == "val"]
    figures = accuracy_metrics(samples, "val")
    if not figures:
        raise RunFailed(f"no rollout was scored; see {own.samples}", slug="agent-exits-nonzero")
    scored = sum(one.get("correct") is not None for one in samples)
    right = figures["val/accuracy_any_form"]
    low, high = wilson(right, scored)
    rewards = [one["reward"] for one in samples if one.get("reward") is not None]
    return Evaluated(
        target=target,
        step=step,
        split=split,
        blank_images=bool(config.mmqa.blank_images),
        scored=scored,
        failed=len(samples) - scored,
        right=right,
        right_in_wanted_form=figures["val/accuracy_wanted_form"],
        wanted_form=figures["val/wanted_form"],
        low=low,
        high=high,
        reward=sum(rewards) / max(1, len(rewards)),
        chance=float(getattr(tasks.load(config.mmqa.task), "CHANCE", 0.0)),
        folder=str(own.root),
    )
