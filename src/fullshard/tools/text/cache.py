"""Files that are made once from others, and kept: tokens of a text, bytes of a table's column.

Several processes may want the same file at once: one makes it, the others wait and take it. Beside each file lie
checksums of its blocks, so that other bytes than were written are noticed by whoever reads them.
"""

import contextlib
import hashlib
import json
import shutil
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fullshard.tools.config import OptionError

_MADE = "made.json"  # the sizes of all files, once they are there
_CHECKSUMS = ".crc32"  # of a file's blocks, in a file of its own
_BLOCK_NBYTES = 1 << 14


class CorpusError(OptionError):
    """Text that is missing, unreadable, too short or not what the run was started with."""


def kept(cache: Path, key: Any, make: Callable[[Path], None]) -> Path:
    """Return the folder for a key, after `make` has filled it if it is not there yet.

    key: all that decides what is in it, as JSON takes it. Raises CorpusError if nothing can be written.
    """
    from filelock import FileLock  # which torch needs anyway

    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    folder, unfinished = cache / name, cache / f"{name}.unfinished"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if _is_whole(folder):  # without the lock: the cache may be read-only by now
            return folder
        with FileLock(cache / f"{name}.lock"):
            if not _is_whole(folder):
                for left in (folder, unfinished):
                    shutil.rmtree(left, ignore_errors=True)
                unfinished.mkdir()
                try:
                    make(unfinished)
                except Exception:  # text that is refused leaves nothing
                    shutil.rmtree(unfinished, ignore_errors=True)
                    raise
                for path in [*unfinished.iterdir()]:
                    sums = array("I", (zlib.crc32(block) for block in _blocks(path)))
                    path.with_name(path.name + _CHECKSUMS).write_bytes(sums.tobytes())
                (unfinished / _MADE).write_text(json.dumps(_sizes(unfinished)))
                unfinished.rename(folder)
    except OSError as error:
        raise CorpusError(
            f"--cache {cache}: cannot be written ({error.strerror}). Name another folder."
        ) from error
    return folder


class KeptFile:
    """A file of such a folder, to be read in parts; raises CorpusError for what is not as it was written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._naming():
            self.nbytes = path.stat().st_size
            self._sums = array("I", path.with_name(path.name + _CHECKSUMS).read_bytes())

    def read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each span: (offset, number)."""
        with self._naming(), self.path.open("rb") as file:
            found = []
            for offset, nbytes in spans:
                first = offset // _BLOCK_NBYTES
                file.seek(first * _BLOCK_NBYTES)
                last = -(-(offset + nbytes) // _BLOCK_NBYTES)
                data = b"".join(
                    self._checked(file.read(_BLOCK_NBYTES), number) for number in range(first, last)
                )
                found.append(data[offset - first * _BLOCK_NBYTES :][:nbytes])
            return found

    def check(self) -> None:
        """Read all of it."""
        with self._naming():
            for number, block in enumerate(_blocks(self.path)):
                self._checked(block, number)

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Say of a file that is gone, as where somebody has removed the cache, which it was."""
        try:
            yield
        except OSError as error:
            raise CorpusError(
                f"{self.path} cannot be read: {error.strerror}. It is made anew when the run is started again."
            ) from error

    def _checked(self, block: bytes, number: int) -> bytes:
        if zlib.crc32(block) != self._sums[number]:
            with contextlib.suppress(OSError):
                (self.path.parent / _MADE).unlink()
            raise CorpusError(
                f"{self.path}: does not hold what was written there (from byte {number * _BLOCK_NBYTES} on). Start "
                "the run again: the file is made anew. If it comes back, look at the disk, or name another "
                "folder with --cache."
            )
        return block


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_NBYTES):
            yield block


def _is_whole(folder: Path) -> bool:
    """Whether a folder has its files as they were made: a full disk, or somebody, may have cut them."""
    try:
        return bool(json.loads((folder / _MADE).read_text()) == _sizes(folder))
    except (OSError, ValueError):
        return False


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != _MADE}
