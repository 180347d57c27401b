"""Ways in which ranks exchange bytes, as planning sees them, and the memory that each takes.

`comm` implements them. What both need to agree on is here: which parameters travel directly, in which dtype sums
are formed, what is staged, and which memory is kept from one collective to the next.
"""

import dataclasses
import mmap
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fullshard.plan.layout import BucketLayout, DirectRule, round_up

# Up to this size, a buffer in host memory costs more to free and fault in again than to keep.
KEPT_NBYTES = 1 << 20
# Larger regions are not pooled: there copying costs more than making views, and it would keep too
# much memory.
POOLED_NBYTES = 1 << 20
# Bytes of a cache line. What ranks stage in a ring, and the fields in that, begin on one, so that ranks which write
# next to each other do not share a line, and every dtype is aligned.
LINE = 64
# What ranks read in each other's memory is compared from pass to pass: a shard of up to so many words is copied for
# that, of others one sum per so many words is kept.
COPIED_WORDS = 4096
SUMMED_WORDS = 1024
NUM_TURNS = 3  # units whose whole parameters are in memory: one is read, one arrives, one was read
MAX_REPLICATED = 2  # sums over replicas in scratch that may be under way when the next one begins


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """A way in which the ranks of a group exchange bytes.

    overlaps: a started collective progresses without the caller, so prefetching helps.
    rule: which parameters a layout routes directly.
    sums_natively: a backend forms the sums, in the dtype that travels.
    reads_in_place: ranks read each other's shards where they are.
    """

    name: str
    overlaps: bool
    rule: DirectRule
    sums_natively: bool = False
    reads_in_place: bool = False

    def sum_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``reduce_dtype`` are summed."""
        return reduce_dtype if self.sums_natively else sum_dtype(reduce_dtype)


def sum_dtype(reduce_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which ranks that form sums themselves sum gradients of ``reduce_dtype``."""
    return torch.promote_types(reduce_dtype, torch.float32)


ALL_DIRECT = DirectRule(even=False, min_nbytes=0)
ONE_RANK = Way("one rank", overlaps=False, rule=ALL_DIRECT, reads_in_place=True)
PEER_MEMORY = Way("peer memory", overlaps=False, rule=ALL_DIRECT, reads_in_place=True)
GLOO = Way("gloo", overlaps=True, rule=DirectRule(even=True, min_nbytes=1 << 18))
NCCL = Way(
    "nccl", overlaps=True, rule=DirectRule(even=True, min_nbytes=1 << 16), sums_natively=True
)


class Region(NamedTuple):
    """Pooled memory that a collective uses: regions of one size and dtype are used again."""

    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


class GatherMemory(NamedTuple):
    """What gathering a bucket takes, in bytes.

    buffer_nbytes: private unsharded memory, all of which arrives: 0 if everything is read in place.
    cast_nbytes: of this rank's shards in the compute dtype, while they are sent. region: in which packed
    parameters arrive.
    """

    buffer_nbytes: int
    cast_nbytes: int
    region: Region


def gather_memory(bucket: BucketLayout, way: Way, *, is_offloaded: bool) -> GatherMemory:
    """Return what gathering a bucket takes. is_offloaded: shards are in host memory, and copied from there."""
    dtype = bucket.compute_dtype
    is_cast = bucket.dtype != dtype or is_offloaded
    if way.reads_in_place:
        num_private = bucket.unsharded_numel - (0 if is_cast else bucket.direct_numel)
        return GatherMemory(num_private * dtype.itemsize, 0, Region(0, dtype))
    return GatherMemory(
        bucket.unsharded_nbytes,
        bucket.shard_numel * dtype.itemsize if is_cast else 0,
        Region(region_numel(bucket), dtype),
    )


def region_numel(bucket: BucketLayout) -> int:
    """Return the elements of the region in which packed parameters of all ranks arrive; 0 if there are none."""
    return 0 if bucket.is_flat else bucket.shard_size * bucket.packed_numel


