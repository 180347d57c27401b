"""Packed parameters find their places, in whatever runs they are copied."""

import itertools

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from fullshard.comm.packing import Landing, Region, copy_in_gradients
from fullshard.plan.builders import regroup, rows_layout
from fullshard.plan.layout import BucketLayout, DirectRule, ParamSpec


@st.composite
def buckets(draw: st.DrawFn) -> BucketLayout:
    """A float32 bucket of few shapes, so that many parameters lie alike, with direct ones or not."""
    shard_size = draw(st.integers(1, 5))
    shapes = [(shard_size,), (2 * shard_size, 3), (3,), (shard_size * 4, 4), (0, 2), (2, 4, 5)]
    specs = [
        ParamSpec(
            f"p{number}",
            shape,
            torch.float32,
            torch.float32,
            shard_dim=draw(st.integers(0, len(shape) - 1)),
        )
        for number, shape in enumerate(draw(st.lists(st.sampled_from(shapes), min_size=1)))
    ]
    rule = DirectRule(min_nbytes=draw(st.sampled_from([1, 1 << 18])))
    (bucket,) = rows_layout(specs, shard_size=shard_size, rule=rule).buckets
    return regroup(bucket, shard_size=draw(st.integers(1, 4))) if draw(st.booleans()) else bucket


@given(buckets())
def test_runs_are_the_packed_parameters_and_what_is_in_one_lies_alike(bucket: BucketLayout) -> None:
    assert tuple(param for run in bucket.packed_runs for param in run) == bucket.packed
    for run in bucket.packed_runs:
        assert all(p.num_equal_shards for p in run) or len({p.spec.extents for p in run}) == 1
        assert len({p.num_equal_shards for p in run}) == 1
        assert len({param.chunk_numel for param in run}) == 1
        for offsets in (
            [param.shard_offset for param in run],
            [param.unsharded_offset for param in run],
        ):
            assert len({b - a for a, b in itertools.pairwise(offsets)}) <= 1


def test_even_parameters_of_one_size_are_one_run_wherever_they_are_registered() -> None:
    shapes = [(4,), (4, 8), (4,), (6,), (8, 4), (4,)]
    specs = [ParamSpec(str(s), s, torch.float32, torch.float32) for s in shapes]
    (bucket,) = rows_layout(specs, shard_size=2, rule=DirectRule()).buckets
    assert [[p.index for p in run] for run in bucket.packed_runs] == [[0, 2, 5], [3], [1, 4]]


def test_equal_shards_are_counted_where_they_are_the_parameter() -> None:
    counts = {}
    for shape, dim in [((6,), 0), ((7, 2), 0), ((2, 6), 1), ((1, 6), 1), ((0,), 0)]:
        for shard_size in (2, 4, 5):
            spec = ParamSpec("p", shape, torch.float32, torch.float32, shard_dim=dim)
            (bucket,) = rows_layout([spec], shard_size=shard_size, rule=DirectRule()).buckets
            counts[shape, shard_size] = bucket.params[0].num_equal_shards
    by_shape = [
        [counts[shape, size] for size in (2, 4, 5)] for shape in [(6,), (7, 2), (2, 6), (1, 6)]
    ]
    assert by_shape == [[2, 3, 3], [0, 0, 0], [0, 0, 0], [2, 3, 3]]
    assert [counts[(0,), size] for size in (2, 4, 5)] == [0, 0, 0]


def test_uneven_parameters_of_one_form_are_one_run() -> None:
    shapes = [(3,), (5, 2), (3, 1), (2, 5), (5, 2), (3,)]
    specs = [ParamSpec(str(s), s, torch.float32, torch.float32) for s in shapes]
    (bucket,) = rows_layout(specs, shard_size=4, rule=DirectRule()).buckets
    assert [[p.index for p in run] for run in bucket.packed_runs] == [[1, 4], [3], [0, 2, 5]]


@given(buckets(), st.booleans())
def test_what_is_gathered_lands_where_each_parameter_belongs(
    bucket: BucketLayout, has_direct_in_place: bool
) -> None:
    assume(bucket.packed)
    whole = [
        torch.randn(param.spec.shape, generator=torch.Generator().manual_seed(param.index))
        for param in bucket.params
    ]
    first = bucket.direct_numel if has_direct_in_place else 0
    region = Region(torch.full((bucket.shard_size * bucket.packed_numel,), float("nan")))
    copy_in_gradients(bucket, whole, region, packed_only=True)
    unsharded = torch.full((bucket.unsharded_numel - first,), float("nan"))
    Landing(bucket, unsharded, first).copy_out(region)
    for param, expected in zip(bucket.params, whole, strict=True):
        if param in bucket.packed:
            start = param.unsharded_offset - first
            landed = unsharded[start : start + param.spec.numel].view(param.spec.shape)
            torch.testing.assert_close(landed, expected, rtol=0, atol=0)
