"""Moving parameters between ranks, from one division over them to another.

Every rank plans by itself what moves (`plan.regrid`), without a message. Only elements that change
ranks are sent, as bytes, so that any mix of dtypes fits into one collective. At its peak, memory
holds the local tensors, the results, one send buffer and one receive buffer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.outside_steps import run_collective
from fullshard.errors import LayoutError
from fullshard.plan.regrid import Division, Transfer, local_numel, regrid


class _Copies(NamedTuple):
    """Runs of bytes as uint8 views of local tensors and of results.

    kept: (source, target) of the runs that stay on this rank.
    sent, received: by the other rank, the runs in the order in which they are sent.
    """

    kept: list[tuple[torch.Tensor, torch.Tensor]]
    sent: list[list[torch.Tensor]]
    received: list[list[torch.Tensor]]


@torch.no_grad()
def exchange(
    tensors: Sequence[torch.Tensor],
    old: Sequence[Division],
    new: Sequence[Division],
    group: dist.ProcessGroup | None,
    *,
    device: torch.device,
    wire_device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Return this rank's parts of several parameters in the new divisions. Collective.

    tensors: one 1-D contiguous tensor per parameter, possibly empty. A parameter's dtype is the
        same on every rank. old, new: its divisions over the ranks of ``group``.
    group: None is this rank alone. There is one all-to-all, even if nothing moves, and none in a
        group of one.
    device: the results' device. wire_device: the device on which the group communicates, if that is
        another one.

    Two parameters of 4 elements on 2 ranks, flat -> whole: each rank sends 2 elements of each, in
    one call, and returns two new tensors of 4 elements. Result elements that no piece of ``new``
    names are zero.

    Raises LayoutError, on all ranks alike and before anything is sent, if divisions are not over
    the ranks of the group or the old ones lack elements of the new ones.
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    divisions = list(zip(old, new, strict=True))
    for index, pair in enumerate(divisions):
        if {len(division) for division in pair} != {size}:
            raise LayoutError(
                f"parameter {index}: divided over {len(pair[0])} ranks and then over "
                f"{len(pair[1])}, in a group of {size}. Divide it over all ranks of the group; "
                "those that hold or need nothing have no pieces."
            )
    plans = _plan(divisions, rank)
    results = [
        torch.zeros(local_numel(after[rank]), dtype=tensor.dtype, device=device)
        for tensor, (_, after) in zip(tensors, divisions, strict=True)
    ]
    for tensor, (before, _) in zip(tensors, divisions, strict=True):
        assert tensor.dim() == 1
        assert tensor.numel() >= local_numel(before[rank])
    copies = _copies(tensors, results, plans, rank, size)
    if copies.kept:
        sources, targets = zip(*copies.kept, strict=True)
        torch._foreach_copy_(targets, sources)
    if size > 1:
        _communicate(copies, group, device, wire_device or device)
    return results


def _plan(divisions: Sequence[tuple[Division, Division]], rank: int) -> list[tuple[Transfer, ...]]:
    """Return each parameter's transfers; tensors with the same divisions share one plan."""
    plans: dict[tuple[int, int], tuple[Transfer, ...]] = {}
    for before, after in divisions:
        # Identities are safe as keys, since `divisions` keeps all of them alive.
        if (id(before), id(after)) not in plans:
            plans[id(before), id(after)] = regrid(before, after, rank=rank)
    return [plans[id(before), id(after)] for before, after in divisions]


def _copies(
    tensors: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    plans: Sequence[Sequence[Transfer]],
    rank: int,
    size: int,
) -> _Copies:
    copies = _Copies([], [[] for _ in range(size)], [[] for _ in range(size)])
    for tensor, result, plan in zip(tensors, results, plans, strict=True):
        itemsize = tensor.itemsize
        # `detach`: a parameter that requires grad has no view of another dtype.
        source, target = tensor.detach().view(torch.uint8), result.view(torch.uint8)
        for sender, receiver, sender_start, receiver_start, numel in plan:
            nbytes = numel * itemsize
            if sender == rank:
                here = source.narrow(0, sender_start * itemsize, nbytes)
            if receiver == rank:
                there = target.narrow(0, receiver_start * itemsize, nbytes)
            if sender == receiver:
                copies.kept.append((here, there))
            elif sender == rank:
                copies.sent[receiver].append(here)
            else:
                copies.received[sender].append(there)
    return copies


def _communicate(
    copies: _Copies,
    group: dist.ProcessGroup | None,
    device: torch.device,
    wire_device: torch.device,
) -> None:
    """Send and receive everything in one all-to-all.

    Ranks agree on the order of runs, because it is the order of their plans, which are equal.
    """
    sent_nbytes, received_nbytes = (
        [sum(run.numel() for run in runs) for runs in by_rank]
        for by_rank in (copies.sent, copies.received)
    )
    outgoing = torch.empty(sum(sent_nbytes), dtype=torch.uint8, device=wire_device)
    incoming = torch.empty(sum(received_nbytes), dtype=torch.uint8, device=wire_device)
    sent = [run for runs in copies.sent for run in runs]
    if sent:
        torch._foreach_copy_(outgoing.split([run.numel() for run in sent]), sent)
    run_collective(
        dist.all_to_all_single,
        incoming,
        outgoing,
        received_nbytes,
        sent_nbytes,
        group=group,
        label="exchanging parts of a state dict",
    )
    del outgoing  # before `incoming` may be copied to another device, which takes as much again
    received = [run for runs in copies.received for run in runs]
    if received:
        # Moved in one piece: runs may be many, and copies between devices are slow to start.
        pieces = incoming.to(device).split([run.numel() for run in received])
        torch._foreach_copy_(received, pieces)
