"""Where the files of checkpoints are: a directory on a disk, or a prefix of an object store.

A `Folder` is one of them, by the path or the URL that the user gave. Everything else in this room sees
files through it: reading and writing them, giving a checkpoint its name, removing one.

    runs/a/step-100            LocalFolder: complete once it has its name
    s3://bucket/a/step-100     ObjectFolder: complete once it has its manifest

`opening.folder_at` makes one of a path or a URL.
"""

import abc
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.process_hooks import start_thread

logger = logging.getLogger("fullshard")

SHARD_SUFFIX = ".safetensors"

# Each save has a tag of its own, which its files' names bear: what lacks one is never removed.
TAG = "[0-9a-f]{8}"
_SHARD = re.compile(rf"shard-\d{{5,}}-\d+\.({TAG})\.safetensors")

# A save shows that it is alive this often, and is presumed dead after three missed beats.
BEAT_S = 10.0
# What nobody has changed for so long is left over, where there is no time to watch it.
LEFT_AFTER_S = 3600.0

# A manifest has about 20 bytes for each MiB of tensors, and 150 for each piece of one.
_MOST_SMALL_NBYTES = 4 << 30


def new_tag() -> str:
    """Return a tag that no other save has."""
    return secrets.token_hex(4)


def shard_name(rank: int, number: int, tag: str) -> str:
    """Return the name of a rank's file of tensors."""
    return f"shard-{rank:05d}-{number}.{tag}{SHARD_SUFFIX}"


def is_small(nbytes: int) -> bool:
    """Whether a file of this size is read, and so written, as a whole."""
    return nbytes <= _MOST_SMALL_NBYTES


def tag_of(name: str) -> str | None:
    """Return the tag of the save that wrote a file of tensors; None for a file of another name."""
    match = _SHARD.fullmatch(name)
    return match and match[1]


class DataFile(abc.ABC):
    """A file of a checkpoint, open for reading from several threads. nbytes: its size."""

    nbytes: int

    @abc.abstractmethod
    def read_into(self, out: memoryview, position: int) -> int:
        """Fill memory from a position on; return how many bytes there were."""

    @abc.abstractmethod
    def close(self) -> None: ...


class NewFile(abc.ABC):
    """A file that is being written."""

    @abc.abstractmethod
    def write(self, data: bytes | memoryview) -> None: ...

    @abc.abstractmethod
    def finish(self) -> None:
        """Return once all of it is stored for good."""

    @abc.abstractmethod
    def discard(self) -> None:
        """Close it after an error. What was written may stay, for `Draft.give_up`."""


class Draft(abc.ABC):
    """A checkpoint that is being written, until it is complete. Used by rank 0.

    folder: where all ranks write their files. Making one fails where another job is writing the same
    checkpoint, or one is there already and may not be replaced.

    [Note: When a checkpoint becomes visible] All files and the manifest are stored by then, one call makes them the
    checkpoint, and what follows it only tidies up:

        on a disk, a new one      its folder gets its name         LocalDraft.complete
        on a disk, replacing      the manifest is renamed          LocalDraft._replace
        in a store                the manifest is written          ObjectDraft._put
    """

    folder: "Folder"

    @abc.abstractmethod
    def complete(self, manifest: bytes, names: list[str]) -> None:
        """Make it the checkpoint of its name, once all files (``names``) are stored."""

    @abc.abstractmethod
    def give_up(self) -> None:
        """Remove what has been written."""


