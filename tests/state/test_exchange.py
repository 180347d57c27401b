"""Parameters that move between real ranks from one division to another."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fullshard.errors import LayoutError
from fullshard.peers.groups import own_group
from fullshard.plan.builders import flat_layout
from fullshard.plan.layout import ParamSpec, Piece
from fullshard.plan.regrid import (
    Division,
    box_pieces,
    bucket_division,
    local_numel,
    row_division,
    whole_division,
)
from fullshard.state.exchange import exchange
from tests.collectives import record_traffic
from tests.harness import on_ranks, rank, world_size
from tests.selection import each_value

CPU = torch.device("cpu")
SHAPES = [(7, 5), (3,), (2, 6, 3), (16, 16), (1,), (0, 4), ()]
# Sizes of 4, 2, 8, 1, 8, 16 and 4 bytes, so that most runs begin at odd places on the wire.
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float64,
    torch.complex128,
    torch.float32,
]


def _parameters() -> list[Tensor]:
    """Make the same whole parameters on every rank."""
    torch.manual_seed(1)
    return [
        torch.randint(-100, 100, shape).to(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def _part(param: Tensor, pieces: Sequence[Piece]) -> Tensor:
    """Take this rank's local tensor out of a whole parameter."""
    local = torch.zeros(local_numel(pieces), dtype=param.dtype)
    for start, shard_start, numel in pieces:
        local[shard_start : shard_start + numel] = param.flatten()[start : start + numel]
    return local


def _parts(params: Sequence[Tensor], divisions: Sequence[Division]) -> list[Tensor]:
    return [_part(param, d[rank()]) for param, d in zip(params, divisions, strict=True)]


def _flat() -> list[Division]:
    """Cut each parameter as a flat bucket of its dtype, behind 6 elements of another, would be."""
    divisions: list[Division] = []
    for shape, dtype in zip(SHAPES, DTYPES, strict=True):
        specs = [ParamSpec("v", (6,), dtype, dtype), ParamSpec("w", shape, dtype, dtype)]
        (bucket,) = flat_layout(specs, shard_size=world_size()).buckets
        divisions.append(bucket_division(bucket, bucket.params[1]))
    return divisions


def _rows(dim: int) -> list[Division]:
    """Divide by rows of this dim, or of the last one of parameters that have fewer."""
    return [
        row_division(shape or (1,), dim=min(dim, max(len(shape) - 1, 0)), num_ranks=world_size())
        for shape in SHAPES
    ]


def _whole() -> list[Division]:
    return [whole_division(math.prod(shape), num_ranks=world_size()) for shape in SHAPES]


def _on_last_rank() -> list[Division]:
    return [[*[()] * (world_size() - 1), division[-1]] for division in _whole()]


def _replicated_pairs() -> list[Division]:
    """Divide by rows over the first half of the ranks, with the second half as replicas."""
    half = world_size() // 2
    return [row_division(shape or (1,), dim=0, num_ranks=half) * 2 for shape in SHAPES]


DIVISIONS = {
    "flat": _flat,
    "rows": lambda: _rows(0),
    "columns": lambda: _rows(1),
    "whole": _whole,
    "on_last_rank": _on_last_rank,
    "replicated_pairs": _replicated_pairs,
}


