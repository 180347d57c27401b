"""Builders of layouts: which rank owns which elements, and where they lie.

`rows_layout` shards a dimension of each parameter as ``torch.chunk`` does, and `flat_layout` cuts
the concatenation of all parameters into equal parts; both make the same frozen type, a
`layout.UnitLayout`. `retype` and `regroup` make a layout out of another one. A new way to lay out a
unit is a new function here.
"""

import dataclasses
import math
from collections.abc import Sequence

import torch

from fullshard.errors import LayoutError
from fullshard.plan.layout import (
    ALIGNMENT_NBYTES,
    BucketLayout,
    DirectRule,
    ParamLayout,
    ParamSpec,
    Route,
    UnitLayout,
    round_up,
    rows_per_rank,
)


def rows_layout(specs: Sequence[ParamSpec], *, shard_size: int, rule: DirectRule) -> UnitLayout:
    """Shard each parameter along its own dimension, chunked as ``torch.chunk`` and DTensor do.

    Any size along the dimension works: if there are fewer rows than ranks, the last ranks own
    nothing. Every parameter has its shard dimension: `faces` refuse others, and 0-dim ones.
    """
    groups: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault((spec.dtype, spec.compute_dtype), []).append(index)
    buckets = [_rows_bucket(members, specs, shard_size, rule) for members in groups.values()]
    return UnitLayout(shard_size, tuple(buckets))


