"""Reading: which handwritten digit is this? Real scans (UCI ML hand-written digits) that scikit-learn ships.

One row, as the trainer sees it (the 8 x 8 scan is enlarged to 84 x 84 px, dark ink on white):

    {"id": "digits-train-1042", "task": "digits", "question": "Which digit?",
     "images": ["file:///.../images/a1b2….png"], "answer": "7"}

1,797 scans; every fifth of each class is held out as "val", the rest is "train" (no scan is in both).
Source: E. Alpaydin, C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from PIL import Image, ImageOps

from agent.tasks.base import Sample

NAME = "digits"
CHANCE = 0.1
ANSWERS = tuple(str(n) for n in range(10))
SIZE = 84
QUESTION = "Which digit?"


@lru_cache(maxsize=1)
def scans() -> tuple[tuple[Image.Image, int], ...]:
    """All 1,797 scans as (84 x 84 RGB image, digit), in scikit-learn's order. Nothing is downloaded."""
    import numpy as np
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    grey = (np.clip(data.images / 16.0, 0, 1) * 255).astype("uint8")  # 8 x 8, 0..16 is paper..ink
    pictures = (ImageOps.invert(Image.fromarray(one)).resize((SIZE, SIZE), Image.Resampling.BICUBIC) for one in grey)
    return tuple((picture.convert("RGB"), int(digit)) for picture, digit in zip(pictures, data.target, strict=True))


@lru_cache(maxsize=2)
def split_indices(split: str) -> tuple[int, ...]:
    """Indices into ``scans()``: "val" is every fifth scan of each digit, "train" the other four."""
    seen = dict.fromkeys(range(10), 0)
    chosen = []
    for index, (_, digit) in enumerate(scans()):
        held_out = seen[digit] % 5 == 4
        seen[digit] += 1
        if held_out == (split == "val"):
            chosen.append(index)
    return tuple(chosen)


def samples(split: str, count: int, seed: int) -> Iterator[Sample]:
    """Yield ``count`` scans of a shuffled split, starting over when it is used up; see ``Task``."""
    order = list(split_indices(split))
    random.Random(seed).shuffle(order)
    for position in range(count):
        index = order[position % len(order)]
        image, digit = scans()[index]
        yield Sample(f"{NAME}-{split}-{index}", QUESTION, str(digit), (image,))
