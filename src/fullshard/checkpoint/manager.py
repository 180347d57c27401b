"""`CheckpointManager`: checkpoints of a training loop, when and how many, and which one to go on from.

runs/books/
  step-00000300/    complete
  step-00000350/    complete, the newest
  latest            the name of the newest: "step-00000350"
"""

import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.checkpoint.content import Models, Optimizers
from fullshard.checkpoint.folder import (
    has_manifest,
    read_small,
    remove,
    remove_left_over,
    replace_durably,
)
from fullshard.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from fullshard.checkpoint.manifest import MANIFEST, loads
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.saving import (
    PendingSave,
    SavedCheckpoint,
    async_save_checkpoint,
    finish_background,
    save_checkpoint,
)
from fullshard.errors import CheckpointError

LATEST = "latest"
_NAME = re.compile(r"step-(\d{1,18})")


class Checkpoint(NamedTuple):
    """A complete checkpoint of a folder, and the number of steps it has behind it."""

    step: int
    path: Path

    def __fspath__(self) -> str:
        return str(self.path)


def checkpoints_in(folder: str | os.PathLike[str]) -> list[Checkpoint]:
    """Return the complete checkpoints of a folder, by their steps; others' folders are left out."""
    found = []
    parent = Path(folder)
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and not path.is_symlink() and has_manifest(path):
            found.append(Checkpoint(int(match[1]), path))
    return sorted(found)


def latest_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint | None:
    """Return the complete checkpoint with the most steps whose manifest is undamaged, or None."""
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            loads(read_small(checkpoint.path, MANIFEST), str(checkpoint.path))
        except CheckpointError:
            continue
        return checkpoint
    return None


