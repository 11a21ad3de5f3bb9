"""Agent Lightning's trainer with guards around it: a subclass made at start-up, in the process that runs it.

The guards do what the stock trainer leaves out: failed rollouts are not trained on, a missing row does not skip the
step, the first step proves that the pictures reach the actor, the gap between the engine's and the actor's log-probs is
a metric of each step, and every phase, metric and sample is written to the run directory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from agent.training import data_order, dispatch, image_proof, rows, saving
from agent.training.progress import Progress
from agent.training.rundir import STEP_METRICS, RunDir, append_jsonl, stop_file, write_json

CHECK_SECONDS = 5.0  # without a rollout that ended, before gateway and engine are looked at
RUN_ENV, ATTEMPT_ENV, KEY_ENV = "MMQA_RUN_DIR", "MMQA_ATTEMPT", "MMQA_KEY_FILE"


class TrainingStopped(RuntimeError):
    """The guards stopped the run; the message says why in one line, ``symptom`` names its page if there is one."""

    def __init__(self, message: str, symptom: str | None = None) -> None:
        super().__init__(message)
        self.symptom = symptom


def accuracy_metrics(samples: Sequence[dict[str, Any]], prefix: str) -> dict[str, float]:
    """Accuracy over the samples that were scored: in any form (seeing) and in the wanted form (seeing and form)."""
    scored = [one for one in samples if one.get("correct") is not None]
    if not scored:
        return {}
    correct = sum(bool(one["correct"]) for one in scored)
    wanted = sum(bool(one["correct"]) and one["form"] == "tagged" for one in scored)
    tagged = sum(one["form"] == "tagged" for one in scored)
    return {
        f"{prefix}/accuracy_any_form": correct / len(scored),
        f"{prefix}/accuracy_wanted_form": wanted / len(scored),
        f"{prefix}/wanted_form": tagged / len(scored),
    }


def sample_of(completed: Any) -> dict[str, Any]:
    """What ``samples.jsonl`` keeps of one completed rollout: its sample event, state and reward."""
    events = [event["data"] for event in completed.events if event["event_type"] == "sample"]
    return {
        "rollout_id": completed.rollout_id,
        "group": completed.data_id,
        "state": str(completed.rollout_state.value) if completed.rollout_state else None,
        "reward": completed.final_reward,
        **{key: value for key, value in (events[-1] if events else {}).items() if key != "reward"},
        **({} if events else {"error": completed.error_message}),
    }


def watched_manager(base: type, owner: Any) -> type:
    """Agent Lightning's rollout manager, reporting to ``owner``: counts, samples, and which rollouts may be trained.

    The stock one asks for each pending rollout in each round; with hundreds of them that keeps the gateway from its
    work. This one follows the gateway's list of ended rollouts instead (``owner.ended_seen`` is the place in it).
    """

    class WatchedManager(base):  # type: ignore[misc]
        def enqueue_and_wait_until_completed(self, data: dict[str, Any], *, is_train: bool) -> list[Any]:
            enqueued = self._create_rollouts(data, is_train=is_train)
            dispatch.ring()
            pending = {one.rollout_id: one for one in enqueued}
            completed: list[Any] = []
            checked = time.monotonic()
            owner.report_rollouts(0, len(enqueued), is_train)
            while pending:
                ended = [pending.pop(rollout) for rollout in self._newly_ended() if rollout in pending]
                for one in ended:
                    completed.append(self._complete(one))
                    owner.report_rollouts(len(completed), len(enqueued), is_train)
                if ended:
                    checked = time.monotonic()
                    continue
                if time.monotonic() - checked > CHECK_SECONDS:
                    checked = time.monotonic()
                    self._get_rollout(next(iter(pending)))  # raises if the gateway has lost it (restarted)
                    owner.check_engine()
                time.sleep(self._poll_interval_seconds)
            return owner.on_completed(completed, is_train)

        def _newly_ended(self) -> list[str]:
            response = self.client.get("/api/rollouts/terminal", params={"after": owner.ended_seen})
            response.raise_for_status()
            page = response.json()
            owner.ended_seen = page["next_after"]
            return [item["rollout_id"] for item in page["items"]]

        def _complete(self, enqueued: Any) -> Any:
            rollout = self._get_rollout(enqueued.rollout_id)
            self._record_lifecycle_timestamps(enqueued, rollout)
            if rollout.status.state == "succeeded":
                self._run_succeeded_hook(rollout)
            else:
                self._run_failed_hook(rollout)
            completed = self._build_completed_rollout(enqueued, rollout)
            self._delete_rollout(enqueued.rollout_id)
            return completed

    return WatchedManager


def metrics_line(data: dict[str, Any], step: int, attempt: int) -> dict[str, Any]:
    """One object of ``metrics.jsonl``: the figures among ``data``."""
    figures = {key: value for key, value in data.items() if isinstance(value, int | float)}
    figures |= {key: value.item() for key, value in data.items() if hasattr(value, "item") and value.size == 1}
    return {"step": step, "attempt": attempt, "time": round(time.time(), 3), **figures}


def run_tracking(base: type, run: RunDir, attempt: int) -> type:
    """verl's ``Tracking`` that also appends each step to ``metrics.jsonl``.

    verl's own "file" logger empties its file on resume; this one never does.
    """

    class RunTracking(base):  # type: ignore[misc]
        def log(self, data: dict[str, Any], step: int, backend: Any = None) -> None:
            append_jsonl(run.metrics, metrics_line(data, step, attempt))
            super().log(data, step, backend)

    return RunTracking


def guarded(base: type) -> type:
    """Return the guarded subclass of Agent Lightning's ``AgentLightningRayPPOTrainer``."""
    run, attempt = RunDir(Path(os.environ[RUN_ENV])), int(os.environ[ATTEMPT_ENV])
    key = Path(os.environ[KEY_ENV]).read_text().strip()
    progress = Progress(run.attempt(attempt) / "progress.jsonl")
    import agentlightning.verl.trainer as module

    module.Tracking = run_tracking(module.Tracking, run, attempt)  # type: ignore[misc]

    class GuardedTrainer(base):  # type: ignore[misc]
        def init_workers(self) -> None:
            progress.emit("starting", what="loading the actor and the engine")
            super().init_workers()
            progress.emit("starting", what="first refit")

        def fit(self) -> None:
            self._proved = False
            self.ended_seen = 0  # how much of the gateway's list of ended rollouts was read
            self._figures: dict[str, Any] = {}
            self._made = 0  # the newest step that this attempt has made
            self._line: dict[str, Any] = {}  # its line of metrics.jsonl
            wanted = self.total_training_steps
            try:
                super().fit()
            except Exception as error:
                cause = getattr(error, "cause", None) or error  # Ray wraps what a worker raised, traceback and all
                reason = f"{type(cause).__name__}: {cause}".splitlines()[0][:500]
                progress.emit("failed", reason=reason, symptom=getattr(error, "symptom", None))
                raise
            step = self._made or self._began
            progress.emit("stopped" if step < wanted and self._asked_to_stop() else "finished", step=step)

        def _asked_to_stop(self) -> bool:
            return stop_file(run.attempt(attempt)).exists()

        # -- rollouts -------------------------------------------------------------------------------------------

        def _make_rollout_manager(self, manager_cls: type) -> Any:
            settings = self.config.agentlightning
            return watched_manager(manager_cls, self)(
                agl_base_url=settings.agl_base_url,
                agl_key=key,  # from its file: verl prints the whole configuration into the log
                model=self.config.actor_rollout_ref.model.path,
                step=self.global_steps,
                train_rollout_n=self.config.actor_rollout_ref.rollout.n,
                rollout_timeout_seconds=settings.rollout_timeout_seconds,
                poll_interval_seconds=self.config.mmqa.poll_interval_seconds,
                hooks=self._ensure_hooks(),
                local_agent_class=settings.local.agent_class,
                local_env_map=settings.local.env_map,
                k8s_job_template_path=settings.k8s.job_template_path,
            )

        def check_engine(self) -> None:
            """Stop if an engine is dead: gateway and agents would try again for minutes, rollout after rollout."""
            for address in self.llm_server_manager.get_addresses():
                try:
                    status = httpx.get(f"http://{address}/health", timeout=10.0, trust_env=False).status_code
                except httpx.TimeoutException:
                    continue  # busy
                except httpx.TransportError as error:
                    status = type(error).__name__
                if status != 200:
                    said = f"step {self.global_steps}: the engine at {address} is dead ({status})"
                    raise TrainingStopped(said, "vllm-engine-dead")

        def report_rollouts(self, done: int, total: int, is_train: bool) -> None:
            if done in (0, total) or time.monotonic() - self._reported > 1:
                self._reported = time.monotonic()
                phase = "rollout" if is_train else "validating"
                progress.emit(phase, step=self.global_steps, done=done, total=total)

        def on_completed(self, completed: list[Any], is_train: bool) -> list[Any]:
            """Write the samples and leave FAILED rollouts out of training (validation counts them as reward 0)."""
            taken = [sample_of(one) for one in completed]
            split = "train" if is_train else "val"
            for one in taken:
                append_jsonl(run.samples, {"step": self.global_steps, "attempt": attempt, "split": split, **one})
            failed = [one for one in taken if one["state"] != "succeeded"]
            self._figures |= accuracy_metrics(taken, split)
            self._figures[f"{split}/n_rollouts_failed"] = len(failed)
            if not is_train:
                return completed
            self._with_images = sum(bool((one.input or {}).get("images")) for one in completed)
            survivors = [one for one, seen in zip(completed, taken, strict=True) if seen["state"] == "succeeded"]
            rewards = [one.final_reward for one in survivors if one.final_reward is not None]
            self._figures["training/reward_of_survivors"] = sum(rewards) / max(1, len(rewards))
            if len(failed) > self.config.mmqa.max_failed_rollouts * len(completed):
                reason = next((one["error"] for one in failed if one.get("error")), "no error message was recorded")
                raise TrainingStopped(
                    f"step {self.global_steps}: {len(failed)} of {len(completed)} rollouts failed; "
                    f"the first one says: {reason}",
                    "agent-exits-nonzero",
                )
            return survivors

        def _rollout(self, gen_batch: Any, is_train: bool) -> tuple[Any, dict[str, Any]]:
            self._reported = 0.0
            batch, metrics = super()._rollout(gen_batch, is_train)
            if is_train:
                size = self.config.actor_rollout_ref.rollout.n
                batch, counts = rows.settle(batch, self.config.actor_rollout_ref.actor.ppo_mini_batch_size * size, size)
                metrics |= counts
            return batch, metrics

        def _validate(self, merged: bool = False) -> dict[str, Any]:
            metrics = super()._validate(merged)
            figures = {name: value for name, value in self._figures.items() if name.startswith("val/")}
            progress.emit("validated", step=self.global_steps, reward=metrics.get("val/reward"), **figures)
            made = self._made == self.global_steps > 0
            if made:
                self._line |= metrics_line({**metrics, **figures}, self.global_steps, attempt)
            if self._asked_to_stop() and self.total_training_steps > self.global_steps:
                self.total_training_steps = self.global_steps
                often = self.config.trainer.save_freq
                if made and often > 0 and self.global_steps % often:
                    self._save_checkpoint()  # the loop saves by itself only where save_freq falls due
            return {**metrics, **figures}

        # -- one step -------------------------------------------------------------------------------------------

        def _train_step(self, timing_raw: dict[str, float], curr_step_profile: bool) -> Any:
            self._figures = {}
            self._step_started = time.monotonic()
            result = super()._train_step(timing_raw, curr_step_profile)
            if result is None:
                said = f"step {self.global_steps}: no row was left to train on; see samples.jsonl"
                raise TrainingStopped(said, "zero-training-rows")
            metrics, batch = result
            metrics |= self._figures
            self._made = self.global_steps
            self._line = metrics_line(metrics, self.global_steps, attempt)
            progress.emit(
                "step",
                step=self.global_steps,
                seconds=round(time.monotonic() - self._step_started, 2),
                reward=metrics.get("training/reward"),
                timing={name: round(value, 2) for name, value in timing_raw.items()},
                **{name: self._figures.get(name) for name in ("training/logprob_gap_mean", "train/accuracy_any_form")},
            )
            if self._asked_to_stop():  # the loop takes this step for the last one: it saves, and ends
                self.total_training_steps = self.global_steps
                self.config.trainer.test_freq = -1
            return metrics, batch

        def _compute_old_log_prob(self, batch: Any) -> Any:
            progress.emit("training", step=self.global_steps, what="log-probs")
            result = super()._compute_old_log_prob(batch)
            self._figures |= image_proof.logprob_gap(batch, result[0].batch["old_log_probs"])
            if not self._proved:
                self._prove_images(batch, result[0].batch["old_log_probs"])
                self._proved = True
            return result

        def _prove_images(self, batch: Any, log_probs: Any) -> None:
            shown = image_proof.count_vision_rows(batch)
            proof: dict[str, Any] = {"step": self.global_steps, "rows": len(batch), **shown, **self._figures}
            if self._with_images and shown["rows_with_pixels"]:
                blank, _ = super()._compute_old_log_prob(image_proof.without_pixels(batch))
                proof |= image_proof.shift(batch, log_probs, blank.batch["old_log_probs"])
            write_json(run.attempt(attempt) / "image_proof.json", proof)
            problem = image_proof.problem(proof, bool(self._with_images), self.config.mmqa.max_logprob_gap)
            if problem:
                blind = "pixel" in problem
                raise TrainingStopped(problem, "images-not-in-training" if blind else "logprob-mismatch-unwatched")
            print(f"mmqa: pictures reach the actor: {proof}")

        def _update_actor(self, batch: Any) -> Any:
            progress.emit("training", step=self.global_steps, what="update")
            return super()._update_actor(batch)

        # -- checkpoints ----------------------------------------------------------------------------------------

        def _save_checkpoint(self) -> None:
            """Save, verify, and then let older checkpoints go; a save that would not fit is not begun."""
            step, keep = self.global_steps, self.config.mmqa.keep_checkpoints
            progress.emit("saving", step=step)
            started = time.monotonic()
            try:
                saving.check_space(run, self.config.actor_rollout_ref.model.path)
                saving.begin(run, step)
                super()._save_checkpoint()
                # the loop logs the step after it has saved it: if it is killed in between, the line is not lost
                write_json(run.checkpoints / f"global_step_{step}" / STEP_METRICS, self._line)
                written = time.monotonic()
                saving.finish(run, step, attempt)
                removed = saving.prune(run, keep, self.config.mmqa.keep_best)
            except saving.SaveRefused as error:
                raise TrainingStopped(f"step {step}: {error}", "checkpoint-partial-or-disk-full") from error
            ended = time.monotonic()
            progress.emit(
                "saved",
                step=step,
                seconds=round(ended - started, 2),
                verify_seconds=round(ended - written, 3),
                removed=removed,
            )
            if self._asked_to_stop():
                self.total_training_steps = min(self.total_training_steps, step)

        def _load_checkpoint(self) -> Any:
            result = super()._load_checkpoint()
            self._began = self.global_steps
            settings = self.config.trainer
            if not settings.val_only and data_order.ends_epoch(self.global_steps, len(self.train_dataloader)):
                self._restore_order(Path(settings.resume_from_path) / "data.pt")
            progress.emit("starting", what="refit", step=self.global_steps, resumed_from=self.global_steps or None)
            return result

        def _restore_order(self, file: Path) -> None:
            import torch

            data_order.go_on(self.train_dataloader, torch.load(file, weights_only=False))
            print(f"mmqa: the order of the data goes on from {file}, though verl left it unread")

    return GuardedTrainer
