"""The probe's own tiny random Qwen2-VL: written once per probe, by whichever transformers the probed vLLM brings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>How many red circles?<|im_end|>\n"
    "<|im_start|>assistant\n"
)
SIDE = 112  # px: the processor below neither enlarges nor shrinks the probe's picture


def build(folder: Path, seed: int = 0, *, depth: int = 2, width: int = 64, side: int = SIDE) -> Path:
    """Write model, tokenizer and processor (0.6 million parameters, float32) and return the folder.

    ``depth`` layers of ``width`` make the vision tower; pictures larger than ``side`` px are shrunk to it.
    """
    import torch
    import transformers

    library: Any = transformers  # names differ between the releases served

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(folder)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL}
    sections = {"rope_type": "default", "mrope_section": [4, 6, 6]}
    config = library.Qwen2VLConfig(
        text_config=dict(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            rope_theta=10000.0,  # transformers 4
            rope_scaling=sections,
            rope_parameters=sections | {"rope_theta": 10000.0},  # transformers 5
            tie_word_embeddings=True,
            bos_token_id=ids["<|im_start|>"],
            eos_token_id=ids["<|im_end|>"],
            pad_token_id=ids["<|endoftext|>"],
        ),
        vision_config=dict(
            depth=depth, embed_dim=width, num_heads=2, mlp_ratio=2, hidden_size=128, patch_size=14, spatial_merge_size=2
        ),
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
        initializer_range=0.06,
    )
    torch.manual_seed(seed)
    library.Qwen2VLForConditionalGeneration(config).float().save_pretrained(folder)
    _processor(tokenizer, side).save_pretrained(folder)
    return folder


def _tokenizer(folder: Path) -> Any:
    """Byte-level tokenizer without merges: eight special tokens and 256 bytes."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    library: Any = transformers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = Tokenizer(models.BPE({token: index for index, token in enumerate([*SPECIAL, *letters])}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    library.PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL[1:]),
    ).save_pretrained(folder)
    return library.Qwen2TokenizerFast.from_pretrained(folder)


def _processor(tokenizer: Any, side: int) -> Any:
    import transformers

    video = getattr(transformers, "Qwen2VLVideoProcessor", None)
    images = transformers.Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=side * side)
    extra = {"video_processor": video()} if video else {}
    return transformers.Qwen2VLProcessor(image_processor=images, tokenizer=tokenizer, chat_template="", **extra)
