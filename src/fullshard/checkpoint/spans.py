"""Copying boxes of tensors out of a file: which of its elements to read, and where they go.

A **piece** is a box of a tensor that lies in a file in row-major order. A box that is wanted shares a
box with it, whose elements lie in a span of the piece, with others between them:

    piece (4, 6), shared columns 2 to 4      . . x x . .     span: elements 2 to 22,
                                             . . x x . .     gaps of 4 elements between rows
                                             . . x x . .
                                             . . x x . .

Nothing here knows what a file is: how bytes of a piece are read is the caller's.
"""

import concurrent.futures
import itertools
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from fullshard.plan.boxes import Box
from fullshard.state.host_memory import bytes_of

T = TypeVar("T")

READS_AT_ONCE = 4


class Wanted(NamedTuple):
    """A box of a tensor that is wanted, and the memory for it: a view of the box's shape."""

    name: str
    box: Box
    view: torch.Tensor


class Limits(NamedTuple):
    """What reading may cost, in bytes.

    buffer_nbytes: of a buffer, unless one row of the innermost dim is larger.
    gap_nbytes: what lies between two rows is read along with them if it is less.
    """

    buffer_nbytes: int
    gap_nbytes: int


class Scratch(threading.local):
    """Memory of a thread that it uses again and again, and that goes back to the system with the thread.

    Not from the heap, where what threads free stays mapped: a load by columns kept 64 MB a thread.
    """

    def __init__(self) -> None:
        self._memory: dict[str, torch.Tensor] = {}

    def of(self, nbytes: int, use: str) -> torch.Tensor:
        """Return so many bytes. The next call with the same use returns the same memory."""
        known = self._memory.get(use)
        if known is None or known.numel() < nbytes:
            self._memory.pop(use, None)
            known = torch.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=torch.uint8)
            self._memory[use] = known
        return known[:nbytes]


scratch = Scratch()


def read_shared(
    wanted: Wanted,
    piece: Box,
    shared: Box,
    dtype: torch.dtype,
    read: Callable[[int, memoryview], int],
    limits: Limits,
) -> int:
    """Read the elements that a wanted box shares with a piece into their memory.

    dtype: of the piece's elements, which are converted if those of the memory are of another.
    read: fills memory with the piece's bytes from an offset on, and returns how many were read for it.
    Returns the sum of these.
    """
    target = wanted.view[shared.within(wanted.box)]
    first, stop = span(shared, piece)
    direct = (
        stop - first == shared.numel
        and target.is_contiguous()
        and target.device.type == "cpu"
        and target.dtype == dtype
    )
    if direct:
        return read(first * dtype.itemsize, bytes_of(target))
    total = 0
    for part in parts_to_read(shared, piece, dtype.itemsize, limits):
        first, stop = span(part, piece)
        buffer = scratch.of((stop - first) * dtype.itemsize, "span")
        total += read(first * dtype.itemsize, bytes_of(buffer))
        source = buffer.view(dtype).as_strided(part.shape, _strides(piece.shape))
        wanted.view[part.within(wanted.box)].copy_(source)
    return total


def read_at_once(
    tasks: Iterator[Sequence[T]],
    run: Callable[[T], int],
    progress: Callable[[int], object] | None,
    *,
    num_threads: int = READS_AT_ONCE,
) -> int:
    """Run tasks, which return bytes, several at once; return the sum.

    tasks: in parts of a few MB, as small ones may be many. progress: is called with the bytes of each.
    """
    total = 0
    with concurrent.futures.ThreadPoolExecutor(num_threads, "fullshard-read") as pool:
        jobs = [pool.submit(lambda part: sum(map(run, part)), part) for part in tasks]
        try:
            for job in concurrent.futures.as_completed(jobs):
                nbytes = job.result()
                total += nbytes
                if progress is not None:
                    progress(nbytes)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return total


def span(part: Box, piece: Box) -> tuple[int, int]:
    """Return the first element of a part in its piece, in row-major order, and the one after its last."""
    strides = _strides(piece.shape)
    low = [o - b for o, b in zip(part.offset, piece.offset, strict=True)]
    first = sum(start * stride for start, stride in zip(low, strides, strict=True))
    last = first + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))
    return first, last + 1


def parts_to_read(part: Box, piece: Box, itemsize: int, limits: Limits) -> Iterator[Box]:
    """Cut a part of a piece into parts of which each is read at once.

    A part is some rows of the first dim whose rows are not too large, and close enough to each other.
    """
    if not part.shape:
        yield part
        return
    strides = _strides(piece.shape)
    dim = 0
    while dim < len(strides) - 1:
        row = strides[dim] * itemsize
        wanted = 1 + sum(
            (n - 1) * s for n, s in zip(part.shape[dim + 1 :], strides[dim + 1 :], strict=True)
        )
        if row <= limits.buffer_nbytes and row - wanted * itemsize < limits.gap_nbytes:
            break
        dim += 1
    step = max(1, limits.buffer_nbytes // max(strides[dim] * itemsize, 1))
    for outer in itertools.product(*map(range, part.shape[:dim])):
        for begin in range(0, part.shape[dim], step):
            start = (*outer, begin, *(0 for _ in part.shape[dim + 1 :]))
            size = (*(1 for _ in outer), min(step, part.shape[dim] - begin), *part.shape[dim + 1 :])
            yield Box(start, size).moved(part.offset)


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]
