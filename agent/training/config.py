"""One configuration from four layers: Agent Lightning's verl defaults <- preset <- cache-safe settings <- overrides."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

import agent
from agent import yaml_dialect
from agent.caches.cache_safe_rollout import WHY as cache_reasons
from agent.caches.cache_safe_rollout import cache_safe_rollout, installed_version
from agent.errors import InputError
from agent.training import schema

STOCK_AGENT = "agent.loop.MultimodalQAAgent"
# The project's own section, with its defaults; presets and overrides may set these keys and no others.
MMQA_DEFAULTS: dict[str, Any] = {
    "backend": "gpu",  # cpu | gpu
    "task": "digits",  # circles, digits, folder (own data), or the dotted path of a module of your own
    "data_root": None,  # folder of the "folder" task
    "train_samples": 1024,  # rows to train on; of the folder task at most as many
    "val_samples": 96,  # held-out rows, for the validations
    "seed": 1,  # of the rows that a task makes; the order of the data has data.seed
    "max_pixels": 1024 * 1024,  # the size limit of pictures, applied once in the image store
    "blank_images": False,  # every picture white: what is left is what the model can guess
    "max_logprob_gap": 0.1,  # nats a token between engine and actor, above which the first step stops the run
    "max_failed_rollouts": 0.5,  # share of a step's rollouts that may fail before the run stops
    "poll_interval_seconds": 0.2,  # between two looks for ended rollouts
    "controller": "local",  # local: in-process, see dispatch.py; agl: Agent Lightning's, a process a rollout
    "agl_poll_seconds": 1.0,  # controller=agl: between two of its looks (its own default is 10)
    "controller_slots": 512,  # rollouts in work at a time
    "warm_start": True,  # cpu: import the stack once and fork every process from it
    "keep_checkpoints": 2,  # newest whole ones kept (0: all); trainer.max_actor_ckpt_to_keep is taken for it
    "keep_best": True,  # and the whole one with the best validation reward
    "cache": {  # how vLLM's image caches are kept in step on versions that forget (see cache_safe_rollout)
        "strategy": "settings",  # settings | plugin: both caches stay on, this package's vLLM plugin keeps them equal
        "keep_prefix_caching": False,  # settings: switch the processor cache off alone
    },
    "agent_class": STOCK_AGENT,  # package.module.Class: the stock agent, or a subclass of your own
    "agent": {
        "instruction": None,  # text after each question; null: the stock one; "": none
        "max_tokens": 512,
        "max_turns": 1,
        "fallback_reward": 0.5,  # for a right answer in any other form than the wanted one (that earns 1.0)
        "allow_remote_images": False,
    },
}


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """OmegaConf's complaints (an unclosed ``${``, a reference to nothing) as ``InputError``."""
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except OmegaConfBaseException as error:
        key = f"{error.full_key}: " if getattr(error, "full_key", None) else ""
        raise InputError(f"configuration: {key}{str(error).splitlines()[0]}") from None


def presets_dir() -> Path:
    """The folder of presets: inside an installed package, else ``examples/configs`` of the checkout."""
    inside = Path(agent.__file__).parent / "presets"
    return inside if inside.is_dir() else Path(agent.__file__).parents[1] / "examples" / "configs"


def preset_names() -> list[str]:
    """Names that ``--preset`` takes, beside a path to a YAML file."""
    return sorted(file.stem for file in presets_dir().glob("*.yaml"))


def read_preset(name: str) -> tuple[dict[str, Any], str]:
    """The preset's own keys and where they stand. ``name`` is a name or the path of a YAML file."""
    path = Path(name) if name.endswith((".yaml", ".yml")) else presets_dir() / f"{name}.yaml"
    if not path.is_file():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown preset {name!r} (known: {', '.join(preset_names())}){hint}")
    return load_yaml(path), str(path.name)


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping; ``InputError`` names the file and line otherwise."""
    try:
        value = yaml_dialect.load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{path}{line}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if value is None:
        raise InputError(f"{path}: the file is empty; expected keys and values, for example  data: {{seed: 1}}")
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else f"the single value {value!r}"
        raise InputError(f"{path}: expected keys and values, for example  data: {{seed: 1}}; found {kind}")
    return value


def upstream_defaults() -> Any:
    """Agent Lightning's verl configuration with hydra, without importing verl (which takes 10 s)."""
    roots: dict[str, Any] = {name: schema.package_dir(name) for name in ("agentlightning", "verl")}
    if missing := [name for name, root in roots.items() if root is None]:
        raise InputError(
            f"{missing[0]} is not installed; install the stack with: uv sync --extra cpu   (or --extra gpu)"
        )
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(roots["agentlightning"] / "verl"), version_base=None):
        return compose(config_name="config", overrides=[f"hydra.searchpath=[file://{roots['verl']}/trainer/config]"])


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """``["a.b=1"]`` to ``{"a": {"b": 1}}``; values are YAML. ``InputError`` for what is not ``key=value``."""
    result: dict[str, Any] = {}
    for one in overrides:
        key, equals, text = one.partition("=")
        key = key.lstrip("+").strip()
        if not equals or not key or any(not part for part in key.split(".")):
            raise InputError(f"override {one!r} is not of the form key=value (for example data.train_batch_size=16)")
        try:
            value = yaml_dialect.load(text)
        except (yaml.YAMLError, ValueError):
            raise InputError(f"override {one!r}: the value is not valid YAML; quote it") from None
        node = result
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise InputError(f"override {one!r}: {parent} already has a value of its own")
        node[last] = value
    return result


