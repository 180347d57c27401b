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

from fullshard.plan.layout import BucketLayout, DirectRule, ParamLayout


class Work(Protocol):
    """Something under way. ``wait`` returns once the current stream may use the result."""

    def wait(self) -> None: ...


class Reduction(Protocol):
    """A reduce-scatter under way.

    ``wait`` returns, for each parameter of the bucket in order, whether any rank had a gradient.
    """

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
    label: what is reduced, for messages.
    """

    wire_dtype: torch.dtype
    scaling: Scaling = Scaling()
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
    """

    bucket: BucketLayout
    shards: list[torch.Tensor]
    flat: torch.Tensor | None = None
    gathered: list[torch.Tensor] = dataclasses.field(default_factory=list)
    packed_region: torch.Tensor | None = None
    _packed_copy: "PackedCopy | None" = None

    def copy_out_packed(self, region: torch.Tensor, unsharded: torch.Tensor, first: int) -> None:
        """Copy every packed parameter from the packed region of all ranks to where it belongs.

        first: the element of the unsharded buffer at which ``unsharded`` begins.
        """
        if self._packed_copy is None or self._packed_copy.unsharded is not unsharded:
            self._packed_copy = PackedCopy(self.bucket, unsharded, first)
        self._packed_copy(region)


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
        """Allocate this rank's shards of a bucket, uninitialised. Every rank has to call it."""

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
    def all_reduce(self, tensor: torch.Tensor, how: Sum) -> Work:
        """Sum a 1-D tensor over the ranks, in place, unscaled."""

    def accumulate_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``reduce_dtype`` are summed."""
        return torch.promote_types(reduce_dtype, torch.float32)

    def staged_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        """How much memory a reduce-scatter of this bucket stages in what `prepare` makes."""
        return 0

    def prepare(self, staged_nbytes: Sequence[int]) -> None:  # noqa: B027
        """Make room for reductions that stage this much. Every rank has to call it."""

    def fence(self, label: str) -> None:  # noqa: B027
        """Return once every rank has arrived here, if ranks read each other's memory.

        Shards written before are then visible to all, and nobody still reads what was there.
        """

    def abandon(self) -> None:  # noqa: B027
        """Forget reductions that were started and never waited for (after an exception)."""


class Done:
    """Work that was finished when it was started."""

    def wait(self) -> None:
        return None


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
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        view.set_(storage[start:stop])
        views.append(view.view(shape))
    return views


def shard_parts(param: ParamLayout, full: torch.Tensor) -> list[torch.Tensor]:
    """Split a parameter or its gradient into all shards of full size, and the shorter last one.

    full: the parameter's elements, contiguous, in any shape.
    """
    if param.spec.numel == 0:
        return []
    rows = param.rows_per_shard
    num_rows = param.spec.shape[param.spec.shard_dim]
    whole, rest = divmod(num_rows, rows)
    cube = full.view(param.outer_numel, num_rows, param.inner_numel)
    parts = [cube[:, : whole * rows].unflatten(1, (whole, rows)).transpose(0, 1)]
    if rest:
        parts.append(cube[:, whole * rows :])
    return parts


def shard_places(
    param: ParamLayout, region: torch.Tensor, *, offset: int, stride: int
) -> list[torch.Tensor]:
    """Return where `shard_parts` lie, part by part, in a rank-major region.

    region: 1-D; rank r's shard of the parameter begins at ``offset + r * stride``.
    """
    if param.spec.numel == 0:
        return []
    base = region.storage_offset() + offset
    outer, rows, inner = param.outer_numel, param.rows_per_shard, param.inner_numel
    whole, rest = divmod(param.spec.shape[param.spec.shard_dim], rows)
    full_shards = (whole, outer, rows, inner), (stride, rows * inner, inner, 1)
    places = [region.as_strided(*full_shards, base)]
    if rest:
        last_shard = (outer, rest, inner), (rest * inner, inner, 1)
        places.append(region.as_strided(*last_shard, base + whole * stride))
    return places


class PackedCopy:
    """Copies packed parameters from the packed region of all ranks to where they belong.

    Holds the views it writes to: the unsharded buffer is the same tensor from step to step.
    """

    def __init__(self, bucket: BucketLayout, unsharded: torch.Tensor, first: int) -> None:
        self.unsharded = unsharded
        self._bucket = bucket
        self._columns = bucket.columns[2 * len(bucket.direct) :]
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._region: torch.Tensor | None = None
        for param in bucket.packed:
            full = unsharded.as_strided(
                (param.spec.numel,),
                (1,),
                unsharded.storage_offset() + param.unsharded_offset - first,
            )
            if param.is_even:
                self._targets.append(full.view(param.shard_size, param.chunk_numel))
            else:
                self._targets.extend(shard_parts(param, full))

    def __call__(self, region: torch.Tensor) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources_in(region))

    def _sources_in(self, region: torch.Tensor) -> list[torch.Tensor]:
        if region is self._region:
            return self._sources
        stride = self._bucket.packed_numel
        matrix = region.view(self._bucket.shard_size, stride)
        sources: list[torch.Tensor] = []
        pieces = matrix.split_with_sizes(self._columns, 1)[::2]
        for param, piece in zip(self._bucket.packed, pieces, strict=True):
            if param.is_even:
                sources.append(piece)
            else:
                offset = param.shard_offset - self._bucket.packed_offset
                sources.extend(shard_places(param, region, offset=offset, stride=stride))
        self._region, self._sources = region, sources
        return sources


def copy_in_gradients(
    bucket: BucketLayout,
    grads: Sequence[torch.Tensor | None],
    region: torch.Tensor,
    *,
    packed_only: bool = False,
    divisor: float = 1.0,
) -> None:
    """Copy gradients, divided by ``divisor``, into a rank-major region; None becomes zeros.

    region: each rank's shard buffer after the other, or only what is packed of it. It may have
    more columns than that, but for a flat bucket, whose padding is set to zero.
    """
    if bucket.is_flat:
        _copy_in_flat(bucket, grads, region, divisor)
        return
    start = len(bucket.direct) if packed_only else 0
    first = bucket.packed_offset if packed_only else 0
    matrix = region.view(bucket.shard_size, -1)
    stride = matrix.size(1)
    columns = bucket.columns[2 * start :]
    pieces = matrix.split_with_sizes((*columns, stride - sum(columns)), 1)[:-1:2]
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    missing: list[torch.Tensor] = []
    for param, grad, piece in zip(bucket.params[start:], grads[start:], pieces, strict=True):
        places = (
            [piece]
            if param.is_even
            else shard_places(param, region, offset=param.shard_offset - first, stride=stride)
        )
        if grad is None:
            missing.extend(places)
            continue
        full = grad.contiguous()
        targets.extend(places)
        if param.is_even:
            sources.append(full.view(param.shard_size, -1))
        else:
            sources.extend(shard_parts(param, full))
    if targets:
        torch._foreach_copy_(targets, sources)
    if targets and divisor != 1.0:
        torch._foreach_div_(targets, divisor)
    if missing:
        torch._foreach_zero_(missing)


def _copy_in_flat(
    bucket: BucketLayout,
    grads: Sequence[torch.Tensor | None],
    region: torch.Tensor,
    divisor: float,
) -> None:
    columns = region.split_with_sizes(bucket.columns)
    pieces, padding = columns[::2], columns[1::2]
    found = [(piece, grad) for piece, grad in zip(pieces, grads, strict=True) if grad is not None]
    if found:
        torch._foreach_copy_([piece for piece, _ in found], [grad.reshape(-1) for _, grad in found])
        if divisor != 1.0:
            torch._foreach_div_([piece for piece, _ in found], divisor)
    missing = [piece for piece, grad in zip(pieces, grads, strict=True) if grad is None]
    blank = [part for part in (*missing, *padding) if part.numel()]
    if blank:
        torch._foreach_zero_(blank)


def add_in_order(terms: Sequence[torch.Tensor], out: torch.Tensor, *, divisor: float) -> None:
    """Set ``out`` to the sum of the terms, first to last, divided by ``divisor``.

    Works through blocks that stay in cache, so that memory is read once however many terms there
    are. The sum is formed in ``out.dtype``: adding bfloat16 terms to a float32 ``out`` is exact
    in the terms.
    """
    block = 1 << 16
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
