"""Where every parameter of a unit lies, and which part each rank owns.

A unit's parameters are split into **buckets**, one per storage and compute dtype. Each bucket has

- a *shard buffer* per rank (storage dtype), the same size on every rank;
- an *unsharded buffer* (compute dtype) in which every parameter is contiguous.

    w (4, 8) and b (6,) in float32 on 2 ranks, w direct, b packed:

        shard buffer, rank 0   [ 0, 16) w rows 0-1   [16, 20) b 0-2, 1 padding
        shard buffer, rank 1   [ 0, 16) w rows 2-3   [16, 20) b 3-5, 1 padding
        unsharded buffer       [ 0, 32) w            [32, 38) b

A **direct** parameter's shards, one after the other, are the parameter itself, so they are gathered
straight into place. The rest is **packed**: gathered rank by rank into one piece of memory (the
packed region, ``shard_size`` times ``packed_numel``) and copied from there. `builders` makes layouts:
by rows of each parameter, or flat.

Offsets and sizes are in elements. Every piece starts on a 16-byte boundary at any number of ranks
(unaligned pieces make NCCL an order of magnitude slower). Source: ZeRO-3, arXiv 1910.02054;
PyTorch FSDP, arXiv 2304.11277.
"""

import dataclasses
import enum
import functools
import itertools
import math
import weakref
from typing import NamedTuple

import torch

from fullshard.plan.sizes import rows_per_rank

ALIGNMENT_NBYTES = 16
Shape = tuple[int, ...]


class Route(enum.Enum):
    """How a parameter travels between its sharded and its unsharded form."""

    DIRECT = "direct"  # the shards in rank order are the parameter
    PACKED = "packed"  # through the packed region
    FLAT = "flat"  # the whole buffer travels at once; a shard may hold any range of elements


