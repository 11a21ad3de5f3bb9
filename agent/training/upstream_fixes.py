"""Corrections of Agent Lightning 1.0.2 and verl 0.8.0 that every run needs, on any device.

Registered like those of ``cpu_backend``: each is applied right after the module that defines the symbol is imported.
"""

from __future__ import annotations

import importlib.util
import os
import socket
from typing import Any

SCRATCH_ENV = "MMQA_SCRATCH"  # an attempt's folder of sockets


def install() -> None:
    """Register every correction (idempotent)."""
    import wrapt

    if getattr(install, "done", False):
        return
    install.done = True  # type: ignore[attr-defined]
    wrapt.register_post_import_hook(_store_on_loopback, "torch.distributed.rendezvous")
    wrapt.register_post_import_hook(_equal_length_rows, "verl.workers.utils.padding")
    if importlib.util.find_spec("flash_attn") is None:
        wrapt.register_post_import_hook(_padding_functions, "verl.utils.attention_utils")
    wrapt.register_post_import_hook(_optimizer_of_this_run, "verl.workers.engine.fsdp.transformer_impl")
    wrapt.register_post_import_hook(_guarded_trainer, "agentlightning.verl.trainer")
    wrapt.register_post_import_hook(_sending_socket, "verl.workers.rollout.vllm_rollout.vllm_rollout")
    wrapt.register_post_import_hook(_receiving_socket, "verl.workers.rollout.vllm_rollout.utils")


def _store_on_loopback(rendezvous: Any) -> None:
    """``TCPStore`` (torch): its server listens on every address, also when its own one is the loopback address.

    The key-value store of a process group takes commands from whoever connects. Given a socket that is already bound,
    it uses that one.
    """
    original = rendezvous.TCPStore

    def store(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(("host_name", "port", "world_size", "is_master", "timeout"), args, strict=False)) | kwargs
        if given.get("is_master") and given["host_name"] in ("127.0.0.1", "localhost"):
            listener = socket.create_server(("127.0.0.1", given["port"]))
            given["port"] = listener.getsockname()[1]
            given["master_listen_fd"] = listener.detach()  # the store owns it from here on
        return original(**given)

    rendezvous.TCPStore = store


def _equal_length_rows(padding: Any) -> None:
    """``left_right_2_no_padding`` (verl 0.8.0): rows that all have one length crash the update of a Qwen-VL model.

    ``torch.nested.as_nested_tensor`` then picks the wrong ragged dimension for position ids of shape [4, tokens].
    They are built again with the ragged dimension named.
    """
    from verl.utils.tensordict_utils import nested_tensor_from_tensor_list

    original = padding.left_right_2_no_padding

    def left_right_2_no_padding(data: Any) -> Any:
        position_ids, mask = data["position_ids"], data["attention_mask"].bool()
        out = original(data)
        if position_ids.dim() == 3:
            out["position_ids"] = nested_tensor_from_tensor_list(
                [row[:, kept] for row, kept in zip(position_ids, mask, strict=True)], ragged_idx=2
            )
        return out

    padding.left_right_2_no_padding = left_right_2_no_padding


def _padding_functions(attention_utils: Any) -> None:
    """``_get_attention_functions`` (verl 0.8.0) imports flash_attn even with another attention implementation.

    Its own pure-torch twins, kept for another device, do the same.
    """

    def functions() -> tuple[Any, Any, Any, Any]:
        from verl.utils import npu_flash_attn_utils as twins

        return twins.index_first_axis, twins.pad_input, twins.rearrange, twins.unpad_input

    attention_utils._get_attention_functions = functions


def _own_socket(handle: str) -> str:
    scratch = os.environ.get(SCRATCH_ENV)
    return handle.replace("ipc:///tmp/", f"ipc://{scratch}/") if scratch else handle


def _sending_socket(vllm_rollout: Any) -> None:
    """``ServerAdapter`` (verl 0.8.0): its socket for a refit lies in /tmp and is named by Ray's job id.

    That id is 01000000 in every Ray cluster of its own, so two runs on one machine would use one socket.
    """
    original = vllm_rollout.ServerAdapter.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.zmq_handle = _own_socket(self.zmq_handle)

    vllm_rollout.ServerAdapter.__init__ = init


def _receiving_socket(utils: Any) -> None:
    """``vLLMColocateWorkerExtension._get_zmq_handle`` (verl 0.8.0): the other end of the same socket."""
    original = utils.vLLMColocateWorkerExtension._get_zmq_handle
    utils.vLLMColocateWorkerExtension._get_zmq_handle = lambda self: _own_socket(original(self))


def _optimizer_of_this_run(transformer_impl: Any) -> None:
    """``FSDPEngine.load_checkpoint`` (verl 0.8.0) also brings back the settings that the checkpoint was made with."""
    original = transformer_impl.FSDPEngine.load_checkpoint

    def load_checkpoint(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if getattr(self, "optimizer", None) is not None:
            as_configured(self.optimizer, self.lr_scheduler)

    transformer_impl.FSDPEngine.load_checkpoint = load_checkpoint


def as_configured(optimizer: Any, scheduler: Any) -> None:
    """Give a ``torch.optim`` optimizer back the numbers that it was built with; its moments stay as they were loaded.

    ``load_state_dict`` of optimizer and ``LambdaLR`` replaces learning rate, weight decay, betas and the schedule's
    base by those of the checkpoint, but not the schedule's function. So a new learning rate would be ignored, and a
    cosine over other steps would begin one step late. If nothing was changed, this changes nothing.
    """
    built = {
        name: value
        for name, value in optimizer.defaults.items()
        if isinstance(value, float | tuple) or (isinstance(value, int) and not isinstance(value, bool))
    }
    for group in optimizer.param_groups:
        group.update(built)
    if scheduler is None:
        return
    scheduler.base_lrs = [built["lr"]] * len(optimizer.param_groups)
    for group, base, curve in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["initial_lr"] = base
        group["lr"] = base * curve(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in optimizer.param_groups]


def _guarded_trainer(module: Any) -> None:
    """``run_ppo`` takes the trainer class from this module when it starts: it gets our subclass of it."""
    from agent.training.trainer import guarded

    module.AgentLightningRayPPOTrainer = guarded(module.AgentLightningRayPPOTrainer)
