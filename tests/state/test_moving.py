"""Tensors that move between real ranks from one division to another."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import LayoutError
from fullshard.peers.groups import own_group
from fullshard.plan.boxes import Box, Division, boxes_of_run, chunks, whole_box
from fullshard.state.moving import Moving, move
from tests.collectives import record_traffic
from tests.harness import on_ranks, rank, world_size

CPU = torch.device("cpu")
SHAPES = [(7, 5), (3,), (2, 6, 3), (16, 16), (1,), (0, 4), ()]
# Sizes of 4, 2, 8, 1, 8, 16 and 4 bytes, so that most boxes begin at odd places on the wire.
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float64,
    torch.complex128,
    torch.float32,
]


def _tensors() -> list[Tensor]:
    """Make the same whole tensors on every rank."""
    torch.manual_seed(1)
    return [
        torch.randint(-100, 100, shape).to(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def _part(whole: Tensor, box: Box) -> Tensor:
    return whole[box.within(whole_box(tuple(whole.shape)))].clone()


def _moved(
    wholes: Sequence[Tensor],
    old: Sequence[Division],
    new: Sequence[Division],
    group: dist.ProcessGroup | None = None,
) -> list[list[Tensor]]:
    """Move what ranks have of these tensors in old divisions; return what this rank has in new ones."""
    number = dist.get_rank(group) if dist.is_initialized() else 0
    moving = [
        Moving(
            before,
            after,
            [_part(whole, box) for box in before[number]],
            [whole.new_empty(box.shape) for box in after[number]],
        )
        for whole, before, after in zip(wholes, old, new, strict=True)
    ]
    move(moving, group or dist.group.WORLD, device=CPU)
    for whole, each in zip(wholes, moving, strict=True):
        for box, held in zip(each.held[number], each.held_here, strict=True):
            assert torch.equal(held, _part(whole, box))
    return [list(each.wanted_here) for each in moving]


def _flat() -> list[Division]:
    """Cut each tensor where a flat buffer, in which 6 elements precede it, is cut."""
    divisions: list[Division] = []
    for tensor in _tensors():
        size = -(-(6 + tensor.numel()) // world_size())
        cuts = [min(max(n * size - 6, 0), tensor.numel()) for n in range(world_size() + 1)]
        runs = itertools.pairwise(cuts)
        divisions.append([boxes_of_run(tuple(tensor.shape), a, b - a) for a, b in runs])
    return divisions


def _by(dim: int, num_ranks: int) -> list[Division]:
    """Divide along this dim, or the last one of tensors that have fewer; a number is the first rank's."""
    return [
        [(box,) for box in chunks(shape, min(dim, len(shape) - 1), num_ranks)]
        if shape
        else [(whole_box(()),), *[()] * (num_ranks - 1)]
        for shape in SHAPES
    ]


def _whole() -> list[Division]:
    return [[(whole_box(shape),)] * world_size() for shape in SHAPES]


def _on_last_rank() -> list[Division]:
    return [[*[()] * (world_size() - 1), division[-1]] for division in _whole()]


