"""Move tensors between ranks, from one division into boxes to another.

Every rank plans by itself what moves (`plan.boxes.moves`), without a message. Only elements that change
ranks are sent, as bytes, so that any mix of dtypes fits into one collective. At its peak, memory holds
what is held, what is wanted, one send buffer and one receive buffer.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.outside_steps import run_collective
from fullshard.peers.groups import place_in
from fullshard.plan.boxes import Division, Move, moves


class Moving(NamedTuple):
    """A tensor that the ranks of a group hold in one division and want in another.

    held, wanted: by rank of the group. held_here, wanted_here: this rank's memory of its boxes, each a
    tensor of the box's shape; those that are wanted are written.
    """

    held: Division
    wanted: Division
    held_here: Sequence[torch.Tensor]
    wanted_here: Sequence[torch.Tensor]


@torch.no_grad()
def move(
    tensors: Sequence[Moving], group: dist.ProcessGroup | None, *, device: torch.device
) -> None:
    """Give every rank the boxes that it wants of several tensors. Collective.

    group: None is this rank alone. There is one all-to-all, even if nothing moves, and none in a group
        of one. device: on which the group communicates.

    Two parameters of 4 elements on 2 ranks, halves -> whole: each rank sends 2 elements of each, in one
    call. A tensor's dtype is the same on every rank.
    """
    rank, size = place_in(group)
    kept: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    sent: list[list[torch.Tensor]] = [[] for _ in range(size)]
    received: list[list[torch.Tensor]] = [[] for _ in range(size)]
    # Tensors of one division share a plan. Identities are safe as keys: `tensors` keeps divisions alive.
    plans: dict[tuple[int, int], list[Move]] = {}
    for held, wanted, held_here, wanted_here in tensors:
        key = id(held), id(wanted)
        if key not in plans:
            plans[key] = list(moves(held, wanted, rank=rank))
        for sender, receiver, own, target, box in plans[key]:
            if sender == rank:
                here = _bytes(held_here[own][box.within(held[rank][own])])
            if receiver == rank:
                there = _bytes(wanted_here[target][box.within(wanted[rank][target])])
            if sender == receiver:
                kept[0].append(there)
                kept[1].append(here)
            elif sender == rank:
                sent[receiver].append(here)
            else:
                received[sender].append(there)
    _copy(*kept)
    if size == 1:
        return
    # Ranks agree on the order within a message, because it is the order of their plans.
    sent_nbytes, received_nbytes = (
        [sum(view.numel() for view in views) for views in by_rank] for by_rank in (sent, received)
    )
    outgoing = torch.empty(sum(sent_nbytes), dtype=torch.uint8, device=device)
    incoming = torch.empty(sum(received_nbytes), dtype=torch.uint8, device=device)
    leaving, arriving = [*itertools.chain(*sent)], [*itertools.chain(*received)]
    _copy(_slots(outgoing, leaving), leaving)
    run_collective(
        dist.all_to_all_single,
        incoming,
        outgoing,
        received_nbytes,
        sent_nbytes,
        group=group,
        label="exchanging parts of a state dict",
    )
    _copy(arriving, _slots(incoming, arriving))


def _bytes(view: torch.Tensor) -> torch.Tensor:
    """Return a view of any strides as bytes, in one more dim."""
    # `detach`: a parameter that requires grad has no view of another dtype.
    return view.detach().unsqueeze(-1).view(torch.uint8)


def _slots(message: torch.Tensor, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the places of views in a message, in their shapes."""
    places = message.split([view.numel() for view in views])
    return [place.view(view.shape) for place, view in zip(places, views, strict=True)]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
