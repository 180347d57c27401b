"""Reading boxes of tensors from files.

A **piece** is a box of a tensor that lies in a file in row-major order. A box that is wanted shares a
box with it, whose elements lie in a span of the piece, with others between them:

    piece (4, 6), shared columns 2 to 4      . . x x . .     span: elements 2 to 22,
                                             . . x x . .     gaps of 4 elements between rows
                                             . . x x . .
                                             . . x x . .

    read_shared     copies what a wanted box shares with a piece; how bytes are read is the caller's
    SavedState      what a load sees of files, whatever their form: tensors by name, and values
    Reader          a checkpoint of our own format; others are in foreign.py

`Reader` reads of a piece the blocks alone in which wanted elements lie, and compares each with its checksum before
it is used. Where elements lie in order in the wanted memory too, they are read straight into it.
"""

import abc
import concurrent.futures
import contextlib
import dataclasses
import itertools
import mmap
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fullshard.checkpoint.folder import DataFile, Folder
from fullshard.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    FilePiece,
    SavedTensor,
    TensorEntry,
    blocks_of,
    loads,
)
from fullshard.checkpoint.values import check_encoded
from fullshard.errors import CheckpointError, DamagedCheckpointError, FullshardError
from fullshard.plan.boxes import Box, common
from fullshard.state.host_memory import bytes_of, checksum

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


# What a load sees of files

_Self = TypeVar("_Self", bound="SavedState")

# What Python raises where a value is of another form than the one that reads it takes for granted.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError)


