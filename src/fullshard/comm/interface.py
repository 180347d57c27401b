"""The interface of every way of communicating. A new way is a new subclass of `Comm`.

A `Comm` belongs to one process group. It decides where shards are stored (`allocate_shards`),
because that decides what has to be moved: collectives read a private buffer, while ranks of one
host may read each other's. A method that starts something returns a work handle. The handle holds
the tensors that are still needed; after `wait` it may be dropped, which releases them.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from fullshard.comm.packing import Landing, Region
from fullshard.peers.flight_record import FlightRecord
from fullshard.plan.layout import BucketLayout
from fullshard.plan.ways import ALL_DIRECT, sum_dtype


class Work(Protocol):
    """A collective under way. ``wait`` returns once the current stream may use the result.

    Of a reduction it returns, for each parameter of the bucket in order, whether any rank had a gradient; () of others.
    tensors: memory that the handle holds until then, not counting the output it was given.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def wait(self) -> tuple[bool, ...]: ...


class Done:
    """Work that was complete when it was started. present: what ``wait`` returns."""

    tensors = ()

    def __init__(self, present: tuple[bool, ...] = ()) -> None:
        self._present = present

    def wait(self) -> tuple[bool, ...]:
        return self._present


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """Factors by which gradients are divided before and after they are summed."""

    before: float = 1.0
    after: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """Instructions for summing gradients.

    wire_dtype: dtype of the gradients that travel. The sum has the dtype of the result.
    may_average: True if a backend may form the mean itself instead of a sum.
    label: name of the reduction in messages and flight record entries, the same on all ranks.
    """

    wire_dtype: torch.dtype
    scaling: Scaling = Scaling()
    may_average: bool = True
    label: str = "reduce-scatter"


@dataclasses.dataclass(slots=True)
class ShardBuffer:
    """One rank's shards of one bucket.

    shards: the local shard of each parameter, in bucket order and in its local shape.
    flat: the shard buffer as one 1-D tensor, or None if the shards do not lie in one piece.
    in_place: unsharded tensors of the direct parameters that can be read without a copy; empty if
        there are no direct parameters or if they have to be moved first.
    packed_region: packed shards of all ranks, rank by rank, if this rank can read them in place.
        For a flat bucket: the whole unsharded buffer.
    memory: what keeps the memory of all of these.
    mapped_nbytes: bytes that all ranks of a host share for the bucket; 0 if they share no memory.
    """

    bucket: BucketLayout
    shards: list[torch.Tensor]
    flat: torch.Tensor | None = None
    in_place: list[torch.Tensor] = dataclasses.field(default_factory=list)
    packed_region: Region | None = None
    memory: Any = None
    mapped_nbytes: int = 0
    last_landing: Landing | None = None

    def landing(self, unsharded: torch.Tensor, offset: int = 0) -> Landing:
        """Return views of where gathered parameters belong in an unsharded buffer.

        offset: the element of the bucket's unsharded buffer at which ``unsharded`` begins.
        """
        # Only the last one is kept: a unit is gathered into the same memory in every step.
        if self.last_landing is None or self.last_landing.unsharded is not unsharded:
            self.last_landing = Landing(self.bucket, unsharded, offset, self.flat)
        return self.last_landing

    @property
    def landing_views(self) -> list[torch.Tensor]:
        """Views of the unsharded buffer that was filled last; they count as references to it."""
        return [] if self.last_landing is None else self.last_landing.views

    def forget_landing(self) -> None:
        """Drop the views of the unsharded buffer that was filled last."""
        self.last_landing = None


