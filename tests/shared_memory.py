"""The memory that ranks share, as the system sees it: it has no name in /dev/shm."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE = "memfd:fullshard"


def mapped() -> list[str]:
    """Return what this process maps of it, by inode, and what it keeps open."""
    return sorted([*(f"inode {inode}" for inode in _mapped(Path("/proc/self"))), *_open()])


def inodes_of(pids: Iterable[int]) -> set[str]:
    """Return the files that these processes map."""
    return {inode for pid in pids for inode in _mapped(Path(f"/proc/{pid}"))}


def still_mapped(inodes: set[str]) -> set[str]:
    """Return those of these files that any process maps. Memory that none maps is free."""
    everyone = (process for process in Path("/proc").iterdir() if process.name.isdigit())
    return inodes & {inode for process in everyone for inode in _mapped(process)}


def _mapped(process: Path) -> Iterator[str]:
    with contextlib.suppress(OSError):  # it is gone, or another user's
        for line in (process / "maps").read_text().splitlines():
            _, _, _, _, inode, *name = line.split()
            if FILE in " ".join(name):
                yield inode


def _open() -> Iterator[str]:
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            if FILE in str(entry.readlink()):
                yield f"descriptor {entry.name}"
