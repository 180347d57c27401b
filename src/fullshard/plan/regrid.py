"""Regridding: moving a parameter's elements from one division over ranks to another.

A **division** of a parameter says, rank by rank, which runs of its elements (in row-major order)
lie where in the rank's 1-D local tensor. Several ranks may hold the same elements, and several may
need them. Flat shards, rows, boxes and whole copies are all divisions, so one function, `regrid`,
leads from any of them to any other:

    w (2, 3) on 2 ranks, cut flat after 4 elements -> by rows

        rank 0 holds elements 0-3      needs 0-2 (row 0)
        rank 1 holds elements 4-5      needs 3-5 (row 1)

    Transfer(sender=0, receiver=0, sender_start=0, receiver_start=0, numel=3)
    Transfer(sender=0, receiver=1, sender_start=3, receiver_start=0, numel=1)
    Transfer(sender=1, receiver=1, sender_start=0, receiver_start=1, numel=2)

All numbers are in elements. Costs grow with the number of runs, not with their lengths.
"""

import bisect
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullshard.errors import LayoutError
from fullshard.plan.layout import BucketLayout, ParamLayout, Piece, Shape
from fullshard.plan.sizes import rows_per_rank

Division = Sequence[Sequence[Piece]]


class Transfer(NamedTuple):
    """A run of elements that ``sender`` gives ``receiver``, or keeps if they are the same rank.

    sender_start, receiver_start: where the run begins in each rank's local tensor.
    """

    sender: int
    receiver: int
    sender_start: int
    receiver_start: int
    numel: int


class _Run(NamedTuple):
    """A half-open range of a parameter's elements."""

    start: int
    stop: int


class _Segment(NamedTuple):
    """Elements [start, stop) of a parameter, all held by the same ranks.

    ranks: in ascending order.
    shifts: one per rank; added to an element's number, it gives the place in the local tensor.
    """

    start: int
    stop: int
    ranks: tuple[int, ...]
    shifts: tuple[int, ...]