class Comm(abc.ABC):
    """Communication among the ranks of one process group.

    name: description for users, as `describe` prints it.
    overlaps: True if a started collective progresses without the caller, so prefetching helps.
    rank, size: this rank's place in the group, and the number of its ranks.
    rule: which parameters a layout may route directly for this way of communicating; by default all that can be.
    joins_dtypes: whether gradients of several dtypes travel at once, in the widest of them.
    tells_presence: whether ranks tell each other which parameters have a gradient.
    wants_means: whether the reduce-scatter forms means wherever PyTorch's engine asks for them.
    needs_host: whether the host takes part in moving bytes, so that no CUDA graph can hold it.
    record: the flight record of the group; None if nobody compares what its ranks do.
    """

    name: str
    overlaps: bool
    rank: int
    size: int
    rule = ALL_DIRECT
    joins_dtypes = False
    tells_presence = True
    wants_means = False
    needs_host = True
    record: FlightRecord | None = None

    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        """Allocate this rank's shards of a bucket; values are undefined. Every rank must call it.

        Private memory, unless ranks share theirs. Raises UnavailableError on every rank if one of them cannot.
        """
        memory = torch.zeros(
            bucket.shard_numel,
            dtype=bucket.dtype,
            device=device,
            pin_memory=pin_memory and torch.accelerator.is_available(),
        )
        # Users have what is over it, whose storage may be given other memory: see `UnitBuffers.bring_home`.
        flat = tensor_over(memory.untyped_storage()[:], 0, memory.shape, memory.dtype)
        shards = shard_views(bucket, flat, self.rank)
        return ShardBuffer(bucket, shards, flat=flat, memory=memory)

    @abc.abstractmethod
    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, label: str, offset: int = 0
    ) -> Work:
        """Start filling the bucket's unsharded buffer (1-D, compute dtype).

        unsharded: the buffer, from its element ``offset`` on.
        offset: 0, or ``bucket.direct_numel`` if the direct parameters are read in place.
        label: name of the gather in messages and flight record entries, the same on all ranks.
        """

    def gather_unit(
        self, buffers: Sequence[tuple[ShardBuffer, torch.Tensor, int]], label: str
    ) -> list[Work]:
        """Start `all_gather` for each bucket of a unit: (shards, unsharded, offset). By one call, if possible."""
        gather = self.all_gather
        return [
            gather(shards, unsharded, offset=offset, label=label)
            for shards, unsharded, offset in buffers
        ]

    @abc.abstractmethod
    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: Callable[[], torch.Tensor],
        how: Sum,
    ) -> Work:
        """Start summing gradients over the ranks; ``out`` gets the sums of this rank's shards.

        grads: one full gradient per parameter of the bucket, in order; None counts as zeros. The
            caller may free them once this returns: what still reads them holds them.
        out: called once, when the sums are about to be written, here or in ``wait``. Returns a 1-D
            tensor of ``bucket.shard_numel`` elements of `accumulate_dtype`, arranged as the shard
            buffer. Padding becomes zero in a flat bucket and is undefined in others.
        """

    @abc.abstractmethod
    def all_reduce(self, total: torch.Tensor, present: tuple[bool, ...], how: Sum) -> Work:
        """Start summing a 1-D tensor of gradients over the ranks, in place and without scaling.

        present: for each parameter in ``total``, whether this rank has a gradient. Empty if all
            ranks know already which parameters have one.
        """

    def accumulate_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of ``reduce_dtype`` are summed."""
        return sum_dtype(reduce_dtype)

    def staged_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        """Return the bytes of staging memory (see `prepare`) of a reduce-scatter of this bucket."""
        return 0

    def summed_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        """Return the bytes of staging memory of an all-reduce of a rank's shard of this bucket."""
        return bucket.shard_numel * wire_dtype.itemsize

    @property
    def staging(self) -> Sequence[torch.Tensor]:
        """Memory that this rank keeps from one collective to the next; without the device's scratch."""
        return ()

    @property
    def mapped_nbytes(self) -> int:
        """Staging bytes of all ranks together, if they share them on one host; otherwise 0."""
        return 0

    def prepare(self, staged_nbytes: Sequence[int]) -> None:  # noqa: B027
        """Allocate staging memory for reductions of these sizes in bytes. Every rank must call it.

        Raises UnavailableError on every rank if ranks share the memory and one of them cannot.
        """

    def fence(self, label: str) -> None:  # noqa: B027
        """Return once every rank has arrived here, if ranks read each other's memory.

        After it, shards that were written before the fence are visible to all ranks, and no rank
        still reads what was in them earlier. It does nothing where ranks read only private memory.
        """

    @property
    def reads_in_place(self) -> bool:
        """Whether ranks read each other's shards, so that writes need fences around them."""
        return type(self).fence is not Comm.fence

    @property
    def gathers_alone(self) -> bool:
        """Whether a rank can gather while others do not."""
        return self.size == 1 or self.reads_in_place

    def agree(self, bits: int, num_bits: int) -> int:
        """Return the bitwise "or" of all ranks' ``bits``. Every rank must call it alike.

        The host waits for the answer, and so for its device: not for every pass. bits: an integer
        of ``num_bits`` bits.
        """
        return bits

    def abandon(self) -> None:  # noqa: B027
        """Drop reductions that were started and will never be waited for (after an exception)."""


def named_in(bucket: BucketLayout) -> str:
    """Return what a bucket is of, for messages: its first parameter, and how many more."""
    if not bucket.params:
        return ""
    first = bucket.params[0].spec
    others = f" and {len(bucket.params) - 1} more" if len(bucket.params) > 1 else ""
    return f" of {first.name} {tuple(first.shape)}{others}"


def shard_views(bucket: BucketLayout, flat: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """Return this rank's shard of each parameter, in its local shape, as views of a shard buffer.

    Each has a storage of its own over the same memory. So saving one saves its bytes only, and
    DTensor's copying and pickling work, which ignore storage offsets.
    """
    storage, itemsize = flat.untyped_storage(), flat.dtype.itemsize
    base = flat.storage_offset()
    views = []
    for param in bucket.params:
        offset, shape = bucket.shard_range(param, rank)
        start = (base + offset) * itemsize
        stop = start + math.prod(shape) * itemsize
        views.append(tensor_over(storage[start:stop], 0, shape, flat.dtype))
    return views


def tensor_over(
    storage: torch.UntypedStorage, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return a contiguous tensor over a storage, from element ``offset`` on.

    It is not a view of another tensor: in-place operations on views cost more, which shows in
    optimizers, and views share their base's version counter.
    """
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, tuple(shape))  # type: ignore[call-overload]


def add_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: float) -> None:
    """Set ``out`` to the sum of the terms, added first to last, divided by ``divisor``.

    The sum is formed in ``out.dtype``, so bfloat16 terms enter a float32 ``out`` unrounded.
    """
    # On the CPU, 65,536 elements at a time: a block of `out` stays in cache while all terms are
    # added, so memory is read once. On other devices each block would cost a kernel launch.
    block = 1 << 16 if out.is_cpu else max(out.numel(), 1)
    for start in range(0, out.numel(), block):
        total = out[start : start + block]
        first, *others = (term[start : start + block] for term in terms)
        if others and first.dtype == total.dtype:
            # One pass instead of a copy and an addition. Not for narrower terms: `torch.add` would
            # add two of them in their own dtype, and round before `out` gets the sum.
            torch.add(first, others.pop(0), out=total)
        else:
            total.copy_(first)
        for term in others:
            total.add_(term)
        if divisor != 1.0:
            total.div_(divisor)
