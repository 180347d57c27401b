"""Bytes of units on a disk of this host, read and written beside the program.

    files = UnitFiles(Path("/scratch"), rank=0)
    block = files.create("blocks.3", 64 << 20)              zeros, on space that is reserved
    buffer = files.new_buffer(64 << 20, pin_memory=True)    one buffer serves every file that is no larger
    files.read(block, buffer).wait()
    ticket = files.write(block, buffer)                     `buffer` must stay as it is until
    ticket.wait()                                           this returns, or raises what failed
    files.view(block)                                       memory-mapped, for state dicts

The files have no names: the system frees them when this process ends, however it ends. So there is nothing to
clear after a crash, no run can read what another one left, and all ranks may use one folder. They are never
the only copy of what a checkpoint has.

Whatever is asked of one file happens in the order in which it was asked; requests for different files overlap.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from fullshard.errors import AllocationError, ShardingError, StateError
from fullshard.host import filesystem
from fullshard.process_hooks import AFTER_FORK

# Positions, lengths and addresses of direct I/O. Disks ask for at most 4096; pages may be larger.
ALIGNMENT = max(mmap.PAGESIZE, 4096)
# Of one request. On an ext4 disk of 2.5 GB/s, requests of 1 MiB by one thread had 0.86 of its rate, those of
# 8 MiB by two threads all of it; 16 and 64 MiB, or four threads, no more.
_CHUNK = 8 << 20

_Chunks = Sequence[Future[None]]
_LIMITS = {
    errno.ENOSPC: "",
    errno.EDQUOT: "",
    errno.EFBIG: " (a limit of the filesystem, or of this process: ulimit -f)",
    errno.EMFILE: " (a limit of this process, which needs a file for each unit: ulimit -n)",
    errno.ENFILE: "",
}
_NO_DISK = {
    **dict.fromkeys(("ramfs", "tmpfs"), "in this host's memory, which they are to leave free"),
    **dict.fromkeys(
        ("9p", "beegfs", "ceph", "cifs", "fuse.sshfs", "gpfs", "lustre", "nfs", "nfs4", "smb3"),
        "on other machines, and every step waits for the network",
    ),
}


def padded(nbytes: int) -> int:
    """Return the bytes that so many take in a file and in a buffer, at least one block."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


