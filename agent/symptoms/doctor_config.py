"""Read a config as people have it: YAML (nested or with dotted keys), ``key=value`` lines, a whole start script, or a
Python file that holds it as a dictionary (as Agent Lightning's examples do; the file is read, never run).
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from agent import yaml_dialect
from agent.caches.cache_safe_rollout import merged
from agent.errors import InputError
from agent.symptoms.hazards_facts import dialect_of

KNOWN = "actor_rollout_ref, trainer (verl), agentlightning, policy, grpo (NeMo-RL) or mmqa (this project)"
_OVERRIDE = re.compile(r"[+~]*([A-Za-z_][\w]*(?:\.[\w]+)+)=(.*)", re.DOTALL)
_HANDED = re.compile(r"--config[= ]+[\"']?([\w./-]+\.ya?ml)")
_VLM = re.compile(r"vlm|[-_]vl(?:[-_0-9]|$)", re.IGNORECASE)
_MAX_BYTES = 4 * 1024 * 1024


def read_config(path: Path, missing: list[str] | None = None) -> dict[str, Any]:
    """The nested config in this file.

    A string under ``defaults`` that names a file beside it is read first and merged under it, as NeMo-RL does; so is
    the YAML file that a start script hands over with ``--config``. ``missing``: gets the names of those not found.

    Raises ``InputError``: no such file, not text, not YAML, or none of the three layouts.
    """
    tree = _with_parents(path, 0, [] if missing is None else missing)
    if dialect_of(tree) == "unknown":
        raise InputError(
            f"{path}: not a training config: its top-level keys are {', '.join(map(str, list(tree)[:6]))}; "
            f"expected some of {KNOWN}"
        )
    return tree


def _with_parents(path: Path, depth: int, missing: list[str]) -> dict[str, Any]:
    text = _text(path)
    handed = None if path.suffix in (".yaml", ".yml", ".py") else _HANDED.search(text)
    try:
        tree = parse(text, str(path))
    except InputError:
        if handed is None:
            raise
        tree = {}  # a script that hands over a config, and no override besides
    parent = handed[1] if handed else tree.get("defaults")
    parent = parent if isinstance(parent, str) else None
    if parent is None or depth >= 8:
        return tree
    for place in (path.parent / parent, Path(parent)):
        if place.is_file():
            return merged(_with_parents(place, depth + 1, missing), tree)
    missing.append(parent)
    if dialect_of(tree) == "nemo" and _VLM.search(parent):
        tree = merged({"policy": {"is_vlm": True}}, tree)  # all that its name tells
    return tree


def _text(path: Path) -> str:
    if path.is_dir():
        raise InputError(f"{path} is a folder; name the config file in it")
    try:
        size = path.stat().st_size
        if size > _MAX_BYTES:
            raise InputError(f"{path}: {size / 1e6:.0f} MB is no config; for a log: mmqa diagnose {path}")
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    encoding = "utf-16" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        text = raw.decode(encoding)
    except UnicodeDecodeError:
        raise InputError(f"{path}: not a text file in UTF-8") from None
    if "\0" in text:
        raise InputError(f"{path}: not a text file (it holds zero bytes)")
    return text


def parse(text: str, name: str) -> dict[str, Any]:
    """The nested config in ``text``; ``name`` stands in messages. Raises ``InputError``."""
    if not text.strip():
        raise InputError(f"{name}: empty")
    if name.endswith(".py"):
        return _dictionaries(text, name)
    try:
        value = yaml_dialect.load(text)
    except (yaml.YAMLError, ValueError) as error:
        overrides = _overrides(text)
        if overrides:
            return overrides
        mark = getattr(error, "problem_mark", None)
        where = f" line {mark.line + 1}" if mark else ""
        raise InputError(f"{name}{where}: not valid YAML ({getattr(error, 'problem', None) or error})") from None
    if isinstance(value, Mapping):
        try:
            return _expanded(value)
        except RecursionError:
            raise InputError(f"{name}: an anchor in it holds itself; write its keys out") from None
    overrides = _overrides(value if isinstance(value, list) else text)
    if not overrides:
        raise InputError(f"{name}: neither a YAML mapping nor lines of the form key=value")
    return overrides


def _dictionaries(text: str, name: str) -> dict[str, Any]:
    """The config dictionaries written out in a Python file, later ones on top. Raises ``InputError``."""
    try:
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Dict)]
    except SyntaxError as error:
        raise InputError(f"{name} line {error.lineno}: not valid Python ({error.msg})") from None
    tree: dict[str, Any] = {}
    for node in nodes:
        try:
            value = ast.literal_eval(node)
        except ValueError:  # something in it is computed
            continue
        if dialect_of(value) in ("verl", "preset", "nemo"):
            tree = merged(tree, _expanded(value))
    if not tree:
        raise InputError(f"{name}: no dictionary of constants with some of the keys {KNOWN}")
    return tree


def _overrides(source: str | list[Any]) -> dict[str, Any]:
    """Every ``a.b.c=value`` in a list of overrides or in the text of a shell script, later ones winning."""
    words = [str(item) for item in source] if isinstance(source, list) else _words(source)
    tree: dict[str, Any] = {}
    for word in words:
        found = _OVERRIDE.fullmatch(word)
        if found:
            _put(tree, found[1].split("."), _value(found[2]))
    return tree


def _words(text: str) -> Iterator[str]:
    """The shell's words, line by line; a line that the shell could not split is split at blanks."""
    for line in text.splitlines():
        line = line.strip().rstrip("\\").strip()
        try:
            yield from shlex.split(line, comments=True)
        except ValueError:
            yield from line.split()


def _value(text: str) -> Any:
    if "$" in text:  # a shell variable or an interpolation: not known here
        return f"${{{text}}}" if not text.startswith("${") else text
    try:
        return yaml_dialect.load(text)
    except (yaml.YAMLError, ValueError):
        return text


def _put(tree: dict[str, Any], parts: list[str], value: Any) -> None:
    for part in parts[:-1]:
        below = tree.get(part)
        tree[part] = below if isinstance(below, dict) else {}
        tree = tree[part]
    tree[parts[-1]] = value


def _expanded(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Dotted keys (``a.b: 1``) as nested ones."""
    tree: dict[str, Any] = {}
    for key, below in value.items():
        inner = _expanded(below) if isinstance(below, Mapping) else below
        parts = str(key).split(".")
        if len(parts) == 1 or not all(parts):
            found = tree.get(str(key))
            tree[str(key)] = merged(found, inner) if isinstance(found, dict) and isinstance(inner, dict) else inner
        else:
            _put(tree, parts, inner)
    return tree
