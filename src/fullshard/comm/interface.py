"""What every way of communicating offers to the engine.

A `Comm` belongs to one process group. It decides where shards are stored (`allocate_shards`),
because that decides what has to be moved: collectives read a private buffer, ranks of one host
read each other's. Everything that is started returns a work handle, which holds the tensors it
needs; dropping it after `wait` releases them.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch

from fullshard.plan.layout import BucketLayout, DirectRule, ParamLayout, Route


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


@dataclasses.dataclass(slots=True)
class ShardBuffer:
    """One rank's shards of one bucket.

    shards: the local shard of each parameter, in bucket order and in its local shape.
    flat: the shard buffer as one tensor, or None where the shards do not lie in one piece.
    gathered: the direct parameters, unsharded, readable without any copy; empty if there are none
        or if they cannot be read in place.
    packed_region: the packed shards of all ranks, rank by rank, if they are readable in place.
    """

    bucket: BucketLayout
    shards: list[torch.Tensor]
    flat: torch.Tensor | None = None
    gathered: list[torch.Tensor] = dataclasses.field(default_factory=list)
    packed_region: torch.Tensor | None = None


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
        *,
        wire_dtype: torch.dtype,
        scaling: Scaling,
        label: str,
    ) -> Reduction:
        """Sum gradients over the ranks; ``out`` gets this rank's shard buffer of the sums.

        grads: one full gradient per parameter of the bucket, in order; None counts as zeros. They
            are no longer needed once this returns.
        out: 1-D, ``bucket.shard_numel`` elements of `accumulate_dtype`. Padding is undefined.
        wire_dtype: what travels; sums are formed in ``out.dtype``.
        """

    @abc.abstractmethod
    def all_reduce(self, tensor: torch.Tensor, *, wire_dtype: torch.dtype, label: str) -> Work:
        """Sum a 1-D tensor over the ranks, in place."""

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
        start = (base + param.shard_offset) * itemsize
        stop = start + param.shard_numel(rank) * itemsize
        view = torch.empty(0, dtype=flat.dtype, device=flat.device)
        view.set_(storage[start:stop])
        views.append(view.view(param.shard_shape(rank)))
    return views


def shard_parts(param: ParamLayout, full: torch.Tensor) -> list[torch.Tensor]:
    """Split a parameter or its gradient into all shards of full size, and the shorter last one.

    full: the parameter's elements, contiguous, in any shape.
    """
    if param.spec.numel == 0:
        return []
    if param.route is Route.REPLICATED:
        return [full.reshape(1, 1).expand(param.shard_size, 1)]
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
    if param.route is Route.REPLICATED:
        return [region.as_strided((param.shard_size, 1), (stride, 1), base)]
    outer, rows, inner = param.outer_numel, param.rows_per_shard, param.inner_numel
    whole, rest = divmod(param.spec.shape[param.spec.shard_dim], rows)
    full_shards = (whole, outer, rows, inner), (stride, rows * inner, inner, 1)
    places = [region.as_strided(*full_shards, base)]
    if rest:
        last_shard = (outer, rest, inner), (rest * inner, inner, 1)
        places.append(region.as_strided(*last_shard, base + whole * stride))
    return places


def copy_out_packed(
    bucket: BucketLayout, region: torch.Tensor, unsharded: torch.Tensor, first: int
) -> None:
    """Copy every packed parameter from the packed region of all ranks to where it belongs.

    first: the element of the unsharded buffer at which ``unsharded`` begins.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for param in bucket.packed:
        full = unsharded.narrow(0, param.unsharded_offset - first, param.spec.numel)
        offset = param.shard_offset - bucket.packed_offset
        parts = shard_parts(param, full)
        places = shard_places(param, region, offset=offset, stride=bucket.packed_numel)
        if param.route is Route.REPLICATED:
            parts, places = [parts[0][0]], [places[0][0]]  # any rank's copy will do
        targets.extend(parts)
        sources.extend(places)
    if targets:
        torch._foreach_copy_(targets, sources)


def copy_in_gradients(
    params: Sequence[ParamLayout],
    grads: Sequence[torch.Tensor | None],
    region: torch.Tensor,
    *,
    first: int,
    stride: int,
    divisor: float = 1.0,
) -> None:
    """Copy gradients, divided by ``divisor``, into a rank-major region; None becomes zeros.

    first: the shard offset at which the region begins.
    """
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    missing: list[torch.Tensor] = []
    for param, grad in zip(params, grads, strict=True):
        places = shard_places(param, region, offset=param.shard_offset - first, stride=stride)
        if grad is None:
            missing.extend(places)
        else:
            targets.extend(places)
            sources.extend(shard_parts(param, grad.contiguous()))
    if targets:
        torch._foreach_copy_(targets, sources)
    if targets and divisor != 1.0:
        torch._foreach_div_(targets, divisor)
    if missing:
        torch._foreach_zero_(missing)
