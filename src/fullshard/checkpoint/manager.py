"""`CheckpointManager`: checkpoints of a training loop, when and how many, and which one to go on from.

runs/books/
  step-00000300/    complete
  step-00000350/    complete, the newest
  latest            the name of the newest: "step-00000350"
"""

import os
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from fullshard.checkpoint.content import Models, Optimizers, named
from fullshard.checkpoint.folder import Folder, Location, folder_at
from fullshard.checkpoint.load import LoadedCheckpoint, load_checkpoint
from fullshard.checkpoint.manifest import MANIFEST, loads
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.save import (
    PendingSave,
    SavedCheckpoint,
    SaveRequest,
    finish_background,
    save_later,
    save_now,
)
from fullshard.errors import CheckpointError, DamagedCheckpointError
from fullshard.process_hooks import AFTER_FORK, set_signal

LATEST = "latest"
_CAN_BE_HEARD = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
# With a second number where an abandoned one has kept its name.
_NAME = re.compile(r"step-(\d{1,18})(-\d+)?")


Sizes = dict[str, dict[str, int]]  # of a checkpoint's files, by its location and their names


class Checkpoint(NamedTuple):
    """A complete checkpoint of a folder, and the number of steps it has behind it.

    path: a string if it is a URL.
    """

    step: int
    path: Path | str

    def __fspath__(self) -> str:
        return str(self.path)


def _complete_in(parent: Folder) -> list[tuple[int, Folder]]:
    return [(step, found) for step, found in _steps_in(parent) if _is_complete(found)]


def _is_complete(folder: Folder) -> bool:
    return folder.size_of(MANIFEST) is not None


def _steps_in(parent: Folder) -> list[tuple[int, Folder]]:
    """Return the complete checkpoints by their steps, and those whose manifest is gone."""
    found = []
    for folder in parent.children():
        match = _NAME.fullmatch(folder.name)
        if match and (_is_complete(folder) or folder.has_lost_manifest()):
            found.append((int(match[1]), folder))
    return sorted(found, key=lambda each: each[0])


def latest_checkpoint(folder: Location) -> Checkpoint | None:
    """Return the checkpoint with the most steps that has all its files, or None. See `_fault_of`.

    Warns of damaged ones with more.
    """
    for step, found in reversed(_steps_in(folder_at(folder))):
        fault = _fault_of(found, {})
        if not fault:
            return Checkpoint(step, found.location)
        warnings.warn(
            f"{found} is damaged, so it is not taken for the newest: {fault}",
            UserWarning,
            stacklevel=2,
        )
    return None


def _fault_of(folder: Folder, known: Sizes) -> str:
    """Say why a checkpoint cannot be loaded; "" if its manifest is undamaged and files are of their sizes.

    What is in the files is not read, and a manifest once: known has what it said.
    """
    try:
        sizes = folder.sizes()
        wanted = known.get(str(folder), {})
        if not wanted or not wanted.items() <= sizes.items():
            manifest = loads(folder.read_small(MANIFEST), f"{folder}/{MANIFEST}")
            wanted = {file.name: file.nbytes for file in manifest.files}
            known[str(folder)] = {**wanted, MANIFEST: sizes.get(MANIFEST, 0)}
    except (CheckpointError, OSError) as error:
        return str(error)
    for name, nbytes in wanted.items():
        if sizes.get(name) != nbytes:
            return f"{folder}/{name}: has {sizes.get(name, 0)} bytes instead of {nbytes}."
    return ""


