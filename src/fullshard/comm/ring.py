"""A ring of memory in which the ranks of one host stage what they sum.

Every rank has a part of the same size. A reduction takes a stretch, the same in every part: a rank
writes there, posts a counter, and sums what all ranks have posted. A stretch is used again once
all ranks have consumed it. Offsets follow from the sequence of reductions, which is the same on
all ranks, so no message carries them.

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

LINE = 64  # stretches and what is in them begin on cache lines


@dataclasses.dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of the ring, the same in every rank's part, holding reduction ``sequence``."""

    sequence: int
    start: int
    stop: int


class Order:
    """What has to be ordered besides counters: on the CPU, nothing."""

    def before_post(self, sequence: int) -> None:
        """This rank has staged a reduction, and is about to say so."""

    def before_read(self, sequence: int) -> None:
        """All ranks have posted it; this one is about to read."""

    def before_release(self, sequence: int) -> None:
        """This rank has read it, and is about to say so."""

    def before_reuse(self, sequence: int) -> None:
        """All ranks have consumed it; this one is about to write there."""


class Ring:
    """The stretches in use, and the reductions of which this rank has not formed its sum yet.

    enlarge: makes every rank's part this large, with no reduction under way. Every rank comes to it
        at the same point.
    max_under_way: how many reductions may wait for a rank to consume them; None is any number.
    """

    def __init__(
        self,
        memory: SharedMemory,
        enlarge: Callable[[int], None],
        order: Order | None = None,
        max_under_way: int | None = None,
    ) -> None:
        self.nbytes = 0  # of one rank's part
        self._memory = memory
        self._enlarge = enlarge
        self._order = order or Order()
        self._max_under_way = max_under_way
        self._next = 0
        self._sequence = 0
        self._stretches: collections.deque[Stretch] = collections.deque()
        self._pending: collections.deque[PendingSum] = collections.deque()

    def prepare(self, staged_nbytes: Sequence[int]) -> None:
        """Make room for reductions that stage this much. Raises UnavailableError if there is none."""
        sizes = sorted(staged_nbytes, reverse=True)
        if sizes:
            # The largest alone, or two of the next size at once: the one being summed and the one
            # being filled. Room for two of the largest would mostly be air (an embedding).
            self._reserve(max(sizes[0], 2 * sizes[min(1, len(sizes) - 1)]))

    def claim(self, nbytes: int, label: str) -> Stretch:
        """Take the next stretch, once all ranks have consumed what it held.

        Raises DivergenceError if another rank reduces something else here. It is asked first: a
        ring that only some ranks enlarge would make them wait for ever.
        """
        self._memory.ledger.enter(label, nbytes)
        nbytes = round_up(nbytes, LINE)
        try:
            self._reserve(nbytes)
        except UnavailableError as reason:  # more than `prepare` was told, and too late to change
            raise CommError(
                f"{label}: {reason}. Raise the limit, or use set_default_comm('process_group')."
            ) from reason
        start = self._next if self._next + nbytes <= self.nbytes else 0
        stop = start + nbytes
        held = [
            each.sequence for each in self._stretches if each.start < stop and start < each.stop
        ]
        if self._max_under_way is not None:
            held.append(self._sequence + 1 - self._max_under_way)
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
        """Tell the others that this rank has staged its terms; ``finish`` forms its sum."""
        self._order.before_post(stretch.sequence)
        self._memory.set(SharedMemory.POSTED, stretch.sequence)
        pending = PendingSum(self, stretch.sequence, finish, label)
        self._pending.append(pending)
        return pending

    def finish_through(self, sequence: int) -> None:
        """Sum everything up to ``sequence``, in order: one counter says what is consumed."""
        while self._pending and self._pending[0].sequence <= sequence:
            pending = self._pending.popleft()
            self._memory.wait_all(SharedMemory.POSTED, pending.sequence, pending.label)
            self._order.before_read(pending.sequence)
            pending.result = pending.finish()
            self._order.before_release(pending.sequence)
            self._memory.set(SharedMemory.CONSUMED, pending.sequence)

    def abandon(self) -> None:
        """Forget what was posted and never summed."""
        self._pending.clear()
        self._order.before_release(self._sequence)
        self._memory.set(SharedMemory.CONSUMED, self._sequence)

    def _reserve(self, nbytes: int) -> None:
        if nbytes <= self.nbytes:
            return
        if self._stretches:
            self._wait_consumed(self._stretches[-1].sequence, "enlarging the gradient ring")
        self._enlarge(nbytes)
        self.nbytes = nbytes
        self._next = 0

    def _wait_consumed(self, sequence: int, label: str) -> None:
        self.finish_through(sequence)
        self._memory.wait_all(SharedMemory.CONSUMED, sequence, label)
        self._order.before_reuse(sequence)
        while self._stretches and self._stretches[0].sequence <= sequence:
            self._stretches.popleft()


@dataclasses.dataclass(slots=True, eq=False)
class PendingSum:
    """A posted reduction of which this rank has not formed its sum yet."""

    ring: Ring
    sequence: int
    finish: Callable[[], tuple[bool, ...]]
    label: str
    result: tuple[bool, ...] = ()
    tensors: ClassVar[tuple[torch.Tensor, ...]] = ()

    def wait(self) -> tuple[bool, ...]:
        self.ring.finish_through(self.sequence)
        return self.result
