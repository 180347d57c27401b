"""Communication of ranks on one host that read each other's memory (CPU).

Shards are stored in memory that all ranks share, in the arrangement of the *unsharded* buffer: rank
r's shard of a direct parameter is its rows of the parameter itself. So unsharding a direct
parameter moves no bytes at all, and the host holds one copy of it however many ranks there are.

    shared memory of a bucket, 2 ranks:   [ w rows 0-1 | w rows 2-3 | packed of 0 | packed of 1 ]
                                            `- rank 0's   `- rank 1's

Reading peers' memory takes no message, only the certainty that they have finished writing and that
nobody writes while somebody still reads: the engine calls `fence` before the first unshard of an
iteration and after the last use.

Gradients are staged: each rank copies its gradients, rank by rank, into its own part of a shared
ring and posts a counter; each rank then sums its shard over all parts, in rank order, block by
block. A part of the ring is used again once all ranks have consumed it. Offsets in the ring follow
from the sequence of reductions, which is the same on all ranks, so no message carries them.
"""

import collections
import dataclasses
import math
import mmap
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from fullshard.comm.interface import (
    Comm,
    Done,
    Reduction,
    ShardBuffer,
    Sum,
    Work,
    add_in_order,
    copy_in_gradients,
)
from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.plan.layout import BucketLayout, DirectRule, Route

_LINE = 64  # records and what is in them begin on cache lines


@dataclasses.dataclass(frozen=True, slots=True)
class _Record:
    """A stretch of the ring, the same in every rank's part, holding reduction ``sequence``."""

    sequence: int
    start: int
    stop: int