def _assert_same(result: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(result, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


@each_value()
@pytest.mark.parametrize("after", DIVISIONS)
@pytest.mark.parametrize("before", DIVISIONS)
@on_ranks(2, 4)
def test_every_division_leads_to_every_other_in_one_call(before: str, after: str) -> None:
    params, old, new = _parameters(), DIVISIONS[before](), DIVISIONS[after]()
    tensors = _parts(params, old)
    own_group(_world())  # made at the first call, which is none of what is counted
    with record_traffic() as traffic:
        result = exchange(tensors, old, new, dist.group.WORLD, device=CPU)
    assert traffic.calls == {"reduce_scatter": 1}  # what `record_traffic` calls an all-to-all
    _assert_same(result, _parts(params, new))
    _assert_same(tensors, _parts(params, old))


@on_ranks(2)
def test_what_stays_is_not_sent() -> None:
    param = torch.arange(12, dtype=torch.bfloat16)
    old: Division = [[Piece(0, 0, 8)], [Piece(8, 0, 4)]]
    new = row_division((12,), dim=0, num_ranks=2)
    own_group(_world())
    with record_traffic() as traffic:
        (result,) = exchange(_parts([param], [old]), [old], [new], dist.group.WORLD, device=CPU)
    assert result.tolist() == param.chunk(2)[rank()].tolist()
    assert traffic.nbytes == {"reduce_scatter": 4 if rank() == 0 else 0}


@on_ranks(2, 4)
def test_ranks_for_which_nothing_moves_take_part() -> None:
    whole = _whole()
    params = _parameters()
    own_group(_world())
    with record_traffic() as traffic:
        result = exchange(_parts(params, whole), whole, whole, dist.group.WORLD, device=CPU)
        assert exchange([], [], [], dist.group.WORLD, device=CPU) == []
    assert traffic.calls == {"reduce_scatter": 2}
    assert traffic.nbytes == {"reduce_scatter": 0}
    _assert_same(result, [param.flatten() for param in params])


@on_ranks(4)
def test_divisions_are_over_the_ranks_of_the_group() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([3, 2])]
    group = groups[rank() // 2]
    param = torch.arange(10) + 100 * (rank() // 2)
    old, new = (row_division((5, 2), dim=dim, num_ranks=2) for dim in (0, 1))
    mine = old[dist.get_rank(group)]
    (result,) = exchange([_part(param, mine)], [old], [new], group, device=CPU)
    assert torch.equal(result, _part(param, new[dist.get_rank(group)]))


@on_ranks(4)
def test_boxes_of_a_2d_mesh_become_rows() -> None:
    param = torch.arange(35.0).view(5, 7)
    boxes = [
        box_pieces((5, 7), (row, column), (3 - row // 3, 4 - column // 4))
        for row in (0, 3)
        for column in (0, 4)
    ]
    rows = row_division((5, 7), dim=0, num_ranks=4)
    row, column = 3 * (rank() // 2), 4 * (rank() % 2)
    local = param[row : row + 3, column : column + 4][: 3 - row // 3].flatten()
    (result,) = exchange([local], [boxes], [rows], dist.group.WORLD, device=CPU)
    assert torch.equal(result, param[2 * rank() : 2 * rank() + 2].flatten())


@on_ranks(2)
def test_parameters_that_require_grad_may_share_a_buffer() -> None:
    # The local tensor may be longer than its pieces, such as the shard buffer of a whole bucket.
    specs = [ParamSpec(n, (3, 3), torch.float32, torch.float32) for n in "vw"]
    (bucket,) = flat_layout(specs, shard_size=2).buckets
    buffer = torch.arange(12.0).add(12 * rank()).requires_grad_()
    old = [[bucket.pieces(param, r) for r in range(2)] for param in bucket.params]
    new = [whole_division(9, num_ranks=2)] * 2
    v, w = exchange([buffer, buffer], old, new, dist.group.WORLD, device=CPU)
    assert not v.requires_grad
    assert v.tolist() == list(range(9))
    assert w.tolist() == list(range(12, 21))


@on_ranks(2)
def test_wrong_divisions_are_refused_on_every_rank_before_anything_is_sent() -> None:
    local, rows = torch.zeros(2), row_division((4,), dim=0, num_ranks=2)
    for old, new, message in [
        (rows, whole_division(4, num_ranks=3), "parameter 0: divided over 2 ranks and then over 3"),
        ((rows[0], ()), rows, r"no rank holds elements \[2, 4\)"),
    ]:
        with record_traffic() as traffic, pytest.raises(LayoutError, match=message):
            exchange([local], [old], [new], dist.group.WORLD, device=CPU)
        assert not traffic.calls


def test_one_rank_alone_copies() -> None:
    param = torch.arange(6, dtype=torch.int16)
    old: list[Division] = [[[Piece(3, 0, 3), Piece(0, 3, 3)]]]
    tensor = torch.cat((param[3:], param[:3]))
    (result,) = exchange([tensor], old, [whole_division(6, num_ranks=1)], None, device=CPU)
    assert torch.equal(result, param)
    assert torch.equal(tensor, torch.cat((param[3:], param[:3])))


def test_places_that_no_piece_names_are_zero() -> None:
    new: list[Division] = [[[Piece(0, 2, 2)]]]
    whole = [whole_division(2, num_ranks=1)]
    (result,) = exchange([torch.ones(2)], whole, new, None, device=CPU)
    assert result.tolist() == [0, 0, 1, 1]


def test_results_share_no_memory_with_what_they_come_from() -> None:
    tensor, whole = torch.ones(4), [whole_division(4, num_ranks=1)]
    (result,) = exchange([tensor], whole, whole, None, device=CPU)
    result.zero_()
    assert tensor.tolist() == [1, 1, 1, 1]
