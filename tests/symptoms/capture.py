"""Write the captured sample logs again: each text is raised or printed by the installed package itself.

    python tests/symptoms/capture.py            write them into agent/symptoms/samples
    python tests/symptoms/capture.py --check    exit 1 if one of them would come out otherwise

No engine, no training, no GPU: a function of the package is called with the input that it refuses. Two things are added
to what it says: the process prefix that Ray or vLLM puts before each line (``who``), and stable names for what differs
between two machines (folders, ports, addresses in memory, times). Lines of source and local variables are left out.
``agent/symptoms/evidence/samples.yaml`` says how each sample was made, also those that are not captured.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

SAMPLES = Path(__file__).resolve().parents[2] / "agent/symptoms/samples"
PROCESSES = "WorkerDict pid=21313", "_AglTaskRunner pid=20871", "vLLMHttpServer pid=21044"
WORKER, TASK, SERVER = (f"\x1b[36m({process})\x1b[0m " for process in PROCESSES)  # as Ray does
ENGINE = SERVER + "(EngineCore_DP0 pid=21390) ERROR 11-29 08:01:13 [core.py:1101] "
WHEN = "2026-11-29 10:05:00"
FRAMES = 5  # of a traceback that are kept
FIRST = {"verl": ["verl.trainer.ppo.ray_trainer"], "vllm": ["vllm.multimodal.media", "vllm.config"]}

ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
Capture = Callable[[Path], Any]
GROUPS: dict[str, dict[str, tuple[str, Capture]]] = {}


def sample(group: str, name: str, who: str = "") -> Callable[[Capture], Capture]:
    """Register a function whose output and error are the sample ``name``; it gets an empty folder."""

    def register(function: Capture) -> Capture:
        GROUPS.setdefault(group, {})[f"{name}.log"] = (who, function)
        return function

    return register


def stub(**parts: Any) -> Any:
    """What stands in for an object of a package: the few parts that the called function looks at."""
    return SimpleNamespace(**parts)


def text_of(who: str, function: Capture) -> str:
    """What the function prints, and the traceback that it ends in, from the package's first frame on."""
    out = io.StringIO()
    with tempfile.TemporaryDirectory(prefix="capture-") as folder:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            try:
                function(Path(folder))
            except BaseException as error:
                out.write("".join(without_own_frames(traceback.TracebackException.from_exception(error)).format()))
        text = stable(out.getvalue(), folder)
    return "".join(f"{who}{line}\n".replace("\x1b[0m \n", "\x1b[0m\n") for line in text.rstrip("\n").split("\n"))


def without_own_frames(trace: traceback.TracebackException) -> traceback.TracebackException:
    """The same traceback, of the exceptions behind it too: its last frames, without lines of source."""
    kept = [one for one in trace.stack if one.filename != __file__ and "/asyncio/" not in one.filename]
    bare = [traceback.FrameSummary(one.filename, one.lineno, one.name, line="") for one in kept[-FRAMES:]]
    trace.stack = traceback.StackSummary.from_list(bare)
    for behind in (trace.__cause__, trace.__context__):
        if behind:
            without_own_frames(behind)
    return trace


def stable(text: str, folder: str) -> str:
    """Names that are the same on every machine and in every run."""
    import site
    import sysconfig

    for real, shown in (
        (os.path.realpath(folder), "/data/run"),
        (folder, "/data/run"),
        (sysconfig.get_paths()["purelib"], "/venv/lib/python3.12/site-packages"),
        (sys.prefix, "/venv"),
        (os.path.realpath(sysconfig.get_paths()["stdlib"]), "/usr/lib/python3.12"),
        (str(Path(__file__).resolve().parents[2]), "/repo"),
        (site.getuserbase(), "/home/user/.local"),
    ):
        text = text.replace(real, shown)
    text = re.sub(r"0x[0-9a-f]{6,}", "0x7f11aa00c0de", text)
    text = re.sub(r"(127\.0\.0\.1(?::|', ))\d+", r"\g<1>8080", text)
    text = re.sub(r"\b[0-9a-f]{32}\b", "7c1d0b5e8ad01c7751aa5b1e91ac77ab", text)
    text = re.sub(r"^│ (?:[╭│╰❱]|  *[0-9]+ [│ ]|      ).*\n|^│ +│\n", "", text, flags=re.MULTILINE)  # source, variables
    text = re.sub(r"20\d\d-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?", WHEN, text)
    return re.sub(r"(pid=|process \[)\d+", r"\g<1>21313", text)


# -- torch, transformers -----------------------------------------------------------------------------------------------


@sample("transformers", "checkpoint-partial-or-disk-full", WORKER)
def _(folder: Path) -> None:
    import torch

    torch.save({"w": torch.zeros(1 << 20)}, "/dev/full")


@sample("transformers", "checkpoint-partial-or-disk-full-load", WORKER)
def _(folder: Path) -> None:
    import torch

    file = folder / "model_world_size_1_rank_0.pt"
    torch.save({"w": torch.zeros(1 << 16)}, file)
    file.write_bytes(file.read_bytes()[: 1 << 17])
    torch.load(file, weights_only=False)


