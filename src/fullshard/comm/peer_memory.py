"""Communication of ranks on one host that read each other's memory (CPU).

Shards are stored in memory that all ranks share, in the arrangement of the *unsharded* buffer: rank
r's shard of a direct parameter is its rows of the parameter itself. So unsharding a direct
parameter moves no bytes at all, and the host holds one copy of it however many ranks there are.

    shared memory of a bucket, 2 ranks:   [ w rows 0-1 | w rows 2-3 | packed of 0 | packed of 1 ]
                                            `- rank 0's   `- rank 1's

Reading a peer's shard takes no message. It is safe if the peer has finished writing, and if nobody
writes while a rank still reads. So the engine calls `fence` before the first unshard of an
iteration and after the last use. Shards may be written from the second of these fences until the
first one of the next iteration (see `engine/iteration.py`, Note: Fences). So nothing in
`all_gather` waits.

Gradients are staged. Each rank copies its gradients, for all ranks, into its own part of a shared
ring (see `ring`, which orders writers and readers by counters). Each rank then sums its shard over
all parts, in rank order, block by block.
"""

import itertools
import math
import mmap
import operator
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
    named_in,
    tensor_over,
)
from fullshard.comm.packing import Region, copy_in_gradients
from fullshard.comm.ring import LINE, Ring, Stretch
from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.peers.flight_record import FlightRecord, keep_record
from fullshard.peers.groups import backend_name, let_go_at_exit
from fullshard.plan.layout import BucketLayout, DirectRule, Route
from fullshard.plan.sizes import round_up


