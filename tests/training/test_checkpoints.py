"""Which checkpoints are whole, which one is chosen, and what is exported."""

import errno
import json
import shutil
import subprocess
import zipfile

import pytest
import yaml

from agent.errors import InputError, RunFailed
from agent.training import export as export_module
from agent.training import saving
from agent.training.checkpoints import as_json, best, by_age, checkpoints, choose, open_run
from agent.training.export import export, own_dtype, pinned
from agent.training.rundir import RunDir, append_jsonl


def save(run, step, world_size=1, reward=None):
    """A checkpoint in verl's layout (torch.save writes zip files)."""
    folder = run.checkpoints / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    names = [
        f"actor/{k}_world_size_{world_size}_rank_{r}.pt"
        for k in ("model", "optim", "extra_state")
        for r in range(world_size)
    ]
    for name in [*names, "data.pt"]:
        with zipfile.ZipFile(folder / name, "w") as archive:
            archive.writestr("data", b"x" * 1000)
    if reward is not None:
        append_jsonl(run.metrics, {"step": step, "val/reward": reward})
    return folder


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path)
    run.new_attempt()
    return run


def test_whole_and_torn(run):
    save(run, 10, reward=0.9)
    save(run, 20, world_size=2, reward=0.5)
    torn = save(run, 30) / "actor" / "model_world_size_1_rank_0.pt"
    torn.write_bytes(torn.read_bytes()[:-30])
    (save(run, 40) / "data.pt").unlink()
    (run.checkpoints / "global_step_5" / "actor").mkdir(parents=True)
    found = {one.step: one for one in checkpoints(run)}
    assert list(found) == [5, 10, 20, 30, 40]
    assert found[10].problem is None and found[20].problem is None and found[20].world_size == 2
    assert found[30].problem == "actor/model_world_size_1_rank_0.pt is cut short"
    assert found[40].problem == "data.pt is missing" and str(found[5].problem).startswith("no model shard")
    assert choose(run, None).step == 20 and choose(run, "best").step == 10 and choose(run, "20").step == 20
    assert [one["step"] for one in json.loads(as_json(checkpoints(run)))] == [5, 10, 20, 30, 40]
    with pytest.raises(InputError, match=r"step 30: actor/model_world_size_1_rank_0\.pt is cut short"):
        choose(run, "30")
    with pytest.raises(InputError, match=r"no checkpoint of step 7; there are 10, 20, and best"):
        choose(run, "7")


def test_nothing_to_choose_from(run, tmp_path):
    with pytest.raises(InputError, match="no whole checkpoint"):
        choose(run, None)
    with pytest.raises(InputError, match="no run here"):
        open_run(tmp_path / "elsewhere")
    save(run, 3)
    with pytest.raises(InputError, match="no whole checkpoint has a validation reward"):
        choose(run, "best")


# -- manifests -------------------------------------------------------------------------------------------------------


def problems(run):
    return {one.step: one.problem for one in checkpoints(run)}


def test_with_manifests_an_unfinished_save_is_told(run):
    save(run, 10)
    save(run, 20)
    assert problems(run) == {10: None, 20: None}  # verl's own: none has a manifest
    saving.finish(run, 10, 1)
    assert problems(run) == {10: None, 20: "no manifest: the save did not finish"}
    with pytest.raises(InputError, match="step 20: no manifest: the save did not finish"):
        choose(run, "20")
    assert choose(run, None).step == 10


def test_from_before_manifests(run):
    """A run that was begun without them keeps what it has."""
    save(run, 10)
    (save(run, 20) / "data.pt").unlink()
    save(run, 30)
    saving.finish(run, 30, 2)
    save(run, 40)
    assert problems(run) == {10: None, 20: "data.pt is missing", 30: None, 40: "no manifest: the save did not finish"}


def test_what_a_manifest_tells(run):
    for step in (10, 20, 30, 40, 50, 60, 70):
        folder = save(run, step)
        (folder / "actor" / "fsdp_config.json").write_text("{}")
        saving.finish(run, step, 1)
    size = (run.checkpoints / "global_step_30" / "data.pt").stat().st_size
    where = {step: run.checkpoints / f"global_step_{step}" for step in problems(run)}
    (where[10] / "data.pt").unlink()
    (where[20] / "actor" / "fsdp_config.json").unlink()
    (where[30] / "data.pt").write_bytes(b"short")
    (where[40] / "manifest.json").write_text('{"schema": 1, "fi')
    (where[50] / "manifest.json").write_text('{"schema": 2, "shards": []}')
    (where[60] / "manifest.json").write_text("[]")
    found = problems(run)
    assert found[10] == "data.pt is missing" and found[20] == "actor/fsdp_config.json is missing"
    assert found[30] == f"data.pt has 5 bytes; {size} were saved"
    assert found[40].startswith("manifest.json is not readable (")
    assert found[50] == "manifest.json has schema 2; this version of mmqa reads 1"
    assert found[60] == "manifest.json is not one of this package" and found[70] is None


def test_newest_and_best(run):
    for step, attempt, reward in ((10, 1, 0.5), (20, 1, 0.7), (30, 1, 0.7), (15, 2, 0.1)):
        save(run, step, reward=reward)
        saving.finish(run, step, attempt)
    found = checkpoints(run)
    assert [one.step for one in found] == [10, 15, 20, 30]
    assert [one.step for one in by_age(found)] == [10, 20, 30, 15] and choose(run, None).step == 15
    assert best(found).step == choose(run, "best").step == 30


