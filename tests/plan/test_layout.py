"""Layouts, checked for every rank of jobs of up to 1,024 ranks in one process."""

import gc
import math
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from fullshard.plan.builders import flat_layout, regroup, rows_layout
from fullshard.plan.layout import (
    ALIGNMENT_NBYTES,
    BucketLayout,
    DirectRule,
    ParamLayout,
    ParamSpec,
    Route,
    UnitLayout,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn]


@st.composite
def param_specs(draw: st.DrawFn, min_dims: int = 1) -> list[ParamSpec]:
    specs = []
    for number in range(draw(st.integers(1, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), min_size=min_dims, max_size=3)))
        if shape and draw(st.booleans()):
            shape = (draw(st.integers(1, 300)), *shape[1:])
        specs.append(
            ParamSpec(
                name=f"p{number}",
                shape=shape,
                dtype=draw(st.sampled_from(DTYPES)),
                compute_dtype=draw(st.sampled_from(DTYPES)),
                shard_dim=draw(st.integers(0, max(len(shape) - 1, 0))),
            )
        )
    return specs


shard_sizes = st.one_of(st.integers(1, 9), st.sampled_from([16, 64, 256, 1000, 1024]))
rules = st.builds(DirectRule, even=st.booleans(), min_nbytes=st.sampled_from([0, 64, 1 << 18]))


def params_of(layout: UnitLayout) -> list[tuple[BucketLayout, ParamLayout]]:
    return [(bucket, param) for bucket in layout.buckets for param in bucket.params]


def owners(bucket: BucketLayout, param: ParamLayout) -> list[int]:
    """Count the ranks that own each element of a parameter."""
    counts = [0] * param.spec.numel
    for rank in range(bucket.shard_size):
        for piece in bucket.pieces(param, rank):
            for element in range(piece.param_start, piece.param_start + piece.numel):
                counts[element] += 1
    return counts


@given(param_specs(), shard_sizes, rules)
def test_rows_own_every_element_exactly_once(
    specs: list[ParamSpec], shard_size: int, rule: DirectRule
) -> None:
    layout = rows_layout(specs, shard_size=shard_size, rule=rule)
    assert sorted(p.index for _, p in params_of(layout)) == list(range(len(specs)))
    for bucket, param in params_of(layout):
        assert owners(bucket, param) == [1] * param.spec.numel


@given(param_specs(min_dims=0), shard_sizes)
def test_flat_owns_every_element_exactly_once(specs: list[ParamSpec], shard_size: int) -> None:
    layout = flat_layout(specs, shard_size=shard_size)
    assert sorted(p.index for _, p in params_of(layout)) == list(range(len(specs)))
    for bucket, param in params_of(layout):
        assert owners(bucket, param) == [1] * param.spec.numel


@given(param_specs(), shard_sizes, rules)
def test_row_chunks_are_those_of_dtensor(
    specs: list[ParamSpec], shard_size: int, rule: DirectRule
) -> None:
    for _, param in params_of(rows_layout(specs, shard_size=shard_size, rule=rule)):
        num_rows = param.spec.shape[param.spec.shard_dim]
        for rank in range(shard_size):
            size, offset = Shard(param.spec.shard_dim).local_shard_size_and_offset(
                num_rows, shard_size, rank
            )
            start, stop = param.rows(rank)
            assert stop - start == size
            assert size == 0 or start == offset


