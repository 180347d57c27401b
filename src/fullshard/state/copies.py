"""Choose one rank to hand on each box that several ranks hold: every element is one rank's to send or write.

Of plain modules, and of a model that is sharded several times in a job without replicating, that is the first
rank. Nothing keeps their values equal, though mostly all have the same. Where they have not, two stages of a
pipeline may have parameters of one name, and all but the first would be lost without a word: so it is said.
"""

import hashlib
import itertools
import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fullshard.comm.outside_steps import gather_objects
from fullshard.peers.groups import place_in_job
from fullshard.plan.boxes import Box, share, without
from fullshard.plan.units import first_names
from fullshard.state.holdings import ELSEWHERE, Holding
from fullshard.state.host_memory import crc, host_bytes
from fullshard.state.unit_parts import HeldBox

_LABEL = "agreeing on who hands on what"

Differing = Mapping[str, tuple[int, int]]  # by name, two ranks, the first of which is taken

# By name, what tells boxes apart, and what tells their values apart.
_Values = Mapping[str, tuple[str, str]]

_Boxes = tuple[Box, ...]

# Boxes smaller than this are not divided among the ranks that all hold them.
_WORTH_SHARING_NBYTES = 1 << 20


def digest_of_unnumbered(holdings: Sequence[Holding]) -> bytes:
    """Return what ranks have alike that hold the same boxes of what is not numbered yet."""
    return hashlib.sha256(repr(sorted(_unnumbered(holdings).items())).encode()).digest()


def _unnumbered(holdings: Sequence[Holding]) -> dict[str, Any]:
    return {
        h.name: (h.shape, tuple(held.box for held in h.boxes)) for h in holdings if not h.copies
    }


def numbered(
    holdings: Sequence[Holding], group: dist.ProcessGroup | None, digests: Sequence[bytes]
) -> list[Holding]:
    """Give every holding its number among the ranks that hold the same boxes. Collective.

    digests: of all ranks' unnumbered holdings. Nothing is sent if they are equal, as with plain modules.

    What is numbered here, the engine does not keep equal, so it is the first rank's that holds it: were
    ranks to differ, a mixture would be a model that no rank had. Where boxes overlap that are not the
    same, later ranks lose what earlier ones hold: pieces of one parameter that flat units of different
    lengths have cut at other elements.
    """
    unknown = _unnumbered(holdings)
    if place_in_job(group).size == 1:
        return [h if h.copies else h._replace(copies=1) for h in holdings]
    # By name, the different boxes that ranks hold, and the ranks that hold them.
    holders: dict[str, dict[_Boxes, list[int]]] = {}
    if len(set(digests)) > 1:
        everyones = gather_objects(unknown, group, _LABEL)
        for number, own in enumerate(everyones):
            for name, (_, boxes) in own.items():
                holders.setdefault(name, {}).setdefault(boxes, []).append(number)

    def with_number(holding: Holding) -> Holding:
        if holding.copies:
            return holding
        found = holders.get(holding.name, {})  # empty if every rank has the same
        first = found[unknown[holding.name][1]][0] if found else 0
        if first != dist.get_rank(group):
            return holding._replace(copy=ELSEWHERE, copies=1)
        boxes = _left(holding, found) if found else holding.boxes
        return holding._replace(boxes=boxes, copies=1)

    return [with_number(holding) for holding in holdings]


def numbered_and_compared(
    holdings: Sequence[Holding], group: dist.ProcessGroup | None, *, taken: str
) -> list[Holding]:
    """Number holdings as `numbered` does, and warn of values that nothing keeps equal and that differ.

    taken: what is done with the values of the first of two ranks, such as "saved". Collective.
    """
    if place_in_job(group).size == 1:
        return numbered(holdings, group, [])
    own = digest_of_unnumbered(holdings), digest_of_values(holdings)
    told = gather_objects(own, group, _LABEL)
    if len(set(told)) > 1:
        ranks = dist.get_process_group_ranks(group)
        found = differing_tensors(holdings, lambda own: gather_objects(own, group, _LABEL))
        names = {name: (ranks[one], ranks[other]) for name, (one, other) in found.items()}
        if names:
            warnings.warn(said_of_differing(names, taken=taken), stacklevel=4)
    return numbered(holdings, group, [boxes for boxes, _ in told])


