"""Reading boxes of tensors from a checkpoint's files, each block checked before it is used.

A box that is wanted is taken from the pieces that it shares elements with. Of a piece, only the blocks
are read in which those lie. Where they lie in order in the wanted memory too, they are read straight
into it; otherwise through a buffer of a block.
"""

import concurrent.futures
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from fullshard.checkpoint.checksums import checksum
from fullshard.checkpoint.folder import open_data, read_small
from fullshard.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    Piece,
    TensorEntry,
    blocks_of,
    loads,
)
from fullshard.checkpoint.writing import bytes_of
from fullshard.errors import CheckpointError
from fullshard.plan.boxes import Box, common

_READS_AT_ONCE = 4


class Wanted(NamedTuple):
    """A box of a tensor that is wanted, and the memory for it: a view of the box's shape."""

    name: str
    box: Box
    view: torch.Tensor


class _Shared(NamedTuple):
    """The elements that a wanted box and a piece have in common."""

    tensor: TensorEntry
    wanted: Wanted
    piece: Piece
    box: Box


class Reader:
    """The files of one checkpoint, opened when they are first read. Use it in a `with` statement.

    Raises CheckpointError if there is no manifest, or it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        content = read_small(folder, MANIFEST)
        self.manifest = loads(content, str(folder / MANIFEST))
        self.digest = checksum(content)  # of the manifest's file
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "Reader":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open.clear()

    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None = None
    ) -> None:
        """Read boxes into their memory. progress: is called with numbers of bytes that were read.

        Raises CheckpointError for a file that is missing, cut short or changed, with the name of the
        tensor and of the file.
        """
        with concurrent.futures.ThreadPoolExecutor(_READS_AT_ONCE, "fullshard-read") as pool:
            jobs = [pool.submit(self._read_all, tasks) for tasks in self._divided(wanted)]
            try:
                for job in concurrent.futures.as_completed(jobs):
                    nbytes = job.result()
                    if progress is not None:
                        progress(nbytes)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _divided(self, wanted: Sequence[Wanted]) -> Iterator[list[_Shared]]:
        """Yield what is to be read in parts of a few MB, as small tensors may be many."""
        tasks: list[_Shared] = []
        nbytes = 0
        for each in wanted:
            tensor = self.manifest.tensors[each.name]
            for piece in tensor.pieces:
                shared = common(each.box, piece.box)
                if shared is not None:
                    tasks.append(_Shared(tensor, each, piece, shared))
                    nbytes += shared.numel * tensor.dtype.itemsize
                if nbytes >= 4 * self.manifest.block_nbytes:
                    yield tasks
                    tasks, nbytes = [], 0
        if tasks:
            yield tasks

    def _read_all(self, tasks: Sequence[_Shared]) -> int:
        return sum(self._read_shared(*task) for task in tasks)

    def verify(self) -> Iterator[tuple[str, CheckpointError | None]]:
        """Read everything and yield, for each file's header and each piece, its name and its fault."""
        for number, file in enumerate(self.manifest.files):
            fault = None
            try:
                self._descriptor(number)
            except CheckpointError as error:
                fault = error
            yield file.name, fault
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                fault = None
                try:
                    self._check_piece(name, tensor, piece)
                except CheckpointError as error:
                    fault = error
                yield name, fault

    def _check_piece(self, name: str, tensor: TensorEntry, piece: Piece) -> None:
        nbytes = self.manifest.piece_nbytes(tensor, piece)
        block = self.manifest.block_nbytes
        for number, (begin, stop) in enumerate(blocks_of(nbytes, block)):
            self._read_block(name, piece, number, begin, memoryview(bytearray(stop - begin)))

    def _read_shared(self, tensor: TensorEntry, wanted: Wanted, piece: Piece, shared: Box) -> int:
        """Read the elements that are in a piece and in a wanted box; return the bytes read."""
        target = wanted.view[shared.within(wanted.box)]
        itemsize = tensor.dtype.itemsize
        # Elements of the piece, in row-major order, among which all shared ones lie.
        first, stop = _span(shared, piece.box)
        direct = (
            stop - first == shared.numel
            and target.is_contiguous()
            and target.device.type == "cpu"
            and target.dtype == tensor.dtype
        )
        if direct:
            out = bytes_of(target)
            return self._read_span(wanted.name, tensor, piece, first * itemsize, out)
        rows = _rows(shared, piece.box, itemsize, self.manifest.block_nbytes)
        total = 0
        for part in rows:  # rows of the outermost dim that fit into a buffer
            first, stop = _span(part, piece.box)
            buffer = torch.empty((stop - first) * itemsize, dtype=torch.uint8)
            out = bytes_of(buffer)
            total += self._read_span(wanted.name, tensor, piece, first * itemsize, out)
            source = _strided(buffer.view(tensor.dtype), part, piece.box)
            wanted.view[part.within(wanted.box)].copy_(source)
        return total

    def _read_span(
        self, name: str, tensor: TensorEntry, piece: Piece, first: int, out: memoryview
    ) -> int:
        """Read bytes of a piece from ``first`` on; check the blocks that they lie in."""
        total = self.manifest.piece_nbytes(tensor, piece)
        block = self.manifest.block_nbytes
        stop, nbytes_read = first + len(out), 0
        for number in range(first // block, -(-stop // block)):
            begin, end = number * block, min((number + 1) * block, total)
            nbytes_read += end - begin
            if first <= begin and end <= stop:
                self._read_block(name, piece, number, begin, out[begin - first : end - first])
                continue
            scratch = memoryview(bytearray(end - begin))
            self._read_block(name, piece, number, begin, scratch)
            low, high = max(first, begin), min(stop, end)
            out[low - first : high - first] = scratch[low - begin : high - begin]
        return nbytes_read

    def _read_block(
        self, name: str, piece: Piece, number: int, begin: int, out: memoryview
    ) -> None:
        descriptor = self._descriptor(piece.file)
        position, rest = piece.start + begin, out
        while rest:
            count = os.preadv(descriptor, [rest], position)
            if count == 0:
                raise self._damaged(piece.file, f"ends within {name}")
            position, rest = position + count, rest[count:]
        if checksum(out) != piece.checksums[number]:
            raise self._damaged(piece.file, f"{name} at byte {piece.start + begin} has changed")

    def _descriptor(self, number: int) -> int:
        """Open a file, and check its size and header once."""
        with self._lock:
            if number not in self._open:
                file = self.manifest.files[number]
                descriptor = open_data(self.folder, file.name)
                try:
                    self._check_file(descriptor, number, file)
                except BaseException:
                    os.close(descriptor)
                    raise
                self._open[number] = descriptor
            return self._open[number]

    def _check_file(self, descriptor: int, number: int, file: FileEntry) -> None:
        nbytes = os.fstat(descriptor).st_size
        if nbytes != file.nbytes:
            raise self._damaged(number, f"has {nbytes} bytes instead of {file.nbytes}")
        if checksum(os.pread(descriptor, file.header_nbytes, 0)) != file.header_checksum:
            raise self._damaged(number, "its header has changed")

    def _damaged(self, file: int, what: str) -> CheckpointError:
        path = self.folder / self.manifest.files[file].name
        return CheckpointError(
            f"{path}: is damaged: {what}. Restore the file, or load another checkpoint."
        )


def _strides(shape: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


def _span(part: Box, piece: Box) -> tuple[int, int]:
    """Return the first element of a part in its piece, in row-major order, and the one after its last."""
    strides = _strides(piece.shape)
    low = [o - b for o, b in zip(part.offset, piece.offset, strict=True)]
    first = sum(start * stride for start, stride in zip(low, strides, strict=True))
    last = first + sum((n - 1) * stride for n, stride in zip(part.shape, strides, strict=True))
    return first, last + 1


def _strided(elements: torch.Tensor, part: Box, piece: Box) -> torch.Tensor:
    """Return a part of a piece from the elements of its `_span`."""
    return elements.as_strided(part.shape, _strides(piece.shape))


def _rows(part: Box, piece: Box, itemsize: int, nbytes: int) -> Iterator[Box]:
    """Cut a part along its first dim, so that each span in the piece is a few blocks at most."""
    if not part.shape:
        yield part
        return
    row = _strides(piece.shape)[0] * itemsize
    step = max(1, 8 * nbytes // max(row, 1))
    for begin in range(0, part.shape[0], step):
        size = min(step, part.shape[0] - begin)
        yield Box((part.offset[0] + begin, *part.offset[1:]), (size, *part.shape[1:]))