@sample("transformers", "flash-attn-missing", WORKER)
def _(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    size = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8)
    count = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    AutoModelForCausalLM.from_config(Qwen2Config(**size, **count), attn_implementation="flash_attention_2")


def hub_says(code: int, error: str, folder: Path) -> None:
    """What transformers makes of an answer of the hub (a stub: nothing is sent)."""
    import httpx
    from transformers.utils import hub

    def refused(*arguments: Any, **options: Any) -> None:
        request = httpx.Request("GET", "https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instuct/resolve/main/config.json")
        hub.hf_raise_for_status(httpx.Response(code, headers={"X-Error-Code": error}, request=request))

    from huggingface_hub.utils import hf_raise_for_status

    with mock.patch.multiple(hub, hf_raise_for_status=hf_raise_for_status, hf_hub_download=refused):
        hub.cached_files("Qwen/Qwen2.5-VL-3B-Instuct", ["config.json"], cache_dir=folder)


@sample("transformers", "hub-model-not-found", TASK)
def _(folder: Path) -> None:
    hub_says(401, "RepoNotFound", folder)


@sample("transformers", "hub-model-not-found-gated", TASK)
def _(folder: Path) -> None:
    hub_says(403, "GatedRepo", folder)


@sample("transformers", "hub-model-not-found-offline", TASK)
def _(folder: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.from_pretrained("Qwen/Qwen2.5-VL-3B-Instruct", cache_dir=folder)  # HF_HUB_OFFLINE=1


@sample("transformers", "hf-folder-has-no-weights")
def _(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen2Config

    actor = folder / "checkpoints/global_step_20/actor/huggingface"
    Qwen2Config().save_pretrained(actor)
    AutoModelForCausalLM.from_pretrained(actor)


@sample("transformers", "merged-model-without-processor")
def _(folder: Path) -> None:
    from transformers import AutoImageProcessor, Qwen2VLConfig

    Qwen2VLConfig().save_pretrained(folder / "merged-model")
    AutoImageProcessor.from_pretrained(folder / "merged-model")


@sample("transformers", "image-features-tokens-mismatch-hf", WORKER)
def _(folder: Path) -> None:
    import torch
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    model = stub(config=stub(image_token_id=7, video_token_id=8))
    given: dict[str, Any] = {"inputs_embeds": torch.zeros(1, 196, 4), "image_features": torch.zeros(784, 4)}
    Qwen3VLModel.get_placeholder_mask(model, input_ids=torch.full((1, 196), 7).long(), **given)  # type: ignore


@sample("transformers", "transformers-too-old-for-qwen35", TASK)
def _(folder: Path) -> None:
    """The installed transformers, with the model type taken out of its list."""
    from transformers import AutoConfig
    from transformers.models.auto import configuration_auto

    (folder / "config.json").write_text('{"model_type": "qwen3_5"}')
    known = configuration_auto.CONFIG_MAPPING
    kept = known._mapping.pop("qwen3_5")
    try:
        AutoConfig.from_pretrained(folder)
    finally:
        known._mapping["qwen3_5"] = kept


@sample("transformers", "qwen35-slow-torch-path", WORKER)
def _(folder: Path) -> None:
    import logging

    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

    size: dict[str, Any] = {"hidden_size": 8, "linear_key_head_dim": 4, "linear_value_head_dim": 4}
    config: Any = Qwen3_5TextConfig(linear_num_key_heads=1, linear_num_value_heads=1, **size)
    for handler in logging.getLogger("transformers").handlers:
        handler.setStream(sys.stdout)  # type: ignore
    Qwen3_5GatedDeltaNet(config, 0)


# -- verl --------------------------------------------------------------------------------------------------------------


def verl_config(*overrides: str) -> Any:
    from agent.training import config as configs

    base = configs.upstream_defaults()
    from omegaconf import OmegaConf

    OmegaConf.set_struct(base, False)
    return OmegaConf.merge(base, OmegaConf.from_dotlist(list(overrides)))


@sample("verl", "batch-size-assertions", TASK)
def _(folder: Path) -> None:
    from verl.utils.config import validate_config

    config = verl_config("data.train_batch_size=3", "actor_rollout_ref.rollout.n=4", "trainer.n_gpus_per_node=8")
    validate_config(config, use_reference_policy=False, use_critic=False)


@sample("verl", "batch-size-assertions-missing", TASK)
def _(folder: Path) -> None:
    from verl.utils.config import validate_config

    config = verl_config(
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.use_dynamic_bsz=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    )
    validate_config(config, use_reference_policy=True, use_critic=False)


@sample("verl", "batch-size-assertions-empty", TASK)
def _(folder: Path) -> None:
    from torch.utils.data import SequentialSampler
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    rows = [{"x": 1}] * 4
    trainer = stub(config=verl_config("data.train_batch_size=8", "data.dataloader_num_workers=0"))
    RayPPOTrainer._create_dataloader(trainer, rows, rows, list, SequentialSampler(rows))


@sample("verl", "batch-size-assertions-micro", WORKER)
def _(folder: Path) -> None:
    import torch
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.engine.utils import prepare_micro_batches

    data = TensorDict({"x": torch.zeros(7, 1)}, batch_size=7)
    tensordict_utils.assign_non_tensor(data, use_dynamic_bsz=False, micro_batch_size_per_gpu=2)
    prepare_micro_batches(data)


@sample("verl", "image-features-tokens-mismatch", WORKER)
def _(folder: Path) -> None:
    import torch
    from verl.models.transformers import qwen2_vl

    visual = lambda pixels, grid_thw: torch.zeros(1024, 4)  # noqa: E731
    visual.dtype = torch.float32  # type: ignore[attr-defined]
    model = stub(
        get_input_embeddings=lambda: lambda ids: torch.zeros(*ids.shape, 4),
        visual=visual,
        config=stub(image_token_id=7),
    )
    given: dict[str, Any] = {"pixel_values": torch.zeros(1, 1), "image_grid_thw": torch.ones(1, 3).long()}
    qwen2_vl._get_input_embeds(model, input_ids=torch.full((1, 1025), 7), **given)  # type: ignore


@sample("verl", "merger-wrong-folder")
def _(folder: Path) -> None:
    from verl.model_merger.base_model_merger import ModelMergerConfig
    from verl.model_merger.fsdp_model_merger import FSDPModelMerger

    step = folder / "checkpoints/global_step_20"
    step.mkdir(parents=True)
    merger = stub(config=ModelMergerConfig(operation="merge", backend="fsdp", local_dir=str(step)))
    FSDPModelMerger._get_world_size(merger)


@sample("verl", "metrics-split-or-wiped-on-resume", TASK)
def _(folder: Path) -> None:
    from verl.utils.tracking import FileLogger

    os.environ["VERL_FILE_LOGGER_ROOT"] = str(folder)
    FileLogger("verl_examples", "gsm8k").finish()


@sample("verl", "mm-inputs-concat-shapes", WORKER)
def _(folder: Path) -> None:
    import torch
    from verl.utils.model import extract_multi_modal_inputs

    extract_multi_modal_inputs(
        [{"pixel_values": torch.zeros(13, 3, 384, 384)}, {"pixel_values": torch.zeros(5, 3, 512, 512)}]
    )


@sample("verl", "position-ids-2d-for-vl", WORKER)
def _(folder: Path) -> None:
    import torch
    from verl.models.transformers.qwen2_vl import process_position_ids

    process_position_ids(torch.zeros(4, 128))


@sample("verl", "grad-norm-not-finite", WORKER)
def _(folder: Path) -> None:
    import torch
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters())
    parts = {"optimizer_config": stub(clip_grad=1.0), "module": module, "optimizer": optimizer}
    engine = stub(scaler=None, _qat_enabled=False, **parts)
    for _ in range(3):
        module.weight.grad = torch.full((1, 1), float("nan"))
        FSDPEngine.optimizer_step(engine)


def load_checkpoint(folder: Path, mode: str, path: str | None = None) -> None:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = stub(
        config=verl_config(f"trainer.default_local_dir={folder}", f"trainer.resume_mode={mode}"),
        actor_rollout_wg=stub(load_checkpoint=lambda *args, **given: None),
        use_critic=False,
        train_dataloader=range(64),
    )
    trainer.config.trainer.resume_from_path = path
    RayPPOTrainer._load_checkpoint(trainer)


@sample("verl", "nothing-to-resume", TASK)
def _(folder: Path) -> None:
    load_checkpoint(folder / "checkpoints", "auto")


@sample("verl", "tracker-points-to-missing-folder", TASK)
def _(folder: Path) -> None:
    from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path

    (folder / "checkpoints").mkdir()
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("40")
    find_latest_ckpt_path(str(folder / "checkpoints"))


@sample("verl", "resume-epoch-boundary-order", TASK)
def _(folder: Path) -> None:
    step = folder / "checkpoints/global_step_128"
    step.mkdir(parents=True)
    (step / "data.pt").touch()
    (step.parent / "latest_checkpointed_iteration.txt").write_text("128")
    load_checkpoint(step.parent, "auto")


@sample("verl", "resume-path-format", TASK)
def _(folder: Path) -> None:
    (folder / "checkpoints/global_step_20").mkdir(parents=True)
    (folder / "checkpoints/latest_checkpointed_iteration.txt").write_text("20")
    load_checkpoint(folder / "checkpoints", "resume_path", f"{folder}/checkpoints/global_step_20/actor")


def load_shards(folder: Path, world_size: int) -> None:
    import torch
    from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

    actor = folder / "checkpoints/global_step_20/actor"
    actor.mkdir(parents=True)
    model = torch.nn.Linear(1, 1)
    torch.save(model.state_dict(), actor / "model_world_size_1_rank_0.pt")
    manager = stub(
        should_load_model=True,
        should_load_optimizer=True,
        should_load_extra=True,
        model=model,
        optimizer=torch.optim.SGD(model.parameters()),
        rank=0,
        world_size=world_size,
    )
    FSDPCheckpointManager.load_checkpoint(manager, str(actor))


@sample("verl", "resume-missing-optimizer", WORKER)
def _(folder: Path) -> None:
    load_shards(folder, 1)


@sample("verl", "resume-other-world-size", WORKER)
def _(folder: Path) -> None:
    load_shards(folder, 8)


@sample("verl", "ray-gpu-shortage", TASK)
def _(folder: Path) -> None:
    import ray
    from verl.single_controller.ray.base import ResourcePoolManager

    ray._private.state.available_resources_per_node = lambda: {"node": {"CPU": 2.0}}
    pool = ResourcePoolManager(resource_pool_spec={"global_pool": [1]}, mapping={})
    pool._check_resource_available()


@sample("verl", "flash-attn-missing-import", WORKER)
def _(folder: Path) -> None:
    from verl.utils.attention_utils import _get_attention_functions

    _get_attention_functions()


@sample("verl", "vllm-dist-name-unknown", WORKER)
def _(folder: Path) -> None:
    """The installed verl, where no distribution is called vllm."""
    from importlib import metadata

    real = metadata.version

    def version(name: str) -> str:
        if name == "vllm":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    metadata.version = version
    try:
        import verl.third_party.vllm  # noqa: F401
    finally:
        metadata.version = real


@sample("verl", "ray-actor-died", TASK)
def _(folder: Path) -> None:
    import ray

    raise ray.exceptions.ActorDiedError()


@sample("verl", "ray-socket-path-too-long")
def _(folder: Path) -> None:
    from ray._private.utils import validate_socket_filepath

    user = "/scratch/users/a.person/projects/vision/jobs/4711/tmp/ray"
    validate_socket_filepath(f"{user}/session_2026-11-29_14-00-00_000000_1/sockets/plasma_store")


# -- Agent Lightning's trainer side ------------------------------------------------------------------------------------


def triplet(prompt: int = 4, images: list[str] | None = None) -> Any:
    from agentlightning.verl.agl_rollout_manager import Triplet

    return Triplet(
        prompt={"token_ids": [1] * prompt}, response={"token_ids": [2, 3], "log_probs": [0.0, 0.0]}, image_urls=images
    )


def adapt(*triplets: Any, level: str = "transition", processor: Any = None) -> None:
    import torch
    from agentlightning.verl.agl_rollout_manager import CompletedRollout
    from agentlightning.verl.rollout_adapter import RolloutAdapter

    adapter = RolloutAdapter(
        max_prompt_length=8,
        max_response_length=4,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level=level,
        processor=processor,
    )
    rows = [one if isinstance(one, list) else [one] for one in triplets]
    adapter.get_train_data_batch(
        [
            CompletedRollout(
                rollout_id=f"8ad01c7{number}",
                data_id="d",
                step=1,
                sample_idx_in_step=number,
                enqueue_time=0.0,
                triplets=row,
            )
            for number, row in enumerate(rows)
        ]
    )


class Processor:
    """What the adapter needs of a Qwen-VL processor; its position ids fail as those of transformers do."""

    def __init__(self, *, error: Exception | None = None) -> None:
        self.error = error

    def get_rope_index(self, **inputs: Any) -> Any:
        if self.error:
            raise self.error
        import torch

        length = inputs["input_ids"].shape[1]
        return torch.zeros(3, 1, length, dtype=torch.long)

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        import torch

        return {"pixel_values": torch.zeros(4, 4), "image_grid_thw": torch.ones(1, 3, dtype=torch.long)}


def picture(folder: Path) -> str:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(folder / "5.png")
    return f"file://{folder / '5.png'}"


@sample("verl", "image-processing-failed", TASK)
def _(folder: Path) -> None:
    adapt(triplet(), triplet(images=[f"file://{folder}/images/5.png"]), processor=Processor())


@sample("verl", "image-prompt-truncated", TASK)
def _(folder: Path) -> None:
    adapt(triplet(), triplet(), triplet(prompt=9, images=[picture(folder)]), processor=Processor())


@sample("verl", "no-processor-rows-dropped", TASK)
def _(folder: Path) -> None:
    adapt(triplet(images=[picture(folder)]))


@sample("verl", "policy-samples-image-token", TASK)
def _(folder: Path) -> None:
    adapt(triplet(images=[picture(folder)]), processor=Processor(error=StopIteration()))


@sample("verl", "mrope-noise-text-rows", TASK)
def _(folder: Path) -> None:
    """The adapter passes no mm_token_type_ids for a row without a picture, and transformers wants them."""
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    class Strict(Processor):
        def get_rope_index(self, **inputs: Any) -> Any:
            if inputs["image_grid_thw"] is None:
                Qwen2VLModel.get_rope_index(self, **inputs)  # type: ignore
            return super().get_rope_index(**inputs)

    adapt(triplet(images=[picture(folder)]), triplet(), processor=Strict())


@sample("verl", "trajectory-level-with-images", TASK)
def _(folder: Path) -> None:
    adapt(triplet(images=[picture(folder)]), level="trajectory")


@sample("verl", "zero-training-rows", TASK)
def _(folder: Path) -> None:
    adapt([], [])


@sample("verl", "image-alignment-lost", TASK)
def _(folder: Path) -> None:
    from agentlightning.schemas import Event
    from agentlightning.verl.agl_rollout_manager import _aligned_image_urls

    part = {"type": "image_url", "image_url": {"url": "file:///data/1.png"}}
    events = [
        Event(
            event_type="model_request",
            rollout_id="r",
            attempt_id="0",
            timestamp=0.0,
            data={
                "request": {"messages": [{"role": "user", "content": [part]}]},
                "response": {"prompt_token_ids": [1, number], "choices": [{"token_ids": [2]}]},
            },
        )
        for number in range(3)
    ]
    _aligned_image_urls(events, 2)


def create_rollouts(row: Any) -> None:
    from agentlightning.verl.agl_rollout_manager import AglRolloutManager

    manager = AglRolloutManager(agl_base_url="http://127.0.0.1:1", agl_key="", model="m", step=1)
    manager._create_rollouts({"image": [row]}, is_train=True)


@sample("verl", "dataset-row-not-json", TASK)
def _(folder: Path) -> None:
    from PIL import Image

    picture(folder)
    create_rollouts(Image.open(folder / "5.png"))


@sample("verl", "dataset-row-not-json-bytes", TASK)
def _(folder: Path) -> None:
    picture(folder)
    create_rollouts((folder / "5.png").read_bytes())


@sample("verl", "images-not-in-training", TASK)
def _(folder: Path) -> None:
    from agent.training import image_proof
    from agent.training.trainer import TrainingStopped

    raise TrainingStopped(image_proof.problem({"rows": 8, "rows_with_pixels": 0}, True, 0.1) or "")


@sample("verl", "logprob-mismatch-unwatched", TASK)
def _(folder: Path) -> None:
    from agent.training import image_proof
    from agent.training.trainer import TrainingStopped

    raise TrainingStopped(image_proof.problem({"training/logprob_gap_mean": 0.214}, False, 0.1) or "")


# -- Agent Lightning's gateway and controller --------------------------------------------------------------------------


@contextlib.contextmanager
def gateway(key: str = "k") -> Any:
    """agl-server's application on a free port; its address."""
    import uvicorn
    from agentlightning.server import store
    from agentlightning.server.app import create_app

    store._rollouts.clear()
    store._models.clear()
    settings = {
        "key": key,
        "default_proxy": {
            "model_name": "Qwen/Qwen2.5-7B-Instruct",
            "include_log_probs": True,
            "include_routed_experts": False,
            "train": {"temperature": 1},
            "val": {"temperature": 0.7},
        },
    }
    with contextlib.redirect_stdout(io.StringIO()):
        app = create_app(settings)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def rollouts(address: str, number: int = 1, agent: str = "no_such_module.Agent", **local: Any) -> list[str]:
    """Enqueue rollouts; their ids."""
    import httpx

    config = {"timeout_seconds": 1, "local": {"agent_class": agent, "env_map": local.get("env_map", {})}}
    body = [{"input": local.get("row", {}), "is_train": True, "config": config, "metadata": {}}] * number
    made = httpx.post(f"{address}/api/rollouts", json=body, headers={"Authorization": "Bearer k"})
    return [one["rollout_id"] for one in made.json()]


def stable_boxes() -> None:
    """Rich breaks the lines of a traceback's box where the width ends: give it the stable names to break."""
    import rich.traceback
    from rich.traceback import Trace, Traceback

    if rich.traceback.os is not os:  # done before
        return
    extract = Traceback.extract
    path = {"exists": lambda place: True, "isabs": os.path.isabs, "join": os.path.join}  # it names no missing file
    rich.traceback.os = stub(path=stub(**path))  # type: ignore[assignment]

    def extract_stable(cls: type[Traceback], *what: Any, **options: Any) -> Trace:
        trace = extract(*what, **options)
        for stack in trace.stacks:
            stack.exc_value = stable(stack.exc_value, "/data/run")
            for frame in stack.frames:
                frame.filename = stable(frame.filename, "/data/run")
        return trace

    Traceback.extract = classmethod(extract_stable)  # type: ignore[assignment]


def controller(address: str, key: str = "k", seconds: float = 1.0, interval: float = 60.0) -> None:
    """agl-controller's local reconciler, for some seconds."""
    import structlog
    from agentlightning.client import AgentLightningAsyncClient
    from agentlightning.controller import local_reconciler
    from omegaconf import OmegaConf

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stdout), cache_logger_on_first_use=False)
    stable_boxes()
    settings = {
        "runner_type": "local",
        "agl_server": {"url": address, "agent_url": None, "key": key},
        "local_runner": {"maximum_size": 50, "poll_interval": interval},
    }

    async def run() -> None:
        async with AgentLightningAsyncClient(base_url=address, key=key) as client:
            reconciler = local_reconciler.LocalReconciler(client, OmegaConf.create(settings))
            loop = asyncio.create_task(reconciler._reconcile_loop())
            await asyncio.sleep(seconds)
            reconciler.stop()
            await loop

    asyncio.run(run())


