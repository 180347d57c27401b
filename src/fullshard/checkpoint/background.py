"""Saves in the background: `PendingSave`, and the host memory that they copy to."""

import atexit
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fullshard.checkpoint.peers import Peers, said
from fullshard.checkpoint.stages import SavedCheckpoint, SaveJob, execute
from fullshard.checkpoint.writing import ToWrite
from fullshard.errors import CheckpointError, FullshardError


class PendingSave:
    """A save in the background.

    stall_seconds: how long the program waited for the copy to host memory.
    """

    def __init__(self, job: SaveJob, peers: Peers, begun: float) -> None:
        self._job, self._peers, self._begun = job, peers, begun
        self._error: BaseException | None = None
        self._saved: SavedCheckpoint | None = None
        self.stall_seconds = time.perf_counter() - begun
        # Not a daemon: a program that ends waits for its last checkpoint.
        self._thread = threading.Thread(target=self._run, name="fullshard-checkpoint")
        _in_flight.append(self)
        self._thread.start()

    @property
    def path(self) -> Path | str:
        return self._job.target.location

    @property
    def failure(self) -> BaseException | None:
        """What went wrong and has not been raised yet."""
        return self._error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> SavedCheckpoint:
        """Wait until the checkpoint is complete. Raises what went wrong, once."""
        self._thread.join()
        if self in _in_flight:
            _in_flight.remove(self)
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        if self._saved is None:
            raise CheckpointError(f"{self.path}: was not saved; the error has been raised before.")
        return self._saved

    def _run(self) -> None:
        try:
            nbytes = execute(self._job, self._peers)
            self._saved = self._job.saved(
                nbytes, begun=self._begun, stall_seconds=self.stall_seconds
            )
        except FullshardError as error:
            self._error = error
        except BaseException as error:  # raised where somebody waits
            self._error = CheckpointError(
                f"{self.path}: the save in the background did not complete: {said(error)} Either a rank "
                "died, or destroy_process_group() came before wait(). Older checkpoints are as they were."
            )
            self._error.__cause__ = error


_in_flight: list[PendingSave] = []


@atexit.register
def _say_what_was_lost() -> None:
    """Name the save that failed while the program ended. Its thread has ended by now."""
    for pending in _in_flight:
        if pending.failure is not None:
            print(f"fullshard: {pending.failure}", file=sys.stderr)


def finish_background() -> None:
    """Wait for the save in the background, if there is one. Raises what went wrong in it."""
    while _in_flight:
        _in_flight[0].wait()


class Staging:
    """Host memory that saves in the background copy to, kept from one to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def staged(self, items: Sequence[ToWrite]) -> list[ToWrite]:
        """Return the same boxes over copies of their elements."""
        total = sum(_aligned(item.nbytes) for item in items)
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            on_device = any(item.view.device.type != "cpu" for item in items)
            self._memory = torch.empty(total, dtype=torch.uint8, pin_memory=on_device)
        copies, position = [], 0
        for item in items:
            memory = self._memory[position : position + item.nbytes].view(item.view.dtype)
            copies.append(memory.view(item.view.shape))
            position += _aligned(item.nbytes)
        if copies:
            torch._foreach_copy_(copies, [item.view for item in items])
        return [item._replace(view=copy) for item, copy in zip(items, copies, strict=True)]


staging = Staging()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
