"""Conversion between the ranks' parts of a unit's parameters and the values of state dicts.

A *local* is this rank's part of a parameter, or of a tensor of the parameter's size (optimizer
state): a piece of a flat buffer, or rows. The parts of all of a unit's tensors move in one planned
exchange. Only values that are divided over other ranks than the unit are made whole first.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.unit import Unit
from fullshard.faces.meshes import tensor_parallel_spec
from fullshard.plan.layout import Piece
from fullshard.plan.regrid import Division, bucket_division, row_division, whole_division
from fullshard.state.exchange import exchange
from fullshard.state.values import LocalPart, local_part, sharded_dtensor, sharded_tensor
from fullshard.torch_private import DTensorSpec, ShardedTensor, TensorMeta


def division_group(unit: Unit) -> dist.ProcessGroup | None:
    """Return the group among whose ranks values are divided; replicas if nothing is sharded."""
    return unit.mesh.shard_group or unit.mesh.replicate_group


def divisions_of(unit: Unit) -> list[Division]:
    """Return each parameter's division over the `division_group`."""
    group = division_group(unit)
    size = 1 if group is None else group.size()
    if unit.mesh.shard_group is None:
        return [whole_division(math.prod(param.shape), num_ranks=size) for param in unit.params]
    if not unit.params.is_flat:
        return [
            row_division(param.shape, dim=param.form.shard_dim, num_ranks=size)
            for param in unit.params
        ]
    places = {
        param.index: (bucket, param)
        for bucket in unit.plan_layout().buckets
        for param in bucket.params
    }
    return [bucket_division(*places[index]) for index in range(len(unit.params))]


def sharded_values(
    unit: Unit,
    indices: Sequence[int],
    locals_: Sequence[torch.Tensor],
    *,
    dtensors: bool = False,
) -> list[torch.Tensor | ShardedTensor]:
    """Return the values of a sharded state dict, one per local. Collective.

    indices: the parameter that each local belongs to; one may occur several times.
    dtensors: make DTensors, also where the unit was given no mesh. Otherwise those are
        ShardedTensors.
    """
    if not unit.params.is_flat:
        rows = [
            t.reshape(unit.params[i].shard_shape) for i, t in zip(indices, locals_, strict=True)
        ]
    else:
        rows = _rows(unit, indices, locals_)
    return [
        _as_sharded(unit, index, tensor, dtensors=dtensors)
        for index, tensor in zip(indices, rows, strict=True)
    ]


def whole_values(
    unit: Unit,
    indices: Sequence[int],
    locals_: Sequence[torch.Tensor],
    *,
    rank0_only: bool,
) -> list[torch.Tensor | None]:
    """Return the values of a full state dict, one per local. Collective.

    rank0_only: the other ranks get None, and send without receiving.
    """
    group = division_group(unit)
    divisions = divisions_of(unit)
    wanted = [
        _whole(math.prod(unit.params[i].shape), group, rank0_only=rank0_only) for i in indices
    ]
    tensors = exchange(
        [tensor.detach().reshape(-1) for tensor in locals_],
        [divisions[index] for index in indices],
        wanted,
        group,
        device=unit.device,
    )
    rank = 0 if group is None else group.rank()
    values: list[torch.Tensor | None] = []
    for index, division, tensor in zip(indices, wanted, tensors, strict=True):
        param = unit.params[index]
        is_kept = bool(division[rank]) or math.prod(param.shape) == 0
        whole = tensor.view(param.shape) if is_kept else None
        if whole is not None and (spec := param.form.unsharded) is not None:
            whole = sharded_dtensor(whole, spec)  # not `from_local`, which takes parts for equal
        values.append(whole)
    return values


def locals_of(unit: Unit, indices: Sequence[int], values: Sequence[Any]) -> list[torch.Tensor]:
    """Return this rank's locals of values of any kind, in the shape of its shards. Collective.

    values: whole tensors, DTensors or ShardedTensors, divided in any way; one per index.
    """
    divisions, group = divisions_of(unit), division_group(unit)
    rank = 0 if group is None else group.rank()
    found: dict[int, torch.Tensor] = {}
    parts: dict[int, LocalPart] = {}
    for position, (index, value) in enumerate(zip(indices, values, strict=True)):
        param = unit.params[index]
        if param.form.unsharded is not None:
            own = _own_part(value, param.form.unsharded, unit.device)
            found[position] = _take(own, divisions[index][rank])
        elif isinstance(value, (ShardedTensor, DTensor)):
            parts[position] = local_part(value, param.shape, group, unit.device)
        else:  # a tensor, or what stands for one
            found[position] = _take(torch.detach(value), divisions[index][rank])
    exchanged = exchange(
        [part.local for part in parts.values()],
        [part.division for part in parts.values()],
        [divisions[indices[position]] for position in parts],
        group if parts else None,
        device=unit.device,
    )
    found.update(zip(parts, exchanged, strict=True))
    return [
        found[position].view(unit.params[index].shard_shape)
        for position, index in enumerate(indices)
    ]


