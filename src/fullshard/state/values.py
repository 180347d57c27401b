"""Tensors of sharded state dicts, which have the whole shape while each rank holds some rows.

A value is a ``ShardedTensor``, or a ``DTensor`` where the model was sharded over a device mesh.
Those made here are divided along dim 0 as ``torch.chunk`` does; those read may be divided in any
way.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.plan.layout import Piece, Shape
from fullshard.plan.regrid import Division, box_pieces, row_division, whole_division
from fullshard.plan.sizes import rows_per_rank
from fullshard.state.exchange import exchange
from fullshard.torch_private import (
    DTensorSpec,
    LocalShard,
    RemoteDevice,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    TensorMeta,
    TensorProperties,
)


class LocalPart(NamedTuple):
    """This rank's part of a value, as a 1-D tensor, and the value's division over a group."""

    local: torch.Tensor
    division: Division


def sharded_tensor(
    rows: torch.Tensor, shape: Shape, group: dist.ProcessGroup | None
) -> ShardedTensor:
    """Return a ShardedTensor of this rank's rows, without communication.

    The rows of other ranks follow from ``shape``, the whole one, by ``torch.chunk``'s rule.
    """
    size = 1 if group is None else group.size()
    rank = 0 if group is None else group.rank()
    chunk = rows_per_rank(shape[0], size)
    shards = []
    for other in range(size):
        start = min(other * chunk, shape[0])
        stop = min(start + chunk, shape[0])
        if start == stop:
            continue
        offsets, sizes = [start] + [0] * (len(shape) - 1), [stop - start, *shape[1:]]
        shards.append(ShardMetadata(offsets, sizes, placement=_place(other, rows.device, group)))
    metadata = ShardedTensorMetadata(
        shards_metadata=shards,
        size=torch.Size(shape),
        tensor_properties=TensorProperties(dtype=rows.dtype),
    )
    local = [LocalShard(rows, shards[rank])] if rank < len(shards) else []
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, metadata, process_group=group
    )


def sharded_dtensor(rows: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """Return a DTensor of this rank's part, divided as in ``spec``, in the part's own dtype."""
    meta = TensorMeta(spec.shape, spec.stride, rows.dtype)
    return DTensor(
        rows, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False
    )


def flat_sharded_tensor(
    local: torch.Tensor, sizes: Sequence[int], group: dist.ProcessGroup
) -> ShardedTensor:
    """Return a 1-D ShardedTensor whose ranks hold ranges of these sizes, one after the other."""
    shards, start = [], 0
    mine: list[LocalShard] = []
    for rank, size in enumerate(sizes):
        if size:
            shards.append(ShardMetadata([start], [size], _place(rank, local.device, group)))
            if rank == group.rank():
                mine.append(LocalShard(local, shards[-1]))
        start += size
    metadata = ShardedTensorMetadata(
        shards_metadata=shards,
        size=torch.Size([start]),
        tensor_properties=TensorProperties(dtype=local.dtype),
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, metadata, process_group=group
    )


def local_part(
    value: object, shape: Shape, group: dist.ProcessGroup | None, device: torch.device
) -> LocalPart:
    """Return this rank's part of a value of any kind, and the division of all ranks of ``group``.

    shape: of the whole value. Collective for a value that is divided over other ranks than
    ``group``: it is made whole first, and the division says that every rank has all of it.
    """
    size = 1 if group is None else group.size()
    if isinstance(value, ShardedTensor):
        return _part_of_sharded_tensor(value, shape, group, device)
    if isinstance(value, DTensor):
        return _part_of_dtensor(value, shape, group, size, device)
    assert isinstance(value, torch.Tensor)
    whole = whole_division(math.prod(shape), num_ranks=size)
    return LocalPart(value.detach().to(device).reshape(-1), whole)


def _part_of_sharded_tensor(
    value: ShardedTensor, shape: Shape, group: dist.ProcessGroup | None, device: torch.device
) -> LocalPart:
    own_group = value._process_group
    size = own_group.size()
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in range(size)]
    filled = [0] * size
    for shard in value.metadata().shards_metadata:
        placement = shard.placement
        assert placement is not None
        rank = _group_rank(placement.rank() or 0, value)
        for start, own, numel in box_pieces(shape, shard.shard_offsets, shard.shard_sizes):
            pieces[rank].append((start, filled[rank] + own, numel))
        filled[rank] += math.prod(shard.shard_sizes)
    tensors = [shard.tensor.detach().to(device).reshape(-1) for shard in value.local_shards()]
    local = torch.cat(tensors) if tensors else torch.empty(0, dtype=value.dtype, device=device)
    division = _as_division(pieces)
    if group is not None and _ranks(group) == _ranks(own_group):
        return LocalPart(local, division)
    # Divided over other ranks than it is wanted on: gathered first, one value at a time.
    whole = whole_division(math.prod(shape), num_ranks=size)
    (full,) = exchange([local], [division], [whole], own_group, device=device)
    num_ranks = 1 if group is None else group.size()
    return LocalPart(full, whole_division(math.prod(shape), num_ranks=num_ranks))


def _ranks(group: dist.ProcessGroup) -> list[int]:
    ranks: list[int] = dist.get_process_group_ranks(group)
    return ranks


def _group_rank(rank: int, value: ShardedTensor) -> int:
    return dist.get_group_rank(value._process_group, rank)


def _part_of_dtensor(
    value: DTensor, shape: Shape, group: dist.ProcessGroup | None, size: int, device: torch.device
) -> LocalPart:
    axes = [axis for axis, placement in enumerate(value.placements) if placement.is_shard()]
    plain = all(type(p) in (Shard, Replicate) for p in value.placements)
    if plain and len(axes) == 1 and group is not None:
        (axis,) = axes
        ranks = dist.get_process_group_ranks(value.device_mesh.get_group(axis))
        if ranks == dist.get_process_group_ranks(group):
            dim: int = value.placements[axis].dim  # type: ignore[attr-defined]
            rows = row_division(shape, dim=dim, num_ranks=size)
            return LocalPart(value._local_tensor.detach().to(device).reshape(-1), rows)
    full = value.full_tensor().detach().to(device).reshape(-1)
    return LocalPart(full, whole_division(full.numel(), num_ranks=size))


def _as_division(pieces: Sequence[Sequence[tuple[int, int, int]]]) -> Division:
    return tuple(tuple(Piece(*piece) for piece in sorted(own)) for own in pieces)


def _place(rank: int, device: torch.device, group: dist.ProcessGroup | None) -> RemoteDevice:
    """Return a rank's device as ShardedTensor names it, by the global rank.

    rank: in ``group``, or the global one if that is None.
    """
    rank = rank if group is None else dist.get_global_rank(group, rank)
    if device.type == "cpu":
        return RemoteDevice(f"rank:{rank}/cpu")
    return RemoteDevice(f"rank:{rank}/{device.type}:{rank % torch.accelerator.device_count()}")
