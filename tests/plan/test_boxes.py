"""Boxes: cuts, runs of flattened tensors, shares and tilings."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fullshard.errors import LayoutError
from fullshard.plan.boxes import (
    Box,
    Cut,
    box_after,
    boxes_of_run,
    chunks,
    common,
    moves,
    share,
    tiling_fault,
    whole_box,
    without,
)

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


def _elements(shape: tuple[int, ...], box: Box) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)[box.within(whole_box(shape))]


@given(shapes, st.data())
def test_boxes_of_a_run_are_the_run_in_its_order(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    total = math.prod(shape)
    start = data.draw(st.integers(0, total))
    numel = data.draw(st.integers(0, total - start))
    boxes = boxes_of_run(shape, start, numel)
    found = [e for box in boxes for e in _elements(shape, box).flatten().tolist()]
    assert found == list(range(start, start + numel))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(shapes, st.integers(1, 6), st.data())
def test_cuts_are_those_of_chunk(shape: tuple[int, ...], parts: int, data: st.DataObject) -> None:
    if not shape:
        return
    dim = data.draw(st.integers(0, len(shape) - 1))
    boxes = [box_after(shape, [Cut(dim, part, parts)]) for part in range(parts)]
    chunks = torch.arange(math.prod(shape)).view(shape).chunk(parts, dim)
    found = [_elements(shape, box) for box in boxes if box.numel]
    assert all(a.equal(b) for a, b in zip(found, chunks, strict=True))
    assert tiling_fault(shape, boxes) is None


@given(shapes, st.integers(1, 4))
def test_shares_of_a_box_are_all_of_it_and_contiguous(shape: tuple[int, ...], parts: int) -> None:
    box = Box((2,) * len(shape), shape)
    memory = torch.arange(math.prod(shape)).view(shape)
    shares = [share(box, part, parts) for part in range(parts)]
    views = [memory[part.within(box)] for part in shares if part is not None]
    assert all(view.is_contiguous() for view in views)
    assert sorted(e for view in views for e in view.flatten().tolist()) == list(range(box.numel))


@given(shapes, st.data())
def test_any_change_of_a_tiling_is_a_fault(shape: tuple[int, ...], data: st.DataObject) -> None:
    total = math.prod(shape)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=3)))
    edges = [0, *cuts, total]
    boxes = [box for a, b in itertools.pairwise(edges) for box in boxes_of_run(shape, a, b - a)]
    assert tiling_fault(shape, boxes) is None
    assert tiling_fault(shape, boxes[1:]) is not None
    assert tiling_fault(shape, [*boxes, boxes[0]]) is not None


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.data())
def test_boxes_tile_if_each_element_is_in_one_of_them(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes, left = [], torch.ones(shape, dtype=torch.int64)
    for _ in range(data.draw(st.integers(1, 6))):
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        sizes = [data.draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)]
        boxes.append(Box(tuple(starts), tuple(sizes)))
        left[boxes[-1].within(whole_box(shape))] -= 1
    fault = tiling_fault(shape, boxes)
    assert (fault is None) == bool((left == 0).all())
    if fault is not None:  # it names the first such element
        first = left.nonzero()[0].tolist()
        assert str(first) in fault


def test_tilings_of_many_dims_are_checked_as_fast_as_others() -> None:
    # Of each dim but the last, two boxes: halves of a column, along that dim.
    dims = 40
    shape = (*(2,) * (dims - 1), dims - 1)
    boxes = [
        Box(
            (*(half if d == cut else 0 for d in range(dims - 1)), cut),
            (*(1 if d == cut else 2 for d in range(dims - 1)), 1),
        )
        for cut in range(dims - 1)
        for half in (0, 1)
    ]
    assert tiling_fault(shape, boxes) is None
    boxes[-1] = boxes[-2]
    assert f"element {[0] * (dims - 1) + [dims - 2]} is in 2 pieces" in str(
        tiling_fault(shape, boxes)
    )


def test_boxes_outside_of_a_tensor_are_a_fault() -> None:
    for box in (Box((4,), (1,)), Box((-1,), (1,)), Box((0, 0), (4, 1))):
        assert "inside" in str(tiling_fault((4,), [Box((0,), (4,)), box]))


@given(shapes, st.data())
def test_what_is_left_of_a_box_tiles_it_with_what_was_taken(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    def drawn() -> Box:
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        sizes = [data.draw(st.integers(1, n - a)) for n, a in zip(shape, starts, strict=True)]
        return Box(tuple(starts), tuple(sizes))

    box, others = drawn(), [drawn() for _ in range(data.draw(st.integers(0, 3)))]
    left = without(box, others)
    kept = [e for part in left for e in _elements(shape, part).flatten().tolist()]
    taken = {e for other in others for e in _elements(shape, other).flatten().tolist()}
    wanted = [e for e in _elements(shape, box).flatten().tolist() if e not in taken]
    assert sorted(kept) == sorted(wanted)


def test_common_part_of_boxes() -> None:
    assert common(Box((0, 0), (2, 4)), Box((1, 2), (5, 5))) == Box((1, 2), (1, 2))
    assert common(Box((0,), (2,)), Box((2,), (2,))) is None
    assert common(Box((), ()), Box((), ())) == Box((), ())


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2)])
def test_empty_tensors_have_no_pieces(shape: tuple[int, ...]) -> None:
    assert boxes_of_run(shape, 0, 0) == ()
    assert tiling_fault(shape, []) is None


@st.composite
def _divisions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[tuple[Box, ...]]:
    """Divide a tensor over some ranks: in runs or along a dim, with replicas and ranks without boxes."""
    parts = draw(st.integers(1, 4))
    if shape and draw(st.booleans()):
        own = [(box,) for box in chunks(shape, draw(st.integers(0, len(shape) - 1)), parts)]
    else:
        numel = math.prod(shape)
        cuts = [0, *sorted(draw(st.lists(st.integers(0, numel), max_size=3))), numel]
        own = [boxes_of_run(shape, a, b - a) for a, b in itertools.pairwise(cuts)]
    return draw(st.permutations([*own, *draw(st.lists(st.sampled_from([*own, ()]), max_size=3))]))


@given(shapes, st.data())
def test_moves_give_every_rank_each_element_it_wants_once(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    held, wanted = data.draw(_divisions(shape)), data.draw(_divisions(shape))
    size = max(len(held), len(wanted))
    held, wanted = ([*each, *[()] * (size - len(each))] for each in (held, wanted))
    plans = [list(moves(held, wanted, rank=rank)) for rank in range(size)]
    got: dict[tuple[int, int], list[int]] = {}
    for rank, plan in enumerate(plans):
        for sender, receiver, own, target, box in plan:
            assert rank in (sender, receiver)
            assert common(box, held[sender][own]) == common(box, wanted[receiver][target]) == box
            if receiver == rank:
                got.setdefault((rank, target), []).extend(_elements(shape, box).flatten().tolist())
                # What a rank holds it keeps.
                assert sender == rank or held[sender][own] not in held[rank]
        for other in range(rank):  # what passes between two, they list alike
            both = [
                [m for m in p if {m.sender, m.receiver} == {rank, other}]
                for p in (plan, plans[other])
            ]
            for way in (rank, other):
                one, two = ([m for m in each if m.sender == way] for each in both)
                assert one == two
    for rank, boxes in enumerate(wanted):
        for number, box in enumerate(boxes):
            elements = sorted(_elements(shape, box).flatten().tolist())
            assert sorted(got.get((rank, number), [])) == elements


def test_elements_that_no_rank_holds_are_refused() -> None:
    rows = chunks((4, 2), 0, 2)
    with pytest.raises(LayoutError, match="no rank holds 4 of the elements"):
        list(moves([(rows[0],), ()], [(whole_box((4, 2)),), ()], rank=0))
