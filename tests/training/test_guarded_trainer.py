"""When the guarded trainer saves and stops, on a stand-in for Agent Lightning's trainer that keeps its loop's order."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

from agent.training import trainer
from agent.training.rundir import RunDir, read_jsonl, stop_file


class Tracking:
    def log(self, data, step, backend=None):
        pass


class StandIn:
    """agentlightning 1.0.2, ``AgentLightningRayPPOTrainer.fit``: the same calls in the same order, nothing behind."""

    def __init__(self, config, steps, on):
        self.config, self.total_training_steps, self.on = config, steps, on
        self.saved = []
        self.train_dataloader = [0] * 4  # steps in an epoch

    def fit(self):
        logger = module().Tracking()
        self.global_steps = 0
        self._load_checkpoint()
        logger.log(self._validate(), self.global_steps)
        self.global_steps = 1
        while self.global_steps <= self.total_training_steps:
            metrics, _ = self._train_step({}, False)
            last = self.global_steps >= self.total_training_steps
            if self.config.trainer.test_freq > 0 and (last or self.global_steps % self.config.trainer.test_freq == 0):
                metrics |= self._validate()
            if self.config.trainer.save_freq > 0 and (last or self.global_steps % self.config.trainer.save_freq == 0):
                self._save_checkpoint()
            logger.log(metrics, self.global_steps)
            if last:
                return
            self.global_steps += 1

    def _load_checkpoint(self):
        pass

    def _validate(self, merged=False):
        self.on(self, "validate")
        return {"val/reward": 0.25}

    def _train_step(self, timing, profile):
        self.on(self, "step")
        return {"training/reward": 0.5}, None

    def _save_checkpoint(self):
        self.on(self, "save")
        self.saved.append(self.global_steps)
        folder = trainer.RunDir(self.root).checkpoints / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)


def module():
    return sys.modules["agentlightning.verl.trainer"]


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Train, with Ctrl-C at the given moment; returns the trainer and the events of the attempt."""
    for name in ("agentlightning", "agentlightning.verl", "agentlightning.verl.trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(module(), "Tracking", Tracking, raising=False)
    for name in ("check_space", "begin", "finish"):
        monkeypatch.setattr(trainer.saving, name, lambda *arguments: None)
    monkeypatch.setattr(trainer.saving, "prune", lambda *arguments: [])
    run = RunDir(tmp_path / "run")
    folder = run.attempt(run.new_attempt())
    (folder / "key").write_text("k")
    monkeypatch.setenv(trainer.RUN_ENV, str(run.root))
    monkeypatch.setenv(trainer.ATTEMPT_ENV, "1")
    monkeypatch.setenv(trainer.KEY_ENV, str(folder / "key"))

    def train(moment=None, step=0, save_freq=2, test_freq=2):
        def on(one, what):
            if (what, one.global_steps) == (moment, step):
                stop_file(folder).touch()

        config = SimpleNamespace(
            trainer=SimpleNamespace(save_freq=save_freq, test_freq=test_freq, val_only=False),
            mmqa=SimpleNamespace(keep_checkpoints=2, keep_best=True),
            actor_rollout_ref=SimpleNamespace(model=SimpleNamespace(path="m")),
        )
        made = trainer.guarded(StandIn)(config, 6, on)
        made.root = run.root
        made.fit()
        return made, read_jsonl(folder / "progress.jsonl"), run

    return train


def test_undisturbed_it_saves_where_it_falls_due(fit):
    made, events, run = fit()
    assert made.saved == [2, 4, 6] and events[-1]["phase"] == "finished"
    assert read_jsonl(run.checkpoints / "global_step_2" / "metrics.json") == []  # indented, no JSON line
    assert '"val/reward": 0.25' in (run.checkpoints / "global_step_2" / "metrics.json").read_text()


def test_ctrl_c_in_the_first_validation_saves_nothing(fit):
    made, events, _ = fit("validate", 0)
    assert made.saved == [] and (events[-1]["phase"], events[-1]["step"]) == ("stopped", 0)


@pytest.mark.parametrize(("save_freq", "saved"), [(2, [2]), (3, [2]), (-1, [])])
def test_ctrl_c_in_a_later_validation_saves_once(fit, save_freq, saved):
    made, events, _ = fit("validate", 2, save_freq=save_freq)
    assert made.saved == saved and (events[-1]["phase"], events[-1]["step"]) == ("stopped", 2)


def test_ctrl_c_in_a_save_ends_after_it(fit):
    made, events, _ = fit("save", 2)
    assert made.saved == [2] and (events[-1]["phase"], events[-1]["step"]) == ("stopped", 2)


def test_ctrl_c_in_a_step_saves_that_step(fit):
    made, events, _ = fit("step", 3)
    assert made.saved == [2, 3] and (events[-1]["phase"], events[-1]["step"]) == ("stopped", 3)
