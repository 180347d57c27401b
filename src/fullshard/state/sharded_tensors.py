"""Tensors that have the whole shape while each rank holds boxes of it: DTensors and ShardedTensors.

They are what sharded state dicts have: a ``DTensor`` where the model was sharded over a device mesh, else a
``ShardedTensor``. Those made here are divided as is said; those read may be divided in any way.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.engine.params.form import with_dtype
from fullshard.errors import LayoutError, UnsupportedError
from fullshard.peers.groups import place_in
from fullshard.plan.boxes import Box, Cut, Division, box_after, chunks, tiling_fault, whole_box
from fullshard.plan.layout import Shape
from fullshard.state.moving import Moving, move
from fullshard.torch_private import (
    DTensorSpec,
    LocalShard,
    RemoteDevice,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    StridedShard,
    TensorProperties,
)


class MeshBox(NamedTuple):
    """This rank's box of a tensor on a mesh.

    copy, copies: its number among the ranks of the mesh that hold the same box. num_ranks: of the mesh.
    """

    box: Box
    copy: int
    copies: int
    num_ranks: int


def sharded_tensor(
    local: torch.Tensor, shape: Shape, boxes: Sequence[Box], group: dist.ProcessGroup | None
) -> ShardedTensor:
    """Return a ShardedTensor of which each rank of a group holds one box, without communication.

    local: this rank's part. shape: the whole one. boxes: by rank; one without rows is left out.
    """
    rank = place_in(group).rank
    shards = {
        other: ShardMetadata([*box.offset], [*box.shape], _place(other, local.device, group))
        for other, box in enumerate(boxes)
        if box.shape[0]
    }
    metadata = ShardedTensorMetadata(
        shards_metadata=[*shards.values()],
        size=torch.Size(shape),
        tensor_properties=TensorProperties(dtype=local.dtype),
    )
    here = [LocalShard(local, shards[rank])] if rank in shards else []
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        here, metadata, process_group=group
    )


def sharded_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of this rank's part, divided as in ``spec``, in the part's own dtype.

    Not by `from_local`, which takes parts for equally large.
    """
    return DTensor(local, with_dtype(spec, local.dtype), requires_grad=False)


class ValueParts(NamedTuple):
    """A value's division over the ranks of a group, and this rank's memory of its boxes."""

    division: Division
    here: Sequence[torch.Tensor]


def parts_of_value(
    value: Any, shape: Shape, group: dist.ProcessGroup | None, device: torch.device
) -> ValueParts:
    """Return how a ShardedTensor or DTensor is divided over a group; None is this rank alone.

    shape: of the whole value. Collective for a value that is divided over other ranks: it is made whole
    first, and the division says that every rank has all of it.
    """
    size = place_in(group).size
    if group is not None and isinstance(value, ShardedTensor):
        ranks = dist.get_process_group_ranks(value._process_group)
        if ranks == dist.get_process_group_ranks(group):
            return _of_sharded_tensor(value, shape, device)
    elif group is not None:
        axes = [axis for axis, placement in enumerate(value.placements) if placement.is_shard()]
        plain = all(type(placement) in (Shard, Replicate) for placement in value.placements)
        if (
            plain
            and len(axes) == 1
            and dist.get_process_group_ranks(value.device_mesh.get_group(axes[0]))
            == dist.get_process_group_ranks(group)
        ):
            boxes = chunks(shape, value.placements[axes[0]].dim, size)
            local = value._local_tensor.detach().to(device)
            return ValueParts([(box,) for box in boxes], [local])
    return ValueParts([(whole_box(shape),)] * size, [gathered_value(value, shape, device)])


def gathered_value(value: Any, shape: Shape, device: torch.device) -> torch.Tensor:
    """Return a ShardedTensor or DTensor whole, on every rank that it is divided over. Collective."""
    if not isinstance(value, ShardedTensor):
        whole: torch.Tensor = value.full_tensor().detach().to(device)
        return whole
    group = value._process_group
    found = _of_sharded_tensor(value, shape, device)
    whole = torch.empty(shape, dtype=value.dtype, device=device)
    wanted = [(whole_box(shape),)] * group.size()
    move([Moving(found.division, wanted, found.here, [whole])], group, device=device)
    return whole


def placement_of(spec: DTensorSpec) -> str:
    """Say how a DTensor is divided: "dim 0 over dp 4, replicated over tp 2"."""
    parts = []
    for axis, placement in enumerate(spec.placements):
        names = spec.mesh.mesh_dim_names
        axis_name = f" {names[axis]}" if names else ""
        kind = f"dim {placement.dim}" if hasattr(placement, "dim") else "replicated"
        parts.append(f"{kind} over{axis_name} {spec.mesh.size(axis)}")
    return ", ".join(parts)


def place_on(spec: DTensorSpec, coordinate: Sequence[int] | None = None) -> MeshBox:
    """Return a rank's box of a DTensor: of this one, or of that at a coordinate of the mesh.

    Raises UnsupportedError for a partial sum, of which no rank has the values.
    """
    coordinate = spec.mesh.get_coordinate() if coordinate is None else coordinate
    assert coordinate is not None  # DTensors are made on the ranks of their mesh
    cuts: list[Cut] = []
    later: list[Cut] = []  # a strided axis cuts what the axes behind it have left
    copy, copies = 0, 1
    for axis, placement in enumerate(spec.placements):
        size, number = spec.mesh.size(axis), coordinate[axis]
        if placement.is_replicate():
            copy, copies = copy * size + number, copies * size
        elif isinstance(placement, StridedShard):
            later.append(Cut(placement.dim, number, size))
        elif isinstance(placement, Shard):
            cuts.append(Cut(placement.dim, number, size))
        else:
            raise UnsupportedError(
                f"A DTensor of shape {tuple(spec.shape)} is {placement} on {spec.mesh}: each rank has "
                "a term of a sum, which cannot be saved. Reduce it first."
            )
    return MeshBox(box_after(tuple(spec.shape), [*cuts, *later]), copy, copies, spec.mesh.size())


def _of_sharded_tensor(value: ShardedTensor, shape: Shape, device: torch.device) -> ValueParts:
    """Return the division of a ShardedTensor over its own group.

    Raises LayoutError, on all ranks alike, if its shards are not all of it, each element once.
    """
    group = value._process_group
    division: list[list[Box]] = [[] for _ in range(group.size())]
    for shard in value.metadata().shards_metadata:
        assert shard.placement is not None
        rank = dist.get_group_rank(group, shard.placement.rank() or 0)
        division[rank].append(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
    if fault := tiling_fault(shape, [box for boxes in division for box in boxes]):
        raise LayoutError(f"A ShardedTensor of shape {tuple(shape)}: {fault}.")
    here = [shard.tensor.detach().to(device) for shard in value.local_shards()]
    return ValueParts(division, here)


def _place(rank: int, device: torch.device, group: dist.ProcessGroup | None) -> RemoteDevice:
    """Return a rank's device as ShardedTensor names it, by the global rank.

    rank: in ``group``, or the global one if that is None.
    """
    rank = rank if group is None else dist.get_global_rank(group, rank)
    if device.type == "cpu":
        return RemoteDevice(f"rank:{rank}/cpu")
    return RemoteDevice(f"rank:{rank}/{device.type}:{rank % torch.accelerator.device_count()}")
