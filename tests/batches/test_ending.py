"""Ranks with different numbers of batches end an epoch together."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.errors import ShardingError, StateError
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.training import assert_equal

pytestmark = pytest.mark.apis("peer_memory", "process_group")


class _Noting(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@on_ranks(3)
def test_all_end_with_the_first(api: Api) -> None:
    notes, log = _Noting(), logging.getLogger("fullshard")
    log.addHandler(notes)
    log.setLevel(logging.INFO)
    try:
        assert list(fullshard.join(range(10, 15 - rank()))) == [10, 11, 12]
        assert list(fullshard.join([1, 2])) == [1, 2]  # on all ranks: nothing to tell
    finally:
        log.removeHandler(notes)
        log.setLevel(logging.NOTSET)
    (text,) = notes.texts
    assert "3 batches, since ranks [2]" in text


@on_ranks(3)
def test_all_end_with_the_last(api: Api) -> None:
    batches = fullshard.join(iter([10, 11, 12][: 3 - rank()]), until="last")
    found = [(batch, batches.weight) for batch in batches]
    own = [(batch, 1.0) for batch in [10, 11, 12][: 3 - rank()]]
    assert found == own + [(own[-1][0], 0.0)] * rank()
    assert list(batches) == []  # each loop begins anew, with an iterator that is exhausted


@on_ranks(2)
def test_a_rank_without_any_batch(api: Api) -> None:
    batches = range(2 * rank())
    assert list(fullshard.join(batches)) == []
    with pytest.raises(StateError, match=r"ranks \[0\] have no batch"):
        list(fullshard.join(batches, until="last"))
    with pytest.raises(ShardingError, match="until is 'never'"):
        fullshard.join(batches, until="never")  # type: ignore[arg-type]


@on_ranks(4)
def test_some_ranks_join_each_other(api: Api) -> None:
    mesh = mesh_of(2, 2)
    group = mesh.get_group(1)
    number = dist.get_rank() // 2
    batches = fullshard.join(range(3 + number + rank() % 2), group=group)
    assert list(batches) == list(range(3 + number))


@on_ranks(2)
def test_each_epoch_begins_anew(api: Api) -> None:
    batches = fullshard.join([1, 2, 3][: 3 - rank()])
    assert [list(batches) for _ in range(3)] == [[1, 2]] * 3


@on_ranks(2)
def test_a_rank_that_leaves_a_loop_early_is_named_in_the_next(api: Api) -> None:
    def epochs() -> None:
        for _ in range(2):
            for number in fullshard.join(range(5)):
                if rank() == 0 and number == 1:
                    break  # rank 1 goes on, and meets rank 0 in its next loop

    with pytest.raises(StateError, match=r"different loops, .*rank 0: \d+, rank 1: \d+"):
        epochs()


def test_one_process_asks_nobody() -> None:
    batches = fullshard.join(iter("abc"), until="last")
    assert next(batches) == "a"
    assert [(batch, batches.weight) for batch in batches] == [("b", 1), ("c", 1)]


@on_ranks(2)
def test_an_uneven_epoch_is_that_of_one_process(api: Api) -> None:
    def tokens(owner: int) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(owner)
        for number in range(2 + 3 * owner):
            yield torch.randn(1 + (owner + number) % 3, 4, generator=generator)

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1))
    model = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1))
    model.load_state_dict(alone.state_dict())
    for part in (model[0], model[2], model):
        api.fully_shard(part, mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = fullshard.join(tokens(rank()), until="last")
    for batch in batches:
        loss = model(batch).square().mean()
        fullshard.weighted_loss(loss, len(batch) * batches.weight, model).backward()
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    by_rank = [list(tokens(owner)) for owner in range(world_size())]
    for number in range(max(map(len, by_rank))):
        batch = torch.cat([own[number] for own in by_rank if number < len(own)])
        alone(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_equal(dict(fullshard.iter_full_state(model)), alone.state_dict(), rtol=1e-5, atol=1e-6)
