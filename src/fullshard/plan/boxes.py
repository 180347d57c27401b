"""Boxes: the parts of a tensor that ranks hold and that files contain.

A **box** is a block of a tensor's elements, by its offset and its shape in every dim. This rank's rows
are one box; so is a tensor-parallel part. A run of a flattened tensor is a few: elements 5 to 13 of
a tensor of shape (4, 4) are

    offset (1, 1), shape (1, 3)      the rest of row 1
    offset (2, 0), shape (1, 4)      row 2
    offset (3, 0), shape (1, 2)      the beginning of row 3

Each box of a run is contiguous where the run is, and the boxes follow one another.

A **division** of a tensor says, rank by rank, which boxes of it a rank holds or wants. `moves` leads from
any division to any other.
"""

import itertools
import math
import operator
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from fullshard.errors import LayoutError
from fullshard.plan.layout import Shape, rows_per_rank

_PRIME = 2**61 - 1

Division = Sequence[Sequence["Box"]]


class Box(NamedTuple):
    """A block of a tensor's elements, by its offset and its shape in every dim."""

    offset: Shape
    shape: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def moved(self, by: Sequence[int]) -> "Box":
        """Return the box in a tensor of which this one's tensor is the part at ``by``."""
        return Box(tuple(o + b for o, b in zip(self.offset, by, strict=True)), self.shape)

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the index of this box in a tensor that holds ``outer``, of which it is a part."""
        return tuple(
            slice(own - base, own - base + size)
            for own, base, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


class Cut(NamedTuple):
    """One cut of a dim into ``parts`` chunks as ``torch.chunk`` makes them; ``part`` is kept."""

    dim: int
    part: int
    parts: int


def whole_box(shape: Shape) -> Box:
    """Return the box of all elements."""
    return Box((0,) * len(shape), tuple(shape))


def box_after(shape: Shape, cuts: Iterable[Cut]) -> Box:
    """Return what is left of a tensor after cuts, each of what the one before has left.

    (10, 4), cut into 2 along dim 0 of which part 1 is kept, and that into 2, part 0: rows 5 to 7.
    """
    offset, size = [0] * len(shape), list(shape)
    for dim, part, parts in cuts:
        chunk = rows_per_rank(size[dim], parts)
        start, stop = (min(n * chunk, size[dim]) for n in (part, part + 1))
        offset[dim] += start
        size[dim] = stop - start
    return Box(tuple(offset), tuple(size))


def chunks(shape: Shape, dim: int, parts: int) -> list[Box]:
    """Return the boxes into which ``torch.chunk`` cuts a tensor along a dim; the last may be empty."""
    return [box_after(shape, [Cut(dim, part, parts)]) for part in range(parts)]


def boxes_of_run(shape: Shape, start: int, numel: int) -> tuple[Box, ...]:
    """Return the boxes of consecutive elements of a flattened tensor, in their order."""
    if numel == 0:
        return ()
    if not shape:
        return (Box((), ()),)
    row = math.prod(shape[1:])
    stop = start + numel
    # The first row touched, and the first that is not full to its end.
    first, last = start // row, stop // row
    boxes: list[Box] = []

    def of_row(index: int, begin: int, count: int) -> Iterator[Box]:
        for inner in boxes_of_run(shape[1:], begin, count):
            yield Box((index, *inner.offset), (1, *inner.shape))

    if start % row:
        end = min(stop, (first + 1) * row)
        boxes.extend(of_row(first, start % row, end - start))
        first += 1
    if first < last:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    if first <= last and stop % row:
        boxes.extend(of_row(last, 0, stop % row))
    return tuple(boxes)


def in_rows(box: Box, itemsize: int, most_nbytes: int) -> Iterator[Box]:
    """Cut a box into parts of whole rows of its first dim, of at most so many bytes; a row at least."""
    if not box.shape or box.numel == 0:
        yield box
        return
    row = math.prod(box.shape[1:]) * itemsize
    step = max(1, most_nbytes // row)
    for begin in range(0, box.shape[0], step):
        offset = (box.offset[0] + begin, *box.offset[1:])
        yield Box(offset, (min(step, box.shape[0] - begin), *box.shape[1:]))


def common(one: Box, other: Box) -> Box | None:
    """Return the elements that are in both boxes, or None if there are none."""
    offset, shape = [], []
    for start, size, start2, size2 in zip(*one, *other, strict=True):
        begin, end = max(start, start2), min(start + size, start2 + size2)
        if begin >= end:
            return None
        offset.append(begin)
        shape.append(end - begin)
    return Box(tuple(offset), tuple(shape))


def without(box: Box, others: Iterable[Box]) -> list[Box]:
    """Return what is left of a box without the elements of others, as boxes.

    Rows 0 to 3 without rows 1 to 2: row 0 and row 3.
    """
    left = [box] if box.numel else []
    for other in others:
        left = [part for each in left for part in _without_one(each, other)]
    return left


def _without_one(box: Box, other: Box) -> Iterator[Box]:
    shared = common(box, other)
    if shared is None:
        yield box
        return
    offset, shape = list(box.offset), list(box.shape)
    for dim in range(len(shape)):  # what lies before and behind the shared part, dim by dim
        begin, stop = offset[dim], offset[dim] + shape[dim]
        first, last = shared.offset[dim], shared.offset[dim] + shared.shape[dim]
        for low, high in ((begin, first), (last, stop)):
            if low < high:
                offset[dim], shape[dim] = low, high - low
                yield Box(tuple(offset), tuple(shape))
        offset[dim], shape[dim] = first, last - first


def share(box: Box, part: int, parts: int) -> Box | None:
    """Return the part of a box that one of ``parts`` ranks takes that all hold it; None for nothing.

    Parts are contiguous in the memory of the box: rows of the first dim that has more than one.
    """
    dim = next((d for d, size in enumerate(box.shape) if size > 1), None)
    if dim is None:
        return box if part == 0 and box.numel else None
    own = box_after(box.shape, [Cut(dim, part, parts)]).moved(box.offset)
    return own if own.numel else None


class Move(NamedTuple):
    """Elements that ``sender`` gives ``receiver``, or keeps if they are the same rank.

    box: these elements, in the whole tensor. held, wanted: the numbers of the boxes in which they are,
    among those that the sender holds and those that the receiver wants.
    """

    sender: int
    receiver: int
    held: int
    wanted: int
    box: Box


def moves(held: Division, wanted: Division, *, rank: int) -> Iterator[Move]:
    """Yield the moves in which a rank takes part, after which every rank has what it wants.

        w (3, 2) by rows on 2 ranks, wanted by columns: of rank 1
            Move(0, 1, 0, 0, Box((0, 1), (2, 1)))     rows 0 and 1 of column 1
            Move(1, 0, 0, 0, Box((2, 0), (1, 1)))     row 2 of column 0
            Move(1, 1, 0, 0, Box((2, 1), (1, 1)))     row 2 of column 1 stays

    held: boxes that are equal, and then the first rank that has one sends it, or do not overlap. A rank
    that holds a box keeps what it wants of it.

    Every rank computes its own without a message, and two ranks yield what passes between them in the same
    order. Costs grow with the number of boxes of all ranks. Raises LayoutError, on a rank that wants
    elements which no rank holds.
    """
    first: dict[Box, tuple[int, int]] = {}
    for holder, boxes in enumerate(held):
        for number, box in enumerate(boxes):
            first.setdefault(box, (holder, number))
    sent = {box: place for box, place in first.items() if place[0] == rank}
    kept = {box: (rank, number) for number, box in enumerate(held[rank])}
    for receiver, boxes in enumerate(wanted):
        sources = {**first, **kept} if receiver == rank else sent
        for number, whole in enumerate(boxes):
            lacking = whole.numel
            for box, (sender, own) in sources.items():
                part = common(box, whole)
                if part is not None and (receiver == rank or box not in held[receiver]):
                    lacking -= part.numel
                    yield Move(sender, receiver, own, number, part)
            if receiver == rank and lacking:
                raise LayoutError(f"no rank holds {lacking} of the elements of {whole}.")


def tiling_fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Say where boxes do not cover a tensor exactly once; None if they do.

    Cost grows with the number of boxes and of dims, whatever the boxes are. Each edge of a dim gets a random
    number; a box counts as the product, over dims, of that of its end minus that of its beginning. Boxes
    that cover every element once count together as the whole tensor does; of others the sum is another,
    but for one chance in 2**50 (Schwartz-Zippel: it is a polynomial of the random numbers).
    """
    if math.prod(shape) == 0:
        return (
            None
            if all(box.numel == 0 for box in boxes)
            else "there are elements in an empty tensor"
        )
    left = [box for box in boxes if box.numel]
    for box in left:
        ends = [*map(operator.add, *box)]
        if (
            len(ends) != len(shape)
            or min(box.offset, default=0) < 0
            or any(map(operator.gt, ends, shape))
        ):
            return f"{box} is not inside of it"
    numbers: dict[tuple[int, int], int] = {}

    def number(dim: int, edge: int) -> int:
        key = dim, edge
        return numbers.get(key) or numbers.setdefault(key, 1 + secrets.randbelow(_PRIME - 1))

    def count(box: Box, dim: int) -> int:
        """Return what a box counts as in the dims from one on."""
        product = 1
        for d in range(dim, len(shape)):
            begin = box.offset[d]
            product = product * (number(d, begin + box.shape[d]) - number(d, begin)) % _PRIME
        return product

    index: list[int] = []  # of an element that is not in one box, as far as it is known
    for dim, size in enumerate(shape):
        changes = {0: 0, size: 0}  # of the sum of the boxes at an index of this dim, by its edges
        for box in left:
            begin, own = box.offset[dim], count(box, dim + 1)
            for edge, change in ((begin, own), (begin + box.shape[dim], -own)):
                changes[edge] = changes.get(edge, 0) + change
        edges = sorted(changes)
        whole = count(whole_box(shape), dim + 1)
        sums = itertools.accumulate(changes[edge] for edge in edges)
        parts = zip(edges[:-1], sums, strict=False)
        fault = next((edge for edge, found in parts if (found - whole) % _PRIME), None)
        if fault is None:
            return None
        index.append(fault)
        left = [b for b in left if b.offset[dim] <= fault < b.offset[dim] + b.shape[dim]]
    return None if len(left) == 1 else f"element {index} is in {len(left) or 'no'} pieces"
