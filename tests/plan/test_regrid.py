"""Getting from one division to another, against maps that name every element."""

import itertools
import math
import sys
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Shard

from fullshard.errors import LayoutError
from fullshard.plan.builders import flat_layout, rows_layout
from fullshard.plan.layout import ParamSpec, Piece, Shape
from fullshard.plan.regrid import (
    Division,
    Transfer,
    box_pieces,
    bucket_division,
    local_numel,
    regrid,
    row_division,
    whole_division,
)

FP32 = torch.float32
shapes = st.lists(st.integers(0, 6), max_size=4).map(tuple)


def elements(pieces: Sequence[Piece]) -> dict[int, int]:
    """Map every place of a local tensor that a piece names to the element that lies there."""
    places = {
        piece.shard_start + n: piece.param_start + n for piece in pieces for n in range(piece.numel)
    }
    assert len(places) == sum(piece.numel for piece in pieces)
    return places


def missing(old: Division, new: Division) -> list[int]:
    held, needed = (
        {e for pieces in division for e in elements(pieces).values()} for division in (old, new)
    )
    return sorted(needed - held)


def assert_leads_to(transfers: Sequence[Transfer], old: Division, new: Division) -> None:
    """Assert that every rank gets each element it needs once, from itself if it has it."""
    before, after = [elements(p) for p in old], [elements(p) for p in new]
    got: list[dict[int, int]] = [{} for _ in new]
    for sender, receiver, sender_start, receiver_start, numel in transfers:
        assert numel > 0
        for n in range(numel):
            element = before[sender][sender_start + n]
            assert receiver_start + n not in got[receiver]
            got[receiver][receiver_start + n] = element
            if receiver < len(before) and element in before[receiver].values():
                assert sender == receiver
    assert got == after


@st.composite
def divisions(draw: st.DrawFn, numel: int) -> list[list[Piece]]:
    """Give each of some ranks any runs, in any order and with gaps in the local tensor."""
    division = []
    for _ in range(draw(st.integers(1, 5))):
        pieces, end = [], 0
        for _ in range(draw(st.integers(0, 4))):
            start = draw(st.integers(0, numel))
            run = draw(st.integers(0, numel - start))
            end += draw(st.integers(0, 2))
            pieces.append(Piece(start, end, run))
            end += run
        division.append(draw(st.permutations(pieces)))
    return division


@given(st.data(), st.integers(0, 30))
@settings(max_examples=400, deadline=None)
def test_every_rank_gets_what_it_needs_or_hears_what_nobody_holds(
    data: st.DataObject, numel: int
) -> None:
    old, new = data.draw(divisions(numel)), data.draw(divisions(numel))
    lacking = missing(old, new)
    if lacking and data.draw(st.booleans()):
        first = lacking[0]
        end = next(e for e in itertools.count(first) if e not in lacking)
        with pytest.raises(LayoutError, match=rf"no rank holds elements \[{first}, {end}\)"):
            regrid(old, new)
        return
    for element in lacking:
        pieces = old[data.draw(st.integers(0, len(old) - 1))]
        pieces.append(Piece(element, local_numel(pieces), 1))
    assert_leads_to(regrid(old, new), old, new)