class Folder(abc.ABC):
    """A directory or a prefix, of one checkpoint or of several.

    reads_at_once: requests that pay off at the same time. request_nbytes: bytes to ask for in one.
    """

    reads_at_once = 4
    request_nbytes = 1 << 20

    @property
    @abc.abstractmethod
    def location(self) -> Path | str:
        """What users see: a path, or a URL."""

    @property
    @abc.abstractmethod
    def name(self) -> str: ...

    @abc.abstractmethod
    def child(self, name: str) -> "Folder": ...

    @abc.abstractmethod
    def exists(self) -> bool: ...

    @abc.abstractmethod
    def size_of(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if it is not there."""

    @abc.abstractmethod
    def has_lost_manifest(self) -> bool:
        """Whether this was a complete checkpoint, and its manifest is gone. False if it cannot be known."""

    @abc.abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the sizes of all files in bytes, by name."""

    @abc.abstractmethod
    def open_data(self, name: str) -> DataFile:
        """Open a file for reading. Raises CheckpointError if it is not there, or is a link."""

    @abc.abstractmethod
    def create(self, name: str) -> NewFile:
        """Create a file that is not there yet."""

    @abc.abstractmethod
    def replace_small(self, name: str, content: bytes) -> None:
        """Write a small file that may be there already: at any time it has the old or new content."""

    @abc.abstractmethod
    def children(self) -> list["Folder"]:
        """Return the folders in this one; links, and what was abandoned, are left out."""

    @abc.abstractmethod
    def draft(self, tag: str, *, overwrite: bool) -> Draft:
        """Begin to write a checkpoint of this name. tag: is part of its files' names."""

    @abc.abstractmethod
    def sees_draft(self, tag: str) -> bool:
        """Whether this process sees a draft's folder, which another one has made."""

    @abc.abstractmethod
    def remove(self) -> list[str]:
        """Remove a checkpoint: first what makes it complete, in one step, then its files.

        Returns the names of files that no save has written, which stay.
        """

    @abc.abstractmethod
    def abandon(self, names: Sequence[str]) -> str:
        """Take folders out of `children`, in a time that does not depend on their sizes.

        Returns where they are from now on, for a message.
        """

    def abandoned(self) -> Collection[str]:
        """Return the names in this folder that abandoned ones have kept."""
        return ()

    @abc.abstractmethod
    def remove_left_over(self) -> None:
        """Remove what saves that died, and removals, have left in this folder."""

    def read_small(self, name: str) -> bytes:
        """Return a file's content. Raises as `open_data` does, and CheckpointError if it is not small."""
        file = self.open_data(name)
        try:
            if not is_small(file.nbytes):
                raise CheckpointError(
                    f"{self}/{name}: has {file.nbytes} bytes, so it is not what its name says."
                )
            content = bytearray(file.nbytes)
            count = file.read_into(memoryview(content), 0)
            return bytes(content[:count])
        finally:
            file.close()

    def __str__(self) -> str:
        return str(self.location)


# Who is writing a checkpoint, and whether it still does


class Heartbeat:
    """Tells who writes a checkpoint, now and every few seconds, in a thread of its own, until it is stopped.

    write: puts such a text where others see it; the first time it may raise.
    """

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._who = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
        self._beat(0)
        self._stopped = threading.Event()
        self._thread = start_thread(
            self._run, name="fullshard-alive", why="shows others that a save goes on"
        )

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _beat(self, count: int) -> None:
        self._write(json.dumps({**self._who, "beat": count}).encode())

    def _run(self) -> None:
        count = 0
        while not self._stopped.wait(BEAT_S):
            count += 1
            try:
                self._beat(count)
            except Exception as error:  # the next one may get through; see BEAT_S
                logger.warning("a save could not show that it is alive: %s", error)


def writer_in(text: bytes) -> dict[str, Any]:
    """Return what a heartbeat has written: host, pid, since, beat. Empty for anything else."""
    try:
        who = json.loads(text)
    except ValueError:
        return {}
    return who if isinstance(who, dict) else {}


def error_of_other_writer(target: object, who: Mapping[str, Any]) -> CheckpointError:
    """Return the error of a save to where another one is being written."""
    return CheckpointError(
        f"{target}: another job is writing it (process {who.get('pid', 'unknown')} on "
        f"{who.get('host', 'an unknown host')}). Give each job a path or a URL of its own."
    )


def error_of_taken(target: object) -> CheckpointError:
    """Return the error of a save to where a checkpoint is that may not be replaced."""
    return CheckpointError(
        f"{target}: already holds a checkpoint. Save under another name, or pass overwrite=True to "
        "replace it."
    )


def is_silent(look: Callable[[], Any]) -> bool:
    """Whether what a function sees stays the same for three beats."""
    before = look()
    for _ in range(6):
        time.sleep(3 * BEAT_S / 6)
        if look() != before:
            return False
    return True
