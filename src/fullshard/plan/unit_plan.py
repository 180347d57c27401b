"""What sharding does to a unit, in bytes: its shards, what a gather and a reduction of it take.

From the layouts that the engine makes for the same parameters, so that a plan and a run agree.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fullshard.errors import ShardingError
from fullshard.plan.builders import flat_layout, regroup, rows_layout
from fullshard.plan.gradient_buckets import GradientBucket, flat_buckets, rows_buckets, wire_dtype
from fullshard.plan.gradient_dtypes import (
    GradDtype,
    GradientDtypes,
    flat_gradient_dtypes,
    gradient_dtypes,
    may_overflow,
)
from fullshard.plan.layout import ParamLayout, ParamSpec, UnitLayout
from fullshard.plan.ways import (
    GLOO,
    ONE_RANK,
    PEER_MEMORY,
    GatherMemory,
    ReduceMemory,
    Way,
    flags_nbytes,
    gather_memory,
    reduce_memory,
    sample_nbytes,
)


@dataclasses.dataclass(frozen=True)
class Sharding:
    """How units are laid out and how their ranks exchange bytes. Raises ShardingError for impossible sizes.

    shard_size: ranks over which parameters are sharded. shard_rank: the one that is planned.
    replicate_size: ranks that hold the same shards. way, replicate_way: over the shard axis and the replicate axis.
    is_flat: by pieces of flat buffers, as FSDP1 does it, and not by rows.
    offloads: shards, their gradients and optimizer state are in host memory, where the optimizer steps.
    reduce_dtype, gradients_follow_parameter: see `plan.gradient_dtypes`.
    """

    shard_size: int
    way: Way
    shard_rank: int = 0
    replicate_size: int = 1
    replicate_way: Way | None = None
    is_flat: bool = False
    offloads: bool = False
    reduce_dtype: torch.dtype | None = None
    gradients_follow_parameter: bool = False

    def __post_init__(self) -> None:
        if self.shard_size < 1 or self.replicate_size < 1:
            raise ShardingError(
                f"Sharding over {self.shard_size} ranks with {self.replicate_size} replicas: both are at least 1."
            )
        if not 0 <= self.shard_rank < self.shard_size:
            raise ShardingError(
                f"Sharding(shard_rank={self.shard_rank}): with shard_size={self.shard_size}, ranks are 0 to "
                f"{self.shard_size - 1}."
            )

    @property
    def data_parallel_size(self) -> int:
        return self.shard_size * self.replicate_size

    @property
    def shard_way(self) -> Way:
        return ONE_RANK if self.shard_size == 1 else self.way

    @property
    def all_reduce_way(self) -> Way:
        return ONE_RANK if self.replicate_size == 1 else self.replicate_way or self.way


class BucketPlan(NamedTuple):
    """The reduction of one bucket of gradients, in bytes.

    first: of gradients as autograd leaves them. summed: of sums of several backwards.
    shard_nbytes: of gradient shards. total_nbytes: of scratch memory in which the sum is formed; it is formed in the
    gradient shards if they are free and ``is_final``.
    all_reduced_nbytes: what is summed over replicas; 0 without any. cast_nbytes: of its copy in the reduce dtype.
    is_taken: a parameter of this rank gets a gradient of it; not where all that the rank owns is padding, or frozen.
    """

    first: ReduceMemory
    summed: ReduceMemory
    shard_nbytes: int
    total_nbytes: int
    is_final: bool
    all_reduced_nbytes: int
    cast_nbytes: int
    is_taken: bool


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class UnitPlan:
    """A unit under a `Sharding`, in bytes. Equal units have one, so it is compared by identity.

    gathers: one per bucket of parameters. buckets: of gradients.
    full_nbytes: of full gradients. sums_nbytes: of those that wait for a later reduction, summed.
    unlent_nbytes: of full gradients that autograd leaves beside sums: to others it adds in place.
    staged, staged_sums, all_reduced: bytes in a ring that reductions take, per bucket, where ranks stage them: of
        gradients as autograd leaves them, of sums of several backwards, and over replicas.
    trained_numel, trained_nbytes: of this rank's shards, what an optimizer updates. num_trained: of how many parameters.
    largest_numel: of the largest of these. sample_nbytes: kept to notice writes to shards that peers read.
    is_in_place: peers' shards are read where they are, of one bucket at least.
    is_handed_over: full gradients become those of the shards, since there is one rank. handed_nbytes: of them then.
        hands_sums: so do sums of several backwards, whose dtype may be another one in flat units.
    """

    layout: UnitLayout
    shard_nbytes: int
    gathers: tuple[GatherMemory, ...]
    buckets: tuple[BucketPlan, ...]
    full_nbytes: int
    sums_nbytes: int
    unlent_nbytes: int
    staged: tuple[int, ...]
    staged_sums: tuple[int, ...]
    all_reduced: tuple[int, ...]
    trained_numel: int
    trained_nbytes: int
    num_trained: int
    largest_numel: int
    sample_nbytes: int
    is_in_place: bool
    is_handed_over: bool
    handed_nbytes: int
    hands_sums: bool

    @property
    def gathered_nbytes(self) -> int:
        """Private unsharded memory, into which a gather moves bytes."""
        return sum(each.buffer_nbytes for each in self.gathers)


def plan_unit(params: Sequence[ParamSpec], sharding: Sharding) -> UnitPlan:
    """Plan a unit. Equal units are planned once."""
    # Whether a parameter is trainable, and used, is no part of its equality.
    trained = tuple(index for index, param in enumerate(params) if param.trainable)
    # In a flat bucket all get a gradient.
    stepped = frozenset(n for n in trained if sharding.is_flat or params[n].is_used)
    return _plan_unit(tuple(params), trained, stepped, sharding)


@functools.lru_cache(maxsize=4096)
def _plan_unit(
    params: tuple[ParamSpec, ...],
    trained: tuple[int, ...],
    stepped: frozenset[int],
    sharding: Sharding,
) -> UnitPlan:
    way, rank = sharding.shard_way, sharding.shard_rank
    if sharding.is_flat:
        layout = flat_layout(params, shard_size=sharding.shard_size)
        dtypes = [flat_gradient_dtypes(each, reduce_dtype=sharding.reduce_dtype) for each in params]
        buckets = flat_buckets(layout, dtypes, trained)
    else:
        layout = rows_layout(params, shard_size=sharding.shard_size, rule=way.rule)
        dtypes = [_dtypes(each, sharding) for each in params]
        buckets = rows_buckets(
            params, dtypes, trained, shard_size=sharding.shard_size, rule=way.rule
        )
    own = [
        (param, sum(piece.numel for piece in bucket.pieces(param, rank)))
        for bucket in layout.buckets
        for param in bucket.params
    ]
    updated = [(numel, param.spec.dtype) for param, numel in own if param.index in stepped]
    used = [index for index in trained if index in stepped]  # others have no full gradient
    unlent = [index for index in used if not dtypes[index].takes_sums]
    # Ranks that share memory keep shards without padding between them.
    is_padded = way is not PEER_MEMORY or sharding.is_flat
    shards = sum(numel * param.spec.dtype.itemsize for param, numel in own)
    return UnitPlan(
        layout=layout,
        shard_nbytes=layout.shard_nbytes if is_padded else shards,
        gathers=tuple(
            gather_memory(bucket, way, is_offloaded=sharding.offloads) for bucket in layout.buckets
        ),
        buckets=tuple(_plan_bucket(bucket, sharding, trained) for bucket in buckets),
        full_nbytes=_full_nbytes(params, dtypes, used),
        sums_nbytes=_sums_nbytes(layout, params, dtypes, used, is_flat=sharding.is_flat),
        unlent_nbytes=0 if sharding.is_flat else _full_nbytes(params, dtypes, unlent),
        staged=tuple(_staged_nbytes(b, sharding.shard_size, _wire(b)) for b in buckets),
        staged_sums=tuple(
            _staged_nbytes(b, sharding.shard_size, _wire(b, accumulated=not sharding.is_flat))
            for b in buckets
        ),
        all_reduced=tuple(_staged_nbytes(each, 1, each.reduce_dtype) for each in buckets),
        trained_numel=sum(numel for numel, _ in updated),
        trained_nbytes=sum(numel * dtype.itemsize for numel, dtype in updated),
        # Of a flat buffer, only ranks that own elements of a parameter have a gradient for it.
        num_trained=sum(numel > 0 or not sharding.is_flat for numel, _ in updated),
        largest_numel=max((numel for numel, _ in updated), default=0),
        sample_nbytes=_samples_nbytes(layout, own) if way is PEER_MEMORY else 0,
        is_in_place=way.reads_in_place
        and any(b.direct_numel and b.dtype == b.compute_dtype for b in layout.buckets),
        is_handed_over=sharding.data_parallel_size == 1
        and not sharding.offloads
        and all(each.reduce_dtype == each.layout.dtype for each in buckets),
        handed_nbytes=sum(params[index].numel * params[index].dtype.itemsize for index in used),
        hands_sums=not sharding.is_flat
        or all(each.layout.compute_dtype == each.layout.dtype for each in buckets),
    )


def _samples_nbytes(layout: UnitLayout, own: Sequence[tuple[ParamLayout, int]]) -> int:
    """Return the bytes of samples of a unit that is read in place, which one in another dtype is not."""
    if any(bucket.dtype != bucket.compute_dtype for bucket in layout.buckets):
        return 0
    sizes = ((param.spec.dtype.itemsize, numel) for param, numel in own)
    return sum(sample_nbytes(numel * itemsize, itemsize) for itemsize, numel in sizes if numel)


def _full_nbytes(
    params: Sequence[ParamSpec], dtypes: Sequence[GradientDtypes], indices: Sequence[int]
) -> int:
    return sum(params[index].numel * dtypes[index].full.itemsize for index in indices)


def _dtypes(spec: ParamSpec, sharding: Sharding) -> GradientDtypes:
    return gradient_dtypes(
        spec,
        GradDtype(),
        reduce_dtype=sharding.reduce_dtype,
        follows_param=sharding.gradients_follow_parameter,
    )


def _wire(bucket: GradientBucket, *, accumulated: bool = False) -> torch.dtype:
    return wire_dtype(bucket.layout, bucket.reduce_dtype, accumulated=accumulated)


def _staged_nbytes(bucket: GradientBucket, num_shards: int, wire: torch.dtype) -> int:
    """Return what a rank stages in a ring for the sums of a bucket's shards."""
    numel = num_shards * bucket.layout.shard_numel
    return flags_nbytes(len(bucket.layout.params)) + numel * wire.itemsize


