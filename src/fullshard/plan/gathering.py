"""Plan the buckets in which whole tensors are put together from the boxes that ranks hold.

Every element of a tensor is in one box of one rank. A bucket is one message of each rank with parts of
these boxes, one after the other:

    w (4, 2) and b (2,) of 4 bytes each, by rows on 2 ranks, in buckets of 64 bytes
        rank 0    w rows 0-1 [0, 16)    b row 0 [16, 20)
        rank 1    w rows 2-3 [0, 16)    b row 1 [16, 20)

Tensors follow one another in their order. One that is larger than a bucket has buckets of its own,
each with an equal part of every rank's boxes, so that all ranks send alike.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullshard.plan.boxes import Box, boxes_of_run
from fullshard.plan.layout import Shape, round_up

# Where a part may begin in a message: at a multiple of the largest element, a complex128.
_ALIGNED_NBYTES = 16


@dataclasses.dataclass(frozen=True, slots=True)
class DividedTensor:
    """A tensor: its shape, the bytes of an element, and by rank the boxes that the rank sends."""

    shape: Shape
    itemsize: int
    boxes: Sequence[Sequence[Box]]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize


class MessagePart(NamedTuple):
    """A part of a box in a message.

    tensor: its index. rank: who sends it. number: of the box among that rank's boxes of the tensor.
    box: the part, in the whole tensor. start: its first byte in the message.
    """

    tensor: int
    rank: int
    number: int
    box: Box
    start: int


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """One message of each rank.

    parts: in the order of tensors. nbytes: of each rank's message. complete: the tensors of which
    nothing comes later.
    """

    parts: tuple[MessagePart, ...]
    nbytes: tuple[int, ...]
    complete: tuple[int, ...]


def plan_buckets(
    tensors: Sequence[DividedTensor], *, num_ranks: int, bucket_nbytes: int
) -> Iterator[Bucket]:
    """Yield the buckets that put these tensors together, of at most about ``bucket_nbytes`` each.

    About, since parts are aligned, and as each box has at least one element in a bucket.
    """
    bucket = _Filled(num_ranks)
    for index, tensor in enumerate(tensors):
        if tensor.nbytes > bucket_nbytes:
            if bucket.tensors:
                yield bucket.done()
            num_parts = -(-tensor.nbytes // bucket_nbytes)
            for part in range(num_parts):
                bucket = _Filled(num_ranks)
                bucket.add(index, tensor, part, num_parts)
                if part < num_parts - 1:
                    yield bucket.done(incomplete=True)
            yield bucket.done()
            bucket = _Filled(num_ranks)
            continue
        if bucket.tensor_nbytes + tensor.nbytes > bucket_nbytes:
            yield bucket.done()
            bucket = _Filled(num_ranks)
        bucket.add(index, tensor, 0, 1)
    if bucket.tensors:
        yield bucket.done()


class _Filled:
    """A bucket that is being filled."""

    def __init__(self, num_ranks: int) -> None:
        self.tensors: list[int] = []
        self.tensor_nbytes = 0
        self._parts: list[MessagePart] = []
        self._nbytes = [0] * num_ranks

    def add(self, index: int, tensor: DividedTensor, part: int, num_parts: int) -> None:
        """Add one of ``num_parts`` equal parts of every box of a tensor."""
        self.tensors.append(index)
        self.tensor_nbytes += tensor.nbytes
        for rank, boxes in enumerate(tensor.boxes):
            for number, box in enumerate(boxes):
                start, stop = (box.numel * n // num_parts for n in (part, part + 1))
                for inner in boxes_of_run(box.shape, start, stop - start):
                    own = inner.moved(box.offset)
                    self._parts.append(MessagePart(index, rank, number, own, self._nbytes[rank]))
                    nbytes = own.numel * tensor.itemsize
                    self._nbytes[rank] += round_up(nbytes, _ALIGNED_NBYTES)

    def done(self, *, incomplete: bool = False) -> Bucket:
        """Return the bucket. incomplete: more of its tensors comes later."""
        complete = () if incomplete else tuple(self.tensors)
        return Bucket(tuple(self._parts), tuple(self._nbytes), complete)
