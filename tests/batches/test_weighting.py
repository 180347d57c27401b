"""Weighted losses give the gradients of one process that has all tokens, however they are divided."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fullshard
from fullshard.errors import MisuseError, ShardingError, StateError
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.live.ways import FEW, TRAINING, sharded, without_sync
from tests.selection import one_way
from tests.test_transfer import HYBRID
from tests.training import assert_equal

pytestmark = one_way("tests/parity/test_matrix.py: weights are set before sums travel")

CLASSES = 7
Batch = tuple[torch.Tensor, torch.Tensor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, CLASSES))


def _batch(owner: int, number: int, num_tokens: int | None = None) -> Batch:
    """Return a micro-batch of one rank. Ranks have different numbers of tokens, and some none."""
    generator = torch.Generator().manual_seed(100 * owner + number)
    if num_tokens is None:
        num_tokens = (5, 1, 0, 12, 3)[(owner * 2 + number) % 5]
    draw = torch.randint(11, (num_tokens, 2), generator=generator)
    return draw[:, 0], draw[:, 1] % CLASSES


def _mean(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean over the tokens of a batch; of none, a zero that every parameter is part of."""
    inputs, labels = batch
    if len(labels):
        return F.cross_entropy(model(inputs), labels)
    return model(torch.zeros(1, dtype=torch.long)).sum() * 0


