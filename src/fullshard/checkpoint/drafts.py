"""What drafts on a disk and in a store have in common: the names of their files, and signs of life.

A draft is a checkpoint that is being written. Files have names of their save, so that what clean-up may remove is
known by its name; rank 0's heartbeat tells other jobs whether the save goes on.

[Note: When a checkpoint becomes visible] All files and the manifest are stored by then, one call makes them the
checkpoint, and what follows it only tidies up:

    on a disk, a new one      its folder gets its name         LocalDraft.complete
    on a disk, replacing      the manifest is renamed          LocalDraft._replace
    in a store                the manifest is written          ObjectDraft._put
"""

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from fullshard.checkpoint.manifest import is_small
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


def new_tag() -> str:
    """Return a tag that no other save has."""
    return secrets.token_hex(4)


def shard_name(rank: int, number: int, tag: str) -> str:
    """Return the name of a rank's file of tensors."""
    return f"shard-{rank:05d}-{number}.{tag}{SHARD_SUFFIX}"


def tag_of(name: str) -> str | None:
    """Return the tag of the save that wrote a file of tensors; None for a file of another name."""
    match = _SHARD.fullmatch(name)
    return match and match[1]


class _Readable(Protocol):
    nbytes: int

    def read_into(self, out: memoryview, position: int) -> int: ...

    def close(self) -> None: ...


def whole_of(file: _Readable, where: str) -> bytes:
    """Return a small file's content, and close it. Raises CheckpointError if it is not small."""
    try:
        if not is_small(file.nbytes):
            raise CheckpointError(
                f"{where}: has {file.nbytes} bytes, so it is not what its name says."
            )
        content = bytearray(file.nbytes)
        count = file.read_into(memoryview(content), 0)
        return bytes(content[:count])
    finally:
        file.close()


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
