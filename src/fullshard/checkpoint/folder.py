"""A checkpoint's directory: its files are written to the disk for good, and read without trust.

    runs/books/step-00000350/                        complete: it has its name since all was on the disk
    runs/books/step-00000350.partial-1f3a/           being written, or left by a crash; never read

Where there is a checkpoint under the name already and it may be replaced, the new files join it under
names of their own, and then the new manifest takes the place of the old one, in one step.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fullshard.checkpoint.manifest import MANIFEST
from fullshard.errors import CheckpointError

_PARTIAL = ".partial-"
_REMOVED = ".removed-"
_WRITER = "writer.json"  # in a partial folder; locked by the process that is to complete it
_WITHOUT_LOCK_S = 10.0
_LEFT_AFTER_S = 24 * 3600  # a partial folder of another host: nobody writes to it any more
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_data(folder: Path, name: str) -> int:
    """Open a file of a checkpoint for reading; return its descriptor.

    Raises CheckpointError if it is not there, or is no regular file: a link may lead anywhere.
    """
    path = folder / name
    try:
        descriptor = os.open(path, _READ_FLAGS | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: is missing. Restore it, or load another checkpoint."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file, as every file of a checkpoint is.")
    return descriptor


def read_small(folder: Path, name: str) -> bytes:
    """Return the content of a file of a checkpoint. Raises as `open_data` does."""
    with os.fdopen(open_data(folder, name), "rb") as file:
        return file.read()


def has_manifest(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


class PartialFolder:
    """The folder that one save writes to, until it gets its name. Used by rank 0.

    Creating it fails where another job is writing the same checkpoint, or one is there already.
    """

    def __init__(self, target: Path, tag: str, *, overwrite: bool) -> None:
        self.target, self._tag, self._overwrite = target, tag, overwrite
        self.path = target.with_name(f"{target.name}{_PARTIAL}{tag}")
        self._check_target()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._refuse_other_writer()
        self.path.mkdir()
        self._lock = os.open(self.path / _WRITER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        os.write(self._lock, json.dumps(who).encode())

    def complete(self, manifest: bytes, names: list[str]) -> None:
        """Give the folder its name, once all files (``names``) are on the disk."""
        self._check_target()
        write_durably(self.path / MANIFEST, manifest)
        (self.path / _WRITER).unlink()
        sync_folder(self.path)
        if has_manifest(self.target):
            self._replace(names)
        else:
            if self.target.is_dir():
                self.target.rmdir()  # empty: `_check_target` saw to it
            self.path.rename(self.target)
        sync_folder(self.target.parent)
        os.close(self._lock)

    def give_up(self) -> None:
        """Remove what has been written."""
        with contextlib.suppress(OSError):
            os.close(self._lock)
        shutil.rmtree(self.path, ignore_errors=True)

    def _replace(self, names: list[str]) -> None:
        for name in names:  # they bear this save's tag, so none is there yet
            (self.path / name).rename(self.target / name)
        sync_folder(self.target)
        (self.path / MANIFEST).rename(self.target / MANIFEST)
        sync_folder(self.target)
        for left in self.target.iterdir():
            if left.name not in {MANIFEST, *names} and left.suffix == ".safetensors":
                left.unlink()
        self.path.rmdir()

    def _check_target(self) -> None:
        if has_manifest(self.target):
            if not self._overwrite:
                raise CheckpointError(
                    f"{self.target}: already holds a checkpoint. Save under another name, or pass "
                    "overwrite=True to replace it."
                )
        elif self.target.is_symlink() or (self.target.exists() and not self.target.is_dir()):
            raise CheckpointError(f"{self.target}: is a file or a link. Name another path.")
        elif self.target.is_dir() and any(self.target.iterdir()):
            raise CheckpointError(
                f"{self.target}: is a folder with other files and without a checkpoint. Name another "
                "path, or empty it."
            )

    def _refuse_other_writer(self) -> None:
        for other in partial_folders(self.target.parent, self.target.name):
            if is_being_written(other):
                raise CheckpointError(
                    f"{self.target}: another job is writing it ({_named(_writer_of(other))}). Give each "
                    "job a path of its own."
                )
            shutil.rmtree(other, ignore_errors=True)


def partial_folders(parent: Path, name: str = "*") -> Iterator[Path]:
    """Yield the unfinished folders of saves under a name, or under any."""
    yield from sorted(parent.glob(f"{name}{_PARTIAL}*"))


def is_being_written(partial: Path) -> bool:
    """Whether a process is still writing an unfinished folder.

    On this host its lock tells. Locks may not be seen from other hosts, so their folders count as being
    written until they have not changed for a day. Without a lock a folder is about to get one, or its
    name, which takes no time.
    """
    who = _writer_of(partial)
    try:
        if who.get("host") != socket.gethostname():
            newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
            return time.time() - newest < (_LEFT_AFTER_S if who else _WITHOUT_LOCK_S)
        with (partial / _WRITER).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False


def remove(folder: Path) -> None:
    """Remove a checkpoint: first its name, in one step, then its files."""
    nameless = folder.with_name(f"{folder.name}{_REMOVED}{os.getpid()}")
    folder.rename(nameless)
    sync_folder(folder.parent)
    shutil.rmtree(nameless, ignore_errors=True)


def remove_left_over(parent: Path) -> None:
    """Remove the unfinished folders of saves that died, and what removals have left."""
    for partial in partial_folders(parent):
        if not is_being_written(partial):
            shutil.rmtree(partial, ignore_errors=True)
    for nameless in parent.glob(f"*{_REMOVED}*"):
        shutil.rmtree(nameless, ignore_errors=True)


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file, and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Write a small file that may be there already: at any time it has the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    write_durably(temporary, content)
    temporary.rename(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _writer_of(partial: Path) -> dict[str, Any]:
    try:
        who = json.loads((partial / _WRITER).read_bytes())
    except (OSError, ValueError):
        return {}
    return who if isinstance(who, dict) else {}


def _named(who: dict[str, Any]) -> str:
    return f"process {who.get('pid', 'unknown')} on {who.get('host', 'an unknown host')}"
