"""Writing this rank's pieces to files, several at once, with their checksums.

A file is a safetensors file: 8 bytes with the header's length, the header as JSON, then the data. It is
written block by block, each hashed when it is handed to the system, so memory beyond the model's is a
block for each thread (for tensors on a device: one box).
"""

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from fullshard.checkpoint.drafts import shard_name
from fullshard.checkpoint.folder import Folder
from fullshard.checkpoint.manifest import BLOCK_NBYTES, FileEntry, FilePiece, blocks_of, dtype_name
from fullshard.plan.boxes import Box
from fullshard.process_hooks import start_thread
from fullshard.state.host_memory import checksum, host_bytes

T = TypeVar("T")

FILES_AT_ONCE = 4
_SMALLEST_FILE = 16 << 20
_CHUNK = 8 * BLOCK_NBYTES  # bytes handed to the system at once
PART_OF = "a fullshard checkpoint"
_METADATA = {"format": "pt", "of": PART_OF}


class ToWrite(NamedTuple):
    """A box of a tensor to be written: its name and shape, and this rank's memory of the box."""

    name: str
    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.view.numel() * self.view.itemsize


class WrittenFiles(NamedTuple):
    """What one rank has written. pieces: with the tensor's name each; ``file`` is a number among these files."""

    files: Sequence[FileEntry]
    pieces: Sequence[tuple[str, FilePiece]]


def write_files(
    folder: Folder,
    rank: int,
    tag: str,
    items: Sequence[ToWrite],
    data_of: Callable[[ToWrite], memoryview] | None = None,
) -> WrittenFiles:
    """Write boxes to files of a folder and wait until they are stored for good.

    tag: at the end of files' names, so that those of two saves never meet. data_of: returns the bytes of
    a box; those in the memory of its view if None. Raises OSError as the system does, for a full disk or
    a folder that cannot be written.
    """
    parts = divided(items)
    names = [shard_name(rank, number, tag) for number in range(len(parts))]
    done = _at_once(
        [
            functools.partial(_write_file, folder, name, number, part, data_of or _own_bytes)
            for number, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
    )
    return WrittenFiles([file for file, _ in done], [each for _, pieces in done for each in pieces])


def _own_bytes(item: ToWrite) -> memoryview:
    return host_bytes(item.view)


def _at_once(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run each job in a thread of its own; return their results, or raise the first error.

    No `ThreadPoolExecutor`: it refuses work once the interpreter begins to end, and a save in the
    background has to come to its own end then.
    """
    results: list[Any] = [None] * len(jobs)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = jobs[number]()
        except BaseException as error:  # raised below, in the thread that waits
            errors.append(error)

    threads = [
        start_thread(run, number, name="fullshard-write", why="writes files", is_daemon=False)
        for number in range(len(jobs))
    ]
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def divided(items: Sequence[ToWrite]) -> list[list[ToWrite]]:
    """Divide boxes among files of about the same size, at most as many as are written in parallel."""
    total = sum(item.nbytes for item in items)
    count = max(1, min(FILES_AT_ONCE, total // _SMALLEST_FILE))
    parts: list[list[ToWrite]] = [[] for _ in range(count)]
    sizes = [0] * count
    for item in sorted(items, key=lambda item: -item.nbytes):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(item)
        sizes[smallest] += item.nbytes
    # Wide dtypes first, which keeps every tensor aligned; then by name, to be found.
    return [sorted(p, key=lambda item: (-item.view.itemsize, item.name)) for p in parts if p]


class Described(NamedTuple):
    """What a file's header says of a tensor: its name in the file, its dtype and its shape."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def header_of(tensors: Sequence[Described], metadata: Mapping[str, str]) -> tuple[bytes, list[int]]:
    """Return a file's beginning up to the data, and where the data of each tensor begins."""
    entries: dict[str, object] = {"__metadata__": metadata}
    position, starts = 0, []
    for tensor in tensors:
        starts.append(position)
        entries[tensor.name] = {
            "dtype": dtype_name(tensor.dtype, tensor.name),
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # data begins at a multiple of 64 bytes
    header = struct.pack("<Q", len(text)) + text
    return header, [len(header) + start for start in starts]


def _key(item: ToWrite) -> str:
    """Return a box's key in its file: the tensor's name, and where it begins if it is not all of it."""
    if item.box.shape == item.shape:
        return item.name
    return f"{item.name}@{','.join(map(str, item.box.offset))}"


def _write_file(
    folder: Folder,
    name: str,
    number: int,
    items: Sequence[ToWrite],
    data_of: Callable[[ToWrite], memoryview],
) -> tuple[FileEntry, list[tuple[str, FilePiece]]]:
    described = [Described(_key(item), item.view.dtype, item.box.shape) for item in items]
    header, starts = header_of(described, _METADATA)
    file = folder.create(name)
    try:
        file.write(header)
        pieces = []
        for item, start in zip(items, starts, strict=True):
            data = data_of(item)
            sums: list[str] = []
            for begin, stop in blocks_of(len(data), _CHUNK):
                chunk = data[begin:stop]
                file.write(chunk)
                sums += [checksum(chunk[a:b]) for a, b in blocks_of(len(chunk), BLOCK_NBYTES)]
            pieces.append((item.name, FilePiece(item.box, number, start, tuple(sums))))
    except BaseException:
        file.discard()
        raise
    file.finish()
    nbytes = len(header) + sum(item.nbytes for item in items)
    return FileEntry(name, nbytes, len(header), checksum(header)), pieces
