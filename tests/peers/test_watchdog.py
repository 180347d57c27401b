"""What the watchdog's look at a process leaves in it."""

from __future__ import annotations

import gc
import threading
import weakref

import torch

from fullshard.peers.watchdog import watchdog
from tests.fresh import in_fresh_ranks


@in_fresh_ranks(1)
def test_a_look_at_the_threads_keeps_nothing_of_theirs() -> None:
    """Else what a rank computes when it is looked at stays until Python collects cycles."""
    look = watchdog()._look

    def compute() -> weakref.ref[torch.Tensor]:
        result = torch.zeros(1)
        looks = threading.Thread(target=look)
        looks.start()
        looks.join()
        return weakref.ref(result)

    gc.disable()
    try:
        assert compute()() is None
    finally:
        gc.enable()