def _replicated_pairs() -> list[Division]:
    """Divide by rows over the first half of the ranks, with the second half as replicas."""
    return [[*division, *division] for division in _by(0, world_size() // 2)]


DIVISIONS = {
    "flat": _flat,
    "rows": lambda: _by(0, world_size()),
    "columns": lambda: _by(1, world_size()),
    "whole": _whole,
    "on_last_rank": _on_last_rank,
    "replicated_pairs": _replicated_pairs,
}


def _assert_parts(
    found: Sequence[Sequence[Tensor]], wholes: Sequence[Tensor], new: Sequence[Division]
) -> None:
    for own, whole, division in zip(found, wholes, new, strict=True):
        for box, part in zip(division[rank()], own, strict=True):
            assert part.dtype == whole.dtype
            assert torch.equal(part, _part(whole, box))


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@pytest.mark.parametrize("after", DIVISIONS)
@pytest.mark.parametrize("before", DIVISIONS)
@on_ranks(2, 4)
def test_every_division_leads_to_every_other_in_one_call(before: str, after: str) -> None:
    wholes, old, new = _tensors(), DIVISIONS[before](), DIVISIONS[after]()
    own_group(_world())  # made at the first call, which is none of what is counted
    with record_traffic() as traffic:
        found = _moved(wholes, old, new)
    assert traffic.calls == {"reduce_scatter": 1}  # what `record_traffic` calls an all-to-all
    _assert_parts(found, wholes, new)


@on_ranks(2)
def test_what_stays_is_not_sent() -> None:
    whole = torch.arange(12, dtype=torch.bfloat16)
    old: Division = [boxes_of_run((12,), 0, 8), boxes_of_run((12,), 8, 4)]
    new: Division = [(box,) for box in chunks((12,), 0, 2)]
    own_group(_world())
    with record_traffic() as traffic:
        found = _moved([whole], [old], [new])
    _assert_parts(found, [whole], [new])
    assert traffic.nbytes == {"reduce_scatter": 4 if rank() == 0 else 0}


@on_ranks(2, 4)
def test_ranks_for_which_nothing_moves_take_part() -> None:
    whole, wholes = _whole(), _tensors()
    own_group(_world())
    with record_traffic() as traffic:
        found = _moved(wholes, whole, whole)
        assert _moved([], [], []) == []
    assert traffic.calls == {"reduce_scatter": 2}
    assert traffic.nbytes == {"reduce_scatter": 0}
    _assert_parts(found, wholes, whole)


@on_ranks(4)
def test_divisions_are_over_the_ranks_of_the_group() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    group = groups[rank() // 2]
    whole = torch.arange(10).view(5, 2) + 100 * (rank() // 2)
    old, new = ([(box,) for box in chunks((5, 2), dim, 2)] for dim in (0, 1))
    ((found,),) = _moved([whole], [old], [new], group)
    assert torch.equal(found, whole.chunk(2, 1)[dist.get_rank(group)])


@on_ranks(4)
def test_boxes_of_a_2d_mesh_become_rows() -> None:
    whole = torch.arange(35.0).view(5, 7)
    boxes = [
        (Box((row, column), (3 - row // 3, 4 - column // 4)),)
        for row in (0, 3)
        for column in (0, 4)
    ]
    ((found,),) = _moved([whole], [boxes], [[(box,) for box in chunks((5, 7), 0, 4)]])
    assert torch.equal(found, whole[2 * rank() : 2 * rank() + 2])


@on_ranks(2)
def test_memory_that_requires_grad_is_read_and_of_any_strides() -> None:
    shape = (3, 3)
    held = torch.arange(6.0).view(3, 2).t()[: 2 - rank()].requires_grad_()
    rows: Division = [(box,) for box in chunks(shape, 0, 2)]
    target = torch.empty(shape)
    move([Moving(rows, [(whole_box(shape),)] * 2, [held], [target])], dist.group.WORLD, device=CPU)
    assert target.flatten().tolist() == [0, 2, 4, 1, 3, 5, 0, 2, 4]


@on_ranks(2)
def test_what_no_rank_holds_is_refused() -> None:
    rows = chunks((4,), 0, 2)
    with record_traffic() as traffic, pytest.raises(LayoutError, match="no rank holds 2 of"):
        _moved([torch.zeros(4)], [[(rows[0],), ()]], [[(whole_box((4,)),)] * 2])
    assert not traffic.calls


def test_one_rank_alone_copies() -> None:
    whole = torch.arange(6, dtype=torch.int16).view(2, 3)
    halves: Division = [(Box((1, 0), (1, 3)), Box((0, 0), (1, 3)))]
    ((found,),) = _moved([whole], [halves], [[(whole_box((2, 3)),)]])
    assert torch.equal(found, whole)
