"""A ring of memory in which the ranks of one host stage what they sum.

Every rank has a part of the same size. A reduction takes a stretch, the same bytes of every part.
Offsets follow from the sequence of reductions, which is the same on all ranks, so no message
carries them.

[Note: Life of a stretch] Two counters per rank hold the number of the last reduction that the rank
has staged (POSTED) and summed (CONSUMED):

    claim            wait until CONSUMED of all ranks covers what the stretch held before
    copy gradients   into this rank's part of the stretch
    post             POSTED = sequence
    ...              other units' backward; the sum is formed when it is asked for
    finish           wait until POSTED of all ranks covers it; sum; CONSUMED = sequence

A rank waits for CONSUMED only after it has formed its own sums up to there, and for POSTED only of
what it has posted itself. So ranks that run the same sequence never wait in a circle.

Counters say what a rank's *host* has done. Where a device works behind the host's back, an `Order`
adds what its streams have to wait for.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.errors import CommError
from fullshard.plan.sizes import round_up

# Bytes of a cache line. Stretches and the fields in them begin on one, so that ranks which write
# next to each other do not share a line, and every dtype is aligned.
LINE = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """Bytes [start, stop) of every rank's part, which hold reduction number ``sequence``."""

    sequence: int
    start: int
    stop: int


class Order:
    """Hooks for what has to be ordered besides counters. On the CPU, that is nothing."""

    def before_post(self, sequence: int) -> None:
        """Run when this rank has staged a reduction, before its counter says so."""

    def before_read(self, sequence: int) -> None:
        """Run when all ranks have posted a reduction, before this rank reads their parts."""

    def before_release(self, sequence: int) -> None:
        """Run when this rank has read a reduction, before its counter says so."""

    def before_reuse(self, sequence: int) -> None:
        """Run when all ranks have read a reduction, before this rank writes to its stretch."""


