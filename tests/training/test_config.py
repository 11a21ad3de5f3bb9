"""Presets compose, unknown keys are named, wrong values are one line."""

import importlib.util

import pytest
import yaml

from agent.errors import InputError
from agent.training import config as configs
from agent.training import preflight, run, schema

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("agentlightning") is None or importlib.util.find_spec("verl") is None,
    reason="composes the installed stack's defaults: needs the cpu or gpu extra",
)


@pytest.mark.parametrize("preset", configs.preset_names())
def test_every_preset_composes_and_fits_together(preset):
    config = configs.compose(preset)
    preflight.check_batch(config)
    assert config.agentlightning.trace_aggregator.level == "transition"
    assert config.actor_rollout_ref.rollout.n >= 2
    assert config.trainer.save_freq > 0, "a preset without checkpoints leaves nothing to resume"
    assert "wandb" not in config.trainer.logger


@pytest.mark.parametrize("preset", configs.preset_names())
@pytest.mark.parametrize("version", ["0.16.0", "0.17.1", "0.21.0", "0.22.1"])
def test_every_preset_uses_the_cache_safe_settings(preset, version):
    rollout = configs.compose(preset, vllm_version=version).actor_rollout_ref.rollout
    affected = version in ("0.17.1", "0.21.0")
    assert (rollout.engine_kwargs.vllm.get("mm_processor_cache_gb") == 0) == affected
    assert rollout.enable_prefix_caching is not affected


def test_an_override_wins_over_the_cache_safe_settings():
    given = ["actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb=4"]
    config = configs.compose("cpu", given, vllm_version="0.21.0")
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.mm_processor_cache_gb == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batchsize=8", r"unknown key data\.train_batchsize .*data\.train_batch_size"),
        ("actor_rollout_ref.rolout.n=4", r"unknown key actor_rollout_ref\.rolout .*actor_rollout_ref\.rollout"),
        ("mmqa.tsak=digits", r"mmqa\.tsak .*mmqa\.task"),
        ("rollout.n=4", r"unknown key rollout .*actor_rollout_ref\.rollout"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.mm_procesor_cache_gb=0", r"mm_processor_cache_gb"),
        (
            "actor_rollout_ref.actor.optim.learning_rate=1",
            r"unknown key actor_rollout_ref\.actor\.optim\.learning_rate",
        ),
        ("data.train_batch_size", "not of the form key=value"),
        ("=3", "not of the form key=value"),
        ("data..x=3", "not of the form key=value"),
        ("data.seed=[1", "not valid YAML"),
        ("data.train_batch_size=eight", "expected int"),
        ("data.train_batch_size=8.5", "expected int"),
        ("data.shuffle=3", "expected bool"),
        ("trainer.total_training_steps=0", "at least 1"),
        ("data.train_batch_size=9", "not a multiple"),
        ("actor_rollout_ref.rollout.n=1", "at least 2"),
        ("mmqa.train_samples=4", "no batch at all"),
        ("mmqa.task=circle", "did you mean circles"),
        ("mmqa.backend=tpu", "must be cpu or gpu"),
        ("actor_rollout_ref.rollout.max_model_len=10", "smaller than"),
        ("mmqa.agent.max_tokens=900", "larger than data.max_response_length"),
        ("trainer.n_gpus_per_node=3", "cannot be split over 3 GPUs"),
    ],
)
def test_wrong_input_is_one_line_that_names_the_key(override, message):
    with pytest.raises(InputError, match=message) as caught:
        run.plan("cpu", [override])
    assert "\n" not in str(caught.value)


def test_a_micro_batch_that_does_not_divide_is_named():
    given = ["actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=7"]
    with pytest.raises(InputError, match="ppo_micro_batch_size_per_gpu=7 does not divide"):
        run.plan("cpu", given)


def test_fields_that_only_the_dataclass_knows_are_accepted():
    config = configs.compose("cpu", ["actor_rollout_ref.rollout.enable_sleep_mode=true"])
    assert config.actor_rollout_ref.rollout.enable_sleep_mode is True


