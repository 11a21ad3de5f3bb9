"""The messages sent to the model. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INSTRUCTION = "Look at the image. Think briefly, then give the final answer inside <answer></answer> tags."
ZOOM_INSTRUCTION = (
    "To look closer, reply only with <zoom>left,top,right,bottom</zoom>: four numbers from 0 to 1, "
    "measured from the image's top left corner."
)


def image_part(url: str) -> dict[str, Any]:
    """One image by reference, in the form that both the engine and Agent Lightning's trainer read."""
    return {"type": "image_url", "image_url": {"url": url}}


def question_message(question: str, images: Sequence[str], instruction: str = "") -> dict[str, Any]:
    """The first user message: the images, then the question, then (if any) the instruction."""
    text = f"{question}\n{instruction}" if instruction else question
    return {"role": "user", "content": [*map(image_part, images), {"type": "text", "text": text}]}


def closer_message(image: str) -> dict[str, Any]:
    """The user message that hands over what the zoom tool cut out."""
    return {"role": "user", "content": [image_part(image), {"type": "text", "text": "Here is the part you asked for."}]}
