"""A Qwen2-VL of 0.6 million parameters that a CPU trains: made by code, warmed up for about a minute, cached.

A randomly initialised model cannot see, and GRPO on it would prove nothing. So the model gets a short supervised
warm-up that leaves two things to learn, each measured apart in a run:

* *form*: half of the warm-up answers (in ``circles`` 7 of 10) are bare ("7"), the others tagged ("<answer>7</answer>",
  the form that earns the full reward);
* *seeing*: the warm-up labels are wrong on purpose. In ``digits`` some pairs of digits get either label at random, so
  the model cannot tell 3 from 5 afterwards, and only reward teaches it; in ``circles`` one label in five is off by one,
  and the warm-up ends early (0.39 right on held-out pictures, chance is 0.2): there the form rises first.

The vocabulary is exactly the tokenizer's (``vocab_size == len(tokenizer)``): verl masks a padded vocabulary only in the
engine, which would show as a constant log-prob gap between engine and actor.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from agent.errors import InputError
from agent.tasks import circles, digits

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TAGS = ("<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL_KEY = "actor_rollout_ref.model.path"
SIZE = 84  # px; the processor neither enlarges nor shrinks the tasks' pictures
CONFUSED_DIGITS = {3: 5, 5: 3, 4: 9, 9: 4, 1: 7, 7: 1, 6: 8, 8: 6}


@dataclass(frozen=True)
class Recipe:
    """What decides the warmed-up weights; its hash names the cache folder."""

    task: str
    seed: int = 0
    steps: int = 450
    batch: int = 64
    lr: float = 1e-3
    wrong: float = 0.5  # share of wrong labels: of the confused digits, of the circles' counts
    tagged: float = 0.5  # share of answers in the wanted form
    version: int = 1

    def key(self) -> str:
        """Folder name: task and a hash of every field and of the tokenizer's and template's text."""
        text = json.dumps([asdict(self), SPECIAL, TAGS, CHAT_TEMPLATE], sort_keys=True)
        return f"tiny-vlm-{self.task}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


RECIPES = {"digits": Recipe("digits", wrong=0.5), "circles": Recipe("circles", wrong=0.2, tagged=0.3, steps=300)}


def recipe(task: str) -> Recipe:
    """The recipe of a task; ``InputError`` if the tiny model knows no question of that task."""
    if task not in RECIPES:
        raise InputError(
            f"the tiny model is made for the tasks {', '.join(RECIPES)}, not for {task!r}; set {MODEL_KEY}"
        )
    return RECIPES[task]


def build_tokenizer() -> Any:
    """A byte-level BPE tokenizer of about 340 tokens, trained on the tasks' own words."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    from transformers.models.qwen2 import Qwen2TokenizerFast  # pyright: ignore[reportAttributeAccessIssue]

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    corpus = ["user\n", "assistant\n", "system\n", digits.QUESTION, *map(circles.question, circles.COLOURS)]
    corpus += [str(number) for number in range(10)]
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        min_frequency=1,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(corpus * 5, trainer)
    with tempfile.TemporaryDirectory() as folder:
        plain = PreTrainedTokenizerFast(
            tokenizer_object=bpe,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            additional_special_tokens=list(SPECIAL[1:]),
            chat_template=CHAT_TEMPLATE,
        )
        tags: Any = [AddedToken(tag, special=False, normalized=False) for tag in TAGS]
        plain.add_tokens(tags)
        plain.save_pretrained(folder)
        return Qwen2TokenizerFast.from_pretrained(folder)