def _sums_nbytes(
    layout: UnitLayout,
    params: Sequence[ParamSpec],
    dtypes: Sequence[GradientDtypes],
    trained: Sequence[int],
    *,
    is_flat: bool,
) -> int:
    """Return the bytes of a unit's full gradients, summed over several backwards."""
    if is_flat:  # buffers like those of the parameters
        of_trained = (b for b in layout.buckets if b.params[0].index in trained)
        return sum(bucket.unsharded_nbytes for bucket in of_trained)
    return sum(params[index].numel * dtypes[index].reduced.itemsize for index in trained)


def _plan_bucket(bucket: GradientBucket, sharding: Sharding, trained: Sequence[int]) -> BucketPlan:
    layout, reduce_dtype, way = bucket.layout, bucket.reduce_dtype, sharding.shard_way
    is_alone = sharding.data_parallel_size == 1
    total_dtype = reduce_dtype if is_alone else way.sum_dtype(reduce_dtype)
    replicas = sharding.replicate_size > 1
    is_scaled = may_overflow(reduce_dtype, total_dtype, has_replicas=replicas)

    def memory(full_dtype: torch.dtype, *, accumulated: bool) -> ReduceMemory:
        wire = total_dtype if way.sums_natively else _wire(bucket, accumulated=accumulated)
        return reduce_memory(layout, way, wire, full_dtype=full_dtype, is_scaled=is_scaled)

    is_wide = not layout.is_flat
    reduced_nbytes = layout.shard_numel * reduce_dtype.itemsize
    return BucketPlan(
        first=memory(layout.compute_dtype, accumulated=False),
        summed=memory(reduce_dtype if is_wide else layout.compute_dtype, accumulated=is_wide),
        shard_nbytes=layout.shard_nbytes,
        total_nbytes=layout.shard_numel * total_dtype.itemsize,
        is_final=total_dtype == layout.dtype and not sharding.offloads,
        all_reduced_nbytes=reduced_nbytes if replicas else 0,
        cast_nbytes=reduced_nbytes if replicas and total_dtype != reduce_dtype else 0,
        is_taken=not layout.is_flat
        or any(
            param.index in trained and layout.pieces(param, sharding.shard_rank)
            for param in layout.params
        ),
    )


@functools.lru_cache(maxsize=4096)
def kept_nbytes(plan: UnitPlan, group_size: int) -> int:
    """Return the bytes of a unit's shards over a smaller group of ranks, which it keeps until backward."""
    return sum(regroup(each, shard_size=group_size).shard_nbytes for each in plan.layout.buckets)


@functools.lru_cache(maxsize=4096)
def smaller_gather(plan: UnitPlan, group_size: int) -> tuple[GatherMemory, ...]:
    """Return what gathering a unit over a smaller group takes, per bucket."""
    buckets = (regroup(each, shard_size=group_size) for each in plan.layout.buckets)
    return tuple(gather_memory(each, GLOO, is_offloaded=False) for each in buckets)
