"""Convert between what ranks hold of a unit's parameters and the values of state dicts.

The locals (see `unit_parts`) of all of a unit's tensors move at once (`moving`). Only values that are
divided over other ranks than the unit are made whole first.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.unit import Unit
from fullshard.faces.forms import tensor_parallel_spec
from fullshard.faces.meshes import joined_mesh
from fullshard.peers.groups import place_in
from fullshard.plan.boxes import Box, Division, chunks, common
from fullshard.plan.layout import Shape
from fullshard.state.moving import Moving, move
from fullshard.state.sharded_tensors import (
    gathered_value,
    parts_of_value,
    place_on,
    sharded_dtensor,
    sharded_tensor,
)
from fullshard.state.unit_parts import UnitParts, division_group, parts_of
from fullshard.torch_private import DTensorSpec, ShardedTensor, TensorMeta


def whole_values(
    unit: Unit, indices: Sequence[int], locals_: Sequence[torch.Tensor], *, rank0_only: bool
) -> list[torch.Tensor | None]:
    """Return the values of a full state dict, one per local. Collective.

    indices: the parameter that each local belongs to; one may occur several times.
    rank0_only: all but the first of the ranks that divide them get None, and send without receiving.
    """
    group, parts = division_group(unit), parts_of(unit)
    # Looked up once a call: tensors of one parameter share a plan of what moves. Not kept for longer, as it
    # grows with the number of ranks.
    division = functools.cache(parts.division)
    rank, size = place_in(group)
    is_wanted = rank == 0 or not rank0_only
    wanted: dict[int, Division] = {
        i: [(parts.region(i),) if r == 0 or not rank0_only else () for r in range(size)]
        for i in dict.fromkeys(indices)
    }
    moving: list[Moving] = []
    values: list[torch.Tensor | None] = []
    for index, local in zip(indices, locals_, strict=True):
        shape, spec = parts.region(index).shape, parts.forms[index].unsharded
        here = [torch.empty(shape, dtype=local.dtype, device=unit.device)] if is_wanted else []
        held = _views(parts, index, local)
        moving.append(Moving(division(index), wanted[index], held, here))
        values += [here[0] if spec is None else sharded_dtensor(here[0], spec)] if here else [None]
    move(moving, group, device=unit.device)
    return values


def sharded_values(
    unit: Unit,
    indices: Sequence[int],
    locals_: Sequence[torch.Tensor],
    *,
    dtensors: bool,
) -> list[torch.Tensor | ShardedTensor]:
    """Return the values of a sharded state dict, one per local, of a unit that is sharded. Collective.

    indices: the parameter that each local belongs to; one may occur several times.
    dtensors: make DTensors, also where the unit was given no mesh. Otherwise those are
        ShardedTensors.
    """
    parts, group = parts_of(unit), unit.mesh.shard_group
    values: list[torch.Tensor | ShardedTensor] = []
    if not unit.is_flat:
        for index, local in zip(indices, locals_, strict=True):
            spec = parts.forms[index].spec
            assert spec is not None  # of all parameters that are rows
            values.append(sharded_dtensor(parts.as_local(index, local), spec))
        return values
    assert group is not None
    routes = {i: _route(unit, parts, i, dtensors=dtensors) for i in dict.fromkeys(indices)}
    shares: list[torch.Tensor] = []
    moving: dict[dist.ProcessGroup, list[Moving]] = {group: []}  # in the order of hops
    for index, piece in zip(indices, locals_, strict=True):
        here = _views(parts, index, piece)
        for hop in routes[index].hops:
            rank = hop.group.rank()
            (box,) = hop.wanted[rank]
            share = torch.empty(box.shape, dtype=piece.dtype, device=unit.device)
            held = here if hop.held[rank] else []
            moving.setdefault(hop.group, []).append(Moving(hop.held, hop.wanted, held, [share]))
            here = [share]
        shares.append(share)
    for along, tensors in moving.items():
        move(tensors, along, device=unit.device)
    for index, share in zip(indices, shares, strict=True):
        spec, hops = routes[index]
        if spec is None:
            boxes = [box for (box,) in hops[0].wanted]
            values.append(sharded_tensor(share, parts.region(index).shape, boxes, group))
        else:
            values.append(sharded_dtensor(share, spec))
    return values


def locals_of(unit: Unit, indices: Sequence[int], values: Sequence[Any]) -> list[torch.Tensor]:
    """Return this rank's locals of values of any kind, in the shape of its shards. Collective.

    values: whole tensors, DTensors or ShardedTensors, divided in any way; one per index.
    """
    group, parts = division_group(unit), parts_of(unit)
    division = functools.cache(parts.division)
    locals_: list[torch.Tensor] = []
    moving: list[Moving] = []
    for index, value in zip(indices, values, strict=True):
        inner = parts.forms[index].unsharded
        if inner is not None:
            locals_.append(parts.cut(index, _own_part(value, inner, unit.device)))
        elif isinstance(value, (ShardedTensor, DTensor)):
            found = parts_of_value(value, parts.region(index).shape, group, unit.device)
            local = parts.new_local(index, value.dtype)
            here = _views(parts, index, local)
            moving.append(Moving(found.division, division(index), found.here, here))
            locals_.append(local)
        else:  # a tensor, or what stands for one
            locals_.append(parts.cut(index, torch.detach(value)))
    move(moving, group if moving else None, device=unit.device)
    return locals_


def _views(parts: UnitParts, index: int, local: torch.Tensor) -> list[torch.Tensor]:
    return [held.view for held in parts.boxes(index, local.detach())]


class _Hop(NamedTuple):
    """A move on the way of values: over which group, what its ranks have, and the one box each is to have."""

    group: dist.ProcessGroup
    held: Division
    wanted: Division


class _Route(NamedTuple):
    """How a parameter's values in sharded state dicts are divided, and how pieces get there.

    spec: of the value; None for a ShardedTensor. hops: over the unit's shard group, and, where these ranks
    cannot give each other what they are to have, again over the group of tensor parallel.
    """

    spec: DTensorSpec | None
    hops: Sequence[_Hop]


def _route(unit: Unit, parts: UnitParts, index: int, *, dtensors: bool) -> _Route:
    group = unit.mesh.shard_group
    assert group is not None
    own, shape = parts.forms[index].unsharded, parts.region(index).shape
    held = parts.division(index)
    spec = _spec_of_values(unit, shape, own, dtensors=dtensors)
    if spec is None:
        return _Route(None, [_Hop(group, held, [(box,) for box in chunks(shape, 0, group.size())])])
    axis = None if own is None else _axis_cut_again(spec, own)
    if own is None or axis is None:
        return _Route(spec, [_Hop(group, held, _boxes(spec, group))])
    # What this rank gets, others of the tensor-parallel group have of the parameter. So first it is sent
    # over the shard group to the ranks beside this one, and then over theirs.
    inner = own.mesh.get_group()
    placements = (*spec.placements[:axis], Replicate(), *spec.placements[axis + 1 :])
    beside = DTensorSpec(spec.mesh, placements, spec.tensor_meta)
    shared, region = place_on(beside).box, place_on(own).box
    none = Box(region.offset, (0,) * len(region.shape))
    first = [(common(region, box) or none,) for (box,) in _boxes(beside, group)]
    by_then = [(part,) if (part := common(shared, box)) else () for (box,) in _boxes(own, inner)]
    return _Route(spec, [_Hop(group, held, first), _Hop(inner, by_then, _boxes(spec, inner))])


def _spec_of_values(
    unit: Unit, shape: Shape, own: DTensorSpec | None, *, dtensors: bool
) -> DTensorSpec | None:
    """Return how a flat parameter's values in sharded state dicts are divided; None for ShardedTensors.

    As PyTorch's wrapper divides them, which loads no others without a checkpoint:

        mesh                                    plain parameter         tensor parallel, dim 0 too
        ("dp", "tp")["dp"]                      (Shard(0), Replicate)   (Shard(0), Shard(0))
        ("dp", "tp"), sharded over "dp" alone   (Replicate, Shard(0))   the same
        a process group                         (Shard(0))              the same

    PyTorch cuts a plain parameter's value over the last axis of a mesh that is no slice, whichever axis
    the parameter itself is sharded over.
    """
    group, mesh, axis = unit.mesh.shard_group, unit.mesh.mesh, unit.mesh.shard_axis
    assert group is not None
    if own is not None:  # a ShardedTensor cannot say that tensor parallel has cut it before
        return _around(unit, own)
    if mesh is None:
        if not dtensors:
            return None
        if group not in _meshes:
            _meshes[group] = DeviceMesh.from_group(group, unit.device.type)
        mesh = _meshes[group]
    elif (root := mesh._get_root_mesh()) == mesh:
        axis = mesh.ndim - 1
    elif mesh.mesh_dim_names == (root.mesh_dim_names or ())[: mesh.ndim]:
        mesh = root
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, torch.float32)
    cut = tuple(Shard(0) if each == axis else Replicate() for each in range(mesh.ndim))
    return DTensorSpec(mesh, cut, tensor_meta=meta)


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


def _axis_cut_again(spec: DTensorSpec, own: DTensorSpec) -> int | None:
    """Return the axis on which tensor parallel cuts the rows of a value that an axis before it cuts too."""
    if own.mesh.ndim > 1 or own.placements[0] != Shard(0):
        return None
    (inner,) = _ranks_of(own.mesh)
    axis = _ranks_of(spec.mesh).index(inner)
    return axis if Shard(0) in spec.placements[:axis] else None


def _boxes(spec: DTensorSpec, group: dist.ProcessGroup) -> list[tuple[Box]]:
    """Return the boxes of a DTensor that the ranks of a group hold, which is one in its mesh."""
    ranks = spec.mesh.mesh
    return [
        (place_on(spec, (ranks == rank).nonzero()[0].tolist()).box,)
        for rank in dist.get_process_group_ranks(group)
    ]


# Meshes of groups alone, and of groups around inner meshes: the same object every time.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, DeviceMesh] = weakref.WeakKeyDictionary()
_meshes_around: weakref.WeakKeyDictionary[
    dist.ProcessGroup, list[tuple[weakref.ref[DeviceMesh], DeviceMesh]]
] = weakref.WeakKeyDictionary()


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
    if isinstance(value, (ShardedTensor, DTensor)):
        whole = gathered_value(value, tuple(spec.shape), device)
    else:
        whole = torch.detach(value)
    everywhere = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.tensor_meta)
    cut = sharded_dtensor(whole.to(spec.mesh.device_type), everywhere)
    return cut.redistribute(placements=spec.placements)._local_tensor


def _ranks_of(mesh: DeviceMesh) -> list[list[int]]:
    """Return this rank's group along each axis of a mesh, as global ranks."""
    return [dist.get_process_group_ranks(group) for group in mesh.get_all_groups()]
