"""Python's garbage collector, which has to wait while ranks save or load together: `collector_waits`.

Planning makes many small objects, which set off a collection of everything: 0.2 s in a program with two
models, and then all ranks wait for the one that collects.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_waits() -> Iterator[None]:
    """Keep the collector from beginning by itself. What nothing refers to any more is freed as ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
