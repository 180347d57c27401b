"""Layouts: where every parameter of a unit lies, and which part of it each rank owns.

A unit's parameters are split into **buckets**, one per storage and compute dtype. Each bucket has

- a *shard buffer* per rank (storage dtype), the same size on every rank;
- an *unsharded buffer* (compute dtype) in which every parameter is contiguous.

    w (4, 8) and b (6,) in float32 on 2 ranks, w direct, b packed:

        shard buffer, rank 0   [ 0, 16) w rows 0-1   [16, 20) b 0-2, 1 padding
        shard buffer, rank 1   [ 0, 16) w rows 2-3   [16, 20) b 3-5, 1 padding
        unsharded buffer       [ 0, 32) w            [32, 38) b

The shards of a **direct** parameter, one after the other, are the parameter itself, so they are
gathered straight into place. The others are **packed**: gathered rank by rank into one piece of
memory (the packed region, ``shard_size`` times ``packed_numel`` elements) and copied from there.
`builders` makes layouts: by rows of each parameter, or flat.

[Note: Runs] Packed parameters that are sharded alike (equal `ParamLayout.run_key`) lie next to each
other, and have the same size and padding. So in a shard buffer and in the unsharded buffer, members
of such a run are equally far apart, and one strided view is enough for all of them. `builders`
sorts parameters for that, and `comm.packing` relies on it.

Offsets and sizes are in elements. Every piece starts on a 16-byte boundary at any number of ranks,
except in flat layouts that are not aligned (unaligned pieces make NCCL an order of magnitude
slower). Source: ZeRO-3, arXiv 1910.02054; PyTorch FSDP, arXiv 2304.11277.
"""

import dataclasses
import enum
import functools
import itertools
import math
import weakref
from typing import NamedTuple

import torch

