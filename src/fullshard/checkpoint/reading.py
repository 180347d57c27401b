"""Reading boxes of tensors from a checkpoint's files, each block checked before it is used.

A box that is wanted is taken from the pieces that it shares elements with. Of a piece, only the blocks
are read in which those lie. Where they lie in order in the wanted memory too, they are read straight
into it; otherwise through a buffer of some blocks.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fullshard.checkpoint.folder import DataFile, Folder
from fullshard.checkpoint.manifest import (
    MANIFEST,
    FileEntry,
    FilePiece,
    TensorEntry,
    blocks_of,
    loads,
)
from fullshard.checkpoint.saved_state import SavedState, naming_malformed
from fullshard.checkpoint.spans import Limits, Wanted, read_at_once, read_shared, scratch
from fullshard.checkpoint.values import check_encoded
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.plan.boxes import Box, common
from fullshard.state.host_memory import bytes_of, checksum


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
        """Read boxes into their memory. progress: is called with numbers of bytes that were read.

        Raises CheckpointError for a file that is missing, cut short or changed, with the name of the
        tensor and of the file.
        """
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
            Limits(
                buffer_nbytes=8 * block, gap_nbytes=2 * block
            ),  # of such a gap, a block is skipped
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
