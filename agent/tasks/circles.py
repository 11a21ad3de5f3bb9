"""Counting: how many circles of one colour are in a drawn picture?

One row, as the trainer sees it (the picture is 84 x 84 px, at most one circle in each of 3 x 3 cells):

    {"id": "circles-train-1-0", "task": "circles", "question": "How many red circles?",
     "images": ["file:///.../images/5d0c….png"], "answer": "3"}

The pictures are drawn from the seed, so there is nothing to download, and "train" and "val" never share a seed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from PIL import Image, ImageDraw

from agent.tasks.base import Sample

NAME = "circles"
MAX_COUNT = 5
CHANCE = 1 / MAX_COUNT
ANSWERS = tuple(str(n) for n in range(1, MAX_COUNT + 1))
SIZE = 84  # px; 3 cells of 28 px, so that a cell is one image token of a patch-14, merge-2 vision tower
CELL = 28
MAX_OTHERS = 3  # circles of other colours
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
_SPLIT_SEED = {"train": 0, "val": 1, "warmup": 2}


def draw(rng: random.Random, count: int | None = None) -> tuple[Image.Image, str, int]:
    """Draw one picture. Returns (84 x 84 RGB image, colour asked for, number of circles of that colour)."""
    cells = [(row, column) for row in range(SIZE // CELL) for column in range(SIZE // CELL)]
    rng.shuffle(cells)
    count = count or rng.randint(1, MAX_COUNT)
    colour = rng.choice(sorted(COLOURS))
    others = rng.randint(0, min(MAX_OTHERS, len(cells) - count))
    image = Image.new("RGB", (SIZE, SIZE), "white")
    pen = ImageDraw.Draw(image)
    for index, (row, column) in enumerate(cells[: count + others]):
        paint = colour if index < count else rng.choice([c for c in sorted(COLOURS) if c != colour])
        radius = CELL * rng.uniform(0.28, 0.42)
        slack = CELL / 2 - radius
        x = (column + 0.5) * CELL + rng.uniform(-slack, slack)
        y = (row + 0.5) * CELL + rng.uniform(-slack, slack)
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=COLOURS[paint])
    return image, colour, count


def question(colour: str) -> str:
    """The question asked of a picture."""
    return f"How many {colour} circles?"


def samples(split: str, count: int, seed: int) -> Iterator[Sample]:
    """Yield ``count`` drawn samples; see ``agent.tasks.base.Task``."""
    for index in range(count):
        rng = random.Random(f"{_SPLIT_SEED[split]}/{seed}/{index}")
        image, colour, number = draw(rng)
        yield Sample(f"{NAME}-{split}-{seed}-{index}", question(colour), str(number), (image,))