class UnitFile:
    """A file that `UnitFiles.create` made. It is there until nobody refers to it, or its `UnitFiles` are closed.

    name: of the unit, for messages. nbytes: as asked for; on the disk it has `padded` ones.
    """

    def __init__(self, files: "UnitFiles", name: str, nbytes: int, descriptor: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self._files = files
        self._descriptor = descriptor
        # Work in flight refers to the file, so its descriptor cannot become another file's meanwhile.
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # threads may still use it, and the system closes it
        self._last: _Chunks = ()  # of the last request
        self._last_write: _Chunks = ()

    def __str__(self) -> str:
        return f"{self._files}: the file of {self.name}"


class Ticket:
    """A read or a write that was begun."""

    def __init__(self, file: UnitFile, chunks: _Chunks) -> None:
        self._file = file
        self._chunks = chunks

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return all(chunk.done() for chunk in self._chunks)

    def wait(self) -> None:
        """Return once it is done and the buffer may be used. May be called again.

        Raises StateError, with the file's name, where the system refused a part of it, and where the files
        were closed before; then what the file or the buffer holds is undefined.
        """
        files = self._file._files
        if files._process != os.getpid():  # the threads are the parent's
            raise files._error_of_closed()
        try:
            errors = [chunk.exception() for chunk in self._chunks]  # once all have ended
        except CancelledError:
            raise files._error_of_closed() from None
        for error in errors:
            if error is not None:
                raise error


class UnitFiles:
    """Files of raw bytes of one rank, in one folder. The first request starts the threads.

    rank: for messages. num_workers: requests to the disk at the same time. how: whether they pass the page cache
    by. filesystem: the folder's, such as ext4; empty if the system does not tell.

    Raises ShardingError for a folder that is not there or where no file can be written. Warns on rank 0 where the
    files would be in memory or on other machines.
    """

    how: Literal["direct", "buffered"]

    def __init__(self, folder: Path, *, rank: int, num_workers: int = 2) -> None:
        self.folder = folder.resolve()
        self.filesystem = filesystem(self.folder)
        self.is_closed = False
        self._rank = rank
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._files = weakref.WeakSet[UnitFile]()
        self.how = self._find_how()
        if rank == 0 and self.filesystem in _NO_DISK:
            warnings.warn(
                f"{folder}: is a folder of {self.filesystem}: files of optimizer state are "
                f"{_NO_DISK[self.filesystem]}. Name a folder on a disk of this host.",
                UserWarning,
                stacklevel=2,
            )
        self._pool = ThreadPoolExecutor(num_workers, "fullshard-unit-files")
        _all.add(self)
        # A worker that loads data, say, would keep the disk's space after its parent has freed it.
        AFTER_FORK.add(_leave_to_parent, "files of optimizer state are the parent's")

    def __str__(self) -> str:
        return f"{self.folder} (rank {self._rank})"

    def create(self, name: str, nbytes: int) -> UnitFile:
        """Reserve the space of a file. It reads as zeros before its first write.

        Raises AllocationError, with both numbers, if the filesystem has less left.
        """
        self._refuse_if_closed()
        what = f"{self}: the file of {name} takes {padded(nbytes):,} bytes"
        remedy = "Free space, name a folder on another disk, or keep more on the host."
        try:
            facts = os.statvfs(self.folder)
            free = facts.f_bavail * facts.f_frsize
            if padded(nbytes) > free and facts.f_blocks:  # some filesystems tell no sizes
                raise AllocationError(f"{what}, and its filesystem has {free:,} free. {remedy}")
            file = UnitFile(self, name, nbytes, self._open(padded(nbytes), self.how))
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                remedy = "Allow more open files, or join units."
            elif not self.folder.is_dir():
                remedy = "Its folder was removed: create it."
            if error.errno in _LIMITS:
                hint = _LIMITS[error.errno]
                raise AllocationError(f"{what}: {error.strerror}{hint}. {remedy}") from error
            raise StateError(f"{what}, and cannot be made: {error.strerror}. {remedy}") from error
        self._files.add(file)
        return file

    def read(self, file: UnitFile, buffer: torch.Tensor) -> Ticket:
        """Begin to fill the first `padded(file.nbytes)` bytes of a buffer of `new_buffer`.

        If the last write of the file failed, `Ticket.wait` raises StateError instead of giving what it left.
        """
        return self._begin(file, buffer, is_write=False)

    def write(
        self, file: UnitFile, buffer: torch.Tensor, *, ready: Callable[[], None] | None = None
    ) -> Ticket:
        """Begin to write the first `padded(file.nbytes)` bytes of a buffer of `new_buffer`, which must not change meanwhile.

        ready: called by the threads first; returns once the bytes are there.
        """
        return self._begin(file, buffer, is_write=True, ready=ready)

    def settle(self, file: UnitFile) -> None:
        """Wait for writes that were begun. Raises StateError if the last one failed."""
        Ticket(file, file._last_write).wait()

    def follow_view(self, file: UnitFile) -> None:
        """Bring to the disk what was written to a file's `view`, before the next read."""
        os.fsync(file._descriptor)

    def view(self, file: UnitFile) -> torch.Tensor:
        """Return a file's bytes, uint8 (nbytes,), without reading them: each page comes as it is used.

        Waits for writes that were begun. Shows later ones too, and outlives `close`. What is written to the tensor
        is in the file after `follow_view`. Raises StateError if the last write of the file failed.
        """
        self._refuse_if_closed()
        self.settle(file)
        if not file.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # Not by Python's `mmap`, which would keep a descriptor for as long. The number is this process's.
        path = f"/proc/self/fd/{file._descriptor}"
        return torch.from_file(path, shared=True, size=file.nbytes, dtype=torch.uint8, device="cpu")

    @staticmethod
    def new_buffer(nbytes: int, *, pin_memory: bool) -> torch.Tensor:
        """Return host memory for `read` and `write`, uint8 (padded(nbytes),), that begins at a block.

        Unpinned, it is shared memory: a fork while the disk writes to private memory would give its pages to the
        child, and the parent copies of older content. Source: open(2), notes on O_DIRECT.
        """
        if not pin_memory:
            return torch.frombuffer(mmap.mmap(-1, padded(nbytes)), dtype=torch.uint8)
        # Torch rounds sizes of pinned memory up to powers of two, so a block more could double it.
        for more in (0, ALIGNMENT):
            whole = torch.empty(
                padded(nbytes) + more, dtype=torch.uint8, device="cpu", pin_memory=True
            )
            start = -whole.data_ptr() % ALIGNMENT
            if start <= more:
                break
        return whole[start : start + padded(nbytes)]

    def close(self) -> None:
        """Remove the files, once the requests have ended that the disk is at; later ones are dropped."""
        with self._lock:
            self.is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._close_files()

    def _begin(
        self,
        file: UnitFile,
        buffer: torch.Tensor,
        *,
        is_write: bool,
        ready: Callable[[], None] | None = None,
    ) -> Ticket:
        assert file._files is self
        nbytes = padded(file.nbytes)
        assert (buffer.dtype, buffer.ndim) == (torch.uint8, 1)
        assert buffer.is_contiguous()
        assert buffer.data_ptr() % ALIGNMENT == 0
        assert buffer.numel() >= nbytes, f"{file}: {buffer.numel()} bytes of buffer for {nbytes}"
        memory = buffer.numpy().data[:nbytes]
        with self._lock:  # in the order of the queue nobody waits for what comes later
            self._refuse_if_closed()
            after, written = file._last, () if is_write else file._last_write
            chunks = [
                self._pool.submit(
                    _move,
                    file,
                    memory[at : at + _CHUNK],
                    at,
                    after,
                    written,
                    ready,
                    is_write=is_write,
                )
                for at in range(0, nbytes, _CHUNK)
            ]
            file._last = chunks
            if is_write:
                file._last_write = chunks
        return Ticket(file, chunks)

    def _find_how(self) -> Literal["direct", "buffered"]:
        """Write a block and read it back. Some filesystems refuse direct I/O at the file's opening, some only here."""
        if not self.folder.is_dir():
            raise ShardingError(
                f"{self}: is no folder. Create it, or name another for optimizer state."
            )
        block = self.new_buffer(ALIGNMENT, pin_memory=False)
        with contextlib.suppress(OSError):
            self._try(block, "direct")
            return "direct"
        try:
            self._try(block, "buffered")
        except OSError as error:
            raise ShardingError(
                f"{self}: optimizer state cannot be written here: {error.strerror}. Name a folder on a disk of this "
                "host in which this user may create files."
            ) from error
        return "buffered"

    def _try(self, block: torch.Tensor, how: str) -> None:
        descriptor = self._open(ALIGNMENT, how)
        try:
            for is_write in (True, False):
                _transfer(descriptor, block.numpy().data, 0, is_write=is_write, how=how)
        finally:
            os.close(descriptor)

    def _open(self, nbytes: int, how: str) -> int:
        """Return the descriptor of a new file without a name. Raises OSError."""
        with tempfile.TemporaryFile(buffering=0, prefix="fullshard-", dir=self.folder) as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            if how == "direct":
                # Not at its opening: where a filesystem cannot reserve, the C library writes single bytes.
                flags = fcntl.fcntl(file, fcntl.F_GETFL)
                fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            return os.dup(file.fileno())

    def _refuse_if_closed(self) -> None:
        if self.is_closed:
            raise self._error_of_closed()

    def _error_of_closed(self) -> StateError:
        return StateError(
            f"{self}: the files of optimizer state are closed, or the parent's of this forked process. Step, and read "
            "the state, before they are closed and in the process that made them."
        )

    def _close_files(self) -> None:
        for file in list(self._files):
            file._close()


def _move(
    file: UnitFile,
    memory: memoryview,
    begin: int,
    after: _Chunks,
    written: _Chunks,
    ready: Callable[[], None] | None,
    *,
    is_write: bool,
) -> None:
    """Move one chunk, in a worker, after the file's last request. written: what a read relies on."""
    for chunk in after:
        chunk.exception()
    if ready is not None:
        ready()
    for chunk in written:
        if (error := chunk.exception()) is not None:
            raise StateError(f"{file} was not written as a whole, so it is not read.") from error
    try:
        _transfer(file._descriptor, memory, begin, is_write=is_write, how=file._files.how)
    except OSError as error:
        verb = "written" if is_write else "read"
        raise StateError(
            f"{file} cannot be {verb} at byte {begin:,}: {error.strerror}. See what the system's log says of the disk, "
            "and go on from the last checkpoint with a folder on another one."
        ) from error


def _transfer(descriptor: int, memory: memoryview, begin: int, *, is_write: bool, how: str) -> None:
    """Write or fill memory from a position on. Raises OSError."""
    # Through the page cache the disk's errors would otherwise come later, or to nobody.
    flags = os.RWF_DSYNC if is_write and how == "buffered" else 0
    done = 0
    while done < len(memory):
        call = os.pwritev if is_write else os.preadv
        count = call(descriptor, [memory[done:]], begin + done, flags)
        if count < ALIGNMENT:
            raise OSError(errno.EIO, f"{count} bytes moved, and no more")
        done += count - count % ALIGNMENT


_all = weakref.WeakSet[UnitFiles]()


def _leave_to_parent() -> None:
    for files in list(_all):
        files._lock = threading.Lock()  # another thread may have had it
        files.is_closed = True
        files._close_files()
