"""What every way of communicating offers to the engine.

A `Comm` belongs to one process group. It decides where shards are stored (`allocate_shards`),
because that decides what has to be moved: collectives read a private buffer, ranks of one host
read each other's. Everything that is started returns a work handle, which holds the tensors it
needs; dropping it after `wait` releases them.
"""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

import torch

from fullshard.comm.packing import Landing, Region
from fullshard.plan.layout import BucketLayout, DirectRule


class Work(Protocol):
    """Something under way. ``wait`` returns once the current stream may use the result.

    tensors: what it holds until then, beside what it was given to fill.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def wait(self) -> None: ...


class Reduction(Protocol):
    """A reduce-scatter under way.

    ``wait`` returns, for each parameter of the bucket in order, whether any rank had a gradient.
    tensors: what it holds until then, beside what it was given to fill.
    """

    @property
    def tensors(self) -> Sequence[torch.Tensor]: ...

    def wait(self) -> tuple[bool, ...]: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Scaling:
    """Factors by which gradients are divided before and after they are summed."""

    before: float = 1.0
    after: float = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Sum:
    """How gradients are to be summed.

    wire_dtype: what travels; sums are formed in the dtype of the result.
    may_average: whether a backend that forms means may do so.
    label: what is reduced, for messages.
    """

    wire_dtype: torch.dtype
    scaling: Scaling = Scaling()
    may_average: bool = True
    label: str = "reduce-scatter"


@dataclasses.dataclass(slots=True)
class ShardBuffer:
    """One rank's shards of one bucket.

    shards: the local shard of each parameter, in bucket order and in its local shape.
    flat: the shard buffer as one tensor, or None where the shards do not lie in one piece.
    gathered: the direct parameters, unsharded, readable without any copy; empty if there are none
        or if they cannot be read in place.
    packed_region: the packed shards of all ranks, rank by rank, if they are readable in place; of
        a flat bucket all of it.
    mapped_nbytes: what all ranks of a host share for the bucket, 0 if they share nothing.
    """

    bucket: BucketLayout
    shards: list[torch.Tensor]
    flat: torch.Tensor | None = None
    gathered: list[torch.Tensor] = dataclasses.field(default_factory=list)
    packed_region: Region | None = None
    mapped_nbytes: int = 0
    _landing: Landing | None = None

    def landing(self, unsharded: torch.Tensor, first: int = 0) -> Landing:
        """Return where gathered parameters belong in an unsharded buffer.

        first: the element of the unsharded buffer at which ``unsharded`` begins.
        """
        if self._landing is None or self._landing.unsharded is not unsharded:
            self._landing = Landing(self.bucket, unsharded, first, self.flat)
        return self._landing

    @property
    def landing_views(self) -> list[torch.Tensor]:
        """The views of the unsharded buffer that was filled last."""
        return [] if self._landing is None else self._landing.views

    def forget_landing(self) -> None:
        """Let go of the unsharded buffer that was filled last."""
        self._landing = None


class Comm(abc.ABC):
    """Communication among the ranks of one process group.

    overlaps: whether what is started goes on by itself, so that starting early helps.
    """

    name: str
    overlaps: bool
    rank: int
    size: int
    rule: DirectRule

    @abc.abstractmethod
    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        """Allocate this rank's shards of a bucket, uninitialised. Every rank has to call it.

        Raises UnavailableError, on every rank, if they were to share the memory and cannot.
        """

    @abc.abstractmethod
    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, *, first: int = 0, label: str
    ) -> Work:
        """Fill the bucket's unsharded buffer (1-D, compute dtype) from element ``first`` on.

        first: 0, or ``bucket.direct_numel`` where the direct parameters are read in place.
        """

    @abc.abstractmethod
    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        how: Sum,
    ) -> Reduction:
        """Sum gradients over the ranks; ``out`` gets this rank's shard buffer of the sums.

        grads: one full gradient per parameter of the bucket, in order; None counts as zeros. They
            are no longer needed once this returns.
        out: 1-D, ``bucket.shard_numel`` elements of `accumulate_dtype`. Padding is undefined, but
            zero in a flat bucket.
        """

    @abc.abstractmethod
    def all_reduce(self, total: torch.Tensor, present: tuple[bool, ...], how: Sum) -> Reduction:
        """Sum 1-D gradients over the ranks, in place, unscaled.

        present: for each parameter in them, whether this rank has a gradient; or nothing, if all
            ranks know that of all.
        """

    def accumulate_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``reduce_dtype`` are summed."""
        return torch.promote_types(reduce_dtype, torch.float32)

    def staged_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        """How much memory a reduce-scatter of this bucket stages in what `prepare` makes."""
        return 0

    def summed_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        """How much an all-reduce of a rank's shard of this bucket stages there."""
        return bucket.shard_numel * wire_dtype.itemsize

    @property
    def held_nbytes(self) -> int:
        """How much memory this rank keeps for staging what it sends."""
        return 0

    @property
    def kept(self) -> Sequence[torch.Tensor]:
        """Memory of earlier collectives that is used again, beside the device's scratch memory."""
        return ()

    @property
    def mapped_nbytes(self) -> int:
        """The same of all ranks, if it is memory that they share on one host."""
        return 0

    def prepare(self, staged_nbytes: Sequence[int]) -> None:  # noqa: B027
        """Make room for reductions that stage this much. Every rank has to call it.

        Raises UnavailableError, on every rank, if they were to share the memory and cannot.
        """

    def fence(self, label: str) -> None:  # noqa: B027
        """Return once every rank has arrived here, if ranks read each other's memory.

        Shards written before are then visible to all, and nobody still reads what was there.
        """

    @property
    def reads_in_place(self) -> bool:
        """Whether ranks read each other's memory, so that writes have to be ordered with reads."""
        return type(self).fence is not Comm.fence

    def agree(self, bits: int, num_bits: int) -> int:
        """Combine every rank's bits by "or", if ranks read each other's memory; else its own."""
        return bits

    def combine(self, bits: int, num_bits: int) -> int:
        """Combine every rank's bits by "or"; its own where the answer would stall the host."""
        return self.agree(bits, num_bits)

    def abandon(self) -> None:  # noqa: B027
        """Forget reductions that were started and never waited for (after an exception)."""


