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

Counters say what a rank's *host* has done. Where a device works behind the host's back, `before_post` and what
follows it add what its streams have to wait for.
"""

import abc
import collections
import dataclasses
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist

from fullshard.comm.interface import Comm, Sum, Work, add_in_order
from fullshard.comm.packing import copy_in_gradients
from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.errors import CommError
from fullshard.peers.flight_record import keep_record
from fullshard.plan.layout import BucketLayout, round_up
from fullshard.plan.ways import LINE, RingStretch, place_stretch, ring_nbytes


@dataclasses.dataclass(eq=False)
class PendingSum:
    """A posted reduction whose sum this rank forms when ``wait`` is called, or earlier.

    finish: forms the sum, and returns for each parameter whether any rank had a gradient. Called once, when all ranks
        have posted.
    tensors: none, since gradients were copied into the ring when it was started.
    """

    comm: "StagingComm"
    sequence: int
    finish: Callable[[], tuple[bool, ...]]
    result: tuple[bool, ...] = ()
    tensors: ClassVar[tuple[torch.Tensor, ...]] = ()

    def wait(self) -> tuple[bool, ...]:
        self.comm.finish_through(self.sequence)
        return self.result


class StagingComm(Comm):
    """Communication of ranks of one host that stage what they sum in a ring, whose parts a subclass keeps.

    memory: what their hosts share. ring_nbytes: size of each rank's part of the ring.
    max_under_way: number of reductions that may be staged and not yet read by all ranks; None for any number that fits.
    """

    max_under_way: int | None = None

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.memory = SharedMemory(group)
        self.record = self.memory.record = keep_record(group, self.memory.record)
        self.rank, self.size = self.memory.rank, self.memory.size
        self.ring_nbytes = 0
        self._next = 0  # byte at which the next stretch begins if it fits before the end
        self._sequence = 0  # number of the last reduction that was claimed; the first one is 1
        # Oldest first. Stretches that all ranks have consumed stay until somebody waits for them.
        self._stretches: collections.deque[RingStretch] = collections.deque()
        # Not summed here yet, by sequence. Of a model that is gone, after an exception, a sum is gone with it, but its
        # counter moves on.
        self._pending: collections.deque[tuple[int, weakref.ref[PendingSum], str]] = (
            collections.deque()
        )

    # What a subclass keeps

    @abc.abstractmethod
    def enlarge(self, nbytes: int) -> None:
        """Replace the ring's parts by larger ones. Every rank calls it together, with no reduction under way."""

    @abc.abstractmethod
    def _part(
        self, stretch: RingStretch, rank: int, offset: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a view of what ``rank`` staged, from byte ``offset`` of the stretch on."""

    @abc.abstractmethod
    def _flags(self, stretch: RingStretch, num_params: int) -> list[memoryview]:
        """Return where each rank writes which gradients it has, one byte each, for all hosts to read."""

    def _flags_nbytes(self, num_params: int) -> int:
        """Return how many bytes at the beginning of a stretch its flags take."""
        return 0

    # What has to be ordered besides counters, for a reduction by its number. On the CPU, that is nothing.

    def before_post(self, sequence: int) -> None:
        """Run when this rank has staged it, before its counter says so."""

    def before_read(self, sequence: int) -> None:
        """Run when all ranks have posted it, before this rank reads their parts."""

    def before_release(self, sequence: int) -> None:
        """Run when this rank has read it, before its counter says so."""

    def before_reuse(self, sequence: int) -> None:
        """Run when all ranks have read it, before this rank writes to its stretch."""

    # Reductions

    def staged_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        payload_nbytes = self.size * bucket.shard_numel * wire_dtype.itemsize
        return self._flags_nbytes(len(bucket.params)) + payload_nbytes

    def summed_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        return self._flags_nbytes(len(bucket.params)) + super().summed_nbytes(bucket, wire_dtype)

    @property
    def staging(self) -> Sequence[torch.Tensor]:
        nbytes = self.ring_nbytes
        whole = RingStretch(0, 0, nbytes)
        return [self._part(whole, self.rank, 0, nbytes, torch.uint8)] if nbytes else []

    def prepare(self, staged_nbytes: Sequence[int]) -> None:
        if staged_nbytes:
            self._reserve(ring_nbytes(staged_nbytes))

    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: Callable[[], torch.Tensor],
        how: Sum,
    ) -> Work:
        wire, numel = how.wire_dtype, bucket.shard_numel
        # Returns once all ranks have read what this stretch held before, so it may be overwritten.
        stretch = self._claim(self.staged_nbytes(bucket, wire), how.label)
        start = self._flags_nbytes(len(grads))
        # For all ranks, into this rank's part alone. The gradients may be freed after it.
        staged = self._part(stretch, self.rank, start, self.size * numel, wire)
        copy_in_gradients(bucket, grads, staged, divisor=how.scaling.before)
        present = [grad is not None for grad in grads]
        start += self.rank * numel * wire.itemsize
        return self._post(stretch, start, present, out, how, divisor=how.scaling.after)

    def all_reduce(self, total: torch.Tensor, present: tuple[bool, ...], how: Sum) -> Work:
        wire, numel, start = how.wire_dtype, total.numel(), self._flags_nbytes(len(present))
        stretch = self._claim(start + numel * wire.itemsize, how.label)
        self._part(stretch, self.rank, start, numel, wire).copy_(total)
        return self._post(stretch, start, present, lambda: total, how, divisor=1.0)

    def agree(self, bits: int, num_bits: int) -> int:
        return self.memory.agree(bits, num_bits)

    def abandon(self) -> None:
        # Their counter moves on all the same: peers that go on would wait for it in `_claim`.
        self._pending.clear()
        self.before_release(self._sequence)
        self.memory.set(SharedMemory.CONSUMED, self._sequence)

    # The life of a stretch

    def _claim(self, nbytes: int, label: str) -> RingStretch:
        """Take the next stretch. Returns once all ranks have read what it held before.

        Raises DivergenceError if another rank reduces something else at this place.
        """
        # Before anything else: with other sizes, only some ranks would enlarge the ring, which is
        # collective, and they would wait for ever.
        self.memory.record.enter(label, nbytes)
        nbytes = round_up(nbytes, LINE)
        if nbytes > self.ring_nbytes:
            try:
                self._reserve(nbytes)
            # `prepare` was told less, and in the middle of backward it is too late for another way.
            except UnavailableError as reason:
                raise CommError(
                    f"{label}: {reason}. Raise the limit, or use set_default_comm('process_group')."
                ) from reason
        # The latest is enough: sums are formed in order, so what came before it is consumed too.
        start, latest = place_stretch(nbytes, self._next, self.ring_nbytes, self._stretches)
        stop = start + nbytes
        if self.max_under_way is not None:
            # The reduction that used this one's turn of events and flags (see `device_memory`).
            latest = max(latest, self._sequence + 1 - self.max_under_way)
        if latest > 0:
            self._wait_consumed(latest, label)
        self._sequence += 1
        self._next = stop
        stretch = RingStretch(self._sequence, start, stop)
        self._stretches.append(stretch)
        return stretch

    def _post(
        self,
        stretch: RingStretch,
        start: int,
        present: Sequence[bool],
        out: Callable[[], torch.Tensor],
        how: Sum,
        *,
        divisor: float,
    ) -> Work:
        """Tell the others what is staged. ``out`` gets the sum of all ranks' terms, from byte ``start`` of the stretch on."""
        flags = self._flags(stretch, len(present))
        flags[self.rank][:] = bytes(present)

        # Called once all ranks have posted this stretch, before they are told that this rank has read it.
        def finish() -> tuple[bool, ...]:
            # Memory for the sum is asked for now, when the gradients were freed: it may be theirs.
            total = out()
            parts = (
                self._part(stretch, rank, start, total.numel(), how.wire_dtype)
                for rank in range(self.size)
            )
            # On this rank's device: a view if it is there, else a copy.
            terms = [part.to(total.device, non_blocking=True) for part in parts]
            add_in_order(terms, total, divisor=divisor)
            return tuple(map(any, zip(*flags, strict=True)))

        self.before_post(stretch.sequence)
        # `set` makes the terms visible first: a rank that reads the counter may read them.
        self.memory.set(SharedMemory.POSTED, stretch.sequence)
        pending = PendingSum(self, stretch.sequence, finish)
        self._pending.append((stretch.sequence, weakref.ref(pending), how.label))
        return pending

    def finish_through(self, sequence: int) -> None:
        """Form this rank's sums of all reductions up to ``sequence``."""
        # In order, since one counter says how many are consumed: it must not run past a reduction
        # that this rank still has to read.
        while self._pending and self._pending[0][0] <= sequence:
            number, reference, label = self._pending.popleft()
            self.memory.wait_all(SharedMemory.POSTED, number, label)
            self.before_read(number)
            if (pending := reference()) is not None:
                pending.result = pending.finish()
            # Only now: the counter allows other ranks to overwrite their parts.
            self.before_release(number)
            self.memory.set(SharedMemory.CONSUMED, number)

    def _reserve(self, nbytes: int) -> None:
        """Enlarge the ring if it is smaller. Every rank comes here with the same sizes."""
        if nbytes <= self.ring_nbytes:
            return
        # New memory replaces the old one, so nobody may have anything to read in it.
        if self._stretches:
            self._wait_consumed(self._stretches[-1].sequence, "enlarging the gradient ring")
        nbytes = round_up(nbytes, mmap.PAGESIZE)
        self.enlarge(nbytes)
        self.ring_nbytes = nbytes
        self._next = 0

    def _wait_consumed(self, sequence: int, label: str) -> None:
        """Return once all ranks have read every reduction up to ``sequence``."""
        # This rank's own sums first: others wait for its counter as it waits for theirs.
        if self._pending:
            self.finish_through(sequence)
        self.memory.wait_all(SharedMemory.CONSUMED, sequence, label)
        self.before_reuse(sequence)
        while self._stretches and self._stretches[0].sequence <= sequence:
            self._stretches.popleft()