@readable_errors()
def compose(preset: str, overrides: Sequence[str] = (), *, vllm_version: str | None = None) -> Any:
    """The configuration of a run, as an OmegaConf ``DictConfig`` with every interpolation still in place.

    Raises ``InputError`` for an unknown preset, key, or a value of the wrong kind.
    """
    from omegaconf import OmegaConf

    base = upstream_defaults()
    OmegaConf.set_struct(base, False)
    base = OmegaConf.merge(base, {"mmqa": MMQA_DEFAULTS})
    known: Any = OmegaConf.to_container(base, resolve=False)
    layer, source = read_preset(preset)
    schema.refuse_unknown(layer, known, f"preset {source}")
    _check_kinds(known, layer, f"preset {source}")
    given = parse_overrides(overrides)
    merged: Any = OmegaConf.to_container(OmegaConf.merge(base, layer), resolve=False)
    schema.refuse_unknown(given, merged, "the command line")
    _check_kinds(known, given, "the command line")
    safe = _cache_safe({**MMQA_DEFAULTS["cache"], **_cache_keys(layer), **_cache_keys(given)}, vllm_version)
    return _derived(OmegaConf.merge(base, _keep(layer), _rollout(safe), _keep(given)))


def _rollout(settings: dict[str, Any]) -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": settings}} if settings else {}


def _derived(config: Any) -> Any:
    """What follows from other keys, whatever a preset or an override says: this package's trainer depends on it."""
    config.agentlightning.trace_aggregator.level = "transition"
    config.agentlightning.local.agent_class = config.mmqa.agent_class
    if not config.agentlightning.local.env_map:
        config.agentlightning.local.env_map = {"MMQA_ROW": "input"}
    return config


