"""Rewrite a checkpoint of N ranks for M ranks: verl loads only what as many ranks have saved.

Kept: the weights, the optimizer's moments and step counts, the learning-rate schedule, and the place in the data
(``data.pt``). Not kept: the random streams of ranks beyond N; rank r begins with those of rank r modulo N. Nothing of
a sampling engine is in a checkpoint.

verl's FSDP2 shards (``FSDPCheckpointManager``) are pickled state dicts whose tensors are DTensors on a 1-D mesh "fsdp"
of all ranks (``verl.workers.engine.fsdp.utils.create_device_mesh``), split along a dimension as ``torch.chunk`` splits.
Both directions are plain slicing on the CPU: no process group, and no GPU.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent.errors import InputError
from agent.training.checkpoints import KINDS, MANIFEST, problem_of, read_manifest, world_sizes
from agent.training.saving import SaveRefused, write_manifest


def reshard(source: Path, target: Path, world_size: int) -> None:
    """Write ``target``, a ``global_step_<k>`` folder of ``world_size`` ranks, from the checkpoint ``source``.

    The shards are mapped from the disk, and one new shard at a time is held in memory. ``target`` appears under its
    name when it is whole, with a manifest. Raises ``InputError`` if ``source`` is not whole or not of FSDP2, or if
    ``target`` exists; ``SaveRefused`` if what was written is not whole.
    """
    ranks = _check(source, target, world_size)
    scratch = target.with_name(f".resharding-{target.name}")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(source, scratch, ignore=shutil.ignore_patterns("*_world_size_*_rank_*.pt", MANIFEST, ".*"))
    for kind in KINDS:
        shards = [_load(source / "actor" / f"{kind}_world_size_{ranks}_rank_{rank}.pt") for rank in range(ranks)]
        for rank in range(world_size):
            state = _extra(shards, rank) if kind == "extra_state" else _state(shards, rank, world_size)
            _save(state, scratch / "actor" / f"{kind}_world_size_{world_size}_rank_{rank}.pt")
    config = scratch / "actor" / "fsdp_config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"world_size": world_size}, indent=4))
    step = target.name.removeprefix("global_step_")
    attempt = (read_manifest(source) or {"attempt": 0})["attempt"]
    try:
        write_manifest(scratch, int(step), attempt)
    except OSError as error:
        raise SaveRefused(f"{target}: {error.strerror}; the checkpoint that it was made from is untouched") from None
    scratch.rename(target)


def _check(source: Path, target: Path, world_size: int) -> int:
    """The number of ranks of ``source``, if it can be resharded to ``target``."""
    if world_size < 1:
        raise InputError(f"a checkpoint cannot be written for {world_size} ranks")
    if not target.name.removeprefix("global_step_").isdigit():
        raise InputError(f"{target}: verl reads the step from the name; it must be global_step_<step>")
    if target.exists():
        raise InputError(f"{target}: exists already")
    if problem := problem_of(source):
        raise InputError(f"{source}: {problem}", slug="checkpoint-partial-or-disk-full")
    try:
        config = json.loads((source / "actor" / "fsdp_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{source}: actor/fsdp_config.json is not readable ({error})") from None
    ranks = config["world_size"]
    if config.get("FSDP_version") != 2 or world_sizes(source) != [ranks]:
        raise InputError(f"{source}: only FSDP2 checkpoints of one number of ranks can be resharded; it says {config}")
    if (source / "critic").exists():
        raise InputError(f"{source}: has a critic; only the actor can be resharded")
    return ranks


def _load(file: Path) -> Any:
    """A shard, its tensors mapped from the file; torch warns that the mesh has no process group, as is meant here."""
    import logging

    import torch
    import torch.distributed.tensor  # the shards' classes

    mesh_log = logging.getLogger("torch.distributed.device_mesh")
    before = mesh_log.level
    mesh_log.setLevel(logging.ERROR)
    try:
        return torch.load(file, map_location="cpu", weights_only=False, mmap=True)
    finally:
        mesh_log.setLevel(before)


def _save(state: Any, file: Path) -> None:
    import torch

    try:
        torch.save(state, file)
    except (OSError, RuntimeError) as error:  # a full disk is the latter
        raise SaveRefused(
            f"{file}: {str(error).splitlines()[0]}; the checkpoint it is made from is untouched"
        ) from None


def _extra(shards: list[Any], rank: int) -> dict[str, Any]:
    """Scheduler (the same on every rank) and random state."""
    return {**shards[0], "rng": shards[rank % len(shards)]["rng"]}


def _state(shards: list[Any], rank: int, world_size: int) -> Any:
    """Rank ``rank``'s state dict. Tensors that share memory (tied weights) still do."""
    made: dict[Any, Any] = {}
    meshes: dict[Any, Any] = {}

    def piece(parts: list[Any]) -> Any:
        stored = [(one._local_tensor.untyped_storage()._cdata, one._local_tensor.storage_offset()) for one in parts]
        known = (tuple(stored), tuple(parts[0].shape))
        if known not in made:
            old = parts[0].device_mesh
            meshes[old] = meshes.get(old) or _mesh(old, rank, world_size)
            made[known] = _piece(parts, meshes[old], rank)
        return made[known]

    return _mapped(shards, piece, "")


