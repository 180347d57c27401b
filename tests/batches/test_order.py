"""Samples in an order that depends on a seed alone: each once an epoch, however many ranks share it, and after a resume."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

import fullshard
from fullshard import ResumableOrder
from fullshard.batches.order import shuffled
from tests.harness import on_ranks, rank, world_size

NUM_SAMPLES = st.integers(1, 60)
BATCH_SIZES = st.integers(1, 12)
SEEDS = st.integers(0, 2**31 - 1)


def _order(num_samples: int, batch_size: int, seed: int = 0) -> ResumableOrder:
    return ResumableOrder(num_samples, batch_size, seed=seed, rank=0, num_ranks=1)


def _step(order: ResumableOrder, step: int, num_ranks: int) -> list[int]:
    """Return what all ranks together take in a step."""
    shares = [order.samples(step, rank=each, num_ranks=num_ranks) for each in range(num_ranks)]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    return [sample for share in shares for sample in share]


@given(NUM_SAMPLES, BATCH_SIZES, SEEDS, st.data())
def test_each_epoch_has_every_sample_once_on_any_number_of_ranks(
    num_samples: int, batch_size: int, seed: int, data: st.DataObject
) -> None:
    order = _order(num_samples, batch_size, seed)
    taken: list[int] = []
    for step in range(-(-3 * num_samples // batch_size)):
        num_ranks = data.draw(st.integers(1, batch_size))
        found = _step(order, step, num_ranks)
        assert found == _step(order, step, 1)
        taken += found
    for epoch in range(3):
        once = taken[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(once) == [*range(num_samples)]


@given(NUM_SAMPLES, st.lists(BATCH_SIZES, min_size=1, max_size=4), SEEDS, st.data())
def test_a_run_that_is_resumed_goes_on_as_if_it_had_not_ended(
    num_samples: int, batch_sizes: list[int], seed: int, data: st.DataObject
) -> None:
    """Several times, with another number of ranks and another batch each time; what was loaded ahead comes again."""
    taken: list[int] = []
    state = _order(num_samples, batch_sizes[0], seed).state_dict()
    for batch_size in batch_sizes:
        num_ranks = data.draw(st.integers(1, batch_size))
        orders = [
            ResumableOrder(num_samples, batch_size, seed=seed, rank=each, num_ranks=num_ranks)
            for each in range(num_ranks)
        ]
        for order in orders:
            order.load_state_dict(state)
        loaded = [list(itertools.islice(order, 9)) for order in orders]
        for step in range(data.draw(st.integers(0, 9))):
            taken += [sample for share in loaded for sample in share[step]]
            for order in orders:
                order.advance()
        states = [order.state_dict() for order in orders]
        assert states == states[:1] * num_ranks
        state = states[0]
        assert orders[0].epoch == len(taken) / num_samples
    whole = _order(num_samples, 1, seed)
    assert taken == [whole.sample(step, 0) for step in range(len(taken))]


def test_a_step_of_the_past_is_known_only_while_batches_were_as_large() -> None:
    order, other = _order(10, 4), _order(10, 2)
    before = [order.samples(step) for step in range(4)]
    for _ in range(3):
        order.advance()
    assert [order.samples(step) for step in range(4)] == before
    other.load_state_dict(order.state_dict())
    assert other.samples(3) == before[3][:2]
    with pytest.raises(fullshard.ShardingError, match=r"step 2 .* before step 3"):
        other.samples(2)


def test_the_state_of_another_order_is_refused() -> None:
    state = _order(10, 4, seed=3).state_dict()
    with pytest.raises(fullshard.StateError, match="num_samples 10, and this order has 11"):
        _order(11, 4, seed=3).load_state_dict(state)
    with pytest.raises(fullshard.StateError, match="seed 3, and this order has 4"):
        _order(10, 4, seed=4).load_state_dict(state)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((0, 4, 0, 1), "num_samples is 0"),
        ((9, 1, 0, 2), "batch_size is 1, for 2 ranks"),
        ((9, 4, 2, 2), "rank is 2, of 2 ranks"),
    ],
)
def test_ranks_without_samples_are_refused(numbers: tuple[int, int, int, int], said: str) -> None:
    num_samples, batch_size, own, num_ranks = numbers
    with pytest.raises(fullshard.ShardingError, match=said):
        ResumableOrder(num_samples, batch_size, rank=own, num_ranks=num_ranks)


@on_ranks(2)
def test_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    order, model = ResumableOrder(10, 4, seed=1), nn.Linear(2, 2)
    fullshard.fully_shard(model)
    order.advance()
    fullshard.save_checkpoint(tmp_path / "a", model, extra={"order": order})
    resumed = ResumableOrder(10, 2, seed=1)
    fullshard.load_checkpoint(tmp_path / "a", model, extra={"order": resumed})
    assert resumed.state_dict() == order.state_dict()
    assert resumed.samples(1) == [_order(10, 1, seed=1).sample(4 + rank(), 0)]


@on_ranks(3)
def test_it_samples_batches_for_a_loader_of_every_rank() -> None:
    order = ResumableOrder(10, 6, seed=1)
    assert (order.rank, order.num_ranks) == (rank(), world_size())
    loader = DataLoader(range(100, 110), batch_sampler=order)
    (first, second) = itertools.islice(loader, 2)
    whole = _order(10, 6, seed=1)
    mine = slice(2 * rank(), 2 * rank() + 2)
    assert first.tolist() == [100 + sample for sample in whole.samples(0)[mine]]
    assert second.tolist() == [100 + sample for sample in whole.samples(1)[mine]]


@given(count=st.integers(1, 300), seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 10**6))
def test_an_order_has_everything_once(count: int, seed: int, epoch: int) -> None:
    found = [shuffled(number, count, seed=seed, epoch=epoch) for number in range(count)]
    assert sorted(found) == list(range(count))


def test_orders_differ_between_seeds_and_epochs_and_never_change() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return [shuffled(number, 10, seed=seed, epoch=epoch) for number in range(10)]

    # A run that was started with an older version goes on as it began.
    assert order(0, 0) == [7, 2, 8, 0, 3, 4, 1, 6, 5, 9]
    assert len({tuple(order(seed, epoch)) for seed in range(5) for epoch in range(5)}) == 25


def test_places_are_equally_likely() -> None:
    """Of 40 things, each comes about as often to each quarter: 2000 orders, 500 expected, deviation 19."""
    counts = np.zeros((40, 4))
    for seed in range(2000):
        for number in range(40):
            counts[number, shuffled(number, 40, seed=seed, epoch=0) // 10] += 1
    assert abs(counts - 500).max() < 6 * 19.4
