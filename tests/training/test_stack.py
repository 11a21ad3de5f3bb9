"""What this package says of the installed stack, held against the stack itself (imports verl and vLLM: slow)."""

import importlib.util
import io

import pytest
from PIL import Image

from agent.images import ImageStore
from agent.training import config as configs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs the cpu or gpu extra"),
]


def awkward_pictures():
    """Pictures that decoders treat differently unless they are normalised first."""
    exif = Image.Exif()
    exif[0x0112] = 6
    photo = Image.radial_gradient("L").resize((90, 60)).convert("RGB")
    buffer = io.BytesIO()
    photo.save(buffer, "JPEG", exif=exif)
    yield "turned by EXIF", buffer.getvalue()
    clear = Image.new("RGBA", (50, 40), (200, 0, 0, 0))
    clear.paste((0, 0, 255, 128), (5, 5, 30, 30))
    buffer = io.BytesIO()
    clear.save(buffer, "PNG")
    yield "transparent", buffer.getvalue()
    buffer = io.BytesIO()
    Image.new("CMYK", (1500, 1200), (10, 200, 30, 40)).save(buffer, "JPEG")
    yield "large CMYK", buffer.getvalue()


@pytest.mark.parametrize(("name", "data"), list(awkward_pictures()))
def test_engine_and_trainer_decode_the_same_pixels(name, data, tmp_path):
    from agentlightning.verl.rollout_adapter import _load_pil_image
    from vllm.multimodal.media.connector import MediaConnector

    store = ImageStore(tmp_path / "images")
    reference = store.put(data, name)
    engine = MediaConnector(allowed_local_media_path=str(store.root)).fetch_image(reference)
    engine = getattr(engine, "media", engine)
    trainer = _load_pil_image(reference)
    assert engine.mode == trainer.mode == "RGB"
    assert engine.size == trainer.size and engine.tobytes() == trainer.tobytes() == store.open(reference).tobytes()


def test_without_the_store_they_would_differ(tmp_path):
    """Why the store normalises: of the raw file the engine lays transparency onto white, the trainer makes it black."""
    from agentlightning.verl.rollout_adapter import _load_pil_image
    from vllm.multimodal.media.connector import MediaConnector

    raw = tmp_path / "clear.png"
    raw.write_bytes(dict(awkward_pictures())["transparent"])
    engine = MediaConnector(allowed_local_media_path=str(tmp_path)).fetch_image(f"file://{raw}")
    engine, trainer = getattr(engine, "media", engine), _load_pil_image(f"file://{raw}")
    assert engine.getpixel((0, 0)) == (255, 255, 255) and trainer.getpixel((0, 0)) != (255, 255, 255)


def test_the_engine_refuses_pictures_outside_the_store(tmp_path):
    from vllm.multimodal.media.connector import MediaConnector

    store = ImageStore(tmp_path / "images")
    secret = tmp_path / "secret.png"
    Image.new("RGB", (8, 8)).save(secret)
    (store.root / "link.png").symlink_to(secret)
    connector = MediaConnector(allowed_local_media_path=str(store.root))
    for reference in (f"file://{secret}", f"file://{store.root}/../secret.png", f"file://{store.root}/link.png"):
        with pytest.raises(Exception, match="allowed-local-media-path"):
            connector.fetch_image(reference)


@pytest.mark.parametrize("preset", configs.preset_names())
def test_every_preset_passes_verls_own_checks(preset):
    from omegaconf import OmegaConf
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = configs.compose(preset)
    OmegaConf.resolve(config)
    validate_config(config, use_reference_policy=need_reference_policy(config), use_critic=False)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    assert rollout.n == config.actor_rollout_ref.rollout.n and rollout.enable_sleep_mode in (True, False)


def test_the_tiny_model_speaks_the_template_and_pads_nothing(tmp_path):
    from transformers import AutoConfig, AutoProcessor

    from agent.training import tiny_vlm

    folder = tiny_vlm.build_random(tmp_path / "tiny")
    processor = AutoProcessor.from_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    assert config.text_config.vocab_size == len(processor.tokenizer)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which digit?"}]}
    text = processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    assert text == tiny_vlm.prompt_text("Which digit?")
    reply = processor.tokenizer("<answer>7</answer>", add_special_tokens=False)["input_ids"]
    assert len(reply) == 3 and processor.tokenizer.decode(reply, skip_special_tokens=True) == "<answer>7</answer>"


def test_filled_rows_carry_no_gradient_whatever_their_order():
    """The rows of a step of 7 of 8: the filled one gets advantage zero from Agent Lightning's own computation."""
    import numpy as np
    import torch
    from agentlightning.verl.rollout_level_advantage import compute_rollout_level_advantage
    from tensordict import TensorDict
    from verl import DataProto

    from agent.training.rows import settle

    scores = torch.zeros(8, 3)
    scores[:, 1] = torch.tensor([1.0, 0, 1, 0, 0, 1, 0, 1])
    tensors = {
        "responses": torch.ones(8, 3, dtype=torch.long),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 0]] * 8),
        "is_drop_mask": torch.tensor([False] * 7 + [True]),
        "token_level_scores": scores,
    }
    batch = DataProto(batch=TensorDict(tensors, batch_size=8))
    batch.non_tensor_batch["rollout_id_list"] = np.array([f"r{i}" for i in range(8)])
    batch.non_tensor_batch["data_id_list"] = np.array(["a"] * 4 + ["b"] * 4)
    settled, counts = settle(batch, 8, 4)
    assert len(settled) == 8 and counts["training/n_rows_filled"] == 1 and counts["training/n_rows_dropped"] == 1
    settled.reorder(torch.tensor([7, 0, 1, 2, 3, 4, 5, 6]))  # verl balances lengths: the filled row may come first
    settled.non_tensor_batch["uid"] = settled.non_tensor_batch["data_id_list"]
    settled.batch["token_level_rewards"] = settled.batch["token_level_scores"]
    done, _ = compute_rollout_level_advantage(settled, adv_estimator="grpo", gamma=1.0, lam=1.0, num_repeat=4)
    advantages = done.batch["advantages"]
    assert advantages[0].abs().sum() == 0 and (advantages[1:].abs().sum(-1) > 0).all()