@dataclasses.dataclass(frozen=True, slots=True)
class DirectRule:
    """Which parameters a way of communicating can move directly.

    even: every rank must own equally many rows (collectives), or not (ranks that read each other).
    min_nbytes: shards smaller than this are packed, since one call for many beats many calls.
    """

    even: bool = True
    min_nbytes: int = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class ParamSpec:
    """What planning knows of a parameter. ``name`` is used in messages only.

    shard_dim: for a layout by rows. trainable: for a flat one, which keeps frozen ones apart.
    """

    name: str = dataclasses.field(compare=False)
    shape: Shape
    dtype: torch.dtype
    compute_dtype: torch.dtype
    shard_dim: int = 0
    trainable: bool = dataclasses.field(default=True, compare=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def extents(self) -> Shape:
        """Elements along the dimensions before the shard dimension, along it, and after it."""
        dim = self.shard_dim
        return math.prod(self.shape[:dim]), self.shape[dim], math.prod(self.shape[dim + 1 :])


class Rows(NamedTuple):
    """A half-open range along the shard dimension."""

    start: int
    stop: int


class Piece(NamedTuple):
    """A run of a parameter's elements, in the parameter and in the shard buffer."""

    param_start: int
    shard_start: int
    numel: int


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """One parameter's place in its bucket; ``index`` is its position in the unit."""

    index: int
    spec: ParamSpec
    route: Route
    shard_size: int
    shard_offset: int
    unsharded_offset: int

    @functools.cached_property
    def rows_per_shard(self) -> int:
        """Rows of every shard but the last ones, which may be shorter or empty."""
        return rows_per_rank(self.spec.shape[self.spec.shard_dim], self.shard_size)

    @functools.cached_property
    def outer_numel(self) -> int:
        return self.spec.extents[0]

    @functools.cached_property
    def inner_numel(self) -> int:
        return self.spec.extents[2]

    @functools.cached_property
    def chunk_numel(self) -> int:
        """Elements reserved in every rank's shard buffer: the largest shard."""
        return self.outer_numel * self.rows_per_shard * self.inner_numel

    @functools.cached_property
    def num_equal_shards(self) -> int:
        """How many ranks own something, if their shards in rank order are the parameter and of one
        size; else 0. 6 rows: 2 on 2 ranks, 3 on 4 or 5. 7 rows: 0 on 4 ranks.
        """
        if self.spec.numel == 0 or self.outer_numel > 1 or self.spec.numel % self.chunk_numel:
            return 0
        return self.spec.numel // self.chunk_numel

    @functools.cached_property
    def is_even(self) -> bool:
        """Whether every rank owns as much, and more than nothing."""
        return self.num_equal_shards == self.shard_size

    @functools.cached_property
    def run_key(self) -> Shape:
        """Equal for parameters that lie alike: the number and size of equal shards, or extents."""
        if self.num_equal_shards:
            return self.num_equal_shards, self.chunk_numel
        return self.spec.extents

    def rows(self, rank: int) -> Rows:
        """Return the rows ``rank`` owns, as ``torch.chunk`` cuts them.

        5 rows on 4 ranks: [0, 2) [2, 4) [4, 5) [5, 5).
        """
        num_rows = self.spec.shape[self.spec.shard_dim]
        return Rows(
            min(rank * self.rows_per_shard, num_rows),
            min((rank + 1) * self.rows_per_shard, num_rows),
        )

    def shard_shape(self, rank: int) -> Shape:
        start, stop = self.rows(rank)
        dim = self.spec.shard_dim
        return (*self.spec.shape[:dim], stop - start, *self.spec.shape[dim + 1 :])

    def shard_numel(self, rank: int) -> int:
        return math.prod(self.shard_shape(rank))


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """Parameters of one storage and compute dtype, direct ones first; all flat or none.

    shard_numel: elements of each rank's shard buffer, padding included.
    packed_offset: where the packed region begins in the shard buffer; it runs to the end.
    direct_numel: elements of the unsharded buffer before the first packed parameter.
    """

    dtype: torch.dtype
    compute_dtype: torch.dtype
    shard_size: int
    params: tuple[ParamLayout, ...]
    shard_numel: int
    packed_offset: int
    unsharded_numel: int
    direct_numel: int

    @functools.cached_property
    def packed_numel(self) -> int:
        return self.shard_numel - self.packed_offset

    @functools.cached_property
    def geometry(self) -> object:
        """The same object for all buckets that equal this one, so that it is compared quickly.

        For as long as one of them refers to it.
        """
        return _geometries.setdefault(dataclasses.replace(self), _Geometry())

    @functools.cached_property
    def is_flat(self) -> bool:
        return bool(self.params) and self.params[0].route is Route.FLAT

    @functools.cached_property
    def is_gapless(self) -> bool:
        """Whether a shard buffer is nothing but even shards of leading dims, one after the other."""
        return (
            bool(self.params)
            and all(param.is_even and param.spec.shard_dim == 0 for param in self.params)
            and not any(self.columns[1::2])
        )

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """Cut a rank's shard buffer: each parameter's chunk, then the padding after it.

        If flat, the unsharded buffer: each parameter, then the padding after it.
        """
        if self.is_flat:
            sizes = [(param.unsharded_offset, param.spec.numel) for param in self.params]
            stop = self.unsharded_numel
        else:
            sizes = [(param.shard_offset, param.chunk_numel) for param in self.params]
            stop = self.shard_numel
        offsets = [offset for offset, _ in sizes] + [stop]
        return tuple(
            part
            for (offset, numel), following in zip(sizes, offsets[1:], strict=True)
            for part in (numel, following - offset - numel)
        )

    def shard_range(self, param: ParamLayout, rank: int) -> tuple[int, Shape]:
        """Return where ``rank``'s shard of a parameter begins in its shard buffer, and its shape.

        A flat shard is 1-D, unless one rank has all of it.
        """
        if not self.is_flat:
            return param.shard_offset, param.shard_shape(rank)
        if self.shard_size == 1:
            return param.unsharded_offset, param.spec.shape
        pieces = self.pieces(param, rank)
        return (pieces[0].shard_start, (pieces[0].numel,)) if pieces else (0, (0,))

    @functools.cached_property
    def direct(self) -> tuple[ParamLayout, ...]:
        return tuple(p for p in self.params if p.route is Route.DIRECT)

    @functools.cached_property
    def packed(self) -> tuple[ParamLayout, ...]:
        return tuple(p for p in self.params if p.route is Route.PACKED)

    @functools.cached_property
    def packed_runs(self) -> tuple[tuple[ParamLayout, ...], ...]:
        """The packed parameters in order, neighbours that lie alike together."""
        runs = itertools.groupby(self.packed, lambda param: param.run_key)
        return tuple(tuple(run) for _, run in runs)

    @functools.cached_property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    @property
    def unsharded_nbytes(self) -> int:
        return self.unsharded_numel * self.compute_dtype.itemsize

    def pieces(self, param: ParamLayout, rank: int) -> tuple[Piece, ...]:
        """Return which elements of ``param`` are where in ``rank``'s shard buffer.

        Elements count in row-major order of the unsharded parameter.
        """
        if param.route is Route.FLAT:
            start = max(param.unsharded_offset, rank * self.shard_numel)
            stop = min(param.unsharded_offset + param.spec.numel, (rank + 1) * self.shard_numel)
            if start >= stop:
                return ()
            return (
                Piece(
                    start - param.unsharded_offset, start - rank * self.shard_numel, stop - start
                ),
            )
        start, stop = param.rows(rank)
        run = (stop - start) * param.inner_numel
        if run == 0:
            return ()
        stride = param.spec.shape[param.spec.shard_dim] * param.inner_numel
        return tuple(
            Piece(outer * stride + start * param.inner_numel, param.shard_offset + outer * run, run)
            for outer in range(param.outer_numel)
        )


@dataclasses.dataclass(frozen=True, slots=True)
class UnitLayout:
    """The buckets of one unit. Every parameter is in exactly one."""

    shard_size: int
    buckets: tuple[BucketLayout, ...]

    @property
    def num_params(self) -> int:
        return sum(len(bucket.params) for bucket in self.buckets)

    @property
    def shard_nbytes(self) -> int:
        return sum(bucket.shard_nbytes for bucket in self.buckets)

    @property
    def unsharded_nbytes(self) -> int:
        return sum(bucket.unsharded_nbytes for bucket in self.buckets)


class _Geometry:
    """Stands for all buckets that are equal."""


# By a copy of the first of equal buckets: a bucket itself refers to its geometry, and would keep it
# here for ever.
_geometries: weakref.WeakValueDictionary[BucketLayout, _Geometry] = weakref.WeakValueDictionary()
