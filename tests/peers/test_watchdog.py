"""What the watchdog's look at a process leaves in it, and what it says when other processes end."""

from __future__ import annotations

import contextlib
import gc
import queue
import subprocess
import threading
import weakref

import torch

from fullshard.peers import watchdog as module
from fullshard.peers.watchdog import watchdog
from tests.fresh import in_fresh_ranks


@in_fresh_ranks(1)
def test_a_look_at_the_threads_keeps_nothing_of_theirs() -> None:
    """Else what a rank computes stays until Python collects cycles; and autograd copies gradients while it looks."""
    is_looking, may_end = threading.Event(), threading.Event()

    def shown_stack(lines: object) -> tuple[str, ...]:
        is_looking.set()
        assert may_end.wait(10)
        return (str(lines),)

    module.shown_stack = shown_stack
    looks = threading.Thread(target=watchdog()._look)

    def compute() -> weakref.ref[torch.Tensor]:
        result = torch.zeros(1)
        looks.start()
        assert is_looking.wait(10)
        return weakref.ref(result)

    gc.disable()
    try:
        assert compute()() is None
    finally:
        gc.enable()
        may_end.set()
        looks.join()


@in_fresh_ranks(1)
def test_a_neighbour_that_dies_is_named_at_once_and_one_that_is_asked_to_end_is_not() -> None:
    """Launchers end all ranks before an error could be printed: Note: Torn down."""
    said: queue.Queue[str] = queue.Queue()
    module.logger.error = lambda _, text: said.put(text)  # type: ignore[method-assign]
    ways = {1: "kill -9 $$", 2: "kill -15 $$", 3: "exit 0", 4: "exit 5"}
    with contextlib.ExitStack() as stack:
        ranks = {
            rank: stack.enter_context(
                subprocess.Popen(["sh", "-c", f"read line; {way}"], stdin=subprocess.PIPE)
            )
            for rank, way in {-1: "exit 0", **ways}.items()
        }

        def end(*numbers: int) -> None:
            for number in numbers:
                stdin = ranks[number].stdin
                assert stdin is not None
                stdin.close()

        board = watchdog().board
        board.note_processes({rank: ranks[rank].pid for rank in ways})
        end(2, 3, 1)
        text = said.get(timeout=10)
        assert f"rank 1 (pid {ranks[1].pid}) died, killed by SIGKILL" in text
        # The lowest rank that is left says it.
        board.note_processes({-1: ranks[-1].pid})
        end(4)
        assert ranks[4].wait(10) == 5
        watchdog()._ended.wait(1.0)
        assert said.empty()
        end(-1)
