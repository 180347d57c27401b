"""Host memory of this process while a test's body runs."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def peak_mib() -> Iterator[list[float]]:
    """Watch the process's memory; give the most that it had above the beginning's, in MiB."""
    peak, ended = [0.0], threading.Event()

    def resident() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE") / 2**20

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], resident() - before)

    before = resident()
    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield peak
    finally:
        ended.set()
        watching.join()
