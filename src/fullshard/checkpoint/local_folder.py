"""A checkpoint's directory on a disk: written for good under another name, and read without trust.

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

from fullshard.checkpoint.folder import (
    SHARD_SUFFIX,
    DataFile,
    Draft,
    Folder,
    Heartbeat,
    NewFile,
    is_silent,
)
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.errors import CheckpointError, DamagedCheckpointError

_PARTIAL = ".partial-"
_REMOVED = ".removed-"
_WRITER = "writer.json"  # in a partial folder; locked and rewritten by who is to complete it
_WRITER_NBYTES = 512
_WITHOUT_LOCK_S = 3.0
_LEFT_AFTER_S = 3600.0  # a partial folder of another host that has not changed for so long is dead
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class LocalFolder(Folder):
    """A directory on a filesystem that all ranks see."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def location(self) -> Path:
        return self.path

    @property
    def name(self) -> str:
        return self.path.name

    def child(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def exists(self) -> bool:
        return self.path.is_dir()

    def size_of(self, name: str) -> int | None:
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def has_lost_manifest(self) -> bool:
        names = self.path.glob(f"shard-*{SHARD_SUFFIX}")
        return not (self.path / MANIFEST).exists() and any(names)

    def sizes(self) -> dict[str, int]:
        with os.scandir(self.path) as entries:
            return {each.name: each.stat().st_size for each in entries if each.is_file()}

    def open_data(self, name: str) -> DataFile:
        return _LocalData(self.path / name)

    def create(self, name: str) -> NewFile:
        return _NewLocalFile(self.path / name)

    def replace_small(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        write_durably(temporary, content)
        temporary.rename(self.path / name)
        sync_folder(self.path)

    def children(self) -> list[Folder]:
        if not self.path.is_dir():
            return []
        found = (p for p in self.path.iterdir() if p.is_dir() and not p.is_symlink())
        return [LocalFolder(path) for path in sorted(found)]

    def draft(self, tag: str, *, overwrite: bool) -> Draft:
        return LocalDraft(self.path, tag, overwrite=overwrite)

    def sees_draft(self, tag: str) -> bool:
        return self.path.is_dir()

    def remove(self) -> None:
        nameless = set_aside(self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(nameless, ignore_errors=True)

    def rename(self, name: str) -> "LocalFolder":
        target = LocalFolder(self.path.with_name(name))
        self.path.rename(target.path)
        sync_folder(self.path.parent)
        return target

    def remove_left_over(self) -> None:
        for partial in _partial_folders(self.path):
            if not _is_being_written(partial, may_wait=False):
                shutil.rmtree(partial, ignore_errors=True)
        for nameless in removed_folders(self.path):
            shutil.rmtree(nameless, ignore_errors=True)


class _LocalData(DataFile):
    """A regular file. A link may lead anywhere, so it is refused."""

    def __init__(self, path: Path) -> None:
        try:
            self._descriptor = os.open(path, _READ_FLAGS)
        except FileNotFoundError as error:
            raise DamagedCheckpointError(
                f"{path}: is missing. Restore it, or load another checkpoint."
            ) from error
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}.") from error
        facts = os.fstat(self._descriptor)
        if not stat.S_ISREG(facts.st_mode):
            self.close()
            raise CheckpointError(f"{path}: is no regular file, as every file of a checkpoint is.")
        self.nbytes = facts.st_size

    def read_into(self, out: memoryview, position: int) -> int:
        done = 0
        while done < len(out):
            count = os.preadv(self._descriptor, [out[done:]], position + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)


class _NewLocalFile(NewFile):
    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path, flags, 0o644)
        self._nbytes = 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        start = self._nbytes
        while view:
            with self._naming():
                count = os.write(self._descriptor, view)
            self._nbytes += count
            view = view[count:]
        # Linux begins to write these pages to the disk now, while the next ones are copied and hashed;
        # else all of them wait for `fsync`. Saves take half the time. Source: mm/fadvise.c.
        with contextlib.suppress(OSError, AttributeError):  # not every system has it
            os.posix_fadvise(self._descriptor, start, self._nbytes - start, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        try:
            with self._naming():
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def discard(self) -> None:
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Say in errors of a descriptor which file it is."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


class LocalDraft(Draft):
    """A partial folder beside the checkpoint's place, until it gets the checkpoint's name."""

    def __init__(self, target: Path, tag: str, *, overwrite: bool) -> None:
        if not target.name:
            raise CheckpointError(f"{target}: name the folder that is to be the checkpoint.")
        self.target, self.overwrite = target, overwrite
        self.path = target.with_name(f"{target.name}{_PARTIAL}{tag}")
        self.folder = LocalFolder(self.path)
        self.check_target()
        target.parent.mkdir(parents=True, exist_ok=True)
        self._refuse_other_writer()
        self.path.mkdir()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._lock: int | None = os.open(self.path / _WRITER, flags)
        with contextlib.suppress(
            OSError
        ):  # some filesystems have no locks; the beats are seen there
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        self._beat(0)
        self._heart = Heartbeat(self._beat)

    def complete(self, manifest: bytes, names: list[str]) -> None:
        self.check_target()
        write_durably(self.path / MANIFEST, manifest)
        self.seal()
        if (self.target / MANIFEST).is_file():
            self._replace(names)
        else:
            if self.target.is_dir():
                self.target.rmdir()  # empty: `check_target` saw to it
            self.path.rename(self.target)
        sync_folder(self.target.parent)
        self.release()

    def seal(self) -> None:
        """Leave nothing in the folder but the files, and all their names on the disk."""
        self._heart.stop()
        (self.path / _WRITER).unlink()
        sync_folder(self.path)

    def give_up(self) -> None:
        self._heart.stop()
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def _beat(self, count: int) -> None:
        text = json.dumps({**self._who, "beat": count})
        if (
            self._lock is not None
        ):  # of one length, so that no reader finds the end of an older text
            os.pwrite(self._lock, text.ljust(_WRITER_NBYTES).encode(), 0)

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None  # the number may be another file's from now on

    def _replace(self, names: list[str]) -> None:
        for name in names:  # they bear this save's tag, so none is there yet
            (self.path / name).rename(self.target / name)
        sync_folder(self.target)
        (self.path / MANIFEST).rename(self.target / MANIFEST)
        sync_folder(self.target)
        with contextlib.suppress(OSError):  # it is complete, whatever is left of the old one
            for left in self.target.iterdir():
                if left.name not in {MANIFEST, *names} and left.suffix == SHARD_SUFFIX:
                    left.unlink()
            self.path.rmdir()

    def check_target(self) -> None:
        """Raise CheckpointError if what is under the name already is not to be replaced."""
        if (self.target.parent / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.target}: is inside a checkpoint. Name a path beside it instead."
            )
        if (self.target / MANIFEST).is_file():
            if not self.overwrite:
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
        for other in _partial_folders(self.target.parent, self.target.name):
            if _is_being_written(other, may_wait=True):
                raise CheckpointError(
                    f"{self.target}: another job is writing it ({_named(_writer_of(other))}). Give each "
                    "job a path of its own."
                )
            shutil.rmtree(other, ignore_errors=True)


def _partial_folders(parent: Path, name: str = "*") -> Iterator[Path]:
    """Yield the unfinished folders of saves under a name, or under any."""
    yield from sorted(parent.glob(f"{name}{_PARTIAL}*"))


def _is_being_written(partial: Path, *, may_wait: bool) -> bool:
    """Whether a process is still writing an unfinished folder.

    On this host its lock tells. From other hosts it may not be seen, so the folder is watched for a
    while; without the time for that, it counts as being written until it has not changed for an hour.
    Without a writer's file a folder is about to get one, or its name, which takes no time.
    """
    who = _writer_of(partial)
    try:
        if who.get("host") == socket.gethostname():
            with (partial / _WRITER).open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        if may_wait:
            return not is_silent(
                lambda: _seen_of(partial), seconds=None if who else _WITHOUT_LOCK_S
            )
        newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
        return time.time() - newest < (_LEFT_AFTER_S if who else _WITHOUT_LOCK_S)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:  # no locks on this filesystem
        return not may_wait or not is_silent(lambda: _seen_of(partial))


def _seen_of(partial: Path) -> Any:
    sizes = sorted((path.name, path.stat().st_size) for path in partial.iterdir())
    return _writer_of(partial), sizes


def set_aside(folder: Path) -> Path:
    """Take a folder's name away; return the one that it has then, under which it is to be removed."""
    nameless = folder.with_name(f"{folder.name}{_REMOVED}{os.getpid()}")
    folder.rename(nameless)
    return nameless


def removed_folders(parent: Path, name: str = "*") -> Iterator[Path]:
    """Yield the folders that have lost a name, or any, and whose files are left."""
    yield from sorted(parent.glob(f"{name}{_REMOVED}*"))


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file, and wait until the disk has it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


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
