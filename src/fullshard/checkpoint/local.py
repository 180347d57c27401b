"""A checkpoint's directory on a disk: written for good under another name, and read without trust.

    runs/books/step-00000350/                        complete: it has its name since all was on the disk
    runs/books/step-00000350.partial-1f3a/           being written, or left by a crash; never read

Where there is a checkpoint under the name already and it may be replaced, the new files join it under
names of their own, and then the new manifest takes the place of the old one, in one step.
"""

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from fullshard.checkpoint.drafts import (
    LEFT_AFTER_S,
    TAG,
    Heartbeat,
    error_of_other_writer,
    error_of_taken,
    is_silent,
    new_tag,
    tag_of,
    whole_of,
    writer_in,
)
from fullshard.checkpoint.manifest import MANIFEST
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.process_hooks import AFTER_FORK

_PARTIAL = ".partial-"
_REMOVED = ".removed-"
_WRITER = "writer.json"  # in a partial folder; locked and rewritten by who is to complete it
_WRITER_NBYTES = 512
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class LocalFolder:
    """A directory on a filesystem that all ranks see, of one checkpoint or of several.

    reads_at_once: requests that pay off at the same time. request_nbytes: bytes to ask for in one.
    """

    reads_at_once = 4
    request_nbytes = 1 << 20

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def location(self) -> Path:
        """What users see: a path, or a URL."""
        return self.path

    @property
    def name(self) -> str:
        return self.path.name

    def child(self, name: str) -> "LocalFolder":
        return LocalFolder(self.path / name)

    def exists(self) -> bool:
        return self.path.is_dir()

    def size_of(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if it is not there."""
        path = self.path / name
        return path.stat().st_size if path.is_file() else None

    def has_lost_manifest(self) -> bool:
        """Whether this was a complete checkpoint, and its manifest is gone. False if it cannot be known."""
        names = (path.name for path in self.path.glob("shard-*"))
        return not (self.path / MANIFEST).exists() and any(map(tag_of, names))

    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files in bytes, by name."""
        with os.scandir(self.path) as entries:
            return {each.name: each.stat().st_size for each in entries if each.is_file()}

    def open_data(self, name: str) -> "LocalData":
        """Open a file for reading from several threads. Raises CheckpointError if it is not there, or is a link."""
        return LocalData(self.path / name)

    def read_small(self, name: str) -> bytes:
        """Return a file's content. Raises as `open_data` does, and CheckpointError if it is not small."""
        return whole_of(self.open_data(name), f"{self}/{name}")

    def create(self, name: str) -> "NewLocalFile":
        """Create a file that is not there yet."""
        return NewLocalFile(self.path / name)

    def replace_small(self, name: str, content: bytes) -> None:
        """Write a small file that may be there already: at any time it has the old or new content."""
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        write_durably(temporary, content)
        temporary.rename(self.path / name)
        sync_folder(self.path)

    def children(self) -> Sequence["LocalFolder"]:
        """Return the folders in this one; links, and what was abandoned, are left out."""
        if not self.path.is_dir():
            return []
        found = (p for p in self.path.iterdir() if p.is_dir() and not p.is_symlink())
        return [LocalFolder(path) for path in sorted(found)]

    def draft(self, tag: str, *, overwrite: bool) -> "LocalDraft":
        """Begin to write a checkpoint of this name. tag: is part of its files' names.

        Raises CheckpointError where another job is writing it, or one is there already and may not be replaced.
        """
        return LocalDraft(self.path, tag, overwrite=overwrite)

    def sees_draft(self, tag: str) -> bool:
        """Whether this process sees a draft's folder, which another one has made."""
        return self.path.is_dir()

    def remove(self) -> list[str]:
        """Remove a checkpoint: first what makes it complete, in one step, then its files.

        Returns the names of files that no save has written, which stay.
        """
        if others := others_in(self.path, is_of_checkpoint):
            (self.path / MANIFEST).unlink()
            for path in self.path.iterdir():
                if is_of_checkpoint(path.name):
                    path.unlink()
            return others
        nameless = set_aside(self.path)
        sync_folder(self.path.parent)
        discard(nameless, is_of_checkpoint)
        return []

    def abandon(self, names: Sequence[str]) -> str:
        """Take folders out of `children`, in a time that does not depend on their sizes.

        Returns where they are from now on, for a message.
        """
        for name in names:
            free, number = f"{name}.abandoned", 1
            while os.path.lexists(self.path / free):
                number += 1
                free = f"{name}.abandoned-{number}"
            (self.path / name).rename(self.path / free)
        sync_folder(self.path)
        return "renamed, with '.abandoned' at the end"

    def abandoned(self) -> Collection[str]:
        """Return the names in this folder that abandoned ones have kept."""
        return ()

    def remove_left_over(self) -> None:
        """Remove what saves that died, and removals, have left in this folder."""
        for partial in _marked_folders(self.path, _PARTIAL):
            if not _is_being_written(partial, may_wait=False):
                _discard_partial(partial, is_of_checkpoint)
        for nameless in removed_folders(self.path):
            discard(nameless, is_of_checkpoint)


class LocalData:
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
        """Fill memory from a position on; return how many bytes there were."""
        done = 0
        while done < len(out):
            count = os.preadv(self._descriptor, [out[done:]], position + done)
            if count == 0:
                break
            done += count
        return done

    def close(self) -> None:
        os.close(self._descriptor)


class NewLocalFile:
    """A file that is being written."""

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
        """Return once all of it is stored for good."""
        try:
            with self._naming():
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)

    def discard(self) -> None:
        """Close it after an error. What was written may stay, for `LocalDraft.give_up`."""
        os.close(self._descriptor)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Say in errors of a descriptor which file it is."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


