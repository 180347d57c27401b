"""Communication of ranks on one host that read each other's memory (CPU).

Shards are stored in memory that all ranks share, in the arrangement of the *unsharded* buffer: rank
r's shard of a direct parameter is its rows of the parameter itself. So unsharding a direct
parameter moves no bytes at all, and the host holds one copy of it however many ranks there are.

    shared memory of a bucket, 2 ranks:   [ w rows 0-1 | w rows 2-3 | packed of 0 | packed of 1 ]
                                            `- rank 0's   `- rank 1's

Reading a peer's shard takes no message. That nobody writes meanwhile, the engine sees to by calls of `fence`
(see `engine/iteration.py`, Note: Fences). So nothing in `all_gather` waits.

Gradients are staged. Each rank copies its gradients, for all ranks, into its own part of a shared
ring (see `ring`, which orders writers and readers by counters). Each rank then sums its shard over
all parts, in rank order, block by block.
"""

import math

import torch
import torch.distributed as dist

from fullshard.comm.interface import (
    Done,
    ShardBuffer,
    Work,
    named_in,
    tensor_over,
)
from fullshard.comm.packing import Region
from fullshard.comm.ring import StagingComm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.peers.groups import backend_name
from fullshard.plan.layout import BucketLayout, Route
from fullshard.plan.ways import RingStretch, flags_nbytes


class PeerMemoryComm(StagingComm):
    """Communication of CPU ranks that share one host's memory.

    Building it raises UnavailableError, on every rank, if one of them cannot share memory.
    """

    name = "peer memory (one host)"
    overlaps = False

    def __init__(self, group: dist.ProcessGroup) -> None:
        backend = backend_name(group, torch.device("cpu"))
        if backend != "gloo":
            raise UnavailableError(f"the process group's backend is {backend}, not gloo")
        super().__init__(group)
        self._staging = memoryview(b"")  # the ring: one part per rank, one after the other

    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        dtype, packed_numel = bucket.dtype, self.size * bucket.packed_numel
        nbytes = (bucket.direct_numel + packed_numel) * dtype.itemsize
        memory = self.memory.allocate(nbytes, "allocating shards", named_in(bucket))

        def view(offset: int, shape: tuple[int, ...]) -> torch.Tensor:
            # A storage of its own, so that saving a shard saves its bytes only.
            return _view(memory, offset * dtype.itemsize, shape, dtype)

        # `gathered` views all ranks' shards as whole parameters, `shards` this rank's part of them.
        gathered, shards = [], []
        packed_base = bucket.direct_numel + self.rank * bucket.packed_numel
        for param in bucket.params:
            shape = param.shard_shape(self.rank)
            if param.route is not Route.PACKED:
                gathered.append(view(param.unsharded_offset, param.spec.shape))
            if param.route is Route.FLAT:
                start, shape = bucket.shard_range(param, self.rank)
                offset = self.rank * bucket.shard_numel + start
            elif param.route is Route.DIRECT:
                first_row = param.rows(self.rank).start
                offset = param.unsharded_offset + first_row * param.inner_numel
            else:
                offset = packed_base + param.shard_offset - bucket.packed_offset
            shards.append(view(offset, shape))
        flat, region = None, view(bucket.direct_numel, (packed_numel,))
        if bucket.is_flat:
            flat = view(self.rank * bucket.shard_numel, (bucket.shard_numel,))
            region = view(0, (bucket.unsharded_numel,))
        return ShardBuffer(
            bucket, shards, flat, gathered, Region(region), memory, mapped_nbytes=len(memory)
        )

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, label: str, offset: int = 0
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

    def _flags_nbytes(self, num_params: int) -> int:
        return flags_nbytes(num_params)

    @property
    def mapped_nbytes(self) -> int:
        return self.size * self.ring_nbytes

    def _flags(self, stretch: RingStretch, num_params: int) -> list[memoryview]:
        nbytes = self.ring_nbytes
        starts = range(stretch.start, self.size * nbytes, nbytes)
        return [self._staging[start : start + num_params] for start in starts]

    def fence(self, label: str) -> None:
        self.memory.barrier(label)

    def enlarge(self, nbytes: int) -> None:
        self._staging = self.memory.allocate(self.size * nbytes, "allocating the gradient ring")

    def _part(
        self, stretch: RingStretch, rank: int, offset: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        start = rank * self.ring_nbytes + stretch.start + offset
        return _view(self._staging, start, (numel,), dtype)


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
