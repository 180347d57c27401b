"""`sync_buffers`: buffers that every rank has whole, made equal or found to differ.

Sharding leaves buffers alone: each rank has its own. They begin equal if every rank computes them alike, and
running statistics drift apart with the data.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.comm.outside_steps import gather_objects, run_collective
from fullshard.errors import ShardingError, StateError
from fullshard.peers.groups import any_device, moves, place_in_job
from fullshard.plan.units import first_names
from fullshard.state.host_memory import crc, host_bytes
from fullshard.state.owners import owners_of
from fullshard.state.structure import structure_of

_LABEL = "comparing buffers"


@torch.no_grad()
def sync_buffers(
    model: nn.Module, policy: Literal["broadcast", "check"] = "broadcast"
) -> list[str]:
    """Give every rank the first rank's buffers, or raise if they differ. Collective.

        fullshard.sync_buffers(model)            # after loading, before the first forward

    model: sharded or not. Persistent buffers and others are compared, by checksums; only what differs is
    sent. policy: "broadcast" keeps shapes and dtypes of the buffers and changes values in place; "check"
    changes nothing. Returns the names of the buffers that differed.

    Raises StateError, on all ranks, if they have other buffers, shapes or dtypes, if one is on the meta
    device, and with "check" if values differ, with names and ranks.
    """
    if policy not in ("broadcast", "check"):
        raise ShardingError(f"sync_buffers: policy is {policy!r}. Pass 'broadcast' or 'check'.")
    group = owners_of(model)
    if place_in_job(group).size == 1:
        return []
    buffers = _buffers(model)
    own = {
        name: (tuple(b.shape), str(b.dtype), "meta" if b.is_meta else crc(host_bytes(b)))
        for name, b in buffers.items()
    }
    everyones = gather_objects(own, group, _LABEL)
    ranks = dist.get_process_group_ranks(group)
    _check_alike(everyones, ranks)
    differing = {
        name: [rank for rank, each in zip(ranks, everyones, strict=True) if each[name] != fact]
        for name, fact in everyones[0].items()
    }
    found = [name for name, others in differing.items() if others]
    if found and policy == "check":
        shown = "; ".join(f"{name} on ranks {differing[name]}" for name in found[:5])
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise StateError(
            f"sync_buffers: {shown}{more} differ from those of rank {ranks[0]}. Compute them alike on every "
            "rank, or call sync_buffers(model), which sends the first rank's."
        )
    for name in found:
        _broadcast(buffers[name], group)
    return found


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for prefix, module in structure_of(model).modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                found.setdefault(id(buffer), (f"{prefix}{name}", buffer))
    return dict(found.values())


def _check_alike(
    everyones: list[dict[str, tuple[tuple[int, ...], str, str]]], ranks: list[int]
) -> None:
    first = everyones[0]
    for rank, own in zip(ranks, everyones, strict=True):
        on_meta = [name for name, (_, _, value) in own.items() if value == "meta"]
        if on_meta:
            raise StateError(
                f"sync_buffers: {first_names(on_meta)} on rank {rank} are on the meta device. Give them memory "
                "first: model.to_empty(device=...), or fullshard.materialize(model)."
            )
        unlike = [n for n in {**first, **own} if first.get(n, ())[:2] != own.get(n, ())[:2]]
        if unlike:
            name = unlike[0]
            raise StateError(
                f"sync_buffers: {name} is {first.get(name, 'not there')} on rank {ranks[0]} and "
                f"{own.get(name, 'not there')} on rank {rank} (shape, dtype, checksum). Build the same model on "
                "all ranks."
            )


def _broadcast(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    device = buffer.device if moves(group, buffer.device.type) else any_device(group)
    moved = buffer.detach().to(device, copy=True).contiguous()
    run_collective(dist.broadcast, moved, group_src=0, group=group, label=_LABEL)
    buffer.copy_(moved)
