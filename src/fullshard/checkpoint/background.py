"""Saves in the background: `PendingSave`, and the host memory that they copy to."""

import functools
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from fullshard.checkpoint.opening import folder_at
from fullshard.checkpoint.peers import Peers, said
from fullshard.checkpoint.room import check_copies
from fullshard.checkpoint.stages import SavedCheckpoint, SaveJob, SaveRequest, execute
from fullshard.errors import CheckpointError, FullshardError
from fullshard.process_hooks import at_exit, start_thread

# Python lets one thread run at a time, for 5 ms. The program goes first: it has waited for the copy.
_HEAD_START_SECONDS = 0.002


class PendingSave:
    """A save in the background.

    stall_seconds: how long the program waited for the copy to host memory.
    """

    def __init__(
        self, request: SaveRequest, decided: Callable[[], SaveJob], peers: Peers, begun: float
    ) -> None:
        """Begin it. decided: returns what this rank writes. begun: when, by ``time.perf_counter``."""
        self._peers, self._begun = peers, begun
        try:
            self.path: Path | str = folder_at(request.path).location
        except CheckpointError:  # which `decided` raises, on all ranks, once they have met
            self.path = str(request.path)
        self._error: BaseException | None = None
        self._saved: SavedCheckpoint | None = None
        self._warning = ""
        self.stall_seconds = time.perf_counter() - begun
        # Not a daemon: a program that ends waits for its last checkpoint.
        _in_flight.append(self)
        _begin_in_background()
        self._thread = start_thread(
            self._run,
            decided,
            name="fullshard-checkpoint",
            why="saves in the background",
            is_daemon=False,
        )

    @property
    def left_unsaid(self) -> str:
        """What nobody has been told yet: an error or a warning; "" if nothing."""
        return self._warning if self._error is None else str(self._error)

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
        if self._warning:
            warning, self._warning = self._warning, ""
            warnings.warn(warning, stacklevel=2)
        return self._saved

    def _run(self, decided: Callable[[], SaveJob]) -> None:
        time.sleep(_HEAD_START_SECONDS)
        try:
            with self._peers.naming_absent(self.path):
                # Ranks share cores and disks: what one does in the background would hold up others' copies.
                self._peers.wait_for_all()
                job = decided()
                nbytes = execute(job, self._peers)
            self._warning = job.warning(self._peers)
            self._saved = job.saved(nbytes, begun=self._begun, stall_seconds=self.stall_seconds)
        except FullshardError as error:
            self._error = error
        except BaseException as error:  # raised where somebody waits
            self._error = CheckpointError(
                f"{self.path}: the save in the background did not complete: {said(error)} Either a rank "
                "died, or destroy_process_group() came before wait(). Older checkpoints are as they were."
            )
            self._error.__cause__ = error


_in_flight: list[PendingSave] = []


def _say_what_was_lost() -> None:
    """Say what went wrong with the save while the program ended. Its thread has ended by now."""
    for pending in _in_flight:
        if pending.left_unsaid:
            print(f"fullshard: {pending.left_unsaid}", file=sys.stderr)


@functools.cache
def _begin_in_background() -> None:
    at_exit(_say_what_was_lost, why="a save in the background may have failed since")


def finish_background() -> None:
    """Wait for the save in the background, if there is one. Raises what went wrong in it."""
    while _in_flight:
        _in_flight[0].wait()


class Staging:
    """Host memory that saves in the background copy to, kept from one to the next."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._copies: list[torch.Tensor] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []  # of the copies

    @torch.no_grad()
    def copies(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of tensors, which last until the next call."""
        kinds = [(view.shape, view.dtype) for view in views]
        if kinds != self._kinds:
            self._divide(views)
            self._kinds = kinds
        if self._copies:
            torch._foreach_copy_(self._copies, [*views])
        return [*self._copies]

    @torch.inference_mode(False)  # or nothing could be copied there outside of that mode
    def _divide(self, views: Sequence[torch.Tensor]) -> None:
        """Make memory for copies of tensors, if there is too little of it, and divide it among them."""
        sizes = [view.numel() * view.itemsize for view in views]
        total = sum(map(_aligned, sizes))
        self._copies, self._kinds = [], []
        if self._memory.numel() < total:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # the old one goes first
            check_copies(total)
            on_device = any(view.device.type != "cpu" for view in views)
            self._memory = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=on_device)
        position = 0
        for view, nbytes in zip(views, sizes, strict=True):
            memory = self._memory[position : position + nbytes].view(view.dtype)
            self._copies.append(memory.view(view.shape))
            position += _aligned(nbytes)


staging = Staging()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
