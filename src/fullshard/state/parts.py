"""Conversion between the ranks' parts of a unit's parameters and the values of state dicts.

A *local* is this rank's part of a parameter, or of a tensor of the parameter's size (optimizer
state): a piece of a flat buffer, or rows. The parts of all of a unit's tensors move in one planned
exchange. Only values that are divided over other ranks than the unit are made whole first.
"""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.unit import Unit
from fullshard.faces.meshes import joined_mesh, tensor_parallel_spec
from fullshard.plan.boxes import Box, Cut, box_after, common, whole_box
from fullshard.plan.layout import Piece
from fullshard.plan.regrid import (
    Division,
    box_pieces,
    bucket_division,
    row_division,
    whole_division,
)
from fullshard.state.exchange import exchange
from fullshard.state.unit_parts import place_on
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
    """Return the values of a sharded state dict, one per local, of a unit that is sharded. Collective.

    indices: the parameter that each local belongs to; one may occur several times.
    dtensors: make DTensors, also where the unit was given no mesh. Otherwise those are
        ShardedTensors.
    """
    params = unit.params
    specs = {index: _spec_of_values(unit, index, dtensors=dtensors) for index in indices}
    if params.is_flat:
        parts = _from_pieces(unit, indices, locals_, specs)
    else:
        parts = [t.reshape(params[i].shard_shape) for i, t in zip(indices, locals_, strict=True)]
    values: list[torch.Tensor | ShardedTensor] = []
    for index, part in zip(indices, parts, strict=True):
        spec = specs[index]
        if spec is None:
            values.append(sharded_tensor(part, params[index].shape, unit.mesh.shard_group))
        else:
            values.append(sharded_dtensor(part, spec))
    return values


