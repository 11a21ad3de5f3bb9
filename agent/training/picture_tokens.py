"""How many tokens a picture costs a model of the Qwen-VL family, from the files beside its weights. Nothing is imported
from transformers, and nothing is downloaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent import prompts
from agent.training.config import STOCK_AGENT
from agent.training.model_folder import model_folder
from agent.training.rundir import read_json

FAMILY = "Qwen2VLImageProcessor"  # of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5; "...Fast" too
MARKS = 2  # tokens around each picture: where vision starts and ends


@dataclass(frozen=True)
class PictureTokens:
    """The sizes that a model's image processor brings pictures to."""

    side: int  # pixels a side of one token: patch size x merge size
    least: int  # pixels of a picture; smaller ones are enlarged
    most: int

    def count(self, width: int, height: int) -> int:
        """Tokens of one picture, with the marks around it."""
        across, down = round(width / self.side), round(height / self.side)
        pixels = across * down * self.side**2
        if pixels > self.most:
            shrink = math.sqrt(width * height / self.most)
            across, down = (max(1, math.floor(one / shrink / self.side)) for one in (width, height))
        elif pixels < self.least:
            enlarge = math.sqrt(self.least / (width * height))
            across, down = (math.ceil(one * enlarge / self.side) for one in (width, height))
        return across * down + MARKS


def of_model(name: str) -> PictureTokens | None:
    """Those of a model's folder, or of its copy in the hub's cache; None if they cannot be told here."""
    folder = model_folder(name)
    found = _image_processor(folder) if folder else {}
    if not str(found.get("image_processor_type", "")).startswith(FAMILY):
        return None
    edges = found.get("size")
    size: dict[str, Any] = edges if isinstance(edges, dict) else {}
    numbers: list[Any] = [
        found.get("patch_size"),
        found.get("merge_size"),
        found.get("min_pixels") or size.get("shortest_edge"),
        found.get("max_pixels") or size.get("longest_edge"),
    ]
    if not all(isinstance(one, int) and one > 0 for one in numbers):
        return None
    patch, merge, least, most = numbers
    return PictureTokens(patch * merge, least, most)


def _image_processor(folder: Path) -> dict[str, Any]:
    inside = read_json(folder / "processor_config.json").get("image_processor")
    return inside if isinstance(inside, dict) else read_json(folder / "preprocessor_config.json")


def text_counter(name: str) -> Callable[[str], int]:
    """Counts a text's tokens with the model's tokenizer; always 0 where that is not on this machine."""
    folder = model_folder(name)
    if folder is None or not (file := folder / "tokenizer.json").is_file():
        return lambda text: 0
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


@dataclass(frozen=True)
class PromptRoom:
    """What the longest prompt of a run must hold: a row's pictures and what the agent says beside them."""

    tokens: int  # data.max_prompt_length
    pictures: PictureTokens
    text: Callable[[str], int]
    instruction: str = ""
    looks: int = 0  # pictures that the zoom tool may add, each of the first one's size

    def problem(self, sizes: Sequence[tuple[int, int]], question: str) -> str | None:
        """Why a row does not fit, or None. The chat template's own words are not counted."""
        each = [self.pictures.count(*size) for size in sizes]
        pictures = sum(each) + self.looks * (each[0] if each else 0)
        text = self.text(f"{question}\n{self.instruction}")
        if pictures + text <= self.tokens:
            return None
        shown = ", ".join(f"{width} x {height}" for width, height in sizes)
        closer = f", and {self.looks} closer look(s)" if self.looks and each else ""
        said = f" and {text:,} of text" if text else ""
        return (
            f"its pictures ({shown} px{closer}) are {pictures:,} tokens{said}, data.max_prompt_length={self.tokens} "
            "holds less; raise it (with actor_rollout_ref.rollout.max_model_len), or lower mmqa.max_pixels"
        )


def prompt_room(config: Any) -> PromptRoom | None:
    """That of a run's configuration; None if it cannot be told. An agent of one's own may say less."""
    engine = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    if config.data.get("mm_processor_kwargs") or (isinstance(engine, Mapping) and engine.get("mm_processor_kwargs")):
        return None  # other sizes than those beside the weights
    model, agent = str(config.actor_rollout_ref.model.path), config.mmqa.agent
    pictures = of_model(model)
    if pictures is None:
        return None
    if config.mmqa.agent_class != STOCK_AGENT:
        return PromptRoom(config.data.max_prompt_length, pictures, lambda text: 0)
    instruction = prompts.INSTRUCTION if agent.instruction is None else agent.instruction
    return PromptRoom(
        config.data.max_prompt_length, pictures, text_counter(model), instruction, looks=agent.max_turns - 1
    )