def _left(holding: Holding, found: Mapping[_Boxes, Sequence[int]]) -> tuple[HeldBox, ...]:
    """Return the boxes of a holding without what earlier ones hold.

    found: all ranks' boxes, those of the first ranks first.
    """
    if sum(box.numel for boxes in found for box in boxes) == math.prod(holding.shape):
        return holding.boxes  # nothing overlaps
    own = tuple(held.box for held in holding.boxes)
    earlier = list(itertools.chain(*itertools.takewhile(lambda boxes: boxes != own, found)))
    return tuple(
        HeldBox(part, held.view[part.within(held.box)])
        for held in holding.boxes
        for part in without(held.box, earlier)
    )


def own_share(holding: Holding) -> Holding:
    """Return what of a holding this rank hands on: every element is one rank's.

    What is not numbered yet stays as it is. All ranks that hold copies have to know it by the same name.
    """
    if holding.copy == ELSEWHERE:
        return holding._replace(boxes=())
    if holding.copies <= 1:
        return holding
    of_small = zlib.crc32(holding.name.encode()) % holding.copies
    own: list[HeldBox] = []
    for held in holding.boxes:
        if held.view.numel() * held.view.itemsize < _WORTH_SHARING_NBYTES:
            own += [held][: holding.copy == of_small]
            continue
        part = share(held.box, holding.copy, holding.copies)
        if part is not None:
            own.append(HeldBox(part, held.view[part.within(held.box)]))
    return holding._replace(boxes=tuple(own), copy=0, copies=1)


# Values that nothing keeps equal


def digest_of_values(holdings: Sequence[Holding], checksum: Callable[[Any], str] = crc) -> str:
    """Return what ranks have alike that have the same values where nothing keeps them equal."""
    return checksum(repr(_values(holdings, checksum)).encode())


def differing_tensors(
    holdings: Sequence[Holding],
    gathered: Callable[[_Values], Sequence[_Values]],
    checksum: Callable[[Any], str] = crc,
) -> Differing:
    """Return where ranks have different values of the same boxes. Collective.

    gathered: returns every rank's argument, in rank order.
    """
    first: dict[object, tuple[int, str]] = {}
    names: dict[str, tuple[int, int]] = {}
    for rank, values in enumerate(gathered(_values(holdings, checksum))):
        for name, (boxes, value) in values.items():
            number, known = first.setdefault((name, boxes), (rank, value))
            if known != value:
                names.setdefault(name, (number, rank))
    return names


def said_of_differing(names: Differing, *, taken: str) -> str:
    """Return what to say where ranks have different values; "" for none.

    taken: what is done with the values of the first of two ranks, such as "saved".
    """
    if not names:
        return ""
    number, other = next(iter(names.values()))
    return (
        f"{first_names([*names], 3)}: rank {other} has other values than rank {number}, whose are {taken}; nothing keeps "
        "them equal. Stages of a pipeline need different names of parameters. Copies of one model are kept "
        "equal by replicate, DistributedDataParallel, or a mesh with an axis that replicates."
    )


def _values(holdings: Sequence[Holding], checksum: Callable[[Any], str]) -> _Values:
    """Return the boxes and a checksum of the values of what nothing keeps equal.

    Buffers are left out: running means differ, as they do in training. So is the extra state, of which
    each rank has its own.
    """
    return {
        each.name: (
            repr([held.box for held in each.boxes]),
            "".join([checksum(host_bytes(held.view)) for held in each.boxes]),
        )
        for each in holdings
        if not each.copies and not each.is_buffer and not each.name.startswith("extra/")
    }
