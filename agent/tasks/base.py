"""What a task is: pure data in, questions about images out. A task knows nothing of servers or training."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from PIL import Image


@dataclass(frozen=True)
class Sample:
    """One image question.

    ``images`` are PIL images (the task drew them) or file paths (they lie in the user's data root);
    ``extra`` goes into the row as it is and must be plain JSON.
    """

    id: str
    question: str
    answer: str
    images: tuple[Image.Image | str, ...]
    extra: dict[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Interface of a task module in this folder."""

    NAME: str
    CHANCE: float  # accuracy of the best constant answer
    ANSWERS: tuple[str, ...]  # the closed set of answers, empty if open

    def samples(self, split: str, count: int, seed: int) -> Iterator[Sample]:
        """Yield ``count`` samples of ``split`` ("train" or "val"); the same arguments give the same samples."""
        ...
