"""Buckets of gradients: which of a unit's gradients travel together, and in which dtypes.

Only gradients of trainable parameters travel, so buckets of gradients are others than those of parameters.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fullshard.plan.builders import rows_layout
from fullshard.plan.gradient_dtypes import GradientDtypes, common_dtype, reduce_dtypes
from fullshard.plan.layout import BucketLayout, DirectRule, ParamSpec, UnitLayout


class GradientBucket(NamedTuple):
    """One bucket of gradients.

    layout: its storage dtype is that of gradient shards, its compute dtype that of full gradients.
    indices: of its parameters in the unit, in bucket order. reduce_dtype: of finished sums.
    """

    layout: BucketLayout
    indices: list[int]
    reduce_dtype: torch.dtype


def flat_buckets(
    layout: UnitLayout, dtypes: Sequence[GradientDtypes], trainable: Sequence[int]
) -> list[GradientBucket]:
    """Return the buckets of a flat unit's gradients.

    A flat bucket is reduced as a whole if anything in it is trainable, so that every piece of a gradient lies as the
    piece of the parameter does. dtypes: of each parameter's gradients, by index. trainable: indices, ascending.
    """
    buckets = [(each, [param.index for param in each.params]) for each in layout.buckets]
    return [
        GradientBucket(each, indices, dtypes[indices[0]].reduced)
        for each, indices in buckets
        if not set(indices).isdisjoint(trainable)
    ]


def rows_buckets(
    specs: Sequence[ParamSpec],
    dtypes: Sequence[GradientDtypes],
    trainable: Sequence[int],
    *,
    shard_size: int,
    rule: DirectRule,
    joins_dtypes: bool = False,
) -> list[GradientBucket]:
    """Return the buckets of gradients that are sharded by rows.

    specs, dtypes: of all parameters, by index. trainable: indices, ascending. joins_dtypes: gradients of several
    dtypes travel at once, in the widest of them.
    """
    reduced = reduce_dtypes(
        [specs[index].dtype for index in trainable], [dtypes[index].reduced for index in trainable]
    )
    # The dtypes of gradients decide which of them travel together.
    full = [dtypes[index].full for index in trainable]
    shard = [dtypes[i].shard or dtype for i, dtype in zip(trainable, reduced, strict=True)]
    if joins_dtypes:
        full = reduce_dtypes(shard, full)
    gradients = [
        dataclasses.replace(specs[index], dtype=s, compute_dtype=f)
        for index, f, s in zip(trainable, full, shard, strict=True)
    ]
    layout = rows_layout(gradients, shard_size=shard_size, rule=rule)
    # This layout counts the trainable parameters alone; map its indices back to the unit's.
    return [
        GradientBucket(
            each,
            [trainable[param.index] for param in each.params],
            common_dtype(reduced[param.index] for param in each.params),
        )
        for each in layout.buckets
    ]


def wire_dtype(
    bucket: BucketLayout, reduce_dtype: torch.dtype, *, accumulated: bool
) -> torch.dtype:
    """Return the dtype that travels over the shard axis where ranks form the sums.

    The narrower of full and reduce dtype: the sum is wide in any case, so widening before it adds bytes and no
    precision. accumulated: gradients are sums of several backwards, in the reduce dtype.
    """
    if accumulated or reduce_dtype.itemsize <= bucket.compute_dtype.itemsize:
        return reduce_dtype
    return bucket.compute_dtype
