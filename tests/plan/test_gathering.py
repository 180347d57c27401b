"""Buckets of whole tensors: every element comes once, and none is larger than asked."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan.boxes import Box, Cut, box_after, boxes_of_run, whole_box
from fullshard.plan.gathering import DividedTensor, plan_buckets
from fullshard.plan.layout import round_up

shapes = st.lists(st.integers(0, 6), max_size=3).map(tuple)


def _divided(shape: tuple[int, ...], itemsize: int, way: str, num_ranks: int) -> DividedTensor:
    numel = math.prod(shape)
    if way == "rows" and shape:
        boxes = [[box_after(shape, [Cut(0, r, num_ranks)])] for r in range(num_ranks)]
    elif way == "flat" and numel:
        edges = [numel * r // num_ranks for r in range(num_ranks + 1)]
        boxes = [list(boxes_of_run(shape, a, b - a)) for a, b in itertools.pairwise(edges)]
    else:
        boxes = [[whole_box(shape)] if r == num_ranks - 1 else [] for r in range(num_ranks)]
    return DividedTensor(shape, itemsize, [[box for box in own if box.numel] for own in boxes])


@given(
    st.lists(st.tuples(shapes, st.sampled_from([1, 2, 4, 8]), st.sampled_from("rfw")), max_size=6),
    st.integers(1, 4),
    st.integers(1, 400),
)
def test_every_element_comes_once_and_tensors_in_their_order(
    given_tensors: list[tuple[tuple[int, ...], int, str]], num_ranks: int, limit: int
) -> None:
    ways = {"r": "rows", "f": "flat", "w": "one rank"}
    tensors = [_divided(s, size, ways[way], num_ranks) for s, size, way in given_tensors]
    times = [torch.zeros(tensor.shape, dtype=torch.int64) for tensor in tensors]
    complete: list[int] = []
    for bucket in plan_buckets(tensors, num_ranks=num_ranks, bucket_nbytes=limit):
        ends = [0] * num_ranks
        for part in bucket.parts:
            tensor = tensors[part.tensor]
            assert part.tensor not in complete
            assert part.start == ends[part.rank]  # one after the other, at an aligned place
            ends[part.rank] += round_up(part.box.numel * tensor.itemsize, 16)
            _assert_within(part.box, tensor.boxes[part.rank][part.number])
            times[part.tensor][part.box.within(whole_box(tensor.shape))] += 1
        assert tuple(ends) == bucket.nbytes
        sizes = [p.box.numel * tensors[p.tensor].itemsize for p in bucket.parts]
        num_boxes = len({(p.tensor, p.rank, p.number) for p in bucket.parts})
        assert sum(sizes) <= limit + 8 * num_boxes
        complete += bucket.complete
    assert complete == list(range(len(tensors)))
    assert all(bool((each == 1).all()) for each in times)


def _assert_within(inner: Box, outer: Box) -> None:
    for start, size, start2, size2 in zip(*inner, *outer, strict=True):
        assert start2 <= start
        assert start + size <= start2 + size2


def test_a_large_tensor_takes_as_much_of_each_rank_in_every_bucket() -> None:
    tensor = _divided((64, 8), 4, "rows", 4)
    buckets = list(plan_buckets([tensor], num_ranks=4, bucket_nbytes=512))
    assert [bucket.nbytes for bucket in buckets] == [(128,) * 4] * 4
    assert [bucket.complete for bucket in buckets] == [(), (), (), (0,)]