ALIGNMENT_NBYTES = 16
Shape = tuple[int, ...]


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def rows_per_rank(num_rows: int, num_ranks: int) -> int:
    """Return the rows of every rank except the last ones, as ``torch.chunk`` and DTensor cut them.

    Ranks after the rows run out have fewer or none: 5 rows on 4 ranks are 2, 2, 1 and 0.
    """
    return -(-num_rows // num_ranks)


class Route(enum.Enum):
    """The way a parameter takes between its sharded and its unsharded form."""

    DIRECT = "direct"  # the shards in rank order are the parameter
    PACKED = "packed"  # through the packed region
    FLAT = "flat"  # with its whole bucket at once; a shard may begin and end inside a parameter


@dataclasses.dataclass(frozen=True, slots=True)
class DirectRule:
    """The parameters that a way of communicating can move directly.

    even: True if every rank must own equally many rows, as collectives need. Ranks that read each
        other's memory do not need it.
    min_nbytes: smaller shards are packed, since one call for many is faster than many calls.
    """

    even: bool = True
    min_nbytes: int = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class ParamSpec:
    """A parameter as planning sees it. Shapes are those of this rank's unsharded tensor.

    name: for messages only; specs that differ in it are equal.
    dtype: of the shard. compute_dtype: of the unsharded parameter.
    shard_dim: dimension that a layout by rows cuts.
    trainable: flat layouts put frozen parameters into buckets of their own.
    is_used: False for one that never gets a gradient of its own, which then has no optimizer state.
    """

    name: str = dataclasses.field(compare=False)
    shape: Shape
    dtype: torch.dtype
    compute_dtype: torch.dtype
    shard_dim: int = 0
    trainable: bool = dataclasses.field(default=True, compare=False)
    is_used: bool = dataclasses.field(default=True, compare=False)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def extents(self) -> Shape:
        """Elements along the dimensions before the shard dimension, along it, and after it."""
        dim = self.shard_dim
        return math.prod(self.shape[:dim]), self.shape[dim], math.prod(self.shape[dim + 1 :])


class Rows(NamedTuple):
    """A half-open range of rows, that is, of indices along the shard dimension."""

    start: int
    stop: int


class Piece(NamedTuple):
    """A run of consecutive elements, by its start in the parameter and in the shard buffer."""

    param_start: int
    shard_start: int
    numel: int


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """One parameter's place in its bucket.

    index: position of the parameter in the unit.
    shard_offset: where its shard begins in every rank's shard buffer; 0 in a flat bucket.
    unsharded_offset: where it begins in the unsharded buffer.
    """

    index: int
    spec: ParamSpec
    route: Route
    shard_size: int
    shard_offset: int
    unsharded_offset: int

    @functools.cached_property
    def rows_per_shard(self) -> int:
        """Rows of every shard except the last ones, which may be shorter or empty."""
        return rows_per_rank(self.spec.shape[self.spec.shard_dim], self.shard_size)

    @functools.cached_property
    def outer_numel(self) -> int:
        """Elements along the dimensions before the shard dimension; 1 if that is dim 0."""
        return self.spec.extents[0]

    @functools.cached_property
    def inner_numel(self) -> int:
        """Elements of one row: those along the dimensions after the shard dimension."""
        return self.spec.extents[2]

    @functools.cached_property
    def chunk_numel(self) -> int:
        """Elements reserved in every rank's shard buffer: those of the largest shard."""
        return self.outer_numel * self.rows_per_shard * self.inner_numel

    @functools.cached_property
    def num_equal_shards(self) -> int:
        """Number of non-empty shards if they have one size and form the parameter in rank order.

        Otherwise 0. 6 rows: 2 on 2 ranks, 3 on 4 or 5 ranks. 7 rows: 0 on 4 ranks.
        """
        if self.spec.numel == 0 or self.outer_numel > 1 or self.spec.numel % self.chunk_numel:
            return 0
        return self.spec.numel // self.chunk_numel

    @functools.cached_property
    def is_even(self) -> bool:
        return self.num_equal_shards == self.shard_size

    @functools.cached_property
    def run_key(self) -> Shape:
        """A key that is equal for parameters which are sharded alike: see [Note: Runs].

        Number and size of the shards if they are equal, otherwise the extents.
        """
        if self.num_equal_shards:
            return self.num_equal_shards, self.chunk_numel
        return self.spec.extents

    def rows(self, rank: int) -> Rows:
        """Return the rows that ``rank`` owns, as ``torch.chunk`` cuts them.

        5 rows on 4 ranks: [0, 2) [2, 4) [4, 5) [5, 5).
        """
        num_rows = self.spec.shape[self.spec.shard_dim]
        return Rows(
            min(rank * self.rows_per_shard, num_rows),
            min((rank + 1) * self.rows_per_shard, num_rows),
        )

    def shard_shape(self, rank: int) -> Shape:
        """Return the shape of ``rank``'s shard in a layout by rows."""
        start, stop = self.rows(rank)
        dim = self.spec.shard_dim
        return (*self.spec.shape[:dim], stop - start, *self.spec.shape[dim + 1 :])

    def shard_numel(self, rank: int) -> int:
        return math.prod(self.shard_shape(rank))


@dataclasses.dataclass(frozen=True)
class BucketLayout:
    """Parameters of one storage and one compute dtype: first the direct ones, then the packed ones.

    In a flat bucket all parameters are flat.

    shard_numel: elements of each rank's shard buffer, padding included.
    packed_offset: where packed shards begin in the shard buffer; they reach to its end.
    unsharded_numel: elements of the unsharded buffer, padding included.
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
        """Elements of each rank's packed shards, padding included."""
        return self.shard_numel - self.packed_offset

    @functools.cached_property
    def geometry(self) -> object:
        """An identity token that all equal buckets share, for use as a cheap cache key.

        Comparing buckets means comparing all of their parameters. The token lives as long as one of
        the buckets that asked for it.
        """
        return _geometries.setdefault(dataclasses.replace(self), _Geometry())

    @functools.cached_property
    def is_flat(self) -> bool:
        return bool(self.params) and self.params[0].route is Route.FLAT

    @functools.cached_property
    def is_gapless(self) -> bool:
        # A shard buffer consists of even shards of dim 0 alone, without padding.
        return (
            bool(self.params)
            and all(param.is_even and param.spec.shard_dim == 0 for param in self.params)
            and not any(self.columns[1::2])
        )

    @functools.cached_property
    def columns(self) -> tuple[int, ...]:
        """Sizes that cut a rank's shard buffer: per parameter, its chunk and the padding after it.

        In a flat bucket they cut the unsharded buffer: each parameter and the padding after it.
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

        A flat shard is 1-D, and (0,) at 0 if the rank owns nothing of the parameter; with one rank
        it has the parameter's shape.
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
        """The packed parameters in order, grouped into runs: see [Note: Runs]."""
        runs = itertools.groupby(self.packed, lambda param: param.run_key)
        return tuple(tuple(run) for _, run in runs)

    @functools.cached_property
    def shard_nbytes(self) -> int:
        return self.shard_numel * self.dtype.itemsize

    @property
    def unsharded_nbytes(self) -> int:
        return self.unsharded_numel * self.compute_dtype.itemsize

    def pieces(self, param: ParamLayout, rank: int) -> tuple[Piece, ...]:
        """Return which elements of ``param`` lie where in ``rank``'s shard buffer.

        Elements are numbered in row-major order of the unsharded parameter.
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
    def shard_nbytes(self) -> int:
        return sum(bucket.shard_nbytes for bucket in self.buckets)

    @property
    def unsharded_nbytes(self) -> int:
        return sum(bucket.unsharded_nbytes for bucket in self.buckets)


class _Geometry:
    """A token that stands for all equal buckets."""


# The key is a copy of the first of equal buckets (`dataclasses.replace`). With the bucket itself as
# a key, which refers to its geometry, key and value would keep each other here for ever.
_geometries: weakref.WeakValueDictionary[BucketLayout, _Geometry] = weakref.WeakValueDictionary()