class Done:
    """Work that was finished when it was started."""

    tensors = ()

    def wait(self) -> None:
        return None


class Reduced:
    """A reduction that was finished when it was started."""

    tensors = ()

    def __init__(self, present: tuple[bool, ...]) -> None:
        self._present = present

    def wait(self) -> tuple[bool, ...]:
        return self._present


def shard_views(bucket: BucketLayout, flat: torch.Tensor, rank: int) -> list[torch.Tensor]:
    """View a shard buffer as the rank's shard of each parameter, in its local shape.

    Each view has a storage of its own over the same memory: saving it saves its bytes and no
    others, and DTensor's copying and pickling, which know no storage offsets, work.
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

    It is no view of another tensor: on those, operations in place cost more, which shows in
    optimizers, and they share a version counter.
    """
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset, tuple(shape))  # type: ignore[call-overload]


def add_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: float) -> None:
    """Set ``out`` to the sum of the terms, first to last, divided by ``divisor``.

    Works through blocks that stay in cache, so that memory is read once however many terms there
    are; on other devices than the CPU, all at once: there a block would cost its launch. The sum is
    formed in ``out.dtype``: adding bfloat16 terms to a float32 ``out`` is exact in the terms.
    """
    block = 1 << 16 if out.is_cpu else max(out.numel(), 1)
    for start in range(0, out.numel(), block):
        total = out[start : start + block]
        first, *others = (term[start : start + block] for term in terms)
        if others and first.dtype == total.dtype:
            torch.add(first, others.pop(0), out=total)
        else:
            total.copy_(first)
        for term in others:
            total.add_(term)
        if divisor != 1.0:
            total.div_(divisor)