class Ring:
    """The stretches in use, and the posted reductions whose sums this rank has yet to form.

    nbytes: size of each rank's part.
    enlarge: called to make every rank's part this large. All ranks call it at the same place of
        their sequence, with no reduction under way.
    max_under_way: number of reductions that may be staged and not yet read by all ranks; None for
        any number that fits.
    """

    def __init__(
        self,
        memory: SharedMemory,
        enlarge: Callable[[int], None],
        order: Order | None = None,
        max_under_way: int | None = None,
    ) -> None:
        self.nbytes = 0
        self._memory = memory
        self._enlarge = enlarge
        self._order = order or Order()
        self._max_under_way = max_under_way
        self._next = 0  # byte at which the next stretch begins if it fits before the end
        self._sequence = 0  # number of the last reduction that was claimed; the first one is 1
        # Oldest first. Stretches that all ranks have consumed stay until somebody waits for them.
        self._stretches: collections.deque[Stretch] = collections.deque()
        self._pending: collections.deque[PendingSum] = collections.deque()

    def prepare(self, staged_nbytes: Sequence[int]) -> None:
        """Make the ring large enough for reductions that stage this many bytes each.

        Raises UnavailableError on every rank if one of them cannot get the memory.
        """
        sizes = sorted(staged_nbytes, reverse=True)
        if sizes:
            # Room for the largest alone, or for two of the second size: one that is summed while
            # the other is filled. Room for two of the largest would mostly lie idle, since the
            # largest is often an embedding.
            self._reserve(max(sizes[0], 2 * sizes[min(1, len(sizes) - 1)]))

    def claim(self, nbytes: int, label: str) -> Stretch:
        """Take the next stretch. Returns once all ranks have read what it held before.

        Raises DivergenceError if another rank reduces something else at this place.
        """
        # Before anything else: with other sizes, only some ranks would enlarge the ring, which is
        # collective, and they would wait for ever.
        self._memory.record.enter(label, nbytes)
        nbytes = round_up(nbytes, LINE)
        try:
            self._reserve(nbytes)
        # `prepare` was told less, and in the middle of backward it is too late for another way.
        except UnavailableError as reason:
            raise CommError(
                f"{label}: {reason}. Raise the limit, or use set_default_comm('process_group')."
            ) from reason
        # A stretch never wraps around the end, since a reduction is one contiguous tensor.
        start = self._next if self._next + nbytes <= self.nbytes else 0
        stop = start + nbytes
        held = [
            each.sequence for each in self._stretches if each.start < stop and start < each.stop
        ]
        if self._max_under_way is not None:
            # The reduction that used this one's turn of events and flags (see `device_memory`).
            held.append(self._sequence + 1 - self._max_under_way)
        # The latest is enough: sums are formed in order, so what came before it is consumed too.
        if held and max(held) > 0:
            self._wait_consumed(max(held), label)
        self._sequence += 1
        self._next = stop
        stretch = Stretch(self._sequence, start, stop)
        self._stretches.append(stretch)
        return stretch

    def post(
        self, stretch: Stretch, finish: Callable[[], tuple[bool, ...]], label: str
    ) -> "PendingSum":
        """Tell the other ranks that this rank has staged its terms.

        finish: forms this rank's sum, and returns for each parameter whether any rank had a
            gradient. Called once, when all ranks have posted.
        """
        self._order.before_post(stretch.sequence)
        # `set` makes the terms visible first: a rank that reads the counter may read them.
        self._memory.set(SharedMemory.POSTED, stretch.sequence)
        pending = PendingSum(self, stretch.sequence, finish, label)
        self._pending.append(pending)
        return pending

    def finish_through(self, sequence: int) -> None:
        """Form this rank's sums of all reductions up to ``sequence``."""
        # In order, since one counter says how many are consumed: it must not run past a reduction
        # that this rank still has to read.
        while self._pending and self._pending[0].sequence <= sequence:
            pending = self._pending.popleft()
            self._memory.wait_all(SharedMemory.POSTED, pending.sequence, pending.label)
            self._order.before_read(pending.sequence)
            pending.result = pending.finish()
            # Only now: the counter allows other ranks to overwrite their parts.
            self._order.before_release(pending.sequence)
            self._memory.set(SharedMemory.CONSUMED, pending.sequence)

    def abandon(self) -> None:
        """Drop the sums that will never be formed, after an exception."""
        # Their counter moves on all the same: peers that go on would wait for it in `claim`.
        self._pending.clear()
        self._order.before_release(self._sequence)
        self._memory.set(SharedMemory.CONSUMED, self._sequence)

    def _reserve(self, nbytes: int) -> None:
        """Enlarge the ring if it is smaller. Every rank comes here with the same sizes."""
        if nbytes <= self.nbytes:
            return
        # New memory replaces the old one, so nobody may have anything to read in it.
        if self._stretches:
            self._wait_consumed(self._stretches[-1].sequence, "enlarging the gradient ring")
        self._enlarge(nbytes)
        self.nbytes = nbytes
        self._next = 0

    def _wait_consumed(self, sequence: int, label: str) -> None:
        """Return once all ranks have read every reduction up to ``sequence``."""
        # This rank's own sums first: others wait for its counter as it waits for theirs.
        self.finish_through(sequence)
        self._memory.wait_all(SharedMemory.CONSUMED, sequence, label)
        self._order.before_reuse(sequence)
        while self._stretches and self._stretches[0].sequence <= sequence:
            self._stretches.popleft()


@dataclasses.dataclass(slots=True, eq=False)
class PendingSum:
    """A posted reduction whose sum this rank forms when ``wait`` is called, or earlier.

    tensors: none, since gradients were copied into the ring when it was started.
    """

    ring: Ring
    sequence: int
    finish: Callable[[], tuple[bool, ...]]
    label: str
    result: tuple[bool, ...] = ()
    tensors: ClassVar[tuple[torch.Tensor, ...]] = ()

    def wait(self) -> tuple[bool, ...]:
        self.ring.finish_through(self.sequence)
        return self.result
