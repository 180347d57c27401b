"""The cost of a function as a number of calls, which is the same on a busy machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def calls_of(function: Callable[[], object]) -> int:
    """Count the calls of functions, Python's and C's, while this one runs."""
    calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event.endswith("call")

    gc.collect()
    gc.disable()  # what other tests left behind is no work of this function
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