# -- export ----------------------------------------------------------------------------------------------------------


def began_with(run, folder, **config):
    """The run's configuration names a model folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    run.config.write_text(yaml.safe_dump({"actor_rollout_ref": {"model": {"path": str(folder)}}}))


def test_a_reward_that_is_no_number_is_null_for_a_machine(run):
    save(run, 10, reward=float("nan"))
    save(run, 20, reward=0.5)
    assert [one["reward"] for one in json.loads(as_json(checkpoints(run)))] == [None, 0.5]


def test_a_pinned_checkpoint_outlives_the_retention_of_its_run(run, tmp_path):
    save(run, 10)
    chosen = choose(run, None)
    pin = pinned(chosen, tmp_path / "pins")
    assert pin.name == "global_step_10" and (pin / "data.pt").stat().st_ino == (chosen.path / "data.pt").stat().st_ino
    shutil.rmtree(chosen.path)
    assert zipfile.is_zipfile(pin / "actor/model_world_size_1_rank_0.pt")
    with pytest.raises(InputError, match="step 10 was removed meanwhile: its run goes on"):
        pinned(chosen, tmp_path / "again")
    assert not (tmp_path / "again/global_step_10").exists()


def test_a_checkpoint_that_cannot_be_copied_is_not_called_removed(run, tmp_path, monkeypatch):
    save(run, 10)

    def full(*arguments, **keywords):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module.os, "link", full)
    monkeypatch.setattr(export_module.shutil, "copy2", full)
    with pytest.raises(RunFailed, match=r"cannot be read or copied to .*: .*No space left on device"):
        pinned(choose(run, None), tmp_path / "pins")
    assert not (tmp_path / "pins/global_step_10").exists()


FULL = "No space left on device"


@pytest.mark.parametrize(("text", "slug"), [(FULL, "checkpoint-partial-or-disk-full"), ("?", None)])
def test_an_export_that_fails_leaves_nothing_in_the_way(run, tmp_path, monkeypatch, text, slug):
    save(run, 10)
    out = tmp_path / "out"

    def merger(command, **keywords):
        out.mkdir()
        (out / "config.json").write_text("{}")
        return subprocess.CompletedProcess(command, 1, "", f"OSError: {text}\n")

    monkeypatch.setattr(export_module.subprocess, "run", merger)
    for _ in range(2):
        with pytest.raises(RunFailed, match="merger failed on step 10: OSError") as raised:
            export(run, out)
        assert raised.value.slug == slug and not out.exists() and not list(run.root.glob(".export-*"))


def test_own_dtype(run, tmp_path):
    assert own_dtype(run) == "bfloat16"
    began_with(run, tmp_path / "model", dtype="float32")
    assert own_dtype(run) == "float32"
    began_with(run, tmp_path / "model", torch_dtype="float16")
    assert own_dtype(run) == "float16"
    began_with(run, tmp_path / "model", text_config={"dtype": "float32"})
    assert own_dtype(run) == "float32"
    began_with(run, tmp_path / "model")
    assert own_dtype(run) == "bfloat16"
    run.config.write_text(yaml.safe_dump({"actor_rollout_ref": {"model": {"path": "owner/name-at-a-hub"}}}))
    assert own_dtype(run) == "bfloat16"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_export_has_the_models_own_dtype(run, tmp_path, dtype):
    """What is exported computes the actor's log-probs: exactly for a float32 model, rounded for a bfloat16 one."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("verl")
    transformers = pytest.importorskip("transformers")
    from agent.training import tiny_vlm

    folder = save(run, 10)
    tokenizer = tiny_vlm.build_tokenizer()
    actor = tiny_vlm.build_model(tokenizer, seed=5)
    torch.save(actor.state_dict(), folder / "actor" / "model_world_size_1_rank_0.pt")
    (folder / "actor" / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    actor.config.architectures = [type(actor).__name__]
    actor.config.save_pretrained(folder / "actor" / "huggingface")
    tiny_vlm.build_processor(tokenizer).save_pretrained(folder / "actor" / "huggingface")
    began_with(run, tmp_path / "model", dtype=dtype)
    saving.finish(run, 10, 1)

    assert export(run, tmp_path / "out").step == 10
    exported = transformers.Qwen2VLForConditionalGeneration.from_pretrained(tmp_path / "out", dtype="auto")
    assert str(exported.dtype) == f"torch.{dtype}"
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        log_probs = [model.float()(tokens).logits.log_softmax(-1) for model in (actor.eval(), exported.eval())]
    gap = (log_probs[0] - log_probs[1]).abs().max().item()
    assert gap == 0.0 if dtype == "float32" else 1e-3 < gap < 0.5
    with pytest.raises(InputError, match="not empty"):
        export(run, tmp_path / "out")


def test_export_says_why_the_merger_failed(run, tmp_path, monkeypatch):
    save(run, 10)
    failed = subprocess.CompletedProcess([], 1, "", "Traceback ...\nValueError: that\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: failed)
    with pytest.raises(RunFailed, match=r"verl's merger failed on step 10: ValueError: that"):
        export(run, tmp_path / "out")