def _wanted(batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Return what a step of SGD makes of the model in one process with all tokens."""
    model = _model()
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    _mean(model, (inputs, labels)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return model.state_dict()


def _check(model: Any, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> None:
    """Step, and compare with one process. Then give the model its first values again."""
    before = dict(fullshard.iter_full_state(model))
    optimizer.step()
    after = dict(fullshard.iter_full_state(model))
    assert_equal(after, _wanted(batches), rtol=1e-5, atol=1e-6)
    with fullshard.full_parameters(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(before[fullshard_name(name)])


def fullshard_name(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


@pytest.mark.parametrize("syncs", ["every", "last"])
@pytest.mark.parametrize("way", TRAINING)
@on_ranks(2)
def test_gradients_are_those_of_all_tokens(api: Api, way: str, syncs: str) -> None:
    _train(sharded(api, way, _model()), syncs)


@pytest.mark.parametrize("syncs", ["every", "last"])
@pytest.mark.parametrize("way", HYBRID)
@on_ranks(4)
def test_replicas_count_too(api: Api, way: str, syncs: str) -> None:
    _train(sharded(api, way, _model()), syncs)


def _train(model: Any, syncs: str) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, num_backwards in enumerate((1, 3, 2)):
        for number in range(num_backwards):
            batch = _batch(rank(), 10 * step + number)
            is_last = number == num_backwards - 1
            with contextlib.nullcontext() if is_last or syncs == "every" else without_sync(model):
                loss = _mean(model, batch)
                weighted = fullshard.weighted_loss(loss, len(batch[1]), model)
                assert weighted.item() == loss.item()
                weighted.backward()
        batches = [
            _batch(owner, 10 * step + number)
            for owner in range(world_size())
            for number in range(num_backwards)
        ]
        _check(model, optimizer, batches)
        optimizer.zero_grad()


@contextlib.contextmanager
def _stepping(api: Api, way: str = "fully_shard") -> Iterator[tuple[Any, torch.optim.Optimizer]]:
    model = sharded(api, way, _model())
    yield model, torch.optim.SGD(model.parameters(), lr=1.0)


def _backward(model: Any, number: int, num_tokens: int) -> None:
    batch = _batch(rank(), number, num_tokens)
    fullshard.weighted_loss(_mean(model, batch), num_tokens, model).backward()


def _batches(number: int, *sizes: int) -> list[Batch]:
    return [_batch(owner, number, size) for owner, size in enumerate(sizes)]


DROPPING = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "each": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "each, zeros": lambda model, optimizer: [
        p.grad.zero_() for p in model.parameters() if p.grad is not None
    ],
}


@pytest.mark.parametrize("way", FEW)
@pytest.mark.parametrize("when", ["after the step", "before the backward"])
@pytest.mark.parametrize("how", DROPPING)
@on_ranks(2)
def test_a_step_begins_where_gradients_are_dropped(api: Api, way: str, how: str, when: str) -> None:
    with _stepping(api, way) as (model, optimizer):
        for number in range(3):
            sizes = (3 + number, 7 - number)
            batch = _batch(rank(), number, sizes[rank()])
            loss = fullshard.weighted_loss(_mean(model, batch), sizes[rank()], model)
            if when == "before the backward" and number:
                DROPPING[how](model, optimizer)
            loss.backward()
            _check(model, optimizer, _batches(number, *sizes))
            if when == "after the step":
                DROPPING[how](model, optimizer)


@on_ranks(2)
def test_gradients_that_are_zero_by_themselves_count(api: Api) -> None:
    with _stepping(api) as (model, _):
        flat = _batch(rank(), 0, 4)
        fullshard.weighted_loss(_mean(model, flat) * 0, 4, model).backward()
        sizes = (1, 2)
        _backward(model, 1, sizes[rank()])
        total = sum(sizes)
        model_alone = _model()
        inputs, labels = (torch.cat(parts) for parts in zip(*_batches(1, *sizes), strict=True))
        (_mean(model_alone, (inputs, labels)) * total / (8 + total)).backward()
        for ours, theirs in zip(model.parameters(), model_alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@on_ranks(2)
def test_clipping_between_backwards_keeps_what_is_there(api: Api) -> None:
    with _stepping(api) as (model, optimizer):
        _backward(model, 0, 2 + rank())
        fullshard.clip_grad_norm_(model.parameters(), 1e9)
        _backward(model, 1, 5 - rank())
        _check(model, optimizer, [*_batches(0, 2, 3), *_batches(1, 5, 4)])


@on_ranks(2)
def test_weights_may_be_tensors_and_losses_scaled(api: Api) -> None:
    with _stepping(api) as (model, optimizer):
        batch = _batch(rank(), 0, 2 + rank())
        weight = torch.tensor([2 + rank()])
        (fullshard.weighted_loss(_mean(model, batch), weight, model) * 1024).backward()
        for parameter in model.parameters():
            parameter.grad.div_(1024)
        _check(model, optimizer, _batches(0, 2, 3))


@on_ranks(2)
def test_a_step_without_any_token_gives_zeros(api: Api) -> None:
    with _stepping(api) as (model, _):
        fullshard.weighted_loss(_mean(model, _batch(0, 0, 3)), 0, model).backward()
        assert all(not p.grad.full_tensor().any() for p in model.parameters())


def test_one_process_counts_backwards_alone() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number, size in enumerate((4, 1, 6)):
        batch = _batch(0, number, size)
        fullshard.weighted_loss(_mean(model, batch), size, model).backward()
    optimizer.step()
    wanted = _wanted([_batch(0, number, size) for number, size in enumerate((4, 1, 6))])
    assert_equal(model.state_dict(), wanted, rtol=1e-5, atol=1e-6)


# Refused


@on_ranks(2)
def test_what_would_count_wrongly_is_refused(api: Api) -> None:
    with _stepping(api) as (model, _):
        loss = _mean(model, _batch(0, 0, 3))
        for wrong in (-1, float("nan"), float("inf"), None, "2"):
            with pytest.raises(ShardingError, match="weight is"):
                fullshard.weighted_loss(loss, wrong, model)
        with pytest.raises(ShardingError, match=r"weight has shape \(2,\)"):
            fullshard.weighted_loss(loss, torch.ones(2), model)
        with pytest.raises(ShardingError, match=r"the loss has shape \(3,\)"):
            fullshard.weighted_loss(loss.expand(3), 1, model)
        with pytest.raises(ShardingError, match="Linear is not sharded"):
            fullshard.weighted_loss(loss, 1, nn.Linear(2, 2))
        model.set_gradient_divide_factor(1.0)
        with pytest.raises(StateError, match=r"root .* by 1, but 2 ranks"):
            fullshard.weighted_loss(loss, 1, model)


@on_ranks(2)
def test_two_weighted_losses_in_one_backward_are_refused(api: Api) -> None:
    with _stepping(api) as (model, _):
        loss = _mean(model, _batch(0, 0, 3))
        both = fullshard.weighted_loss(loss, 1, model) + fullshard.weighted_loss(loss, 2, model)
        with pytest.raises(MisuseError, match="two weighted losses"):
            both.backward()


@on_ranks(2)
def test_a_part_of_the_model_stands_for_all_of_it(api: Api) -> None:
    model = _model()
    for part in (model[1], model):
        api.fully_shard(part, mesh=mesh_of(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for number, sizes in enumerate(((2, 3), (5, 4))):
        batch = _batch(rank(), number, sizes[rank()])
        fullshard.weighted_loss(_mean(model, batch), sizes[rank()], model[1]).backward()
    _check(model, optimizer, [*_batches(0, 2, 3), *_batches(1, 5, 4)])


class _Two(nn.ModuleList):
    """Two models that are sharded each by itself, one after the other."""


def _two(api: Api) -> tuple[Any, Any, Any]:
    parts = _model()
    first, second = nn.Sequential(*parts[:2]), nn.Sequential(*parts[2:])
    return api.fully_shard(first), api.fully_shard(second), parts


def _backward_of_two(first: Any, second: Any, number: int, size: int, told: nn.Module) -> None:
    inputs, labels = _batch(rank(), number, size)
    loss = F.cross_entropy(second(first(inputs)), labels)
    fullshard.weighted_loss(loss, size, told).backward()


@on_ranks(2)
def test_several_models_of_one_loss_are_told_of_together(api: Api) -> None:
    first, second, _ = _two(api)
    both = _Two([first, second])
    for number, sizes in enumerate(((2, 3), (5, 4))):
        _backward_of_two(first, second, number, sizes[rank()], both)
    alone = _model()
    inputs, labels = (
        torch.cat(parts) for parts in zip(*_batches(0, 2, 3), *_batches(1, 5, 4), strict=True)
    )
    F.cross_entropy(alone(inputs), labels).backward()
    found = [p.grad.full_tensor() for p in both.parameters()]
    for ours, theirs in zip(found, alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)


@pytest.mark.parametrize("told", [0, 1])
@on_ranks(2)
def test_a_loss_that_reaches_another_model_is_refused(api: Api, told: int) -> None:
    first, second, _ = _two(api)
    with pytest.raises(MisuseError, match="not told of"):
        _backward_of_two(first, second, 0, 2, (first, second)[told])


@pytest.mark.parametrize("way", FEW)
@on_ranks(2)
def test_a_backward_without_weight_after_one_with_is_refused(api: Api, way: str) -> None:
    with _stepping(api, way) as (model, optimizer):
        _backward(model, 0, 2 + rank())
        loss = _mean(model, _batch(rank(), 1, 3))
        with pytest.raises(MisuseError, match="this backward has no weight"):
            loss.backward()
        optimizer.zero_grad()
        _mean(model, _batch(rank(), 1, 3)).backward()  # a step without weights
        optimizer.zero_grad()
        _backward(model, 1, 2 + rank())
        _check(model, optimizer, _batches(1, 2, 3))


@on_ranks(2)
def test_a_loss_beside_the_weighted_one_is_refused(api: Api) -> None:
    with _stepping(api) as (model, _):
        loss = _mean(model, _batch(rank(), 1, 3))
        both = fullshard.weighted_loss(loss, 2, model)
        aside = model(torch.zeros(1, dtype=torch.long)).sum()  # comes first, as it was made last
        with pytest.raises(MisuseError, match="another loss that was not weighted"):
            (both + aside).backward()


@on_ranks(2)
def test_gradients_dropped_in_part_are_refused(api: Api) -> None:
    with _stepping(api) as (model, _):
        _backward(model, 0, 3)
        model[0].weight.grad = None
        with pytest.raises(StateError, match=r"0\.weight was dropped, and .*1\.weight"):
            _backward(model, 1, 3)


@on_ranks(2)
def test_a_backward_without_weight_before_is_refused(api: Api) -> None:
    with _stepping(api) as (model, _):
        _mean(model, _batch(0, 0, 3)).backward()
        with pytest.raises(StateError, match=r"0\.weight .*without weight"):
            _backward(model, 1, 3)


def _fail(model: Any) -> None:
    batch = _batch(rank(), 0, 3)
    out = model(batch[0])
    out.register_hook(_raise)
    loss = fullshard.weighted_loss(F.cross_entropy(out, batch[1]), 100, model)
    with pytest.raises(ZeroDivisionError):
        loss.backward()


@pytest.mark.parametrize("then", ["backward", "step"])
@on_ranks(2)
def test_what_a_backward_that_failed_has_left_is_refused(api: Api, then: str) -> None:
    with _stepping(api) as (model, optimizer):
        _backward(model, 0, 2 + rank())
        _fail(model)
        with pytest.raises(StateError, match="an exception has ended"):
            _backward(model, 1, 2) if then == "backward" else optimizer.step()
        model.zero_grad()
        _backward(model, 1, 2 + rank())
        _check(model, optimizer, _batches(1, 2, 3))


@on_ranks(2)
def test_a_failure_drops_what_was_not_reduced_with_its_weight(api: Api) -> None:
    with _stepping(api) as (model, optimizer):
        with without_sync(model):
            _backward(model, 0, 2 + rank())
        _fail(model)
        _backward(model, 1, 2 + rank())
        _check(model, optimizer, _batches(1, 2, 3))


@on_ranks(2)
def test_gradients_that_one_rank_drops_are_refused_on_all(api: Api) -> None:
    with _stepping(api) as (model, _):
        _backward(model, 0, 3)
        if rank() == 0:
            model.zero_grad()
        with pytest.raises(StateError, match=r"some ranks .*0\.weight \(5 par"):
            _backward(model, 1, 3)


def _raise(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@on_ranks(2)
def test_mixed_precision_and_clipping_go_with_it(api: Api) -> None:
    model = _model()
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (model[1], model[3], model):
        api.fully_shard(part, mesh=mesh_of(2), mp_policy=policy)
    for number in range(2):
        _backward(model, number, 2 + 3 * rank())
    norm = fullshard.clip_grad_norm_(model.parameters(), 1e9)
    alone = _model()
    batches = [*_batches(0, 2, 5), *_batches(1, 2, 5)]
    inputs, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    _mean(alone, (inputs, labels)).backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 1e9)
    torch.testing.assert_close(norm, wanted, rtol=0.02, atol=0)  # bfloat16 has 8 bits