def flat_layout(
    specs: Sequence[ParamSpec], *, shard_size: int, is_aligned: bool = True
) -> UnitLayout:
    """Concatenate the parameters and cut the result into equal 1-D shards.

    Frozen parameters get buckets of their own, so that there is no gradient memory for them.

    is_aligned: False puts parameters end to end with the least padding, as PyTorch's
        ``FlatParameter`` does; pieces then need not begin on a 16-byte boundary.

    w (6, 4) and b (6,) in float32 on 4 ranks need 30 elements, padded to 32:
        shard 0 [ 0,  8): w rows 0-1     shard 2 [16, 24): w rows 4-5
        shard 1 [ 8, 16): w rows 2-3     shard 3 [24, 32): b, 2 padding
    """
    buckets = []
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault((spec.dtype, spec.compute_dtype, spec.trainable), []).append(index)
    for members in groups.values():
        first = specs[members[0]]
        align = _alignment(first.dtype, first.compute_dtype) if is_aligned else 1
        params, offset = [], 0
        for index in members:
            params.append(ParamLayout(index, specs[index], Route.FLAT, shard_size, 0, offset))
            offset += round_up(specs[index].numel, align)
        shard_numel = round_up(-(-offset // shard_size), align)
        buckets.append(
            BucketLayout(
                dtype=first.dtype,
                compute_dtype=first.compute_dtype,
                shard_size=shard_size,
                params=tuple(params),
                shard_numel=shard_numel,
                packed_offset=shard_numel,
                unsharded_numel=shard_numel * shard_size,
                direct_numel=shard_numel * shard_size,
            )
        )
    return UnitLayout(shard_size, tuple(buckets))


def retype(layout: UnitLayout, specs: Sequence[ParamSpec]) -> UnitLayout:
    """Return the same layout for parameters of other dtypes; every element keeps its place.

    A flat layout needs this after ``model.half()``, since its shards are never moved between ranks.
    Raises LayoutError if parameters of one bucket have different dtypes now.
    """
    buckets = []
    for bucket in layout.buckets:
        first = specs[bucket.params[0].index]
        params = [dataclasses.replace(param, spec=specs[param.index]) for param in bucket.params]
        if len({(param.spec.dtype, param.spec.compute_dtype) for param in params}) > 1:
            names = ", ".join(f"{param.spec.name} ({param.spec.dtype})" for param in params)
            raise LayoutError(
                f"{names} lie in one flat buffer, but have different dtypes now. Change the dtype of all "
                "of them."
            )
        buckets.append(
            dataclasses.replace(
                bucket,
                dtype=first.dtype,
                compute_dtype=first.compute_dtype,
                params=tuple(params),
            )
        )
    return UnitLayout(layout.shard_size, tuple(buckets))


def regroup(bucket: BucketLayout, *, shard_size: int) -> BucketLayout:
    """Shard the same unsharded buffer over another number of ranks, with every parameter packed.

    With ``reshard_after_forward=N`` these are the shards that ranks keep between forward and
    backward, in the compute dtype. The unsharded buffer is arranged as before.
    """
    align = _alignment(bucket.compute_dtype)
    params: list[ParamLayout] = []
    offset = 0
    for param in bucket.params:
        moved = dataclasses.replace(
            param, route=Route.PACKED, shard_size=shard_size, shard_offset=offset
        )
        params.append(moved)
        offset += round_up(params[-1].chunk_numel, align)
    return dataclasses.replace(
        bucket,
        dtype=bucket.compute_dtype,
        shard_size=shard_size,
        params=tuple(params),
        shard_numel=offset,
        packed_offset=0,
        direct_numel=0,
    )


def _rows_bucket(
    members: Sequence[int], specs: Sequence[ParamSpec], shard_size: int, rule: DirectRule
) -> BucketLayout:
    """Lay out the parameters of one storage and compute dtype. members: their indices."""
    routes = {index: _route(specs[index], shard_size, rule) for index in members}
    drafts = (
        ParamLayout(index, specs[index], routes[index], shard_size, 0, 0) for index in members
    )
    # Direct ones first, in the order given. Packed ones by key, so that runs are as long as
    # possible: see `layout`, Note: Runs. Sorting is stable, so all ranks get the same order.
    ordered = sorted(drafts, key=lambda p: () if p.route is Route.DIRECT else p.run_key)
    first = specs[members[0]]
    align = _alignment(first.dtype, first.compute_dtype)
    params: list[ParamLayout] = []
    shard_offset = unsharded_offset = packed_offset = direct_numel = 0
    for draft in ordered:
        param = dataclasses.replace(
            draft, shard_offset=shard_offset, unsharded_offset=unsharded_offset
        )
        params.append(param)
        shard_offset += round_up(param.chunk_numel, align)
        unsharded_offset += round_up(param.spec.numel, align)
        if param.route is Route.DIRECT:
            packed_offset, direct_numel = shard_offset, unsharded_offset
    return BucketLayout(
        dtype=first.dtype,
        compute_dtype=first.compute_dtype,
        shard_size=shard_size,
        params=tuple(params),
        shard_numel=shard_offset,
        packed_offset=packed_offset,
        unsharded_numel=unsharded_offset,
        direct_numel=direct_numel,
    )


def _route(spec: ParamSpec, shard_size: int, rule: DirectRule) -> Route:
    """Choose the route of a parameter in a layout by rows: direct or packed."""
    num_rows = spec.shape[spec.shard_dim]
    chunk_numel = rows_per_rank(num_rows, shard_size) * math.prod(spec.shape[1:])
    aligned = all(
        chunk_numel * dtype.itemsize % ALIGNMENT_NBYTES == 0
        for dtype in (spec.dtype, spec.compute_dtype)
    )
    # Without `even`, the last ranks' shards may be shorter: they still follow one another.
    even = num_rows % shard_size == 0 or not rule.even
    big = chunk_numel * spec.dtype.itemsize >= rule.min_nbytes
    direct = spec.shard_dim == 0 and spec.numel > 0 and aligned and even and big
    return Route.DIRECT if direct else Route.PACKED


def _alignment(*dtypes: torch.dtype) -> int:
    """Return the number of elements whose multiples are aligned offsets in all of the dtypes."""
    return max(max(1, ALIGNMENT_NBYTES // dtype.itemsize) for dtype in dtypes)