@given(st.data(), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_transfers_are_sorted_and_as_long_as_they_can_be(data: st.DataObject, numel: int) -> None:
    old = [*data.draw(divisions(numel)), [Piece(0, 0, numel)]]
    new = data.draw(divisions(numel))
    transfers = regrid(old, new)
    order = [(t.sender, t.receiver, t.receiver_start) for t in transfers]
    assert order == sorted(order)
    for one, two in itertools.pairwise(transfers):
        assert two != (
            one.sender,
            one.receiver,
            one.sender_start + one.numel,
            one.receiver_start + one.numel,
            two.numel,
        )


@given(st.data(), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_one_ranks_transfers_are_those_of_all_in_which_it_takes_part(
    data: st.DataObject, numel: int
) -> None:
    old = [*data.draw(divisions(numel)), [Piece(0, 0, numel)]]
    new = data.draw(divisions(numel))
    everything = regrid(old, new)
    for rank in range(max(len(old), len(new))):
        mine = tuple(t for t in everything if rank in (t.sender, t.receiver))
        assert regrid(old, new, rank=rank) == mine


@given(shapes.filter(bool), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_flat_to_rows_and_back_is_identity(
    shape: Shape, num_ranks: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    spec = ParamSpec("w", shape, FP32, FP32, shard_dim=dim)
    others = [ParamSpec("v", (5,), FP32, FP32), spec]
    flat_bucket = flat_layout(others, shard_size=num_ranks).buckets[0]
    flat = bucket_division(flat_bucket, flat_bucket.params[1])
    rows = row_division(shape, dim=dim, num_ranks=num_ranks)
    there, back = regrid(flat, rows), regrid(rows, flat)
    assert_leads_to(there, flat, rows)
    assert sorted(back) == sorted(
        Transfer(receiver, sender, receiver_start, sender_start, numel)
        for sender, receiver, sender_start, receiver_start, numel in there
    )


@given(shapes.filter(bool), st.integers(1, 6), st.data())
@settings(max_examples=200, deadline=None)
def test_row_divisions_are_those_of_the_engine(
    shape: Shape, num_ranks: int, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    specs = [ParamSpec("v", (5,), FP32, FP32), ParamSpec("w", shape, FP32, FP32, shard_dim=dim)]
    (bucket,) = rows_layout(specs, shard_size=num_ranks).buckets
    param = next(p for p in bucket.params if p.index == 1)
    rows = row_division(shape, dim=dim, num_ranks=num_ranks)
    by_bucket = bucket_division(bucket, param)
    assert [elements(p) for p in rows] == [elements(p) for p in by_bucket]
    assert [local_numel(p) for p in rows] == [param.shard_numel(r) for r in range(num_ranks)]


@given(shapes, st.data())
@settings(max_examples=200, deadline=None)
def test_a_box_is_what_slicing_takes(shape: Shape, data: st.DataObject) -> None:
    start = [data.draw(st.integers(0, extent)) for extent in shape]
    size = [
        data.draw(st.integers(0, extent - first))
        for extent, first in zip(shape, start, strict=True)
    ]
    index = tuple(slice(s, s + n) for s, n in zip(start, size, strict=True))
    taken = torch.arange(math.prod(shape)).view(shape)[index].flatten().tolist()
    pieces = box_pieces(shape, start, size)
    assert elements(pieces) == dict(enumerate(taken))
    # As few pieces as possible: none goes on where the one before it ends.
    assert all(a.param_start + a.numel != b.param_start for a, b in itertools.pairwise(pieces))


def test_row_divisions_are_those_of_dtensor() -> None:
    for num_rows, num_ranks in itertools.product(range(8), range(1, 6)):
        for rank, pieces in enumerate(row_division((num_rows, 3), dim=0, num_ranks=num_ranks)):
            size, _ = Shard(0).local_shard_size_and_offset(num_rows, num_ranks, rank)
            assert local_numel(pieces) == 3 * size


def test_the_example_of_the_docstring_holds() -> None:
    flat = [[Piece(0, 0, 4)], [Piece(4, 0, 2)]]
    rows = row_division((2, 3), dim=0, num_ranks=2)
    assert rows == (((0, 0, 3),), ((3, 0, 3),))
    assert regrid(flat, rows) == ((0, 0, 0, 0, 3), (0, 1, 3, 0, 1), (1, 1, 0, 1, 2))


def test_the_example_of_a_box_holds() -> None:
    assert box_pieces((4, 6), (1, 3), (2, 3)) == ((9, 0, 3), (15, 3, 3))


def test_a_scalar_has_one_element() -> None:
    assert box_pieces((), (), ()) == ((0, 0, 1),)
    assert whole_division(1, num_ranks=2) == (((0, 0, 1),),) * 2
    nobody_but_the_first = [[Piece(0, 0, 1)], []]
    assert regrid(nobody_but_the_first, whole_division(1, num_ranks=2)) == (
        (0, 0, 0, 0, 1),
        (0, 1, 0, 0, 1),
    )


def test_what_every_rank_has_stays_where_it_is() -> None:
    whole = whole_division(12, num_ranks=4)
    rows = row_division((4, 3), dim=1, num_ranks=4)
    assert {(t.sender, t.receiver) for t in regrid(whole, rows)} == {(0, 0), (1, 1), (2, 2)}
    assert regrid(whole, whole) == tuple((r, r, 0, 0, 12) for r in range(4))


def test_replicas_share_the_work() -> None:
    # Ranks 0 and 1 hold everything, the other six need it.
    old = [*whole_division(10, num_ranks=2), *[()] * 6]
    transfers = regrid(old, whole_division(10, num_ranks=8))
    sent = [(t.sender, t.receiver) for t in transfers if t.sender != t.receiver]
    assert sent == [(0, 2), (0, 3), (0, 4), (1, 5), (1, 6), (1, 7)]


def test_each_replica_serves_itself() -> None:
    # Two replicas of four shards, ranks 0-3 and 4-7, as on two hosts.
    shards = row_division((8, 5), dim=0, num_ranks=4) * 2
    transfers = regrid(shards, whole_division(40, num_ranks=8))
    assert all(t.sender // 4 == t.receiver // 4 for t in transfers)
    sent = [sum(t.numel for t in transfers if t.sender == r != t.receiver) for r in range(8)]
    assert sent == [30] * 8


@given(st.integers(1, 12), st.data())
@settings(max_examples=100, deadline=None)
def test_no_holder_sends_much_more_than_another(num_ranks: int, data: st.DataObject) -> None:
    holders = data.draw(st.sets(st.integers(0, num_ranks - 1), min_size=1))
    old = [[Piece(0, 0, 10)] if rank in holders else [] for rank in range(num_ranks)]
    transfers = regrid(old, whole_division(10, num_ranks=num_ranks))
    served = [sum(t.sender == holder for t in transfers) for holder in holders]
    assert max(served) - min(served) <= 1


def test_the_numbers_of_ranks_may_differ() -> None:
    for before, after in itertools.product(range(1, 6), repeat=2):
        old = row_division((7, 2), dim=0, num_ranks=before)
        new = row_division((7, 2), dim=1, num_ranks=after)
        assert_leads_to(regrid(old, new), old, new)


def test_a_parameter_without_elements_moves_nothing() -> None:
    for shape in [(0,), (0, 4), (4, 0)]:
        rows = row_division(shape, dim=0, num_ranks=3)
        assert rows == ((), (), ())
        assert regrid(rows, whole_division(0, num_ranks=3)) == ()


def test_work_grows_with_ranks_and_not_with_elements() -> None:
    shape, num_ranks = (1_000_003, 4096), 1024
    (bucket,) = flat_layout([ParamSpec("w", shape, FP32, FP32)], shard_size=num_ranks).buckets
    calls = 0

    def count(_frame: object, event: str, _what: object) -> None:
        nonlocal calls
        calls += event.endswith("call")

    sys.setprofile(count)
    try:
        flat = bucket_division(bucket, bucket.params[0])
        rows = row_division(shape, dim=0, num_ranks=num_ranks)
        transfers = regrid(flat, rows)
        shared = regrid(flat, whole_division(math.prod(shape), num_ranks=num_ranks), rank=3)
    finally:
        sys.setprofile(None)
    assert calls < 200 * num_ranks
    assert sum(t.numel for t in transfers) == math.prod(shape)
    assert len(transfers) < 2 * num_ranks
    assert len(shared) == 2 * num_ranks - 1


def test_a_missing_end_is_named_with_the_rank_that_needs_it() -> None:
    old = [[Piece(0, 0, 4)], [Piece(6, 0, 2)]]
    new = [[Piece(0, 0, 3)], [Piece(3, 0, 7)]]
    with pytest.raises(
        LayoutError, match=r"^rank 1 needs element 4, but no rank holds elements \[4, 6\)\."
    ):
        regrid(old, new)


def test_boxes_and_dims_outside_the_parameter_are_refused() -> None:
    for start, size in [((3, 0), (2, 6)), ((-1, 0), (1, 1)), ((0, 0), (1, -1)), ((0,), (1,))]:
        with pytest.raises(LayoutError, match=r"not inside a parameter of shape \(4, 6\)"):
            box_pieces((4, 6), start, size)
    with pytest.raises(LayoutError, match=r"cannot divide dim 2 of a parameter of shape \(4, 6\)"):
        row_division((4, 6), dim=2, num_ranks=2)
