"""The one tool of the agent: look closer at a part of the first image. Pure; the caller loads and stores images."""

from __future__ import annotations

import re

from PIL import Image

_ZOOM = re.compile(r"<zoom>([^<]*)</zoom>", re.IGNORECASE)
MIN_SIDE = 28  # px; the smallest side that a patch-14, merge-2 vision tower can take


def zoom_request(reply: str) -> tuple[float, float, float, float] | None:
    """The box (left, top, right, bottom, each 0..1) that a reply asks for, or None.

    Corners in the wrong order are swapped and values outside 0..1 are clipped; four numbers that span no area are no
    request.
    """
    if not (calls := _ZOOM.findall(reply)):
        return None
    numbers = re.findall(r"-?\d*\.?\d+", calls[-1])
    if len(numbers) != 4:
        return None
    x0, y0, x1, y1 = (min(max(float(n), 0.0), 1.0) for n in numbers)
    x0, x1, y0, y1 = min(x0, x1), max(x0, x1), min(y0, y1), max(y0, y1)
    return (x0, y0, x1, y1) if x1 > x0 and y1 > y0 else None


def zoom(image: Image.Image, box: tuple[float, float, float, float]) -> Image.Image:
    """Cut ``box`` out of ``image`` and enlarge it to the image's own size (at least ``MIN_SIDE`` px a side)."""
    width, height = image.size
    left, top = min(int(box[0] * width), width - 1), min(int(box[1] * height), height - 1)
    right, bottom = max(round(box[2] * width), left + 1), max(round(box[3] * height), top + 1)
    part = image.crop((left, top, right, bottom))
    return part.resize((max(width, MIN_SIDE), max(height, MIN_SIDE)), Image.Resampling.BICUBIC)
