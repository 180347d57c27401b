"""How the gradients of one bucket are reduced: in which dtypes, divided by what, and what follows.

Planning only; `gradients` carries it out.
"""

import dataclasses
from collections.abc import Callable

import torch

from fullshard.comm.interface import Scaling, Sum
from fullshard.plan.layout import BucketLayout
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How a bucket is reduced under one configuration.

    config, accumulated: what it was made from.
    over_shards, over_replicas: the sums, one after the other.
    divisor: of the second.
    total_dtype: in which the sum over the shard axis is formed.
    is_final: whether that sum may be formed in the gradients' own memory, if there are none yet.
    is_deposited: whether nothing happens to the sum before they get it.
    """

    config: UnitConfig
    accumulated: bool
    over_shards: Sum
    over_replicas: Sum
    divisor: float
    reduce_dtype: torch.dtype
    total_dtype: torch.dtype
    is_final: bool
    is_deposited: bool


def make_recipe(
    bucket: BucketLayout,
    config: UnitConfig,
    mesh: MeshPlan,
    *,
    sum_dtype: Callable[[torch.dtype], torch.dtype],
    accumulated: bool,
    is_offloaded: bool,
    label: str,
) -> Recipe:
    """Plan the reduction of a bucket.

    sum_dtype: in which sums over the shard axis are formed, given the dtype of what is summed
        (`Comm.accumulate_dtype`).
    accumulated: whether gradients are sums of several backwards, in the reduce dtype.
    is_offloaded: whether the sharded parameters are on another device than the gradients.
    """
    reduce_dtype = total_dtype = _reduce_dtype(bucket, config)
    if config.comm_hook is None and mesh.data_parallel_size > 1:
        total_dtype = sum_dtype(reduce_dtype)
    scaling, divisor = _scaling(config, mesh, sum_dtype), 1.0
    if mesh.replicate_size > 1:
        scaling, divisor = Scaling(scaling.before), scaling.after
    has_more_to_do = (
        bucket.is_flat
        or mesh.replicate_size > 1
        or reduce_dtype.itemsize < total_dtype.itemsize
        or config.all_reduce_hook is not None
        or config.keep_low_precision_grads
        or config.reduce_scatter_unused_params
    )
    return Recipe(
        config,
        accumulated,
        over_shards=Sum(
            wire_dtype(bucket, config, accumulated=accumulated),
            scaling,
            may_average=not config.force_sum_reduction,
            label=f"{label}: reduce-scatter",
        ),
        over_replicas=Sum(reduce_dtype, label=f"{label}: all-reduce"),
        divisor=divisor,
        reduce_dtype=reduce_dtype,
        total_dtype=total_dtype,
        is_final=(
            total_dtype == bucket.dtype
            and not is_offloaded
            and (config.all_reduce_grads or mesh.replicate_size == 1)
            and not config.keep_low_precision_grads
        ),
        is_deposited=not has_more_to_do,
    )


def wire_dtype(bucket: BucketLayout, config: UnitConfig, *, accumulated: bool) -> torch.dtype:
    """Return what travels: the narrower of gradient and reduce dtype, as sums are wide anyway."""
    reduce_dtype = _reduce_dtype(bucket, config)
    if accumulated or reduce_dtype.itemsize <= bucket.compute_dtype.itemsize:
        return reduce_dtype
    return bucket.compute_dtype


def _reduce_dtype(bucket: BucketLayout, config: UnitConfig) -> torch.dtype:
    return config.mp_policy.reduce_dtype or bucket.compute_dtype


def _scaling(
    config: UnitConfig, mesh: MeshPlan, sum_dtype: Callable[[torch.dtype], torch.dtype]
) -> Scaling:
    """Return by what to divide: the number of ranks that see different data.

    Where sums travel or are formed in float16, part of it comes first, to avoid overflow.
    """
    factor = config.gradient_divide_factor or float(mesh.data_parallel_size)
    low = config.mp_policy.reduce_dtype or config.mp_policy.param_dtype
    # Sums over the shard axis travel over the replicate axis in the reduce dtype.
    overflows = low == torch.float16 and (mesh.replicate_size > 1 or sum_dtype(low) == low)
    if not overflows:
        return Scaling(after=factor)
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Scaling(before, factor / before)