def _keep(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer in which verl's count of checkpoints, if it has one, is this package's.

    verl's forgets the checkpoints of earlier processes; this package's looks at the folder. A layer's own
    ``mmqa.keep_checkpoints`` goes before.
    """
    trainer = layer.get("trainer")
    if not isinstance(trainer, dict) or trainer.get("max_actor_ckpt_to_keep") is None:
        return layer
    trainer = {**trainer, "max_actor_ckpt_to_keep": None}
    own = {"keep_checkpoints": layer["trainer"]["max_actor_ckpt_to_keep"], **(layer.get("mmqa") or {})}
    return {**layer, "trainer": trainer, "mmqa": own}


@readable_errors()
def recompose(saved: Path, overrides: Sequence[str] = (), *, vllm_before: str | None = None) -> Any:
    """The configuration that a run was begun with, with ``overrides``. Raises ``InputError`` as ``compose``.

    ``vllm_before``: the vLLM version of the run's last attempt. Its cache-safe settings give way to those of the
    installed version and of ``mmqa.cache``.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.merge({"mmqa": MMQA_DEFAULTS}, load_yaml(saved))  # a key may be newer than the run
    known: Any = OmegaConf.to_container(config, resolve=False)
    given = parse_overrides(overrides)
    schema.refuse_unknown(given, known, "the command line")
    _check_kinds(known, given, "the command line")
    kept = {**MMQA_DEFAULTS["cache"], **_cache_keys(known)}
    before, now = _cache_safe(kept, vllm_before), _cache_safe({**kept, **_cache_keys(given)}, None)
    if before != now:
        rollout: Any = OmegaConf.to_container(config.actor_rollout_ref.rollout, resolve=False)
        defaults: Any = OmegaConf.to_container(upstream_defaults().actor_rollout_ref.rollout, resolve=False)
        _take_back(rollout, before, defaults)
        config.actor_rollout_ref.rollout = rollout
    return _derived(OmegaConf.merge(config, _rollout(now if before != now else {}), _keep(given)))


def _take_back(settings: dict[str, Any], added: dict[str, Any], defaults: dict[str, Any]) -> None:
    """Undo in ``settings`` what was ``added``, where it was not changed since."""
    for key, value in added.items():
        default = defaults.get(key) if isinstance(defaults, dict) else None
        if isinstance(value, dict) and isinstance(settings.get(key), dict):
            _take_back(settings[key], value, default or {})
        elif settings.get(key) == value and default is None:
            del settings[key]
        elif settings.get(key) == value:
            settings[key] = default


def _check_kinds(known: Any, given: Any, where: str, path: str = "") -> None:
    """A number where the default is a number, a bool where it is a bool, a section where it is a section.

    A whole number is wanted where the default is one, but for 0 and 1: verl writes shares and temperatures so. A
    default of null takes anything; so does one that refers to another key. Raises ``InputError``.
    """
    for key, value in given.items():
        default = known.get(key) if isinstance(known, dict) else None
        full = f"{path}.{key}" if path else str(key)
        refers = isinstance(default, str) and default.startswith("${")
        if isinstance(value, dict):
            if default is not None and not refers and not isinstance(default, dict):
                raise InputError(f"{full} in {where}: a section, where the default is the value {default!r}")
            _check_kinds(default if isinstance(default, dict) else {}, value, where, full)
            continue
        if isinstance(default, dict) and default and not str(value).startswith("${"):
            raise InputError(f"{full}={value} in {where}: expected a section with keys of its own")
        if isinstance(default, bool):
            good = isinstance(value, bool)
        elif isinstance(default, int | float):
            whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
            share = isinstance(default, float) or default in (0, 1)
            good = not isinstance(value, bool) and (whole or (share and isinstance(value, float)))
        else:
            continue
        if not good and not (isinstance(value, str) and value.startswith("${")) and value is not None:
            kind = type(default).__name__
            raise InputError(f"{full}={value} in {where}: expected {kind} as in the default {default}")


def _cache_keys(layer: dict[str, Any]) -> dict[str, Any]:
    return (layer.get("mmqa") or {}).get("cache") or {}


def _cache_safe(chosen: dict[str, Any], vllm_version: str | None) -> dict[str, Any]:
    """``cache_safe_rollout`` with the keys of ``mmqa.cache``; its refusals as ``InputError``."""
    try:
        return cache_safe_rollout(
            vllm_version, strategy=str(chosen["strategy"]), keep_prefix_caching=bool(chosen["keep_prefix_caching"])
        )
    except ValueError as error:
        raise InputError(f"mmqa.cache: {error}") from None


_WHY = {
    **{path: f"{why} (mm-cache-desync)" for path, why in cache_reasons.items()},
    "enable_sleep_mode": "true: the engine sleeps while the actor trains; false: it is paused (a CPU cannot sleep)",
    "free_cache_engine": "whether the engine gives its memory back while the actor trains",
    "engine_kwargs.vllm.limit_mm_per_prompt": "media in one prompt, over all turns",
    "n": "rollouts a prompt: the GRPO group",
}


def rollout_section(preset: str, overrides: Sequence[str] = (), vllm_version: str | None = None) -> str:
    """What preset, cache-safe settings and overrides put under ``actor_rollout_ref.rollout``, as YAML with reasons.

    ``vllm_version``: for that version instead of the installed one. Raises ``InputError`` as ``compose``.
    """
    from omegaconf import OmegaConf

    config = compose(preset, overrides, vllm_version=vllm_version)
    safe = _cache_safe(dict(config.mmqa.cache), vllm_version)
    chosen: Any = OmegaConf.merge(
        read_preset(preset)[0].get("actor_rollout_ref", {}).get("rollout", {}),
        safe,
        parse_overrides(overrides).get("actor_rollout_ref", {}).get("rollout", {}),
    )
    reasons = _WHY if safe else {key: why for key, why in _WHY.items() if key not in cache_reasons}
    said = "its lines are marked mm-cache-desync" if safe else "adds nothing, this version is not affected"
    head = f"# preset {preset}; cache_safe_rollout() for vLLM {vllm_version or installed_version()}: {said}"
    if config.mmqa.backend == "cpu":
        marked = "only the lines marked mm-cache-desync, or " if safe else ""
        head += f"\n# made for a tiny model on a CPU: for a project on GPUs copy {marked}another preset (--preset NAME)"
    lines = _yaml_lines(OmegaConf.to_container(chosen), reasons, "", 4)  # type: ignore[arg-type]
    return "\n".join([head, "actor_rollout_ref:", "  rollout:", *lines])


def _yaml_lines(node: dict[str, Any], reasons: dict[str, str], path: str, indent: int) -> list[str]:
    """YAML with the reason behind each value that has one."""
    lines = []
    for key, value in node.items():
        where = f"{path}.{key}" if path else str(key)
        why = f"  # {reasons[where]}" if where in reasons else ""
        if isinstance(value, dict) and value:
            lines += [f"{' ' * indent}{key}:{why}", *_yaml_lines(value, reasons, where, indent + 2)]
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000).strip().removesuffix("...").strip()
            lines.append(f"{' ' * indent}{key}: {text}{why}")
    return lines