def _mapped(parts: list[Any], piece: Callable[[list[Any]], Any], path: str) -> Any:
    """``parts``: the same place in each rank's state. Dicts are followed, DTensors cut; the rest is rank 0's."""
    from torch.distributed.tensor import DTensor

    first = parts[0]
    if isinstance(first, DTensor):
        return piece(parts)
    if not isinstance(first, dict):
        return first
    if any(list(part) != list(first) for part in parts):
        raise InputError(f"the ranks' states differ at {path or 'the top'}: they are not of one model")
    result = type(first)()
    for key in first:
        result[key] = _mapped([part[key] for part in parts], piece, f"{path}.{key}")
    if hasattr(first, "_metadata"):  # versions of modules, on the OrderedDict of Module.state_dict
        result._metadata = first._metadata  # pyright: ignore[reportAttributeAccessIssue]
    return result


def _piece(parts: list[Any], mesh: Any, rank: int) -> Any:
    """The DTensor of ``rank`` on ``mesh`` from those of all old ranks."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    spec = parts[0]._spec
    placement = spec.placements[0]
    if len(spec.placements) != 1 or type(placement) not in (Shard, Replicate):
        raise InputError(f"tensors placed as {spec.placements} on {spec.mesh} cannot be resharded (only 1-D FSDP2)")
    local = [part._local_tensor for part in parts]
    if isinstance(placement, Shard):
        tensor = _slice(local, placement.dim, parts[0].shape[placement.dim], rank, mesh.size())
    else:
        tensor = local[0].clone()
    made = DTensorSpec(mesh, spec.placements, tensor_meta=spec.tensor_meta)
    return DTensor(tensor, made, requires_grad=parts[0].requires_grad)  # pyright: ignore[reportCallIssue]


def _slice(local: list[Any], dim: int, length: int, rank: int, world_size: int) -> Any:
    """What ``torch.chunk`` gives ``rank``: ceil(length / world_size) rows of the whole, the last ranks fewer."""
    import torch

    if sum(one.shape[dim] for one in local) != length:
        raise InputError(f"shards of {[one.shape[dim] for one in local]} rows do not add up to {length}")
    size = -(-length // world_size)
    begin, end = min(rank * size, length), min((rank + 1) * size, length)
    cut, offset = [], 0
    for one in local:
        first, last = max(begin - offset, 0), min(end - offset, one.shape[dim])
        if first < last:
            cut.append(one.narrow(dim, first, last - first))
        offset += one.shape[dim]
    return torch.cat(cut, dim) if cut else local[0].narrow(dim, 0, 0).clone()


def _mesh(old: Any, rank: int, world_size: int) -> Any:
    """A mesh like ``old`` of ``world_size`` ranks, as it is pickled by ``rank``: equal to the one verl will make.

    verl's mesh spans all ranks, so its group is the default one, which has the same name in every run.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh(
        old.device_type,
        torch.arange(world_size),
        mesh_dim_names=old.mesh_dim_names,
        _init_backend=False,
        _rank=rank,
    )
    mesh._dim_group_names = list(old._dim_group_names)
    return mesh