def _rows(unit: Unit, indices: Sequence[int], pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange pieces of flat buffers for rows along dim 0: (rows of this rank, *shape[1:])."""
    divisions, group = divisions_of(unit), division_group(unit)
    shapes = [unit.params[index].shape for index in indices]
    size = 1 if group is None else group.size()
    rows = exchange(
        [piece.detach().reshape(-1) for piece in pieces],
        [divisions[index] for index in indices],
        [row_division(shape, dim=0, num_ranks=size) for shape in shapes],
        group,
        device=unit.device,
    )
    return [
        tensor.view(tensor.numel() // max(math.prod(shape[1:]), 1), *shape[1:])
        for tensor, shape in zip(rows, shapes, strict=True)
    ]


def _as_sharded(
    unit: Unit, index: int, rows: torch.Tensor, *, dtensors: bool
) -> torch.Tensor | ShardedTensor:
    param, group = unit.params[index], division_group(unit)
    if param.form.spec is not None:
        return sharded_dtensor(rows, param.form.spec)
    inner = param.form.unsharded
    if group is None or (not dtensors and inner is None):
        return sharded_tensor(rows, param.shape, group)
    if inner is not None:  # a ShardedTensor cannot say that tensor parallel has cut it before
        spec = tensor_parallel_spec(_mesh_around(group, inner.mesh), (Shard(0),), inner)
        return sharded_dtensor(rows, spec)
    meta = TensorMeta(
        torch.Size(param.shape), torch.empty(param.shape, device="meta").stride(), rows.dtype
    )
    mesh = _mesh_of(group, unit.device.type)
    return sharded_dtensor(rows, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta))


_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()
_meshes_around: weakref.WeakKeyDictionary[
    dist.ProcessGroup, list[tuple[weakref.ref[DeviceMesh], DeviceMesh]]
] = weakref.WeakKeyDictionary()


def _mesh_of(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Return the 1-D mesh of a group, the same object every time."""
    if group not in _meshes:
        _meshes[group] = DeviceMesh.from_group(group, device_type)
    return _meshes[group]


def _mesh_around(group: dist.ProcessGroup, inner: DeviceMesh) -> DeviceMesh:
    """Return the mesh of a group each of whose ranks has an inner mesh, the same object every time.

    Group (0, 2) around ranks (0, 1) is [[0, 1], [2, 3]]. Every rank of the group has to call it.
    """
    known = _meshes_around.setdefault(group, [])
    for reference, mesh in known:
        if reference() is inner:
            return mesh
    everyones = gather_objects(inner.mesh.tolist(), group, "making a mesh for whole tensors")
    names = inner.mesh_dim_names
    mesh = DeviceMesh.from_group(
        [group, *inner.get_all_groups()],
        inner.device_type,
        mesh=torch.tensor(everyones, dtype=torch.int, device="cpu"),
        mesh_dim_names=("dp", *names) if names and "dp" not in names else None,
    )
    known.append((weakref.ref(inner), mesh))
    return mesh


def _whole(numel: int, group: dist.ProcessGroup | None, *, rank0_only: bool) -> Division:
    if group is None:
        return whole_division(numel, num_ranks=1)
    everyone = whole_division(numel, num_ranks=group.size())
    if not rank0_only:
        return everyone
    ranks = dist.get_process_group_ranks(group)
    return tuple(own if rank == 0 else () for rank, own in zip(ranks, everyone, strict=True))


def _take(full: torch.Tensor, pieces: Sequence[Piece]) -> torch.Tensor:
    """Return pieces of a whole tensor as one 1-D tensor; a single piece shares memory with it."""
    flat = full.reshape(-1)
    taken = [flat[piece.param_start : piece.param_start + piece.numel] for piece in pieces]
    if len(taken) == 1:
        return taken[0]
    return torch.cat(taken) if taken else flat[:0]


def _own_part(value: Any, spec: DTensorSpec, device: torch.device) -> torch.Tensor:
    """Return this rank's tensor-parallel part of a value, not yet cut for data parallel.

    spec: of the parameter over its own mesh. Collective.
    """
    if isinstance(value, DTensor):
        num_outer = value.device_mesh.ndim - spec.mesh.ndim
        if num_outer >= 0 and _ranks_of(value.device_mesh)[num_outer:] == _ranks_of(spec.mesh):
            placements = [*[Replicate()] * num_outer, *spec.placements]
            return value.redistribute(placements=placements)._local_tensor
    # From another mesh, or from none: put together first, one value at a time.
    if isinstance(value, ShardedTensor):
        whole = local_part(value, tuple(spec.shape), None, device).local.view(spec.shape)
    else:
        value = torch.detach(value)
        whole = value.full_tensor() if isinstance(value, DTensor) else value
    everywhere = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.tensor_meta)
    cut = sharded_dtensor(whole.to(spec.mesh.device_type), everywhere)
    return cut.redistribute(placements=spec.placements)._local_tensor


def _ranks_of(mesh: DeviceMesh) -> list[list[int]]:
    """Return this rank's group along each axis of a mesh, as global ranks."""
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