class PeerMemoryComm(Comm):
    """Ranks of one host that share memory. Raises UnavailableError where they cannot."""

    name = "peer memory (one host)"
    overlaps = False
    rule = DirectRule(even=False, min_nbytes=0)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != "cpu":
            raise UnavailableError(f"it serves CPU ranks, this is {device.type}")
        if dist.get_backend(group) != "gloo":
            raise UnavailableError(
                f"the process group's backend is {dist.get_backend(group)}, not gloo"
            )
        self.memory = SharedMemory.connect(group)
        self.rank = self.memory.rank
        self.size = self.memory.size
        self._ring: mmap.mmap | None = None
        self._ring_nbytes = 0
        self._ring_next = 0
        self._records: collections.deque[_Record] = collections.deque()
        self._pending: collections.deque[_PendingSum] = collections.deque()
        self._sequence = 0

    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        itemsize = bucket.dtype.itemsize
        total_numel = bucket.direct_numel + self.size * bucket.packed_numel
        memory = self.memory.allocate(total_numel * itemsize, "allocating shards")

        def view(offset: int, shape: tuple[int, ...]) -> torch.Tensor:
            # A storage of its own, so that saving a shard saves its bytes and no others.
            return _view(memory, offset * itemsize, shape, bucket.dtype)

        gathered, shards = [], []
        packed_base = bucket.direct_numel + self.rank * bucket.packed_numel
        for param in bucket.params:
            shape = param.shard_shape(self.rank)
            if param.route is Route.FLAT:
                gathered.append(view(param.unsharded_offset, param.spec.shape))
                start, shape = bucket.shard_range(param, self.rank)
                offset = self.rank * bucket.shard_numel + start
            elif param.route is Route.DIRECT:
                gathered.append(view(param.unsharded_offset, param.spec.shape))
                first_row = param.rows(self.rank).start
                offset = param.unsharded_offset + first_row * param.inner_numel
            else:
                offset = packed_base + param.shard_offset - bucket.packed_offset
            shards.append(view(offset, shape))
        if bucket.is_flat:
            flat = view(self.rank * bucket.shard_numel, (bucket.shard_numel,))
            whole = view(0, (bucket.unsharded_numel,))
            return ShardBuffer(bucket, shards, flat, gathered, packed_region=whole)
        region = view(bucket.direct_numel, (self.size * bucket.packed_numel,))
        return ShardBuffer(bucket, shards, gathered=gathered, packed_region=region)

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, *, first: int = 0, label: str
    ) -> Work:
        bucket = shards.bucket
        assert shards.packed_region is not None
        if bucket.is_flat:
            if first == 0:
                unsharded.copy_(shards.packed_region)
            return Done()
        if first == 0 and shards.gathered:
            targets = [
                unsharded.narrow(0, p.unsharded_offset, p.spec.numel).view(p.spec.shape)
                for p in bucket.direct
            ]
            torch._foreach_copy_(targets, shards.gathered)
        shards.copy_out_packed(shards.packed_region, unsharded, first)
        return Done()

    def staged_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        payload_nbytes = self.size * bucket.shard_numel * wire_dtype.itemsize
        return _round_up(len(bucket.params), _LINE) + payload_nbytes

    def prepare(self, staged_nbytes: Sequence[int]) -> None:
        sizes = sorted(staged_nbytes, reverse=True)
        if sizes:
            # The largest alone, or two of the next size at once: the one being summed and the one
            # being filled. Room for two of the largest would mostly be air (an embedding).
            self._reserve(max(sizes[0], 2 * sizes[min(1, len(sizes) - 1)]))

    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        how: Sum,
    ) -> Reduction:
        record = self._claim(self.staged_nbytes(bucket, how.wire_dtype), how.label)
        header_nbytes = _round_up(len(grads), _LINE)
        payload_numel = self.size * bucket.shard_numel
        flags = self._part(record, self.rank, 0, len(grads), torch.uint8)
        flags.copy_(torch.tensor([grad is not None for grad in grads], dtype=torch.uint8))
        copy_in_gradients(
            bucket,
            grads,
            self._part(record, self.rank, header_nbytes, payload_numel, how.wire_dtype),
            divisor=how.scaling.before,
        )
        start = header_nbytes + self.rank * bucket.shard_numel * how.wire_dtype.itemsize

        def finish() -> tuple[bool, ...]:
            terms = self._parts(record, start, bucket.shard_numel, how.wire_dtype)
            add_in_order(terms, out, divisor=how.scaling.after)
            everyones = self._parts(record, 0, len(grads), torch.uint8)
            return tuple(torch.stack(everyones).any(0).tolist())

        return self._post(record, finish, how.label)

    def all_reduce(self, tensor: torch.Tensor, how: Sum) -> Work:
        numel = tensor.numel()
        record = self._claim(numel * how.wire_dtype.itemsize, how.label)
        self._part(record, self.rank, 0, numel, how.wire_dtype).copy_(tensor)

        def finish() -> tuple[bool, ...]:
            add_in_order(self._parts(record, 0, numel, how.wire_dtype), tensor, divisor=1.0)
            return ()

        return _WithoutResult(self._post(record, finish, how.label))

    def fence(self, label: str) -> None:
        self.memory.barrier(label)

    def abandon(self) -> None:
        self._pending.clear()
        self.memory.set(SharedMemory.CONSUMED, self._sequence)

    def _reserve(self, nbytes: int) -> None:
        """Make the ring at least this large. Every rank comes here at the same point."""
        if nbytes <= self._ring_nbytes:
            return
        if self._records:
            self._wait_consumed(self._records[-1].sequence, "enlarging the gradient ring")
        self._ring_nbytes = _round_up(nbytes, mmap.PAGESIZE)
        self._ring_next = 0
        self._ring = self.memory.allocate(
            self.size * self._ring_nbytes, "allocating the gradient ring"
        )

    def _claim(self, nbytes: int, label: str) -> _Record:
        """Take the next stretch of the ring, once all ranks have consumed what it held."""
        nbytes = _round_up(nbytes, _LINE)
        self._reserve(nbytes)
        start = self._ring_next if self._ring_next + nbytes <= self._ring_nbytes else 0
        stop = start + nbytes
        held = [r.sequence for r in self._records if r.start < stop and start < r.stop]
        if held:
            self._wait_consumed(held[-1], label)
        self._sequence += 1
        self._ring_next = stop
        record = _Record(self._sequence, start, stop)
        self._records.append(record)
        return record

    def _post(
        self, record: _Record, finish: Callable[[], tuple[bool, ...]], label: str
    ) -> "_PendingSum":
        self.memory.set(SharedMemory.POSTED, record.sequence)
        pending = _PendingSum(self, record.sequence, finish, label)
        self._pending.append(pending)
        return pending

    def _wait_consumed(self, sequence: int, label: str) -> None:
        self.finish_through(sequence)
        self.memory.wait_all(SharedMemory.CONSUMED, sequence, label)
        while self._records and self._records[0].sequence <= sequence:
            self._records.popleft()

    def finish_through(self, sequence: int) -> None:
        """Sum everything up to ``sequence``, in order: one counter says what is consumed."""
        while self._pending and self._pending[0].sequence <= sequence:
            pending = self._pending.popleft()
            self.memory.wait_all(SharedMemory.POSTED, pending.sequence, pending.label)
            pending.result = pending.finish()
            self.memory.set(SharedMemory.CONSUMED, pending.sequence)

    def _part(
        self, record: _Record, rank: int, offset: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """View what ``rank`` staged, from byte ``offset`` of the record on."""
        assert self._ring is not None
        return _view(self._ring, rank * self._ring_nbytes + record.start + offset, (numel,), dtype)

    def _parts(
        self, record: _Record, offset: int, numel: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        return [self._part(record, rank, offset, numel, dtype) for rank in range(self.size)]


@dataclasses.dataclass(slots=True, eq=False)
class _PendingSum:
    """A posted reduction of which this rank has not formed its sum yet."""

    comm: PeerMemoryComm
    sequence: int
    finish: Callable[[], tuple[bool, ...]]
    label: str
    result: tuple[bool, ...] = ()

    def wait(self) -> tuple[bool, ...]:
        self.comm.finish_through(self.sequence)
        return self.result


@dataclasses.dataclass(slots=True)
class _WithoutResult:
    pending: _PendingSum

    def wait(self) -> None:
        self.pending.wait()


def _view(
    memory: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor over mapped memory, which it keeps mapped, with a storage of its own size."""
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset).view(shape)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
