"""Hazards of the machine a run would start on: disk, memory, socket paths, GPUs, other clusters."""

from __future__ import annotations

from collections.abc import Iterator

from agent.symptoms.hazards_facts import Facts, Finding

GIB = 1024**3
#: Bytes of a checkpoint for each weight: fp32 weights (4) and Adam's two moments (8).
BYTES_PER_WEIGHT = 12
#: What Ray puts behind its temporary folder: "/session_<date>_<time>_<microseconds>_<pid>/sockets/plasma_store".
SOCKET_SUFFIX = len("/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
SOCKET_LIMIT = 107


def ray_temp_dir(facts: Facts) -> tuple[str, str]:
    """Ray's temporary folder in a run with this config and environment, and the variable that moves it."""
    given = facts.settings.explicit("ray_kwargs.ray_init._temp_dir")
    environ = facts.machine.environ if facts.machine else {}
    base = environ.get("TMPDIR", "/tmp").rstrip("/")
    if facts.settings.dialect in ("none", "preset"):
        return f"{base}/mmqa-xxxxxxxx", "TMPDIR=/tmp"  # this package makes a folder of its own for each run
    if given:
        return str(given), "RAY_TMPDIR=/tmp/r1"
    if environ.get("RAY_TMPDIR"):
        # Agent Lightning hands RAY_TMPDIR to Ray as it is; Ray alone adds "/ray".
        added = "" if facts.agent_lightning else "/ray"
        return environ["RAY_TMPDIR"].rstrip("/") + added, "RAY_TMPDIR=/tmp/r1"
    return f"{base}/ray", "RAY_TMPDIR=/tmp/r1"


def socket_path(facts: Facts) -> Iterator[Finding]:
    """Unix sockets: at most 107 bytes of path."""
    if facts.machine is None:
        return
    folder, shorter = ray_temp_dir(facts)
    length = len(folder.encode()) + SOCKET_SUFFIX
    if length > SOCKET_LIMIT:
        yield Finding(
            f"Ray's sockets would get a path of {length} bytes (temporary folder {folder})",
            f"the kernel allows {SOCKET_LIMIT}; Ray stops with AF_UNIX path length cannot exceed 107 bytes",
            f"export {shorter}",
            "ray-socket-path-too-long",
            "crash",
        )


def kept_checkpoints(facts: Facts) -> tuple[int, str]:
    """How many checkpoints exist while one is saved (an old one goes after the new one), and how to keep fewer."""
    if facts.settings.dialect != "preset":
        return 2, "trainer.max_actor_ckpt_to_keep=1 keeps the need at two, until verl forgets the old ones in a restart"
    newest = facts.settings.number("mmqa.keep_checkpoints")
    newest = 2 if newest is None else int(newest) or 2  # 0 keeps all: room for as many as nobody knows
    best = facts.settings.get("mmqa.keep_best") is not False
    return newest + best + 1, "mmqa.keep_checkpoints=1 mmqa.keep_best=false keeps the need at two"


def disk(facts: Facts) -> Iterator[Finding]:
    """Room for as many checkpoints as are kept, and for the one that is being written."""
    machine, parameters = facts.machine, facts.parameters
    save_freq = facts.settings.number("trainer.save_freq")
    if machine is None or machine.disk_free is None or (save_freq is not None and save_freq <= 0):
        return
    where = machine.checkpoint_dir or "the run's folder"
    if parameters and facts.settings.dialect in ("verl", "preset"):
        one = parameters * BYTES_PER_WEIGHT
        count, fewer = kept_checkpoints(facts)
        place = "the run (--run-dir)" if facts.settings.dialect == "preset" else "trainer.default_local_dir"
        need = 1.1 * count * one - machine.checkpoint_bytes
        if machine.disk_free < need:
            yield Finding(
                f"{_gib(machine.disk_free)} free at {where}; a checkpoint of this model takes about {_gib(one)}",
                f"{count} of them exist while one is saved; a save for which there is no room stops the run",
                f"free {_gib(need - machine.disk_free)}, or put {place} elsewhere; {fewer}",
                "checkpoint-partial-or-disk-full",
                "crash" if machine.disk_free < one else "silent",
            )
    elif machine.disk_free < 2 * GIB:
        yield Finding(
            f"{_gib(machine.disk_free)} free at {where}",
            "logs, images and checkpoints are written there; a full disk stops the run in a save",
            "free some space, or use another --run-dir",
            "checkpoint-partial-or-disk-full",
            "silent",
        )


def shared_memory(facts: Facts) -> Iterator[Finding]:
    """``/dev/shm``: Ray's object store, and weights on their way to the engine."""
    machine = facts.machine
    if machine is None or machine.shm_total is None or machine.shm_total >= GIB:
        return
    yield Finding(
        f"/dev/shm has {_gib(machine.shm_total)} in all (a container's default is 64 MiB)",
        "Ray then keeps its objects on disk, and weight transfer and NCCL fail there with No space left on device",
        "start the container with --shm-size=8g (or --ipc=host)",
        "shared-memory-full",
        "slow",
    )


def host_memory(facts: Facts) -> Iterator[Finding]:
    """Offload moves 12 bytes for each weight into the host's memory."""
    actor = "actor_rollout_ref.actor.fsdp_config"
    machine, parameters = facts.machine, facts.parameters
    both = facts.settings.on(f"{actor}.param_offload") and facts.settings.on(f"{actor}.optimizer_offload")
    if not both or machine is None or not machine.memory_total or not parameters:
        return
    need = parameters * BYTES_PER_WEIGHT
    if machine.memory_total < need:
        yield Finding(
            f"param_offload and optimizer_offload are on; the host has {_gib(machine.memory_total)} of memory",
            f"offloaded weights and Adam's moments of this model take about {_gib(need)}: the kernel or Ray kills the "
            "worker",
            f"{actor}.optimizer_offload=False, a smaller model, or more memory",
            "ray-host-memory-kill",
            "crash",
        )


def gpus(facts: Facts) -> Iterator[Finding]:
    """GPUs: enough of them, and free enough for the engine. Nothing is said where there is none."""
    machine, settings = facts.machine, facts.settings
    if machine is None or not machine.gpus or facts.cpu_engine or settings.dialect not in ("verl", "preset"):
        return
    wanted = settings.number("trainer.n_gpus_per_node")
    if wanted and wanted > len(machine.gpus):
        yield Finding(
            f"trainer.n_gpus_per_node={wanted:g} and this machine shows {len(machine.gpus)}",
            "Ray cannot place the workers and stops: total available GPUs is less than total desired GPUs",
            f"trainer.n_gpus_per_node={len(machine.gpus)}",
            "ray-gpu-shortage",
            "crash",
        )
    share = settings.number("actor_rollout_ref.rollout.gpu_memory_utilization")
    for number, gpu in enumerate(machine.gpus[: int(wanted or len(machine.gpus))]):
        if share and gpu.free < share * gpu.total:
            yield Finding(
                f"GPU {number} ({gpu.name}): {_gib(gpu.free)} of {_gib(gpu.total)} free, and the engine wants "
                f"{share:g} of it",
                "another process holds the memory; vLLM refuses to start: Free memory on device is less than desired "
                "GPU memory utilization",
                "nvidia-smi shows whose process it is: end your own left-over one, or lower "
                f"actor_rollout_ref.rollout.gpu_memory_utilization below {gpu.free / gpu.total:.2f}",
                "vllm-start-memory",
                "crash",
            )


def other_clusters(facts: Facts) -> Iterator[Finding]:
    """A Ray cluster that ``ray.init`` would join, and another verl run on this host."""
    machine = facts.machine
    if machine is None or facts.settings.dialect not in ("verl", "preset"):
        return
    own = facts.settings.explicit("ray_kwargs.ray_init.address") == "local"
    forced = machine.environ.get("RAY_ADDRESS", "")
    address = forced or ("" if own else machine.live_ray_address)
    # this package drops RAY_ADDRESS and gives each run a Ray folder of its own
    if address and address != "local" and facts.settings.dialect == "verl":
        yield Finding(
            f"a Ray cluster is there already: {address} ({'RAY_ADDRESS' if forced else machine.ray_address_file})",
            "ray.init joins it, with its GPUs, environment and working directory, instead of starting its own",
            "unset RAY_ADDRESS and set +ray_kwargs.ray_init.address=local",
            "ray-cluster-already-there",
            "silent",
        )
    if machine.weight_sockets:
        yield Finding(
            f"another verl run is on this host (it holds {machine.weight_sockets[0]})",
            "the socket that carries weights to the engine is named after the Ray job, which is the same in every "
            "private cluster: the later run takes the name over, and one of them waits for ever",
            "wait for the other run, or give each its own /tmp (a container)",
            "colocate-socket-two-clusters",
            "hang",
        )


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


CHECKS = (socket_path, disk, shared_memory, host_memory, gpus, other_clusters)