@given(param_specs(), shard_sizes, rules, st.booleans())
def test_every_piece_is_aligned_and_pieces_never_overlap(
    specs: list[ParamSpec], shard_size: int, rule: DirectRule, flat: bool
) -> None:
    layout = (
        flat_layout(specs, shard_size=shard_size)
        if flat
        else rows_layout(specs, shard_size=shard_size, rule=rule)
    )
    for bucket in layout.buckets:
        assert bucket.shard_nbytes % ALIGNMENT_NBYTES == 0
        ends = 0
        for param in sorted(bucket.params, key=lambda p: p.unsharded_offset):
            nbytes = param.unsharded_offset * bucket.compute_dtype.itemsize
            assert nbytes % ALIGNMENT_NBYTES == 0
            assert param.unsharded_offset >= ends
            ends = param.unsharded_offset + param.spec.numel
        assert ends <= bucket.unsharded_numel
        for rank in {0, shard_size // 2, shard_size - 1}:
            ends = 0
            for param in bucket.params:
                pieces = bucket.pieces(param, rank)
                for piece in pieces:
                    assert piece.shard_start >= ends
                    ends = piece.shard_start + piece.numel
                if pieces:
                    nbytes = pieces[0].shard_start * bucket.dtype.itemsize
                    assert nbytes % ALIGNMENT_NBYTES == 0
            assert ends <= bucket.shard_numel


@given(param_specs(), shard_sizes, rules)
def test_direct_shards_in_rank_order_are_the_parameter(
    specs: list[ParamSpec], shard_size: int, rule: DirectRule
) -> None:
    for bucket in rows_layout(specs, shard_size=shard_size, rule=rule).buckets:
        for param in bucket.direct:
            position = 0
            for rank in range(shard_size):
                for piece in bucket.pieces(param, rank):
                    assert piece.param_start == position
                    nbytes = piece.param_start * bucket.dtype.itemsize
                    assert nbytes % ALIGNMENT_NBYTES == 0  # read in place by a peer
                    position += piece.numel
                if rule.even:
                    assert param.shard_numel(rank) == param.chunk_numel
            assert position == param.spec.numel
            assert param.unsharded_offset + param.spec.numel <= bucket.direct_numel


@given(param_specs(), shard_sizes, rules)
def test_shard_shapes_agree_with_pieces(
    specs: list[ParamSpec], shard_size: int, rule: DirectRule
) -> None:
    for bucket, param in params_of(rows_layout(specs, shard_size=shard_size, rule=rule)):
        for rank in range(shard_size):
            numel = sum(piece.numel for piece in bucket.pieces(param, rank))
            assert numel == param.shard_numel(rank) == math.prod(param.shard_shape(rank))
            assert numel <= param.chunk_numel


@given(param_specs(), st.sampled_from([2, 3, 4]), st.sampled_from([2, 4]), rules)
def test_regrouping_keeps_the_unsharded_buffer_and_owns_every_element_once(
    specs: list[ParamSpec], smaller: int, factor: int, rule: DirectRule
) -> None:
    for bucket in rows_layout(specs, shard_size=smaller * factor, rule=rule).buckets:
        regrouped = regroup(bucket, shard_size=smaller)
        for before, after in zip(bucket.params, regrouped.params, strict=True):
            assert after.unsharded_offset == before.unsharded_offset
            assert owners(regrouped, after) == [1] * after.spec.numel


def test_the_example_of_the_rows_docstring_holds() -> None:
    w = ParamSpec("w", (4, 8), torch.float32, torch.float32)
    b = ParamSpec("b", (6,), torch.float32, torch.float32)
    (bucket,) = rows_layout([w, b], shard_size=2, rule=DirectRule(min_nbytes=0)).buckets
    assert [p.route for p in bucket.params] == [Route.DIRECT, Route.PACKED]
    assert bucket.shard_numel == 20
    assert bucket.packed_offset == 16
    assert bucket.direct_numel == 32
    assert bucket.pieces(bucket.params[0], 1) == ((16, 0, 16),)
    assert bucket.pieces(bucket.params[1], 1) == ((3, 16, 3),)


def test_the_example_of_the_flat_docstring_holds() -> None:
    w = ParamSpec("w", (6, 4), torch.float32, torch.float32)
    b = ParamSpec("b", (6,), torch.float32, torch.float32)
    (bucket,) = flat_layout([w, b], shard_size=4).buckets
    assert (bucket.shard_numel, bucket.unsharded_numel) == (8, 32)
    assert bucket.pieces(bucket.params[0], 2) == ((16, 0, 8),)
    assert bucket.pieces(bucket.params[1], 3) == ((0, 0, 6),)


def test_parameters_of_different_dtypes_get_buckets_of_their_own() -> None:
    specs = [
        ParamSpec("a", (4, 4), torch.float32, torch.bfloat16),
        ParamSpec("b", (4, 4), torch.bfloat16, torch.bfloat16),
        ParamSpec("c", (4, 4), torch.float32, torch.bfloat16),
    ]
    layout = rows_layout(specs, shard_size=2, rule=DirectRule())
    assert [[p.index for p in bucket.params] for bucket in layout.buckets] == [[0, 2], [1]]


def test_geometry_is_forgotten_with_the_last_bucket_that_has_it() -> None:
    specs = [ParamSpec("w", (12_345, 3), torch.float32, torch.float32)]
    buckets = [rows_layout(specs, shard_size=2, rule=DirectRule()).buckets[0] for _ in range(2)]
    assert buckets[0].geometry is buckets[1].geometry
    geometry = weakref.ref(buckets[0].geometry)
    del buckets[0]
    gc.collect()
    assert geometry() is not None
    buckets.clear()
    gc.collect()
    assert geometry() is None


def test_buckets_of_one_geometry_are_known_by_one_object() -> None:
    def bucket(name: str, rows: int, *, shard_size: int = 2) -> BucketLayout:
        spec = ParamSpec(name, (rows, 4), torch.float32, torch.float32)
        return rows_layout([spec], shard_size=shard_size, rule=DirectRule()).buckets[0]

    first = bucket("layers.0.weight", 8)
    assert bucket("layers.1.weight", 8).geometry is first.geometry
    assert bucket("layers.0.weight", 6).geometry is not first.geometry
    assert bucket("layers.0.weight", 8, shard_size=4).geometry is not first.geometry