def build_processor(tokenizer: Any) -> Any:
    """Qwen2-VL processor fixed at 84 x 84 px: 36 patches of 14 px, merged to 9 image tokens."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    images = Qwen2VLImageProcessor(min_pixels=SIZE * SIZE, max_pixels=SIZE * SIZE, patch_size=14, merge_size=2)
    return Qwen2VLProcessor(
        image_processor=images,
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
        video_processor=Qwen2VLVideoProcessor(),
    )


def build_model(tokenizer: Any, seed: int) -> Any:
    """A seeded, untrained Qwen2-VL (text: 128 wide, 2 layers; vision: 64 wide, 2 layers), float32."""
    import torch
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    config = Qwen2VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=ids["<|im_start|>"],
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
            dtype="float32",
            initializer_range=0.06,  # 0.02 reaches a plateau
        ),
        vision_config=dict(
            depth=2,
            embed_dim=64,
            num_heads=2,
            mlp_ratio=2,
            hidden_size=128,
            patch_size=14,
            spatial_merge_size=2,
            temporal_patch_size=2,
            in_chans=3,
            initializer_range=0.06,
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        initializer_range=0.06,  # pyright: ignore[reportCallIssue]
    )
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config).float()
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    return model


def prompt_text(question: str) -> str:
    """The chat template applied to one image and one question (what the engine's front end makes of a request)."""
    return f"<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>{question}<|im_end|>\n<|im_start|>assistant\n"


def answer_text(label: str, tagged: bool) -> str:
    """A warm-up target in one of the two forms."""
    return f"{TAGS[0]}{label}{TAGS[1]}" if tagged else label


def _digit_example(rng: random.Random, wrong: float) -> tuple[Image.Image, str, str]:
    image, digit = digits.scans()[rng.choice(digits.split_indices("train"))]
    if digit in CONFUSED_DIGITS and rng.random() < wrong:
        digit = CONFUSED_DIGITS[digit]
    return image, digits.QUESTION, str(digit)


def _circle_example(rng: random.Random, wrong: float) -> tuple[Image.Image, str, str]:
    image, colour, count = circles.draw(rng)
    if rng.random() < wrong:
        count = min(max(count + rng.choice((-1, 1)), 1), circles.MAX_COUNT)
    return image, circles.question(colour), str(count)


_EXAMPLES: dict[str, Callable[[random.Random, float], tuple[Image.Image, str, str]]] = {
    "digits": _digit_example,
    "circles": _circle_example,
}


def batches(recipe: Recipe, processor: Any) -> Iterator[dict[str, Any]]:
    """Yield ``recipe.steps`` supervised batches: model inputs and ``labels`` ([batch, tokens], -100 on the prompt)."""
    import torch

    rng = random.Random(recipe.seed)
    tokenizer = processor.tokenizer
    for _ in range(recipe.steps):
        examples = [_EXAMPLES[recipe.task](rng, recipe.wrong) for _ in range(recipe.batch)]
        prompts = [prompt_text(question) for _, question, _ in examples]
        targets = [answer_text(label, tagged=rng.random() < recipe.tagged) + "<|im_end|>" for _, _, label in examples]
        inputs = processor(
            text=[prompt + target for prompt, target in zip(prompts, targets, strict=True)],
            images=[[image] for image, _, _ in examples],
            padding=True,
            padding_side="right",
            return_tensors="pt",
        )
        labels = torch.full_like(inputs["input_ids"], -100)
        ends = inputs["attention_mask"].sum(-1).tolist()
        for row, (target, end) in enumerate(zip(targets, ends, strict=True)):
            start = end - len(tokenizer(target, add_special_tokens=False)["input_ids"])
            labels[row, start:end] = inputs["input_ids"][row, start:end]
        yield {**inputs, "labels": labels}


def warm_up(model: Any, processor: Any, recipe: Recipe, report: Callable[[str], None]) -> None:
    """Supervised warm-up in place: AdamW, cosine decay after 50 steps of linear rise, gradient clip 1."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / 50, total_iters=50),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, recipe.steps - 50)),
        ],
        milestones=[50],
    )
    model.train()
    started = time.monotonic()
    for step, batch in enumerate(batches(recipe, processor), start=1):
        loss = model(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == recipe.steps:
            left = (time.monotonic() - started) / step * (recipe.steps - step)
            report(f"warm-up {step}/{recipe.steps}  loss {loss.item():.3f}  {left:.0f} s left")
    model.eval()


def cache_root() -> Path:
    """Where warmed-up models lie: ``$MMQA_CACHE``, else ``$XDG_CACHE_HOME/mmqa``, else ``~/.cache/mmqa``."""
    if chosen := os.environ.get("MMQA_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmqa"


def is_cached_path(path: str) -> bool:
    """Whether a model path is that of a tiny model in some cache (it can be made again)."""
    return Path(path).name.startswith("tiny-vlm-")


def _save(model: Any, processor: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def build_random(out_dir: Path, seed: int = 0) -> Path:
    """Write an untrained model (for engine probes that only need shapes) and return its folder."""
    tokenizer = build_tokenizer()
    _save(build_model(tokenizer, seed), build_processor(tokenizer), out_dir)
    return out_dir


def ensure(recipe: Recipe, report: Callable[[str], None] = lambda line: None) -> Path:
    """Return the folder of the warmed-up model, making it first if the cache has none (about a minute)."""
    folder = cache_root() / recipe.key()
    if (folder / "model.safetensors").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    import torch

    report(f"making the tiny model for {recipe.task} (once, about a minute)")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads on two busy cores wait for each other: 1.7 s a step instead of 0.5 s
    tokenizer = build_tokenizer()
    processor = build_processor(tokenizer)
    model = build_model(tokenizer, recipe.seed)
    try:
        warm_up(model, processor, recipe, report)
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _save(model, processor, Path(scratch) / "model")
        with contextlib.suppress(OSError):  # another process finished first: both made the same model
            os.replace(Path(scratch) / "model", folder)
    if not (folder / "model.safetensors").exists():
        shutil.rmtree(folder, ignore_errors=True)
        raise OSError(f"could not write the tiny model to {folder}")
    return folder