def box_pieces(shape: Shape, start: Sequence[int], size: Sequence[int]) -> tuple[Piece, ...]:
    """Return the pieces of a rank whose contiguous local tensor is a box of a parameter.

    The box of size (2, 3) at (1, 3) in w (4, 6) consists of elements 9-11 and 15-17.

    Raises LayoutError on a box that is not inside the parameter.
    """
    if not len(shape) == len(start) == len(size) or any(
        not 0 <= first <= first + length <= extent
        for extent, first, length in zip(shape, start, size, strict=True)
    ):
        raise LayoutError(
            f"a box of size {tuple(size)} at {tuple(start)} is not inside a parameter of shape "
            f"{tuple(shape)}. Give the offset and the size of the shard in every dim."
        )
    if math.prod(size) == 0:
        return ()
    # From the last dim on that is not covered in full, elements follow one another in the
    # parameter, so there is one run per index of the dims before it.
    cut = max((dim for dim, length in enumerate(size) if length != shape[dim]), default=0)
    run = math.prod(size[cut:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(map(operator.mul, start, strides))
    offsets = itertools.product(
        *(range(0, size[dim] * strides[dim], strides[dim]) for dim in range(cut))
    )
    return tuple(
        Piece(first + sum(offset), number * run, run) for number, offset in enumerate(offsets)
    )


def row_division(shape: Shape, *, dim: int, num_ranks: int) -> tuple[tuple[Piece, ...], ...]:
    """Divide a parameter along a dimension, as ``torch.chunk`` and DTensor's ``Shard(dim)`` do.

    5 rows on 4 ranks: [0, 2) [2, 4) [4, 5) and none. Raises LayoutError on a dim that the
    parameter does not have.
    """
    if not 0 <= dim < len(shape):
        raise LayoutError(
            f"cannot divide dim {dim} of a parameter of shape {shape}. "
            f"Choose one of its dims: there are {len(shape)}, from 0 on."
        )
    chunk = rows_per_rank(shape[dim], num_ranks)
    division = []
    for rank in range(num_ranks):
        first, end = (min(n * chunk, shape[dim]) for n in (rank, rank + 1))
        start, size = [0] * len(shape), list(shape)
        start[dim], size[dim] = first, end - first
        division.append(box_pieces(shape, start, size))
    return tuple(division)


def whole_division(numel: int, *, num_ranks: int) -> tuple[tuple[Piece, ...], ...]:
    """Return the division in which every rank has all elements."""
    return ((Piece(0, 0, numel),) if numel else (),) * num_ranks


def bucket_division(bucket: BucketLayout, param: ParamLayout) -> tuple[tuple[Piece, ...], ...]:
    """Divide a parameter as its bucket does, into local tensors of this parameter alone.

    `BucketLayout.pieces` counts from the start of the shard buffer; here each rank's first piece
    begins at 0.
    """
    division = []
    for rank in range(bucket.shard_size):
        pieces = bucket.pieces(param, rank)
        division.append(
            tuple(
                piece._replace(shard_start=piece.shard_start - pieces[0].shard_start)
                for piece in pieces
            )
        )
    return tuple(division)


def local_numel(pieces: Sequence[Piece]) -> int:
    """Return how many elements a local tensor needs for these pieces."""
    return max((piece.shard_start + piece.numel for piece in pieces), default=0)


def regrid(old: Division, new: Division, *, rank: int | None = None) -> tuple[Transfer, ...]:
    """List the transfers after which every rank has what ``new`` says it needs.

    rank: list only what this rank sends, receives or keeps. If each of a thousand ranks needs
        everything, these are two thousand transfers out of a million.

    A rank that holds what it needs keeps it. If several ranks hold elements, each of them serves an
    equal part of the ranks that do not, in order of rank. So of two replicas on ranks 0-3 and 4-7,
    each serves its own ranks, and nothing is fetched from far away. Every rank computes the same
    list without communication.

    Transfers are as long as possible, and sorted by sender, receiver and receiver_start. So sender
    and receiver list what passes between them in the same order.

    Raises LayoutError, on all ranks alike, if elements are needed that no rank holds.
    """
    _check_covered(old, new)
    held = _segments(old)
    if rank is None:
        found = [
            transfer for receiver in range(len(new)) for transfer in _received(held, receiver, new)
        ]
    else:
        mine = [segment for segment in held if rank in segment.ranks]
        found = [
            transfer
            for receiver in range(len(new))
            for transfer in _received(held if receiver == rank else mine, receiver, new)
            if rank in (transfer.sender, receiver)
        ]
    return _merged(found)


def _received(held: Sequence[_Segment], receiver: int, new: Division) -> Iterator[Transfer]:
    """Yield what one rank gets or keeps. held: segments in order, of which it may need parts."""
    for first, shard_start, numel in new[receiver]:
        if numel == 0:
            continue
        end = first + numel
        at = bisect.bisect_right(held, first, key=operator.attrgetter("stop"))
        while at < len(held) and held[at].start < end:
            segment = held[at]
            holder = _holder(segment, receiver, len(new))
            start, stop = max(first, segment.start), min(end, segment.stop)
            yield Transfer(
                segment.ranks[holder],
                receiver,
                start + segment.shifts[holder],
                start - first + shard_start,
                stop - start,
            )
            at += 1


def _holder(segment: _Segment, receiver: int, num_receivers: int) -> int:
    """Return the index, among the segment's holders, of the one that gives it to the receiver."""
    ranks = segment.ranks
    holders_before = bisect.bisect_left(ranks, receiver)
    if holders_before < len(ranks) and ranks[holders_before] == receiver:
        return holders_before
    # Ranks that do not hold it, numbered in order, are dealt out to the holders in equal parts.
    num_others = num_receivers - bisect.bisect_left(ranks, num_receivers)
    return (receiver - holders_before) * len(ranks) // num_others


def _merged(transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """Sort transfers, and join those that are adjacent in both ranks' local tensors."""
    merged: list[Transfer] = []
    for transfer in sorted(transfers, key=operator.itemgetter(0, 1, 3)):
        if merged:
            last = merged[-1]
            following = (
                last.sender,
                last.receiver,
                last.sender_start + last.numel,
                last.receiver_start + last.numel,
            )
            if transfer[:4] == following:
                merged[-1] = last._replace(numel=last.numel + transfer.numel)
                continue
        merged.append(transfer)
    return tuple(merged)


def _segments(division: Division) -> list[_Segment]:
    """Cut the elements wherever their holders change. Elements that no rank holds are left out.

    Sweeps over the starts and ends of all pieces, and keeps the ranks that hold what lies between.
    """
    edges = []
    for rank, pieces in enumerate(division):
        for start, shard_start, numel in pieces:
            if numel:
                holder = rank, shard_start - start
                edges.append((start, True, holder))
                edges.append((start + numel, False, holder))
    edges.sort()
    segments = []
    holders: list[tuple[int, int]] = []
    begin = 0
    for position, opens, holder in edges:
        if holders and begin < position:
            # As a dict, since a rank may hold an element twice, and counts once.
            ranks, shifts = zip(*dict(holders).items(), strict=True)
            segments.append(_Segment(begin, position, ranks, shifts))
        begin = position
        if opens:
            bisect.insort(holders, holder)
        else:
            del holders[bisect.bisect_left(holders, holder)]
    return segments


def _check_covered(old: Division, new: Division) -> None:
    """Raise LayoutError if ``new`` needs elements that no rank holds in ``old``."""
    held = _union(old)
    for start, stop in _union(new):
        # The only run of `held` that may cover the first element. Runs do not touch each other, so
        # it has to cover all of them.
        at = bisect.bisect_right(held, start, key=operator.attrgetter("start")) - 1
        covered = max(start, held[at].stop) if at >= 0 else start
        if covered >= stop:
            continue
        end = min(stop, held[at + 1].start) if at + 1 < len(held) else stop
        rank = next(
            rank
            for rank, pieces in enumerate(new)
            if any(p.param_start <= covered < p.param_start + p.numel for p in pieces)
        )
        raise LayoutError(
            f"rank {rank} needs element {covered}, but no rank holds elements [{covered}, {end}). "
            "Pass divisions of the same parameter, the old one with the pieces of all ranks."
        )


def _union(division: Division) -> list[_Run]:
    """Return the elements that any rank has, in order, as runs that are as long as possible."""
    union: list[_Run] = []
    runs = {(p.param_start, p.param_start + p.numel) for pieces in division for p in pieces}
    for start, stop in sorted(runs):
        if union and start <= union[-1].stop:
            union[-1] = _Run(union[-1].start, max(stop, union[-1].stop))
        elif start < stop:
            union.append(_Run(start, stop))
    return union