def show(address: str, rollout: str) -> None:
    """The rollout as the gateway tells it."""
    import httpx

    answer = httpx.get(f"{address}/api/rollouts/{rollout}", headers={"Authorization": "Bearer k"}).json()
    status = (answer.get("rollout") or answer)["status"]
    print(json.dumps({"rollout_id": "7c1d", "state": status["state"], "error_message": status["error_message"]}))


def ask(address: str, rollout: str, **more: Any) -> None:
    """One call of this package's agent through the gateway."""
    from agent.chat import Chat

    async def run() -> None:
        url = f"{address}/proxy/rollout/{rollout}/attempt/0/mode/train/openai/v1"
        async with Chat(url, "k", retries=0) as chat:
            await chat.complete([{"role": "user", "content": "?"}], **more)

    asyncio.run(run())


@sample("agl", "gateway-401")
def _(folder: Path) -> None:
    with gateway() as address:
        controller(address, key="another")


@sample("agl", "gateway-401-trainer", TASK)
def _(folder: Path) -> None:
    with gateway() as address:
        post(address, "another")


def post(address: str, key: str) -> None:
    from agentlightning import client as module

    module.time = stub(sleep=lambda seconds: None)
    module.AgentLightningSyncClient(base_url=address, key=key, max_retries=2).post_with_retry("/api/models", json=[])


