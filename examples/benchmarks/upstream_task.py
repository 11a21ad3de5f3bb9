"""The digits task with each picture inside its row as a data: address, as the upstream example's rows have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from PIL import Image

from agent.images import InlineImages
from agent.tasks import digits
from agent.tasks.base import Sample

NAME = "digits"
CHANCE = digits.CHANCE
ANSWERS = digits.ANSWERS


def samples(split: str, count: int, seed: int) -> Iterator[Sample]:
    """As ``agent.tasks.digits``, with an "image" key."""
    for sample in digits.samples(split, count, seed):
        picture = sample.images[0]
        assert isinstance(picture, Image.Image)
        yield replace(sample, extra={"image": InlineImages().put(picture)})