def test_numbers_in_exponent_form_are_numbers():
    assert configs.parse_overrides(["a.lr=3e-4", "a.name=x"]) == {"a": {"lr": 3e-4, "name": "x"}}


def test_unknown_preset_names_the_nearest():
    with pytest.raises(InputError, match=r"unknown preset 'cpus'.*did you mean cpu"):
        configs.compose("cpus")


def test_preset_file_with_a_mistake_names_file_and_line(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("mmqa:\n  task: [digits\n")
    with pytest.raises(InputError, match=r"own\.yaml line \d+: not valid YAML"):
        configs.compose(str(file))
    file.write_text("- a\n")
    with pytest.raises(InputError, match="expected a mapping"):
        configs.compose(str(file))


def test_schema_reads_the_installed_sources():
    assert "enable_sleep_mode" in schema.dataclass_fields("verl.workers.config.RolloutConfig")
    assert "lr" in schema.dataclass_fields("verl.workers.config.FSDPOptimizerConfig"), "inherited fields count"
    assert {"mm_processor_cache_gb", "allowed_local_media_path"} <= schema.vllm_arguments()


def test_rollout_section_explains_the_hazard_lines():
    text = configs.rollout_section("qwen2_5_vl_3b", vllm_version="0.21.0")
    rollout = yaml.safe_load(text)["actor_rollout_ref"]["rollout"]
    assert rollout["enable_prefix_caching"] is False and rollout["engine_kwargs"]["vllm"]["mm_processor_cache_gb"] == 0
    reasons = [line for line in text.splitlines() if line.endswith("(mm-cache-desync)")]
    assert [line.split(":")[0].strip() for line in reasons] == ["mm_processor_cache_gb", "enable_prefix_caching"]
    assert "n: 8  # rollouts a prompt" in text


def test_rollout_section_of_a_fixed_version_has_no_cache_lines():
    text = configs.rollout_section("cpu", ["actor_rollout_ref.rollout.n=4"], "0.22.1")
    assert "adds nothing, this version is not affected" in text and "(mm-cache-desync)" not in text
    assert yaml.safe_load(text)["actor_rollout_ref"]["rollout"]["n"] == 4


def test_the_cache_keys_choose_how_the_caches_are_kept_in_step():
    def rollout(*overrides):
        return configs.compose("cpu", overrides, vllm_version="0.21.0").actor_rollout_ref.rollout

    default, keep, plugin = (
        rollout(),
        rollout("mmqa.cache.keep_prefix_caching=true"),
        rollout("mmqa.cache.strategy=plugin"),
    )
    assert default.enable_prefix_caching is False and default.engine_kwargs.vllm.mm_processor_cache_gb == 0
    assert keep.enable_prefix_caching is True and keep.engine_kwargs.vllm.mm_processor_cache_gb == 0
    assert plugin.enable_prefix_caching is True and plugin.engine_kwargs.vllm.additional_config.mmqa_cache_sync is True
    assert "mm_processor_cache_gb" not in plugin.engine_kwargs.vllm
    with pytest.raises(InputError, match=r"mmqa\.cache: unknown strategy 'both'"):
        rollout("mmqa.cache.strategy=both")


@pytest.mark.parametrize("version", ["1.0.0", "1.0.1"])
def test_agentlightning_that_drops_pictures_is_refused(monkeypatch, version):
    real = preflight.installed
    monkeypatch.setattr(
        preflight,
        "installed",
        lambda *names: ("agentlightning", version) if names[0] == "agentlightning" else real(*names),
    )
    with pytest.raises(InputError, match=rf"agentlightning {version} cannot be used .*drop every picture"):
        preflight.check_versions("cpu")


def test_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setattr(preflight, "installed", lambda *names: None)
    with pytest.raises(InputError, match="uv sync --extra cpu"):
        preflight.check_versions("cpu")


def test_another_python_is_refused(monkeypatch):
    monkeypatch.setattr(preflight.sys, "version_info", (3, 11, 7))
    with pytest.raises(InputError, match=r"Python 3\.12 is needed"):
        preflight.check_versions("cpu")
