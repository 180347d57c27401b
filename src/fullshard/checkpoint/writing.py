"""Writing this rank's pieces to files, several at once, with their checksums.

A file is a safetensors file: 8 bytes with the header's length, the header as JSON, then the data. It is
written block by block, each hashed when it is handed to the system, so memory beyond the model's is a
block for each thread (for tensors on a device: one box).
"""

import dataclasses
import functools
import json
import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from fullshard.checkpoint.checksums import checksum
from fullshard.checkpoint.manifest import BLOCK_NBYTES, FileEntry, blocks_of, dtype_name
from fullshard.plan.boxes import Box

T = TypeVar("T")

FILES_AT_ONCE = 4
_SMALLEST_FILE = 16 << 20
_CHUNK = 8 * BLOCK_NBYTES  # bytes handed to the system at once


class ToWrite(NamedTuple):
    """A box of a tensor to be written: its name and shape, and this rank's memory of the box."""

    name: str
    shape: tuple[int, ...]
    box: Box
    view: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.view.numel() * self.view.itemsize


class Written(NamedTuple):
    """A box that has been written. file: number in this rank's `WrittenFiles`."""

    name: str
    box: Box
    file: int
    start: int
    checksums: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What one rank has written."""

    files: tuple[FileEntry, ...]
    pieces: tuple[Written, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


def write_files(folder: Path, rank: int, tag: str, items: Sequence[ToWrite]) -> WrittenFiles:
    """Write boxes to files of a folder and wait until the disk has them.

    tag: at the end of files' names, so that those of two saves never meet. Raises OSError as the system
    does: a full disk, a folder that cannot be written.
    """
    parts = divided(items)
    suffix = f".{tag}" if tag else ""
    names = [f"shard-{rank:05d}-{number}{suffix}.safetensors" for number in range(len(parts))]
    if not parts:
        return WrittenFiles((), ())
    done = _at_once(
        [
            functools.partial(_write_file, folder / name, number, part)
            for number, (name, part) in enumerate(zip(names, parts, strict=True))
        ]
    )
    return WrittenFiles(
        tuple(file for file, _ in done), tuple(piece for _, pieces in done for piece in pieces)
    )


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
        threading.Thread(target=run, args=(number,), name="fullshard-write")
        for number in range(len(jobs))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def divided(items: Sequence[ToWrite]) -> list[list[ToWrite]]:
    """Divide boxes among files of about the same size: as many as are written at once, or fewer."""
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


def host_bytes(view: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes in host memory; a view where they lie there in order."""
    return bytes_of(view.detach().cpu().contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU as bytes."""
    flat = tensor.detach().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]


def header_of(items: Sequence[ToWrite]) -> tuple[bytes, list[int]]:
    """Return a file's beginning up to the data, and where the data of each box begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "of": "a fullshard checkpoint"}}
    position, starts = 0, []
    for item in items:
        starts.append(position)
        entries[_key(item)] = {
            "dtype": dtype_name(item.view.dtype, item.name),
            "shape": list(item.box.shape),
            "data_offsets": [position, position + item.nbytes],
        }
        position += item.nbytes
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
    path: Path, number: int, items: Sequence[ToWrite]
) -> tuple[FileEntry, list[Written]]:
    header, starts = header_of(items)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        _write(descriptor, header)
        pieces = []
        for item, start in zip(items, starts, strict=True):
            data = host_bytes(item.view)
            sums: list[str] = []
            for begin, stop in blocks_of(len(data), _CHUNK):
                chunk = data[begin:stop]
                _write(descriptor, chunk)
                sums += [checksum(chunk[a:b]) for a, b in blocks_of(len(chunk), BLOCK_NBYTES)]
            pieces.append(Written(item.name, item.box, number, start, tuple(sums)))
        os.fsync(descriptor)
        nbytes = os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    return FileEntry(path.name, nbytes, len(header), checksum(header)), pieces


def _write(descriptor: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