def whole_values(
    unit: Unit,
    indices: Sequence[int],
    locals_: Sequence[torch.Tensor],
    *,
    rank0_only: bool,
) -> list[torch.Tensor | None]:
    """Return the values of a full state dict, one per local. Collective.

    rank0_only: all but the first of the ranks that divide them get None, and send without receiving.
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


def _spec_of_values(unit: Unit, index: int, *, dtensors: bool) -> DTensorSpec | None:
    """Return how a parameter's values in sharded state dicts are divided; None for ShardedTensors.

    Those of flat units as PyTorch's wrapper divides them, which loads no others without a checkpoint:

        mesh                                    plain parameter         tensor parallel, dim 0 too
        ("dp", "tp")["dp"]                      (Shard(0), Replicate)   (Shard(0), Shard(0))
        ("dp", "tp"), sharded over "dp" alone   (Replicate, Shard(0))   the same
        a process group                         (Shard(0))              the same

    PyTorch cuts a plain parameter's value over the last axis of a mesh that is no slice, whichever axis
    the parameter itself is sharded over.
    """
    param, group = unit.params[index], unit.mesh.shard_group
    if param.form.spec is not None:
        return param.form.spec
    assert group is not None
    own, mesh, axis = param.form.unsharded, unit.mesh.mesh, unit.mesh.shard_axis
    if own is not None:  # a ShardedTensor cannot say that tensor parallel has cut it before
        return _around(unit, own)
    if mesh is None:
        if not dtensors:
            return None
        mesh = _mesh_of(group, unit.device.type)
    elif (root := mesh._get_root_mesh()) == mesh:
        axis = mesh.ndim - 1
    elif mesh.mesh_dim_names == (root.mesh_dim_names or ())[: mesh.ndim]:
        mesh = root
    meta = TensorMeta(
        torch.Size(param.shape), torch.empty(param.shape, device="meta").stride(), torch.float32
    )
    return DTensorSpec(mesh, _cut_on(axis, mesh.ndim), tensor_meta=meta)


def _around(unit: Unit, own: DTensorSpec) -> DTensorSpec:
    """Return how a DTensor's values are divided: over a flat unit's ranks and its own."""
    place = unit.mesh
    mesh = joined_mesh(place, own.mesh) if own.mesh.ndim == 1 else None
    if mesh is None:
        assert place.shard_group is not None
        mesh = _mesh_around(place.shard_group, own.mesh)
        if own.mesh.ndim > 1:  # which PyTorch's wrapper does not take
            return tensor_parallel_spec(mesh, (Shard(0),), own)
        return DTensorSpec(mesh, (Shard(0), *own.placements), tensor_meta=own.tensor_meta)
    assert place.mesh is not None
    outer, names = place.mesh.mesh_dim_names or (), own.mesh.mesh_dim_names or ()
    cuts = {outer[place.shard_axis]: Shard(0), names[0]: own.placements[0]}
    placements = tuple(cuts.get(name, Replicate()) for name in mesh.mesh_dim_names or ())
    return DTensorSpec(mesh, placements, tensor_meta=own.tensor_meta)


def _cut_on(axis: int, ndim: int) -> tuple[Placement, ...]:
    return tuple(Shard(0) if each == axis else Replicate() for each in range(ndim))


def _from_pieces(
    unit: Unit,
    indices: Sequence[int],
    pieces: Sequence[torch.Tensor],
    specs: Mapping[int, DTensorSpec | None],
) -> list[torch.Tensor]:
    """Exchange pieces of flat buffers for this rank's parts of values. Collective.

    specs: by index, how values are divided; None for rows over the shard group.
    """
    old, group = divisions_of(unit), unit.mesh.shard_group
    assert group is not None
    new: dict[int, Division] = {}
    again: dict[dist.ProcessGroup, dict[int, tuple[Division, Division]]] = {}
    for index, spec in specs.items():
        own = unit.params[index].form.unsharded
        if spec is None:
            shape = unit.params[index].shape
            new[index] = row_division(shape, dim=0, num_ranks=group.size())
        elif own is None:
            new[index] = _division(whole_box(tuple(spec.shape)), _boxes(spec, group))
        elif (axis := _axis_cut_again(spec, own)) is None:
            new[index] = _division(place_on(own).box, _boxes(spec, group))
        else:
            # What this rank gets, others of the tensor-parallel group have of the parameter. So first
            # it is sent over the shard group to the ranks beside this one, and then over theirs.
            inner = own.mesh.get_group()
            placements = (*spec.placements[:axis], Replicate(), *spec.placements[axis + 1 :])
            beside = DTensorSpec(spec.mesh, placements, spec.tensor_meta)
            new[index] = _division(place_on(own).box, _boxes(beside, group))
            whole, shared = whole_box(tuple(spec.shape)), place_on(beside).box
            held = [common(shared, box) for box in _boxes(own, inner)]
            both = _division(whole, held), _division(whole, _boxes(spec, inner))
            again.setdefault(inner, {})[index] = both
    parts = exchange(
        [piece.detach().reshape(-1) for piece in pieces],
        [old[index] for index in indices],
        [new[index] for index in indices],
        group,
        device=unit.device,
    )
    for inner, divisions in again.items():
        positions = [position for position, index in enumerate(indices) if index in divisions]
        moved = exchange(
            [parts[position] for position in positions],
            [divisions[indices[position]][0] for position in positions],
            [divisions[indices[position]][1] for position in positions],
            inner,
            device=unit.device,
        )
        for position, part in zip(positions, moved, strict=True):
            parts[position] = part
    return [
        part.view(_shape_here(unit.params[index].shape, specs[index], group))
        for index, part in zip(indices, parts, strict=True)
    ]


def _axis_cut_again(spec: DTensorSpec, own: DTensorSpec) -> int | None:
    """Return the axis on which tensor parallel cuts the rows of a value that an axis before it cuts too."""
    if own.mesh.ndim > 1 or own.placements[0] != Shard(0):
        return None
    (inner,) = _ranks_of(own.mesh)
    axis = _ranks_of(spec.mesh).index(inner)
    return axis if Shard(0) in spec.placements[:axis] else None


def _boxes(spec: DTensorSpec, group: dist.ProcessGroup) -> list[Box]:
    """Return the boxes of a DTensor that the ranks of a group hold, which is one in its mesh."""
    ranks = spec.mesh.mesh
    return [
        place_on(spec, (ranks == rank).nonzero()[0].tolist()).box
        for rank in dist.get_process_group_ranks(group)
    ]


def _division(region: Box, boxes: Sequence[Box | None]) -> Division:
    """Return the division of a box's elements among ranks that hold what boxes have of it."""
    origin = [-start for start in region.offset]
    inside = [None if box is None else common(region, box) for box in boxes]
    return tuple(
        () if box is None else box_pieces(region.shape, *box.moved(origin)) for box in inside
    )


def _shape_here(
    shape: tuple[int, ...], spec: DTensorSpec | None, group: dist.ProcessGroup
) -> tuple[int, ...]:
    if spec is not None:
        return place_on(spec).box.shape
    return box_after(shape, [Cut(0, group.rank(), group.size())]).shape


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
    return everyone if not rank0_only else (everyone[0], *[()] * (group.size() - 1))


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