class CheckpointManager:
    """Saves a training loop's state when it is due, and keeps as many checkpoints as asked for.

        manager = CheckpointManager("runs/a", model, optimizer, every_steps=100, keep_last=3)
        first = manager.resume()                  # steps done, 0 for a fresh run
        for step in range(first, num_steps):
            train(step)
            manager.step(step + 1)                # saves if it is due
            if manager.stopping:                  # SIGTERM came, and its checkpoint is being written
                break
        manager.close()

    every_steps, every_minutes: when `step` saves; either, both or neither.
    keep_last: how many of the newest stay. keep_every: those of steps that this divides stay as well.
    in_background: save with `async_save_checkpoint`.
    signals: on these, `step` saves once more and sets ``stopping``. () for none.

    Every rank makes one, with the same arguments, and calls its methods alike.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        model: Models,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Any] | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int = 3,
        keep_every: int | None = None,
        in_background: bool = True,
        signals: Collection[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        for name, value, least in (
            ("every_steps", every_steps, 1),
            ("every_minutes", every_minutes, 0),
            ("keep_last", keep_last, 1),
            ("keep_every", keep_every, 1),
        ):
            if value is not None and not value >= least:
                raise CheckpointError(f"{name} is {value}: must be at least {least}.")
        self.folder = Path(folder)
        self.stopping = False
        self._model, self._optimizer, self._extra = model, optimizer, dict(extra or {})
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._keep_last, self._keep_every = keep_last, keep_every
        self._in_background = in_background
        self._peers = Peers()
        self._pending: PendingSave | None = None
        self._last_saved_at = time.monotonic()
        self._asked = self._closed = False
        self._vote: tuple[torch.Tensor, Any] | None = None
        self._previous = {number: signal.signal(number, self._ask) for number in signals}
        self._votes = every_minutes is not None or bool(signals)
        # A group of its own: votes are under way while a save in the background talks to its peers.
        self._voters = Peers("votes").group if self._votes else None

    def resume(self, *, allow: Collection[str] = ()) -> int:
        """Load the newest complete checkpoint; return its number of steps, or 0 if there is none."""
        loaded = self.load_latest(allow=allow)
        return 0 if loaded is None else loaded.step or 0

    def load_latest(self, *, allow: Collection[str] = ()) -> LoadedCheckpoint | None:
        """Load the newest complete checkpoint; return what `load_checkpoint` returns, or None."""

        def newest() -> str | None:
            remove_left_over(self.folder)
            found = latest_checkpoint(self.folder)
            return None if found is None else str(found.path)

        path = self._peers.of_first(newest)
        if path is None:
            return None
        return load_checkpoint(path, self._model, self._optimizer, extra=self._extra, allow=allow)

    def step(self, step: int) -> bool:
        """Say that ``step`` steps are done; save if it is due, and return whether it was. Collective.

        A rank's clock and signals are told to the others while they compute: the ranks act on them
        together, one step later.
        """
        if self._closed:
            raise CheckpointError(f"{self.folder}: this manager is closed. Make another one.")
        is_due = self._every_steps is not None and step % self._every_steps == 0
        stop, late = self._votes_of_all()
        self.stopping = self.stopping or stop
        if is_due or stop or late:
            self.save(step)
            return True
        self._prune_after_background()
        return False

    def save(self, step: int) -> SavedCheckpoint | PendingSave:
        """Save now. Collective. A checkpoint of this step that is there already stays."""
        self.wait()
        self._last_saved_at = time.monotonic()
        path = self.folder / f"step-{step:08d}"
        is_there = self._peers.of_first(lambda: has_manifest(path))
        if self._in_background and not is_there:
            self._pending = async_save_checkpoint(
                path, self._model, self._optimizer, extra=self._extra, step=step
            )
            return self._pending
        # The same step again, as after a resume at the last one: the state is the same.
        saved = save_checkpoint(
            path, self._model, self._optimizer, extra=self._extra, step=step, overwrite=is_there
        )
        self._peers.of_first(lambda: self._point_and_prune(path))
        return saved

    def wait(self) -> None:
        """Wait for the save in the background. Collective. Raises what went wrong in it."""
        finish_background()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._peers.of_first(lambda: self._point_and_prune(pending.path))

    def close(self) -> None:
        """Wait for the last save, and give signals back to who had them. Collective."""
        try:
            if self._vote is not None:
                self._vote[1].wait()
                self._vote = None
            self.wait()
        finally:
            self._closed = True
            for number, handler in self._previous.items():
                if (
                    signal.getsignal(number) == self._ask
                ):  # else another one came since, and calls this
                    signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[signal.Signals(number)]
        if self._closed:  # a later manager gave the signal back to this one: it goes further back
            signal.signal(number, previous)
            os.kill(os.getpid(), number)
            return
        self._asked = True
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _votes_of_all(self) -> tuple[bool, bool]:
        """Return whether a rank was asked to stop, and whether it is time, as of the step before."""
        if not self._votes:
            return False, False
        late = (
            self._every_minutes is not None
            and time.monotonic() - self._last_saved_at >= 60 * self._every_minutes
        )
        mine = torch.tensor([int(self._asked), int(late and self._peers.rank == 0)])
        if self._voters is None:
            self._asked = False
            return bool(mine[0]), bool(mine[1])
        result = False, False
        if self._vote is not None:
            votes, work = self._vote
            work.wait()
            result = bool(votes[0]), bool(votes[1])
        if result[0]:
            self._asked, mine[0] = False, 0
        work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._voters, async_op=True)
        self._vote = mine, work
        return result

    def _prune_after_background(self) -> None:
        # Rank 0 alone: what is complete is known from the folder, and nobody waits for this.
        if self._pending is not None and self._peers.rank == 0 and has_manifest(self._pending.path):
            self._point_and_prune(self._pending.path)

    def _point_and_prune(self, newest: Path) -> None:
        """Name the newest checkpoint, and only then remove the oldest ones."""
        replace_durably(self.folder / LATEST, f"{newest.name}\n".encode())
        prune(self.folder, keep_last=self._keep_last, keep_every=self._keep_every)


def prune(
    folder: str | os.PathLike[str],
    *,
    keep_last: int,
    keep_every: int | None = None,
    dry_run: bool = False,
) -> list[Path]:
    """Remove checkpoints of a folder but the newest and those of steps that ``keep_every`` divides.

    Returns what was removed. It loses its name first, so that nobody takes half of one for complete.
    """
    complete = checkpoints_in(folder)
    kept = {each.path for each in complete[-keep_last:]}
    if keep_every:
        kept |= {each.path for each in complete if each.step % keep_every == 0}
    removed = [each.path for each in complete if each.path not in kept]
    if not dry_run:
        for path in removed:
            remove(path)
    return removed