@contextlib.contextmanager
def naming_malformed(what: str, advice: str = "") -> Iterator[None]:
    """Refuse with CheckpointError what is of another form than is known. what: where it was read, and what it is."""
    try:
        yield
    except _MALFORMED as error:
        if isinstance(error, FullshardError):
            raise
        raise CheckpointError(f"{what} of no known form ({error!r:.200}).{advice}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """The names that a load looks for.

    models: by section, the names of its tensors. optimizers: by section, the names that each of its
    parameters stands for, in their order. extra: keys.
    """

    models: Mapping[str, Collection[str]]
    optimizers: Mapping[str, Sequence[tuple[str, ...]]]
    extra: Collection[str]


class SavedState(abc.ABC):
    """Tensors and values that were saved. Use it in a `with` statement.

    location: of the files. digest: ranks that see the same files have the same.
    tensors: by name with its section: "model/0.weight". values: as a manifest has them.
    """

    location: Path | str
    digest: str
    tensors: Mapping[str, SavedTensor]
    values: Mapping[str, Any]

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None: ...

    @abc.abstractmethod
    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None = None
    ) -> None:
        """Read boxes into their memory. progress: is called with numbers of bytes that were read.

        Raises CheckpointError for a file that is missing, cut short or changed, by name.
        """

    def find(self, names: Names) -> None:
        """Bring tensors and values under the names that are looked for, if they have others."""
        return


# Checkpoints of our own format


class _Shared(NamedTuple):
    """The elements that a wanted box and a piece have in common."""

    tensor: TensorEntry
    wanted: Wanted
    piece: FilePiece
    box: Box


class Reader(SavedState):
    """The files of one checkpoint, opened when they are first read. Use it in a `with` statement.

    Raises CheckpointError if there is no manifest, or it is damaged.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder, self.location = folder, folder.location
        content = folder.read_small(MANIFEST)
        self.manifest = loads(content, where := f"{folder}/{MANIFEST}")
        self.tensors, self.values = self.manifest.tensors, self.manifest.values
        with naming_malformed(f"{where}: a value is"):
            try:
                check_encoded(self.values, {name: t.dtype for name, t in self.tensors.items()})
            except CheckpointError as error:
                raise CheckpointError(
                    f"{where}: {error}. Load another checkpoint, or restore this one."
                ) from error
        self.digest = checksum(content)  # of the manifest's file
        self._open: dict[int, DataFile] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def read(
        self, wanted: Sequence[Wanted], progress: Callable[[int], object] | None = None
    ) -> None:
        read_at_once(
            self._divided(wanted),
            lambda shared: self._read_shared(*shared),
            progress,
            num_threads=self.folder.reads_at_once,
        )

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

    def verify(self) -> Iterator[tuple[str, int, CheckpointError | None]]:
        """Read everything; yield, for each file's header and each piece, its name, bytes and fault."""
        for number, file in enumerate(self.manifest.files):
            fault = None
            try:
                self._file(number)
            except CheckpointError as error:
                fault = error
            yield file.name, 0, fault
        for name, tensor in self.manifest.tensors.items():
            for piece in tensor.pieces:
                fault = None
                try:
                    self._check_piece(name, tensor, piece)
                except CheckpointError as error:
                    fault = error
                yield name, self.manifest.piece_nbytes(tensor, piece), fault

    def _check_piece(self, name: str, tensor: TensorEntry, piece: FilePiece) -> None:
        nbytes = self.manifest.piece_nbytes(tensor, piece)
        request = max(self.folder.request_nbytes // self.manifest.block_nbytes, 1)
        for begin, stop in blocks_of(nbytes, request * self.manifest.block_nbytes):
            self._read_blocks(name, piece, begin, memoryview(bytearray(stop - begin)))

    def _read_shared(
        self, tensor: TensorEntry, wanted: Wanted, piece: FilePiece, shared: Box
    ) -> int:
        """Read the elements that are in a piece and in a wanted box; return the bytes read."""
        block = self.manifest.block_nbytes
        return read_shared(
            wanted,
            piece.box,
            shared,
            tensor.dtype,
            lambda first, out: self._read_span(wanted.name, tensor, piece, first, out),
            # Of such a gap, a block is skipped.
            Limits(buffer_nbytes=8 * block, gap_nbytes=2 * block),
        )

    def _read_span(
        self, name: str, tensor: TensorEntry, piece: FilePiece, first: int, out: memoryview
    ) -> int:
        """Read bytes of a piece from ``first`` on; check the blocks that they lie in."""
        total = self.manifest.piece_nbytes(tensor, piece)
        block = self.manifest.block_nbytes
        stop, position, nbytes_read = first + len(out), first, 0
        while position < stop:
            begin = position // block * block
            whole = (stop if stop == total else stop // block * block) - begin
            if position == begin and whole > 0:  # blocks that are wanted in full
                count = min(whole, max(self.folder.request_nbytes // block, 1) * block)
                target = out[position - first : position - first + count]
                self._read_blocks(name, piece, begin, target)
            else:
                whole_block = bytes_of(scratch.of(min(block, total - begin), "block"))
                self._read_blocks(name, piece, begin, whole_block)
                count = min(stop, begin + len(whole_block)) - position
                low = position - begin
                out[position - first : position - first + count] = whole_block[low : low + count]
            nbytes_read += count
            position += count
        return nbytes_read

    def _read_blocks(self, name: str, piece: FilePiece, begin: int, out: memoryview) -> None:
        """Read whole blocks of a piece in one request, and compare them with their checksums."""
        block = self.manifest.block_nbytes
        position = piece.start + begin
        if self._file(piece.file).read_into(out, position) < len(out):
            raise self._damaged(piece.file, f"ends within {name}")
        for start, stop in blocks_of(len(out), block):
            if checksum(out[start:stop]) != piece.checksums[(begin + start) // block]:
                raise self._damaged(piece.file, f"{name} at byte {position + start} has changed")

    def _file(self, number: int) -> DataFile:
        """Open a file, and check its size and header once."""
        with self._lock:
            if number not in self._open:
                entry = self.manifest.files[number]
                file = self._opened(entry)
                try:
                    self._check_file(file, number, entry)
                except BaseException:
                    file.close()
                    raise
                self._open[number] = file
            return self._open[number]

    def _opened(self, entry: FileEntry) -> DataFile:
        try:
            return self.folder.open_data(entry.name)
        except DamagedCheckpointError as error:  # it is missing
            with contextlib.suppress(CheckpointError):
                if checksum(self.folder.read_small(MANIFEST)) != self.digest:
                    raise CheckpointError(
                        f"{self.folder}: was replaced by another save while it was read. Load it again."
                    ) from error
            raise

    def _check_file(self, file: DataFile, number: int, entry: FileEntry) -> None:
        if file.nbytes != entry.nbytes:
            raise self._damaged(number, f"has {file.nbytes} bytes instead of {entry.nbytes}")
        header = bytearray(entry.header_nbytes)
        file.read_into(memoryview(header), 0)
        if checksum(header) != entry.header_checksum:
            raise self._damaged(number, "its header has changed")

    def _damaged(self, file: int, what: str) -> CheckpointError:
        return DamagedCheckpointError(
            f"{self.folder}/{self.manifest.files[file].name}: is damaged: {what}. Restore the file, or "
            "load another checkpoint."
        )
