"""How the gradients of one bucket are reduced: in which dtypes, divided by what, and what follows.

Planning only; `reduction` carries it out. The last column is an example: float32 parameters with
``MixedPrecisionPolicy(param_dtype=bfloat16)``.

| dtype | used for | is | why | example |
| --- | --- | --- | --- | --- |
| full | full gradients from autograd; sums of several backwards of a flat unit | `param_dtype`, \
else the parameter's; what the parameter's `grad_dtype` says | autograd and PyTorch's FSDP1 leave \
them so | bfloat16 |
| wire | what travels over the shard axis where ranks form the sums | the narrower of full and \
reduce dtype; the reduce dtype for sums of several backwards by rows | the sum is wide in any case, so \
widening before it adds bytes and no precision | bfloat16 |
| total | forming the sum over the shard axis | reduce dtype promoted with float32; the reduce dtype \
where a backend sums what travels in it (NCCL, custom collectives), a communication hook reduces, or \
there is one rank | rounding errors do not grow with the number of ranks | float32 |
| reduce | the finished sum; what travels over the replicate axis | `reduce_dtype`, else as \
`plan.gradient_dtypes` says | programs get the gradients that PyTorch would give them | bfloat16 |
| shard | ``.grad`` of sharded parameters | the parameter's, or what its `grad_dtype` says; the reduce \
dtype with `keep_low_precision_grads` | optimizers and autograd expect it | float32 |

In the example, where the reduce dtype is the compute dtype, the float32 sum is formed in the memory
of the gradients, is rounded there to what bfloat16 can express, and stays float32. Where it is
float32 (torch 2.15), the sum is the gradient.
"""

import dataclasses
from collections.abc import Callable

import torch

from fullshard.comm.interface import Scaling, Sum
from fullshard.plan.layout import BucketLayout
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig

# PyTorch's engine asks for means in these, as sums in them do not overflow.
_AVERAGED = (torch.float32, torch.bfloat16)


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How a bucket is reduced under one configuration.

    config, accumulated: what the recipe was made from. It holds while they are equal.
    over_shards, over_replicas: the sum over the shard axis, then the one over the replicate axis.
    sums_replicas: whether there is a second sum.
    divisor: by which the second sum is divided; the first one divides by itself.
    reduce_dtype, total_dtype: see the table above.
    is_final: whether the sum over the shard axis has the dtype and device of the gradients and is
        reduced in this backward, so that it may be formed in their memory, if that is free.
    is_deposited: whether the sum over the shard axis is the gradient: nothing rounds it, adds to it
        or looks at it, and the reduce-scatter says who gets one.
    """

    config: UnitConfig
    accumulated: bool
    over_shards: Sum
    over_replicas: Sum
    sums_replicas: bool
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
    reduce_dtype: torch.dtype,
    sum_dtype: Callable[[torch.dtype], torch.dtype],
    wants_means: bool,
    accumulated: bool,
    is_offloaded: bool,
    label: str,
) -> Recipe:
    """Plan the reduction of a bucket of gradients: of shard dtype ``dtype``, full ``compute_dtype``.

    reduce_dtype: of the finished sum.
    sum_dtype: maps the reduce dtype to the total dtype (`Comm.accumulate_dtype`).
    wants_means: `Comm.wants_means`.
    accumulated: whether gradients are sums of several backwards, in the reduce dtype, or wide anyway.
    is_offloaded: whether sharded parameters are on another device than full gradients.
    label: of the unit in messages and flight records.
    """
    total_dtype = reduce_dtype
    if config.comm_hook is None and mesh.data_parallel_size > 1:
        total_dtype = sum_dtype(reduce_dtype)
    scaling, divisor = _scaling(config, mesh, reduce_dtype, sum_dtype), 1.0
    may_average = not config.force_sum_reduction
    if wants_means:
        may_average &= reduce_dtype in _AVERAGED
    # With replicas, what is divided after the sum is divided after the last sum.
    if mesh.replicate_size > 1:
        num_averaged = 1
        if wants_means and may_average and config.gradient_divide_factor in (None, mesh.shard_size):
            num_averaged = mesh.shard_size
        divisor = scaling.after / num_averaged
        scaling = Scaling(scaling.before, float(num_averaged))
    has_more_to_do = (
        bucket.is_flat  # who gets a gradient follows from the layout, not from the reduce-scatter
        or mesh.replicate_size > 1
        or reduce_dtype.itemsize < total_dtype.itemsize
        or config.all_reduce_hook is not None
        or config.keep_low_precision_grads
        or config.reduces_unused
    )
    return Recipe(
        config,
        accumulated,
        over_shards=Sum(
            wire_dtype(bucket, reduce_dtype, accumulated=accumulated),
            scaling,
            may_average=may_average,
            label=f"{label}: reduce-scatter",
        ),
        over_replicas=Sum(reduce_dtype, label=f"{label}: all-reduce"),
        # A communication hook reduces over all ranks.
        sums_replicas=mesh.replicate_size > 1 and config.comm_hook is None,
        divisor=divisor,
        reduce_dtype=reduce_dtype,
        total_dtype=total_dtype,
        is_final=(
            total_dtype == bucket.dtype
            and not is_offloaded
            # A sum that waits for its all-reduce is no gradient yet, and users must not see it.
            and (config.all_reduce_grads or mesh.replicate_size == 1)
            and not config.keep_low_precision_grads
        ),
        is_deposited=not has_more_to_do,
    )


def wire_dtype(
    bucket: BucketLayout, reduce_dtype: torch.dtype, *, accumulated: bool
) -> torch.dtype:
    """Return the dtype that travels over the shard axis: see the table above.

    accumulated: whether gradients are sums of several backwards, in the reduce dtype.
    """
    if accumulated or reduce_dtype.itemsize <= bucket.compute_dtype.itemsize:
        return reduce_dtype
    return bucket.compute_dtype


def _scaling(
    config: UnitConfig,
    mesh: MeshPlan,
    reduce_dtype: torch.dtype,
    sum_dtype: Callable[[torch.dtype], torch.dtype],
) -> Scaling:
    """Return by what to divide: the user's factor, or the number of ranks that see different data.

    Where sums travel or are formed in float16, a power of two near the root of it comes before the
    sum, to avoid overflow, and the rest after it, to avoid underflow. 8 ranks: 4 before, 2 after.
    """
    factor = config.gradient_divide_factor or float(mesh.data_parallel_size)
    # Over the replicate axis sums travel in the reduce dtype, whatever they were formed in.
    overflows = reduce_dtype == torch.float16 and (
        mesh.replicate_size > 1 or sum_dtype(reduce_dtype) == reduce_dtype
    )
    if not overflows:
        return Scaling(after=factor)
    # As PyTorch chooses it. Powers of two divide without rounding.
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Scaling(before, factor / before)