class PeerMemoryComm(Comm):
    """Communication of CPU ranks that share one host's memory.

    Building it raises UnavailableError, on every rank, if one of them cannot share memory.
    """

    name = "peer memory (one host)"
    overlaps = False
    gathers_alone = True
    rule = DirectRule(even=False, min_nbytes=0)

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        if device.type != "cpu":
            raise UnavailableError(f"it serves CPU ranks, this is {device.type}")
        backend = backend_name(group, device)
        if backend != "gloo":
            raise UnavailableError(f"the process group's backend is {backend}, not gloo")
        let_go_at_exit()  # connecting calls collectives of Gloo: see [Note: Leaving Gloo]
        self.memory = SharedMemory.connect(group)
        self.memory.record = keep_record(group, self.memory.record)
        self.rank = self.memory.rank
        self.size = self.memory.size
        self._ring = Ring(self.memory, self._enlarge)
        self._staging: memoryview | None = None  # the ring: one part per rank, one after the other
        self._part_nbytes = 0

    @property
    def record(self) -> FlightRecord | None:
        return self.memory.record

    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        itemsize = bucket.dtype.itemsize
        total_numel = bucket.direct_numel + self.size * bucket.packed_numel
        nbytes = total_numel * itemsize
        memory = self.memory.allocate(nbytes, "allocating shards", named_in(bucket))

        def view(offset: int, shape: tuple[int, ...]) -> torch.Tensor:
            # A storage of its own, so that saving a shard saves its bytes only.
            return _view(memory, offset * itemsize, shape, bucket.dtype)

        # `gathered` views all ranks' shards as whole parameters, `shards` this rank's part of them.
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
            return ShardBuffer(
                bucket, shards, flat, gathered, Region(whole), mapped_nbytes=len(memory)
            )
        region = view(bucket.direct_numel, (self.size * bucket.packed_numel,))
        return ShardBuffer(
            bucket, shards, None, gathered, Region(region), mapped_nbytes=len(memory)
        )

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, *, offset: int = 0, label: str
    ) -> Work:
        bucket = shards.bucket
        # No wait: the engine's fence has made all shards visible. Copies what cannot be read in
        # place: everything if dtypes differ or memory must be private, else the packed parameters.
        assert shards.packed_region is not None
        if bucket.is_flat:
            if offset == 0:  # else all of it is read in place
                unsharded.copy_(shards.packed_region.memory)
            return Done()
        landing = shards.landing(unsharded, offset)
        if landing.direct:
            torch._foreach_copy_(landing.direct, [each.view(-1) for each in shards.in_place])
        landing.copy_out(shards.packed_region)
        return Done()

    # A reduction's stretch of the ring, in each rank's part: one flag per parameter, padded to a
    # cache line, then gradients, rank by rank.

    def staged_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        payload_nbytes = self.size * bucket.shard_numel * wire_dtype.itemsize
        return round_up(len(bucket.params), LINE) + payload_nbytes

    def summed_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        return round_up(len(bucket.params), LINE) + super().summed_nbytes(bucket, wire_dtype)

    @property
    def held_nbytes(self) -> int:
        return self._part_nbytes

    @property
    def mapped_nbytes(self) -> int:
        return self.size * self._part_nbytes

    def prepare(self, staged_nbytes: Sequence[int]) -> None:
        self._ring.prepare(staged_nbytes)

    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: Callable[[], torch.Tensor],
        how: Sum,
    ) -> Reduction:
        # Returns once all ranks have read what this stretch held before, so it may be overwritten.
        stretch = self._ring.claim(self.staged_nbytes(bucket, how.wire_dtype), how.label)
        header_nbytes = round_up(len(grads), LINE)
        payload_numel, num_params = self.size * bucket.shard_numel, len(grads)
        self._stage_flags(stretch, list(map(operator.is_not, grads, itertools.repeat(None))))
        # For all ranks, into this rank's part alone. The gradients may be freed after it.
        copy_in_gradients(
            bucket,
            grads,
            self._part(stretch, self.rank, header_nbytes, payload_numel, how.wire_dtype),
            divisor=how.scaling.before,
        )
        start = header_nbytes + self.rank * bucket.shard_numel * how.wire_dtype.itemsize

        # The ring calls it once all ranks have posted this stretch, before it tells them that this
        # rank has read it.
        def finish() -> tuple[bool, ...]:
            terms = self._parts(stretch, start, bucket.shard_numel, how.wire_dtype)
            # Memory for the sum is asked for now, when the gradients were freed: it may be theirs.
            add_in_order(terms, out(), divisor=how.scaling.after)
            return self._combined_flags(stretch, num_params)

        return self._ring.post(stretch, finish, how.label)

    def all_reduce(self, total: torch.Tensor, present: tuple[bool, ...], how: Sum) -> Reduction:
        numel, start = total.numel(), round_up(len(present), LINE)
        stretch = self._ring.claim(start + numel * how.wire_dtype.itemsize, how.label)
        self._stage_flags(stretch, present)
        self._part(stretch, self.rank, start, numel, how.wire_dtype).copy_(total)

        def finish() -> tuple[bool, ...]:
            add_in_order(self._parts(stretch, start, numel, how.wire_dtype), total, divisor=1.0)
            return self._combined_flags(stretch, len(present))

        return self._ring.post(stretch, finish, how.label)

    def _stage_flags(self, stretch: Stretch, present: Sequence[bool]) -> None:
        """Write which gradients this rank has: one byte per parameter, at the stretch's start."""
        assert self._staging is not None
        start = self.rank * self._part_nbytes + stretch.start
        self._staging[start : start + len(present)] = bytes(present)

    def _combined_flags(self, stretch: Stretch, num_params: int) -> tuple[bool, ...]:
        """Return for each parameter whether any rank has a gradient."""
        staging = self._staging
        assert staging is not None
        starts = range(stretch.start, self.size * self._part_nbytes, self._part_nbytes)
        everyones = [staging[start : start + num_params] for start in starts]
        return tuple(map(any, zip(*everyones, strict=True)))

    def fence(self, label: str) -> None:
        self.memory.barrier(label)

    def agree(self, bits: int, num_bits: int) -> int:
        return self.memory.agree(bits, num_bits)

    def abandon(self) -> None:
        self._ring.abandon()

    def _enlarge(self, nbytes: int) -> None:
        """Replace the ring by a larger one. The ring calls it with no reduction under way."""
        part_nbytes = round_up(nbytes, mmap.PAGESIZE)
        self._staging = self.memory.allocate(
            self.size * part_nbytes, "allocating the gradient ring"
        )
        self._part_nbytes = part_nbytes

    def _part(
        self, stretch: Stretch, rank: int, offset: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a view of what ``rank`` staged, from byte ``offset`` of the stretch on."""
        assert self._staging is not None
        start = rank * self._part_nbytes + stretch.start + offset
        return _view(self._staging, start, (numel,), dtype)

    def _parts(
        self, stretch: Stretch, offset: int, numel: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return the same view of every rank's part, in rank order."""
        return [self._part(stretch, rank, offset, numel, dtype) for rank in range(self.size)]


def _view(
    memory: memoryview, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a tensor over mapped memory, with a storage of its own size. It keeps the mapping."""
    numel = math.prod(shape)
    if numel == 0:  # `torch.frombuffer` refuses to make empty tensors
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = torch.frombuffer(memory, dtype=dtype, count=numel, offset=offset)
    if len(shape) == 1:
        return flat
    return tensor_over(flat.untyped_storage(), int(flat.storage_offset()), shape, dtype)