class LocalDraft:
    """A partial folder beside the checkpoint's place, until it gets the checkpoint's name. Used by rank 0.

    folder: where all ranks write their files.
    """

    def __init__(self, target: Path, tag: str, *, overwrite: bool) -> None:
        if not target.name:
            raise CheckpointError(f"{target}: name the folder that is to be the checkpoint.")
        self.target, self.overwrite = target, overwrite
        self.path = target.with_name(f"{target.name}{_PARTIAL}{tag}")
        self.folder = LocalFolder(self.path)
        self.check_target()
        _make_for_good(target.parent)
        self._refuse_other_writer()
        self.path.mkdir()
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._lock: int | None = os.open(self.path / _WRITER, flags)
        _drafts.add(self)
        # It may outlive this process.
        AFTER_FORK.add(_leave_to_parent, "locks of checkpoints under way are the parent's")
        with contextlib.suppress(OSError):
            # Some filesystems have no locks; the beats are seen there.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            self._heart = Heartbeat(self._tell)
        except OSError as error:  # of a full disk
            self.release()
            shutil.rmtree(self.path, ignore_errors=True)
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def complete(self, manifest: bytes, names: list[str]) -> None:
        """Make it the checkpoint of its name, once all files (``names``) are stored."""
        replaces = self.check_target()
        write_durably(self.path / MANIFEST, manifest)
        sync_folder(self.path)
        if replaces:
            self._replace(names)
        else:
            self.path.rename(self.target)  # which fails where another job has been sooner
            self.settle(self.target.parent, self.target)

    def settle(self, changed: Path, own: Path) -> None:
        """Take away what says that it is being written. It is complete now, so no failure is one of the save.

        changed: the folder in which the last name has changed. own: the draft's, under the name it has now.
        """
        try:
            sync_folder(changed)
        except OSError as error:
            warnings.warn(
                f"{self.target}: is complete, but a power cut may undo that ({error.strerror}).",
                UserWarning,
                stacklevel=2,
            )
        self._heart.stop()
        with contextlib.suppress(OSError):
            (own / _WRITER).unlink()
        self.release()

    def give_up(self) -> None:
        """Remove what has been written."""
        self._heart.stop()
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def is_known(self, name: str) -> bool:
        """Whether such a draft may have written a file of this name, which may be removed then."""
        return is_of_checkpoint(name)

    def is_ours(self, name: str) -> bool:
        return name == _WRITER or self.is_known(name)

    def _tell(self, text: bytes) -> None:
        if self._lock is not None:
            # Of one length, so that no reader finds the end of an older text.
            os.pwrite(self._lock, text.ljust(_WRITER_NBYTES), 0)

    def release(self) -> None:
        """Give the lock back."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None  # the number may be another file's from now on

    def _replace(self, names: list[str]) -> None:
        # What another job has moved here for its own manifest stays: it is still being written.
        beside = {path.name for path in _marked_folders(self.target.parent, _PARTIAL)}
        old = [
            path
            for path in self.target.iterdir()
            if (tag := tag_of(path.name)) and f"{self.target.name}{_PARTIAL}{tag}" not in beside
        ]
        moved = []
        try:
            for name in names:  # they bear this save's tag, so none is there yet
                (self.path / name).rename(self.target / name)
                moved.append(name)
            sync_folder(self.target)
            (self.path / MANIFEST).rename(self.target / MANIFEST)
        except OSError:
            for name in moved:
                (self.target / name).unlink(missing_ok=True)
            raise
        self.settle(self.target, self.path)
        with contextlib.suppress(OSError):  # it is complete, whatever is left of the old one
            for path in old:
                path.unlink(missing_ok=True)
        discard(self.path, self.is_ours)

    def check_target(self) -> bool:
        """Return whether a checkpoint of this name is to be replaced.

        Raises CheckpointError if what is under the name is not to be.
        """
        if (self.target.parent / MANIFEST).is_file():
            raise CheckpointError(
                f"{self.target}: is inside a checkpoint. Name a path beside it instead."
            )
        if (self.target / MANIFEST).is_file():
            if not self.overwrite:
                raise error_of_taken(self.target)
            return True
        if self.target.is_symlink() or (self.target.exists() and not self.target.is_dir()):
            raise CheckpointError(f"{self.target}: is a file or a link. Name another path.")
        if self.target.is_dir() and (others := sorted(self.target.iterdir())):
            raise CheckpointError(
                f"{self.target}: is a folder with other files ({others[0].name}) and without a checkpoint. Name "
                "another path, or empty it."
            )
        return False

    def _refuse_other_writer(self) -> None:
        for other in _marked_folders(self.target.parent, _PARTIAL, self.target.name):
            if not (other / _WRITER).exists() and others_in(other, self.is_ours):
                continue  # no save's
            if _is_being_written(other, may_wait=True):
                raise error_of_other_writer(self.target, _writer_of(other))
            _discard_partial(other, self.is_ours)


_drafts: weakref.WeakSet[LocalDraft] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Give the locks of a process back in one that it has forked."""
    for draft in [*_drafts]:
        draft.release()