@sample("agl", "pkill-kills-other-runs", TASK)
def _(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    post(address, "k")


@sample("agl", "gateway-restarted-404", TASK)
def _(folder: Path) -> None:
    from agentlightning.verl.agl_rollout_manager import AglRolloutManager

    with gateway() as address:
        AglRolloutManager(agl_base_url=address, agl_key="k", model="m", step=1)._get_rollout("7c1d")


@sample("agl", "gateway-left-paused")
def _(folder: Path) -> None:
    import httpx

    with gateway() as address:
        (rollout,) = rollouts(address)
        key = {"Authorization": "Bearer k"}
        httpx.post(f"{address}/proxy/pause", json={"reason": "rollout_done step=12"}, headers=key).raise_for_status()
        server = [{"model": "Qwen/Qwen2.5-7B-Instruct", "endpoint": "http://127.0.0.1:1/v1"}]
        httpx.post(f"{address}/api/models", json=server, headers=key).raise_for_status()
        ask(address, rollout)


@sample("agl", "no-servers-for-model")
def _(folder: Path) -> None:
    with gateway() as address:
        ask(address, *rollouts(address))


@sample("agl", "streaming-or-responses-api")
def _(folder: Path) -> None:
    import httpx

    with gateway() as address:
        (rollout,) = rollouts(address)
        server = [{"model": "Qwen/Qwen2.5-7B-Instruct", "endpoint": "http://127.0.0.1:1/v1"}]
        httpx.post(f"{address}/api/models", json=server, headers={"Authorization": "Bearer k"}).raise_for_status()
        ask(address, rollout, stream=True)


def agent(folder: Path, body: str) -> str:
    """The name of an agent class that Python finds, here and in child processes."""
    (folder / "my_agent.py").write_text(f"import time\n\n\nclass Agent:\n    def run(self):\n        {body}\n")
    os.environ["PYTHONPATH"] = f"{folder}:{SAMPLES.parents[2]}"
    return "my_agent.Agent"


@sample("agl", "agent-exits-nonzero")
def _(folder: Path) -> None:
    with gateway() as address, inherited(folder):
        (rollout,) = rollouts(address, agent=agent(folder, "print({}['answer'])"))
        controller(address, seconds=6.0, interval=2.5)
        show(address, rollout)


@contextlib.contextmanager
def inherited(folder: Path) -> Any:
    """Lines of child processes, which write to the descriptors themselves."""
    kept = os.dup(1), os.dup(2)
    file = os.open(folder / "children.log", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(file, number)
    try:
        yield
    finally:
        for number, one in enumerate(kept, 1):
            os.dup2(one, number)
        for one in (file, *kept):
            os.close(one)
        print((folder / "children.log").read_text(), end="")


@sample("agl", "agent-timed-out")
def _(folder: Path) -> None:
    with gateway() as address:
        (rollout,) = rollouts(address, agent=agent(folder, "time.sleep(60)"))
        controller(address, seconds=4.0, interval=1.5)
        show(address, rollout)


@sample("agl", "second-controller-kills-rollouts")
def _(folder: Path) -> None:
    import httpx

    with gateway() as address:
        (rollout,) = rollouts(address)
        running = {"status": {"state": "running", "last_attempt_id": "0"}}
        httpx.patch(f"{address}/api/rollouts/{rollout}", json=running, headers={"Authorization": "Bearer k"})
        controller(address)
        show(address, rollout)


@sample("agl", "env-too-large-base64")
def _(folder: Path) -> None:
    with gateway() as address:
        (rollout,) = rollouts(address, env_map={"IMAGE": "input.image"}, row={"image": "A" * 131072})
        controller(address)
        show(address, rollout)


@sample("agl", "gateway-port-taken")
def _(folder: Path) -> None:
    import uvicorn

    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as taken, contextlib.suppress(SystemExit):
        uvicorn.run(app, host="127.0.0.1", port=taken.getsockname()[1], lifespan="off", use_colors=False)


@sample("agl", "no-verl-extra-run")
def _(folder: Path) -> None:
    run_script(folder, "import sys\n\nimport verl\n")


@sample("agl", "old-python-gets-v0-shell")
def _(folder: Path) -> None:
    done = subprocess.run(["/bin/bash", "-c", "agl-server"], env={"PATH": "/nowhere"}, capture_output=True, text=True)
    print(done.stderr, end="")


def run_script(folder: Path, text: str) -> None:
    (folder / "train.py").write_text(text)
    done = subprocess.run([sys.executable, "-I", "-S", str(folder / "train.py")], capture_output=True, text=True)
    print(done.stderr, end="")


@sample("agl", "wandb-not-logged-in", TASK)
def _(folder: Path) -> None:
    os.environ |= {"HOME": str(folder), "WANDB_DIR": str(folder), "WANDB_MODE": "online"}
    os.environ.pop("WANDB_API_KEY", None)
    import wandb

    wandb.init(project="p", dir=str(folder))


# -- this package ------------------------------------------------------------------------------------------------------


@sample("agl", "agent-class-not-found")
def _(folder: Path) -> None:
    """What the controller reports for a rollout whose class it cannot import."""
    from agent.training.dispatch import Dispatcher

    async def patch(rollout: str, state: str, error: str) -> None:
        print(json.dumps({"rollout_id": rollout, "state": state, "error": error}))

    controller = stub(_gateway="http://127.0.0.1:8080", _key="k", _isolation={}, _patch=patch)
    controller._needs_isolation = lambda path: Dispatcher._needs_isolation(controller, path)
    controller._release = lambda rollout: None
    local = {"agent_class": "my_agent.MyAgent", "env_map": {}}
    rollout = {"rollout_id": "7c1d", "is_train": True, "input": {}, "config": {"local": local}}
    asyncio.run(Dispatcher._begin(controller, rollout))


@sample("agl", "no-progress")
def _(folder: Path) -> None:
    from agent.training.watchdog import Watchdog

    watchdog = Watchdog(40, 0.0)
    watchdog.feed({"phase": "rollout", "step": 12, "done": 31, "total": 128}, 0.0)
    print(watchdog.overdue(301.0), watchdog.overdue(603.0), sep="\n")


@sample("agl", "checkpoint-partial-or-disk-full-refused", TASK)
def _(folder: Path) -> None:
    from agent.training import saving
    from agent.training.rundir import RunDir

    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 32], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    saving.shutil.disk_usage = lambda place: stub(free=9 << 30)
    saving.check_space(RunDir(folder), str(folder))


# -- vLLM --------------------------------------------------------------------------------------------------------------


def connector(**options: Any) -> Any:
    from vllm.multimodal.media import MediaConnector

    return MediaConnector(**options)


@sample("vllm", "vllm-image-unreadable", SERVER)
def _(folder: Path) -> None:
    import base64

    from PIL import Image

    Image.frombytes("L", (64, 64), random.Random(1).randbytes(4096)).save(folder / "5.png")
    cut = base64.b64encode((folder / "5.png").read_bytes()[:-500]).decode()
    connector().fetch_image(f"data:image/png;base64,{cut}")


@sample("vllm", "vllm-image-unreadable-url", SERVER)
def _(folder: Path) -> None:
    connector().fetch_image("/data/images/5.png")


@sample("vllm", "vllm-local-file-blocked", SERVER)
def _(folder: Path) -> None:
    connector().fetch_image("file:///data/images/5.png")


@sample("vllm", "vllm-local-file-blocked-outside", SERVER)
def _(folder: Path) -> None:
    (folder / "images").mkdir()
    connector(allowed_local_media_path=str(folder / "images")).fetch_image("file:///home/me/cat.png")


@sample("vllm", "vllm-kv-cache-too-small", ENGINE)
def _(folder: Path) -> None:
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    _check_enough_kv_cache_memory(0, lambda: 1, 6144, lambda bytes: 0)


@sample("vllm", "vllm-kv-cache-too-small-length", ENGINE)
def _(folder: Path) -> None:
    from vllm.v1.core.kv_cache_utils import _check_enough_kv_cache_memory

    _check_enough_kv_cache_memory(7 << 30, lambda: 12 << 30, 262144, lambda bytes: 152912)


@sample("vllm", "vllm-start-memory", ENGINE)
def _(folder: Path) -> None:
    from vllm.v1.worker.utils import request_memory

    snapshot = stub(total_memory=79 << 30, free_memory=11 << 30, device_="cuda:0")
    request_memory(snapshot, stub(gpu_memory_utilization=0.6))


@sample("vllm", "vllm-mm-item-larger-than-batch", ENGINE)
def _(folder: Path) -> None:
    from vllm.v1.core.encoder_cache_manager import compute_mm_encoder_budget

    compute_mm_encoder_budget(stub(disable_chunked_mm_input=True, max_num_batched_tokens=8192), {"image": 16384})


@sample("vllm", "vllm-prompt-too-long-for-images", SERVER)
def _(folder: Path) -> None:
    from vllm.v1.engine.input_processor import InputProcessor

    model = stub(max_model_len=6144, runner_type="generate")
    processor = stub(model_config=model, supports_mm_inputs=True, skip_prompt_length_check=False)
    InputProcessor._validate_prompt_len(processor, 9216, "decoder")


@sample("vllm", "vllm-prompt-too-long-for-images-context", SERVER)
def _(folder: Path) -> None:
    from vllm.renderers.params import TokenizeParams

    TokenizeParams(max_total_tokens=6144, max_output_tokens=512)._token_len_check(None, [1] * 9216)


@sample("vllm", "vllm-too-many-images", SERVER)
def _(folder: Path) -> None:
    from vllm.multimodal.processing.context import BaseProcessingInfo

    info = stub(supported_mm_limits={"image": None}, allowed_mm_limits={"image": 1})
    BaseProcessingInfo.validate_num_items(info, "image", 2)


@sample("vllm", "vllm-placeholder-replacement-failed-assign", ENGINE)
def _(folder: Path) -> None:
    import torch
    from vllm.model_executor.models.utils import _merge_multimodal_embeddings

    pictures = [torch.zeros(256, 4), torch.zeros(256, 4)]
    _merge_multimodal_embeddings(torch.zeros(513, 4), pictures, torch.ones(513, dtype=torch.bool))


@sample("vllm", "vllm-model-name-404")
def _(folder: Path) -> None:
    from vllm.entrypoints.openai.engine.serving import OpenAIServing

    serving = stub(
        _is_model_supported=lambda name: False,
        models=stub(lora_requests={}),
        create_error_response=OpenAIServing.create_error_response,
    )
    answer = asyncio.run(OpenAIServing._check_model(serving, stub(model="/models/qwen")))
    print(answer.model_dump_json() if answer else None)


@sample("vllm", "vllm-engine-dead", SERVER)
def _(folder: Path) -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    raise EngineDeadError()


@sample("vllm", "vllm-sleep-unsupported", SERVER)
def _(folder: Path) -> None:
    from transformers import Qwen2Config
    from vllm.config import ModelConfig

    Qwen2Config(architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    ModelConfig(model=str(folder), skip_tokenizer_init=True, enable_sleep_mode=True)


# -- the program -------------------------------------------------------------------------------------------------------


def names() -> list[str]:
    """The samples that this program writes."""
    return sorted(name for group in GROUPS.values() for name in group)


def captured(only: list[str]) -> dict[str, str]:
    """Every sample's text (``only``: these), each group in a process of its own."""
    found: dict[str, str] = {}
    for group, members in GROUPS.items():
        wanted = [name for name in members if not only or name in only]
        if not wanted:
            continue
        command = [sys.executable, __file__, "--group", group, *wanted]
        with tempfile.TemporaryDirectory() as home:  # rich shows local variables, the environment among them
            env = ENVIRONMENT | {"HOME": home, "PYTHONPATH": str(SAMPLES.parents[2])}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def comparable(text: str) -> str:
    """The text without the line numbers of Python's own library: they differ between two releases of 3.12."""
    return re.sub(r'(/usr/lib/python3\.12/\S+?(?:", line |:))\d+(.*?)( *│)?$', r"\1\2", text, flags=re.MULTILINE)


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    if arguments[:1] == ["--group"]:
        members = GROUPS[arguments[1]]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for module in FIRST.get(arguments[1], ()):  # what they say while they are imported belongs to no sample
                importlib.import_module(module)
        result = {name: text_of(*members[name]) for name in arguments[2:]}
        sys.__stdout__.write(json.dumps(result) + "\n")
        return 0
    check = "--check" in arguments
    if "--print" in arguments:
        for name, text in captured(arguments[1:]).items():
            print(f"##### {name}\n{text}", end="")
        return 0
    changed = 0
    for name, text in captured([one for one in arguments if one != "--check"]).items():
        file = SAMPLES / name
        if not file.is_file() or comparable(file.read_text(encoding="utf-8")) != comparable(text):
            changed += 1
            print(f"{'differs' if check else 'written'}: {name}")
            if not check:
                file.write_text(text, encoding="utf-8")
    return int(check and bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
