"""The two ways a command can end other than well, and how each is told to the person at the terminal."""

from __future__ import annotations


class InputError(Exception):
    """Something the user gave is wrong (file, row, key, value). Shown as one line; exit code 2.

    The message says what is wrong, where, and what to do. ``slug`` names the symptom's page where there is one.
    """

    exit_code = 2
    general: str | None = "input-refused"  # the page of those without one of their own

    def __init__(self, message: str, *, slug: str | None = None) -> None:
        super().__init__(message)
        self.slug = slug


class RunFailed(Exception):
    """The run itself failed (a process died, the engine stopped answering). Exit code 1."""

    exit_code = 1
    general: str | None = "unknown-failure"

    def __init__(self, message: str, *, slug: str | None = None) -> None:
        super().__init__(message)
        self.slug = slug


class RunStopped(RunFailed):
    """The user ended the run before its last step. Exit code 1: what was asked for is not done."""

    general = None


def page(slug: str) -> str:
    """Where a symptom is explained: the offline command and the site address."""
    return f"mmqa explain {slug}  (docs: /s/{slug}/)"


def one_line(error: Exception) -> str:
    """The text shown for ``InputError`` and ``RunFailed``: the message and its page."""
    slug = getattr(error, "slug", None) or getattr(error, "general", None)
    return f"{error}\n  -> {page(slug)}" if slug else str(error)