def is_of_checkpoint(name: str) -> bool:
    """Whether a save may have written a file of this name in the folder of a checkpoint."""
    return name in (MANIFEST, _WRITER) or tag_of(name) is not None


def others_in(folder: Path, is_ours: Callable[[str], bool]) -> list[str]:
    """Return the paths in a folder of the files that are not ours."""
    found = [(path, str(path.relative_to(folder))) for path in sorted(folder.rglob("*"))]
    return [
        name
        for path, name in found
        if not (path.is_dir() and not path.is_symlink()) and not is_ours(name)
    ]


def discard(folder: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove a folder, unless it has files that are not ours."""
    with contextlib.suppress(OSError):
        if others_in(folder, is_ours):
            return
        for path in sorted(folder.rglob("*"), reverse=True):  # what a folder has before itself
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()


def _discard_partial(partial: Path, is_ours: Callable[[str], bool]) -> None:
    """Remove the folder of a dead save. One that has got the checkpoint's name meanwhile keeps its files."""
    with contextlib.suppress(OSError):
        if not others_in(partial, is_ours):
            discard(set_aside(partial), is_ours)


def _marked_folders(parent: Path, mark: str, name: str | None = None) -> list[Path]:
    """Return the folders whose names end with a mark and a tag. name: what is before, if not any."""
    if not parent.is_dir():
        return []
    before = ".+" if name is None else re.escape(name)
    ours = re.compile(f"{before}{re.escape(mark)}{TAG}", re.DOTALL)
    return sorted(
        path
        for path in parent.iterdir()
        if ours.fullmatch(path.name) and path.is_dir() and not path.is_symlink()
    )


def _is_being_written(partial: Path, *, may_wait: bool) -> bool:
    """Whether a process is still writing an unfinished folder, or has just completed it.

    On this host its lock tells. From other hosts it may not be seen, and some filesystems have none, so the
    folder is watched for a while; without the time for that, it counts as being written until it has not
    changed for an hour.
    """
    try:
        if _writer_of(partial).get("host") == socket.gethostname():
            try:
                with (partial / _WRITER).open("rb") as file:
                    # A shared one, for which NFS takes a file that is open for reading alone.
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
            except BlockingIOError:
                return True
            except FileNotFoundError:
                return True  # completed since
            except OSError:  # no locks on this filesystem
                pass
        if may_wait:
            return not is_silent(lambda: _seen_of(partial))
        newest = max(path.stat().st_mtime for path in (partial, *partial.iterdir()))
        return time.time() - newest < LEFT_AFTER_S
    except FileNotFoundError:  # somebody has changed it just now
        return partial.exists()
    except OSError:  # it cannot be read, and so not be removed
        return True


def _seen_of(partial: Path) -> Any:
    sizes = sorted((path.name, path.stat().st_size) for path in partial.iterdir())
    return _writer_of(partial), sizes


def set_aside(folder: Path) -> Path:
    """Take a folder's name away; return the one that it has then, under which it is to be removed."""
    nameless = folder.with_name(f"{folder.name}{_REMOVED}{new_tag()}")
    folder.rename(nameless)
    return nameless


def removed_folders(parent: Path, name: str | None = None) -> list[Path]:
    """Return the folders that have lost a name, or any, and whose files are left."""
    return _marked_folders(parent, _REMOVED, name)


def _make_for_good(folder: Path) -> None:
    """Make a folder and those around it, and wait until the disk has their names."""
    if folder.is_dir():
        return
    _make_for_good(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_folder(folder.parent)


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
        return writer_in((partial / _WRITER).read_bytes())
    except OSError:
        return {}