def retained(
    steps: Sequence[int],
    is_sound: Callable[[int], bool],
    *,
    keep_last: int,
    keep_every: int | None = None,
) -> set[int]:
    """Return the steps whose checkpoints stay.

        steps 1 to 6, of which 5 is damaged, keep_last 2, keep_every 3  ->  {3, 4, 5, 6}

    These are the newest ``keep_last`` that are sound, damaged ones that are newer than those, and those that
    ``keep_every`` divides. is_sound: is asked about as few as possible.
    """
    kept: set[int] = set()
    num_sound = 0
    for step in sorted(steps, reverse=True):
        if num_sound == keep_last:
            break
        kept.add(step)
        num_sound += is_sound(step)
    return kept | {step for step in steps if keep_every and step % keep_every == 0}


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
    keep_last: how many of the newest stay; None for all. keep_every: those of steps that this divides stay as well.
    in_background: save with `async_save_checkpoint`.
    signals: on these, `step` saves once more and sets ``stopping``. () for none. Python hears them in the main
    thread alone: made in another one, a manager works without, and says so. Forks of this process have theirs back.
    extra: each save takes what the dict has then. Objects in it are loaded by `resume`; other values are
    returned by `load_latest`.

    Every rank makes one, with the same arguments, and calls its methods alike. In a ``with`` statement it
    closes itself; without waiting if an exception leaves it, as the other ranks may be elsewhere then.
    """

    def __init__(
        self,
        folder: Location,
        model: Models,
        optimizer: Optimizers = None,
        *,
        extra: Mapping[str, Any] | None = None,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        in_background: bool = True,
        signals: Collection[signal.Signals] = (signal.SIGTERM,),
    ) -> None:
        def checked() -> Folder:
            if not isinstance(extra, Mapping | None):
                raise CheckpointError(f"extra is {extra!r:.80}: give a dict.")
            numbers = cast("object", signals)  # whatever a user has passed
            if not isinstance(numbers, Collection) or not {*numbers} <= _CAN_BE_HEARD:
                raise CheckpointError(
                    f"signals is {signals!r:.80}: give those that a program can hear, (signal.SIGTERM,) for one."
                )
            _check_counts(every_steps=every_steps, keep_last=keep_last, keep_every=keep_every)
            if type(every_minutes) not in (int, float, type(None)) or not (every_minutes or 0) >= 0:
                raise CheckpointError(f"every_minutes is {every_minutes!r}: must be at least 0.")
            for objects, section in ((model, "model"), (optimizer, "optimizer")):
                named(objects, section)  # which says what is none
            return folder_at(folder, lasting=True)

        self._peers = Peers(call="CheckpointManager")
        self._folder = self._peers.together(checked)
        self.stopping = False
        self._model, self._optimizer = model, optimizer
        # The program's: each save takes what it has then.
        self._extra = {} if extra is None else extra
        self._every_steps, self._every_minutes = every_steps, every_minutes
        self._keep_last, self._keep_every = keep_last, keep_every
        self._in_background = in_background
        self._own_steps: set[int] = set()  # the steps that were loaded or saved here
        self._known: Sizes = {}
        self._last_saved_at = time.monotonic()
        self._asked = self._closed = False
        self._unsaved: int | None = None  # the steps that are done, if no checkpoint is of them
        self._vote: tuple[torch.Tensor, Any] | None = None
        self._is_vote_older = False  # than the last save
        self._previous: dict[int, Any] = {}  # what was called on a signal before
        self._hears = False  # whether signals are this manager's
        self._hear(signals)
        self._votes = every_minutes is not None or bool(signals)  # on every rank, if on one
        # A group of its own: votes are under way while a save in the background talks to its peers.
        self._voters = Peers("votes").group if self._votes else None

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._give_signals_back()

    @property
    def folder(self) -> Path | str:
        """The folder of the checkpoints; a string if it is a URL."""
        return self._folder.location

    def resume(self, *, allow: Collection[str] = ()) -> int:
        """Load the newest complete checkpoint; return its number of steps, or 0 if there is none."""
        loaded = self.load_latest(allow=allow)
        return 0 if loaded is None else loaded.step or 0

    def load_latest(self, *, allow: Collection[str] = ()) -> LoadedCheckpoint | None:
        """Load the newest complete checkpoint; return what `load_checkpoint` returns, or None.

        Where its files are damaged, an older one is loaded, with a warning. A save in the background is
        waited for: it may be the newest.
        """
        self.wait()

        def complete() -> list[tuple[int, str]]:
            self._folder.remove_left_over()
            return [(step, str(found)) for step, found in reversed(_steps_in(self._folder))]

        complete_ones = self._peers.of_first(complete)
        for number, (step, path) in enumerate(complete_ones):
            try:
                loaded = load_checkpoint(
                    path, self._model, self._optimizer, extra=self._extra, allow=allow
                )
                self._own_steps.add(step)
                return loaded
            except DamagedCheckpointError as error:  # on every rank, if on one
                if number + 1 == len(complete_ones):
                    raise
                warnings.warn(
                    f"{path} is damaged, so the checkpoint before it is loaded: {error}",
                    stacklevel=2,
                )
        return None

    def step(self, step: int) -> bool:
        """Say that ``step`` steps are done; save if it is due, and return whether it was. Collective.

        A rank's clock and signals are told to the others while they compute: the ranks act on them
        together, one step later.
        """
        self._check(step)
        is_due = self._every_steps is not None and step % self._every_steps == 0
        stop, late = self._heard()
        self.stopping = self.stopping or stop
        saves = is_due or stop or late
        self._unsaved = step
        if saves:
            self.save(step)
        self._tell()
        return saves

    def save(self, step: int) -> SavedCheckpoint | PendingSave:
        """Save now. Collective. One of this step that this manager has loaded or saved is replaced.

        Others of as many steps or more are renamed, with a warning: they are of another course of training.
        """
        self._check(step)
        self.wait()
        self._unsaved = None
        self._last_saved_at = time.monotonic()
        self._is_vote_older = self._vote is not None

        def prepare() -> tuple[str, bool]:
            self._abandon_after(step)
            name, number, taken = f"step-{step:08d}", 1, self._folder.abandoned()
            while name in taken:
                number += 1
                name = f"step-{step:08d}-{number}"
            return name, _is_complete(self._folder.child(name))

        name, is_there = self._peers.of_first(prepare)
        target = self._folder.child(name)
        self._own_steps.add(step)
        request = SaveRequest(
            target.location,
            self._model,
            self._optimizer,
            dict(self._extra),
            step,
            overwrite=is_there,
            then=lambda: self._point_and_prune(target),
        )
        # The same step again, as after a resume at the last one: the state is the same.
        if not self._in_background or is_there:
            return save_now(request)
        return save_later(request)

    def wait(self) -> None:
        """Wait for the save in the background. Collective. Raises what went wrong in it."""
        finish_background()

    def close(self) -> None:
        """Wait for the last save, and give signals back to who had them. Collective.

        If a rank was asked to stop in the last step, that is saved, if it was not yet.
        """
        try:
            if not self._closed and self._heard()[0]:
                self.stopping = True
                if self._unsaved is not None:
                    self.save(self._unsaved)
            self.wait()
        finally:
            self._give_signals_back()

    def _hear(self, signals: Collection[signal.Signals]) -> None:
        if not signals:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(signal.Signals(number).name for number in signals)
            warnings.warn(
                f"{self.folder}: this manager does not hear {names}, since it is made outside of the main thread, "
                "where Python hears signals. It saves when it is due. Make it in the main thread, or pass signals=().",
                UserWarning,
                stacklevel=3,
            )
            return
        self._hears = True
        _hearing.append(self)
        AFTER_FORK.add(_stop_hearing, "signals that ask for a checkpoint are the parent's")
        for number in signals:
            self._previous[number] = signal.getsignal(number) or signal.SIG_DFL
            set_signal(number, self._ask, why="saves a checkpoint before the process ends")

    def _give_signals_back(self) -> None:
        self._closed = True
        if self._hears and threading.current_thread() is threading.main_thread():
            self.stop_hearing()

    def stop_hearing(self) -> None:
        """Give signals back to who had them, in the main thread."""
        self._hears = False
        _hearing.remove(self)
        for number, handler in self._previous.items():
            if signal.getsignal(number) == self._ask:  # else another one came since, and calls this
                set_signal(number, handler)

    def _check(self, step: int) -> None:
        if self._closed:
            raise CheckpointError(f"{self.folder}: this manager is closed. Make another one.")
        if type(step) is not int or step < 0:
            raise CheckpointError(f"step is {step!r}: give the number of steps that are done.")

    def _ask(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if self._closed or not self._hears:
            # A later one gave the signal back: it goes further back.
            set_signal(number, previous)
            os.kill(os.getpid(), number)
            return
        self._asked = True
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _heard(self) -> tuple[bool, bool]:
        """Return whether a rank was asked to stop, and whether it is time, as of the step before."""
        if not self._votes:
            return False, False
        if self._voters is None:
            votes = self._own_votes()
        elif self._vote is None:
            return False, False
        else:
            votes, work = self._vote
            work.wait()
            self._vote = None
        stop, late = map(bool, votes)
        if stop:
            self._asked = False
        return stop, late and not self._is_vote_older

    def _tell(self) -> None:
        """Tell the others, after a save, whether this rank was asked to stop, and whether it is time."""
        self._is_vote_older = False
        if self._voters is not None:
            mine = self._own_votes()
            work = dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._voters, async_op=True)
            self._vote = mine, work

    def _own_votes(self) -> torch.Tensor:
        late = (
            self._peers.rank == 0
            and self._every_minutes is not None
            and time.monotonic() - self._last_saved_at >= 60 * self._every_minutes
        )
        return torch.tensor([int(self._asked), int(late)], device="cpu")

    def _abandon_after(self, step: int) -> None:
        """Set the checkpoints of another course of training aside, so that none is taken for the newest.

        Training went back to an earlier one, or began anew in a folder of another run.
        """
        later = [
            found
            for number, found in _steps_in(self._folder)
            if number > step or (number == step and step not in self._own_steps)
        ]
        if not later:
            return
        now = self._folder.abandon([found.name for found in later])
        if left := _complete_in(self._folder):
            self._folder.replace_small(LATEST, f"{left[-1][1].name}\n".encode())
        warnings.warn(
            f"{self.folder}: {', '.join(found.name for found in later)} are of step {step} or later, of which a "
            "checkpoint is saved now: training went back or began anew, or another job saves here. They are "
            f"{now}. Nothing goes on from them or removes them; do so when you do not need them.",
            UserWarning,
            stacklevel=2,
        )

    def _point_and_prune(self, newest: Folder) -> None:
        """Name the newest checkpoint, and only then remove the oldest ones."""
        self._folder.replace_small(LATEST, f"{newest.name}\n".encode())
        if self._keep_last is not None:
            _prune(self._folder, self._keep_last, self._keep_every, self._known)


_hearing: list[CheckpointManager] = []  # the last one is called first


def _stop_hearing() -> None:
    """Give signals back in a process that was forked: it is none of the training, and SIGTERM is to end it."""
    for manager in reversed([*_hearing]):
        manager.stop_hearing()


def _check_counts(**counts: int | None) -> None:
    for name, count in counts.items():
        if count is not None and (type(count) is not int or count < 1):
            raise CheckpointError(f"{name} is {count!r}: must be at least 1, a whole number.")


def prune_checkpoints(
    folder: Location,
    *,
    keep_last: int,
    keep_every: int | None = None,
    dry_run: bool = False,
) -> list[Checkpoint]:
    """Remove checkpoints of a folder but the newest and those of steps that ``keep_every`` divides.

    Only those that can be loaded count, as far as names and sizes of files tell; another one that is newer
    than those stays, with a warning. Returns what was removed. It loses its name first, so that nobody
    takes half of one for complete.
    Files in it that no save has written stay, with a warning. What saves and removals that died have left is
    removed, too. Raises CheckpointError for a folder that is a checkpoint itself.
    """
    _check_counts(keep_last=keep_last, keep_every=keep_every)
    parent = folder_at(folder)
    if _is_complete(parent):
        raise CheckpointError(
            f"{folder}: is a checkpoint. Name the folder that holds it and others."
        )
    if not dry_run:
        parent.remove_left_over()
    return _prune(parent, keep_last, keep_every, {}, dry_run=dry_run)


def _prune(
    parent: Folder, keep_last: int, keep_every: int | None, known: Sizes, *, dry_run: bool = False
) -> list[Checkpoint]:
    complete = _complete_in(parent)
    by_step = dict(complete)

    def is_sound(step: int) -> bool:
        if fault := _fault_of(by_step[step], known):
            warnings.warn(
                f"{by_step[step]} is damaged, so it does not count among those to keep, and stays: {fault}",
                UserWarning,
                stacklevel=5,
            )
        return not fault

    kept = retained([*by_step], is_sound, keep_last=keep_last, keep_every=keep_every)
    removed = [(step, found) for step, found in complete if step not in kept]
    for _, found in () if dry_run else removed:
        if others := found.remove():
            warnings.warn(
                f"{found} is removed, but for files that no save has written: {', '.join(others[:5])}.",
                UserWarning,
                stacklevel=3,
            )
    return [Checkpoint(step, found.location) for step, found in removed]