class ReduceMemory(NamedTuple):
    """What a reduce-scatter of a bucket takes from its start to its end, in bytes.

    sent_nbytes: what travels. held_nbytes: of full gradients that travel from where they are.
    copied_nbytes: of others' copies. region: what is packed. scratch_nbytes: of each piece of scratch memory.
    """

    sent_nbytes: int
    region: Region
    held_nbytes: int = 0
    copied_nbytes: int = 0
    scratch_nbytes: tuple[int, ...] = ()


def reduce_memory(
    bucket: BucketLayout,
    way: Way,
    wire_dtype: torch.dtype,
    *,
    full_dtype: torch.dtype,
    is_scaled: bool,
) -> ReduceMemory:
    """Return what a reduce-scatter takes.

    full_dtype: of full gradients. is_scaled: they are divided before they are summed.
    """
    wire = wire_dtype.itemsize
    sent = bucket.shard_size * bucket.shard_numel * wire
    if way.reads_in_place:  # copied into the ring, which is there all the time
        return ReduceMemory(sent, Region(0, wire_dtype))
    direct = sum(param.spec.numel for param in bucket.direct) * wire
    copies = wire_dtype != full_dtype or is_scaled
    held, copied = (0, direct) if copies else (direct, 0)
    if way.sums_natively:
        numel = bucket.unsharded_numel if bucket.is_flat else region_numel(bucket)
        return ReduceMemory(sent, Region(numel, wire_dtype), held, copied)
    if bucket.is_flat:
        nbytes = bucket.unsharded_numel * wire
        return ReduceMemory(sent, Region(0, wire_dtype), scratch_nbytes=(nbytes, nbytes))
    # One more element per parameter and rank: whether it has a gradient.
    region = Region(region_numel(bucket) + bucket.shard_size * len(bucket.params), wire_dtype)
    received = (*(param.spec.numel * wire for param in bucket.direct), region.nbytes)
    return ReduceMemory(sent, region, held, copied, received)


def sample_nbytes(nbytes: int, itemsize: int) -> int:
    """Return the bytes that are kept to notice writes to a shard which peers read."""
    words = nbytes // (itemsize if nbytes % 8 else 8)
    return nbytes if words <= COPIED_WORDS else 8 * (words // SUMMED_WORDS + 1)


def flags_nbytes(num_params: int) -> int:
    """Return the bytes of the flags that a rank stages with gradients: one for each parameter."""
    return round_up(num_params, LINE)


def ring_nbytes(staged: Sequence[int]) -> int:
    """Return the size of each rank's part of a ring for reductions of these sizes.

    Room for the largest alone, or for two of the second size: one that is summed while the other is filled. Room for
    two of the largest would mostly lie idle, since the largest is often an embedding.
    """
    sizes = sorted(staged, reverse=True)
    if not sizes:
        return 0
    return round_up(max(sizes[0], 2 * sizes[min(1, len(sizes) - 1)]), mmap.PAGESIZE)


class RingStretch(NamedTuple):
    """Bytes [start, stop) of every rank's part of a ring, which hold reduction number ``sequence``."""

    sequence: int
    start: int
    stop: int


def place_stretch(
    nbytes: int, begin: int, ring_nbytes: int, taken: Iterable[RingStretch]
) -> tuple[int, int]:
    """Return where the next stretch begins, and the latest reduction whose stretch it overwrites; 0 for none.

    begin: where it begins if it fits before the end: it never wraps around, since a reduction is one contiguous
    tensor. taken: the stretches that may still be read, oldest first.
    """
    start = begin if begin + nbytes <= ring_nbytes else 0
    overwritten = (t.sequence for t in taken if t.start < start + nbytes and start < t.stop)
    return start, max(overwritten, default=0)


def choose_block(free: Iterable[int], nbytes: int) -> int | None:
    """Return which of some free blocks serves, by its place: the smallest that is large enough; None if none is.

    free: sizes in bytes, smallest first.
    """
    return next((place for place, size in enumerate(free) if size >= nbytes), None)
