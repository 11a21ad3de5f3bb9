"""Tasks: one small pure file each. ``load(name)`` gives the module."""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from agent.errors import InputError
from agent.tasks.base import Sample, Task

NAMES = ("circles", "digits", "folder")

__all__ = ["NAMES", "Sample", "Task", "load"]


def load(name: str | None) -> Task:
    """The task of that name, or the module of that dotted path (a task of your own, importable from here).

    Raises ``InputError``, with the nearest name.
    """
    if name is None or not str(name).strip():  # "mmqa.task=" is null
        raise InputError(f"no task is named; set mmqa.task to {', '.join(NAMES)} or a module of your own")
    name = str(name)
    if name not in NAMES and ("." in name or find_spec(name) is not None):
        try:
            if name.startswith("."):
                raise ImportError("a dotted path from the top is needed")
            own = import_module(name)
        except Exception as error:  # it is the user's own code
            raise InputError(
                f"task module {name!r} cannot be imported ({type(error).__name__}: {error}); "
                "is its folder on PYTHONPATH?"
            ) from None
        if missing := [one for one in ("NAME", "ANSWERS", "samples") if not hasattr(own, one)]:
            raise InputError(f"task module {name!r} has no {missing[0]}; see agent/tasks/base.py")
        return cast(Task, own)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"unknown task {name!r} (known: {', '.join(NAMES)}){hint}")
    return cast(Task, import_module(f"agent.tasks.{name}"))
