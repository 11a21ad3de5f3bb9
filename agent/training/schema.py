"""Which configuration keys exist: those of verl's and Agent Lightning's YAML, and the fields of the dataclasses that
verl builds from it. The fields are read from the installed source without importing it (that would cost 10 s).
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent.errors import InputError

# Mappings that hold what the user likes, below these paths.
OPEN = (
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.rollout.engine_kwargs.sglang",
    "actor_rollout_ref.rollout.engine_kwargs.trtllm",
    "actor_rollout_ref.actor.optim.override_optimizer_config",
    "agentlightning.local.env_map",
    "ray_kwargs",
    "data.apply_chat_template_kwargs",
    "data.mm_processor_kwargs",
)
VLLM_KWARGS = "actor_rollout_ref.rollout.engine_kwargs.vllm"


def package_dir(name: str) -> Path | None:
    """Where a top-level package lies, without importing it; None if it is not installed."""
    spec = find_spec(name)
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def _annotated(node: ast.ClassDef) -> set[str]:
    return {i.target.id for i in node.body if isinstance(i, ast.AnnAssign) and isinstance(i.target, ast.Name)}


def _class_fields(folder: Path) -> dict[str, tuple[list[str], set[str]]]:
    classes: dict[str, tuple[list[str], set[str]]] = {}
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
                classes[node.name] = (bases, _annotated(node))
    return classes


@lru_cache(maxsize=1)
def _verl_classes() -> dict[str, tuple[list[str], set[str]]]:
    root = package_dir("verl")
    return _class_fields(root / "workers" / "config") if root else {}


def dataclass_fields(target: str) -> set[str]:
    """Field names, inherited ones too, of a verl configuration class named by its dotted path (empty if unknown)."""
    bases, own = _verl_classes().get(target.rsplit(".", 1)[-1], ([], set()))
    return own.union(*(dataclass_fields(base) for base in bases)) if bases else own


def _statements(package: str, *path: str) -> list[ast.stmt]:
    """The top-level statements of a package's file, read without importing it (none if it is not there)."""
    root = package_dir(package)
    file = root.joinpath(*path) if root else None
    return ast.parse(file.read_text(encoding="utf-8")).body if file is not None and file.exists() else []


def _class_body(statements: list[ast.stmt], name: str) -> list[ast.stmt]:
    return [one for node in statements if isinstance(node, ast.ClassDef) and node.name == name for one in node.body]


def _assigned(statements: list[ast.stmt], name: str) -> list[ast.expr]:
    """The values that are assigned to ``name``."""
    return [
        one.value
        for one in statements
        if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in one.targets)
    ]


def _constants(nodes: list[ast.expr]) -> tuple[str, ...]:
    """The texts written out below ``nodes``, in their order."""
    return tuple(
        sub.value
        for one in nodes
        for sub in ast.walk(one)
        if isinstance(sub, ast.Constant) and isinstance(sub.value, str)
    )


@lru_cache(maxsize=1)
def advantage_estimators() -> tuple[str, ...]:
    """Names that ``algorithm.adv_estimator`` takes: verl's ``AdvantageEstimator`` (empty without verl)."""
    members = _class_body(_statements("verl", "trainer", "ppo", "core_algos.py"), "AdvantageEstimator")
    return _constants([one.value for one in members if isinstance(one, ast.Assign)])


@lru_cache(maxsize=1)
def trackers() -> tuple[str, ...]:
    """Names that ``trainer.logger`` takes: those of verl's ``Tracking`` (empty without verl)."""
    return _constants(
        _assigned(_class_body(_statements("verl", "utils", "tracking.py"), "Tracking"), "supported_backend")
    )


@lru_cache(maxsize=1)
def engine_dtypes() -> tuple[str, ...]:
    """Names that ``rollout.dtype`` takes: vLLM's ``ModelDType`` (empty without vLLM)."""
    return _constants(_assigned(_statements("vllm", "config", "model.py"), "ModelDType"))


@lru_cache(maxsize=1)
def vllm_arguments() -> frozenset[str]:
    """Names that ``engine_kwargs.vllm`` takes: the fields of vLLM's ``EngineArgs`` (empty without vLLM)."""
    statements = _statements("vllm", "engine", "arg_utils.py")
    bodies = [_class_body(statements, name) for name in ("EngineArgs", "AsyncEngineArgs")]
    return frozenset(
        one.target.id
        for body in bodies
        for one in body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    )


def refuse_unknown(given: Mapping[str, Any], base: Mapping[str, Any], where: str, path: str = "") -> None:
    """Raise ``InputError`` for the first key of ``given`` that ``base`` does not know, with the nearest known one.

    ``where`` names the source (a file or "the command line"). Nothing below the paths in ``OPEN`` is looked at.
    """
    if path in OPEN:
        return
    known = vllm_arguments() if path == VLLM_KWARGS else {str(key) for key in base}
    if path == VLLM_KWARGS and not known:
        return
    if "_target_" in base:
        known = known | dataclass_fields(str(base["_target_"]))
    for key, value in given.items():
        full = f"{path}.{key}" if path else str(key)
        if str(key) not in known:
            near = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.6) or _elsewhere(str(key), base)
            hint = f"; the nearest known key is {f'{path}.' if path else ''}{near[0]}" if near else ""
            raise InputError(f"unknown key {full} in {where}{hint}")
        below = base.get(key)
        if isinstance(value, Mapping) and path != VLLM_KWARGS and (isinstance(below, Mapping) or full == VLLM_KWARGS):
            refuse_unknown(value, below or {}, where, full)


def _elsewhere(key: str, base: Mapping[str, Any]) -> list[str]:
    """Dotted path below ``base`` whose last part is ``key``, for a key put one level too high."""
    for name, value in base.items():
        if isinstance(value, Mapping):
            if key in value:
                return [f"{name}.{key}"]
            if deeper := _elsewhere(key, value):
                return [f"{name}.{deeper[0]}"]
    return []
