"""Is the class of ``mmqa.agent_class`` there? Found before anything starts, in the source, without running it."""

from __future__ import annotations

import ast
import difflib
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agent.errors import InputError


def check_agent_class(path: Any) -> None:
    """Raise ``InputError`` if the module of ``mmqa.agent_class`` is not there, or does not name the class.

    Its source is read, not run: an agent may expect the variables of a rollout when it is imported.
    """
    slug = "agent-class-not-found"
    module, _, name = str(path).replace(":", ".").rpartition(".")
    file = _source_of(module)
    if file is None:
        raise InputError(
            f"mmqa.agent_class={path}: no module {module!r} is found; write package.module.Class, and put the folder "
            "that holds the package into PYTHONPATH",
            slug=slug,
        )
    if file.suffix != ".py":
        return
    try:
        found = _names(ast.parse(file.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError) as error:
        raise InputError(f"mmqa.agent_class={path}: {file} is not valid Python ({error})", slug=slug) from None
    if name not in found and not found & {"*", "__getattr__"}:
        near = difflib.get_close_matches(name, found, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"mmqa.agent_class={path}: {file} defines no {name}{hint}", slug=slug)


def _source_of(module: str) -> Path | None:
    """The file of a module, found without running any of its packages; None if there is none."""
    top, *below = module.split(".")
    here = os.getcwd()  # the controller's processes look there too
    sys.path.append(here)
    try:
        spec = find_spec(top) if top else None
    except ValueError:  # a module that was made without one
        return None
    finally:
        sys.path.remove(here)
    if spec is None:
        return None
    if not below:
        return Path(spec.origin or f"{top}.namespace")
    for folder in spec.submodule_search_locations or ():
        place = Path(folder).joinpath(*below)
        found = [file for file in (place.with_suffix(".py"), place / "__init__.py") if file.is_file()]
        found += [*place.parent.glob(f"{place.name}.*.so"), *([place] if place.is_dir() else [])]
        if found:
            return found[0]
    return None


def _names(tree: ast.Module) -> set[str]:
    """What a module's source may define: classes, functions, assigned and imported names ("*" for a star import)."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found
