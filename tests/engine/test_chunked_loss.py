"""A head that is a unit of its own and called once for each chunk of hidden states.

The trunk runs forward without the head. Each chunk then has a forward and a backward of the head
alone, whose input gradients are collected, and at last the trunk's backward runs from those. So no
more than one chunk's logits exist at a time, and one optimizer step has several backwards.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.api import Api
from tests.collectives import record_traffic
from tests.harness import mesh_of, on_ranks, world_size
from tests.selection import one_way
from tests.training import (
    assert_gradients_are_parts_of,
    full_gradients,
    full_parameters,
    local,
    make_batch,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

NUM_CHUNKS = 3
on_process_groups = pytest.mark.apis("process_group", "torch")


class Model(nn.Module):
    """A trunk of two blocks, a norm and a wide head. (n, 16) -> (n, 40), or hidden (n, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 40)

    def forward(self, x: Tensor, *, hidden: bool = False) -> Tensor:
        """Compute logits, or what the head is to make them of."""
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x)
        return x if hidden else self.head(x)


def _sharded(api: Api, grouping: str, **options: Any) -> tuple[Model, Model]:
    torch.manual_seed(0)
    model = Model()
    alone = copy.deepcopy(model)
    for block in model.blocks:
        api.fully_shard(block, **options)
    head = [model.norm, model.head] if grouping == "with the norm" else model.head
    api.fully_shard(head, reshard_after_forward=False, **options)
    return api.fully_shard(model, **options), alone


def _loss(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


def _step(model: Any, batch: Tensor, *, sync: str) -> Tensor:
    """Run forward and backward chunk by chunk, and return the loss."""
    hidden = model(batch, hidden=True)
    detached = hidden.detach().requires_grad_()
    total = torch.zeros(())
    for index, chunk in enumerate(detached.chunk(NUM_CHUNKS)):
        is_last = index == NUM_CHUNKS - 1
        if sync == "last":
            model.head.set_requires_gradient_sync(is_last, recurse=False)
            model.head.set_reshard_after_backward(is_last, recurse=False)
        loss = _loss(model.head(chunk)) / NUM_CHUNKS
        loss.backward()
        total += loss.detach()
    hidden.backward(detached.grad)
    return total


@pytest.mark.parametrize("sync", ["every", "last"])
@pytest.mark.parametrize("grouping", ["alone", "with the norm"])
@on_ranks(2)
def test_chunked_loss_trains_as_the_whole_one(api: Api, grouping: str, sync: str) -> None:
    model, alone = _sharded(api, grouping)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, alone)]
    for step in range(4):
        batch = make_batch(16, seed=step)
        _loss(alone(batch)).backward()
        own = _step(model, my_part(batch), sync=sync)
        with torch.no_grad():
            expected = _loss(alone(my_part(batch)))
        torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6)
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_parameters(model), full_parameters(alone), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sync", ["every", "last"])
@on_ranks(4)
def test_chunked_loss_trains_on_two_axes(api: Api, sync: str) -> None:
    model, alone = _sharded(api, "alone", mesh=mesh_of(2, 2))
    for _ in range(2):
        _loss(alone(make_batch(16))).backward()
        _step(model, my_part(make_batch(16)), sync=sync)
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@on_ranks(2)
def test_chunked_and_whole_losses_may_take_turns(api: Api) -> None:
    model, alone = _sharded(api, "alone")
    for chunked in (False, True, True, False, True):
        batch = make_batch(16, seed=int(chunked))
        _loss(alone(batch)).backward()
        if chunked:
            _step(model, my_part(batch), sync="every")
        else:
            _loss(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@on_ranks(2)
def test_evaluation_in_chunks_gives_the_whole_models_logits(api: Api) -> None:
    model, alone = _sharded(api, "alone")
    batch = make_batch(16)
    _step(model, my_part(batch), sync="every")
    model.zero_grad()
    with torch.no_grad():
        hidden = model(batch, hidden=True)
        logits = torch.cat([model.head(chunk) for chunk in hidden.chunk(NUM_CHUNKS)])
        torch.testing.assert_close(logits, alone(batch), rtol=1e-5, atol=1e-6)


@on_process_groups
@on_ranks(2)
def test_head_is_reduced_for_each_chunk_or_for_the_last_alone(api: Api) -> None:
    model, _ = _sharded(api, "alone")
    for sync, num_reductions in (("every", NUM_CHUNKS), ("last", 1), ("every", NUM_CHUNKS)):
        model.head.set_requires_gradient_sync(requires_gradient_sync=True)
        model.head.set_reshard_after_backward(reshard_after_backward=True)
        with record_traffic() as traffic:
            _step(model, my_part(make_batch(16)), sync=sync)
        # Two blocks and the root, once each.
        assert traffic.calls["reduce_scatter"] == 3 + num_reductions
        model.zero_grad()


@on_process_groups
@on_ranks(2)
def test_head_that_stays_whole_between_chunks_is_gathered_once(api: Api) -> None:
    model, _ = _sharded(api, "alone")
    gathers = {}
    for sync in ("every", "last"):
        model.head.set_requires_gradient_sync(requires_gradient_sync=True)
        model.head.set_reshard_after_backward(reshard_after_backward=True)
        _step(model, my_part(make_batch(16)), sync=sync)
        with record_traffic() as traffic:
            _step(model, my_part(make_batch(16)), sync=sync)
        gathers[sync] = traffic.calls["all_gather"]
    assert gathers["every"] - gathers["last"] == NUM_CHUNKS - 1


@on_ranks(2)
def test_head_has_no_gradient_until_it_is_synchronised(api: Api) -> None:
    model, _ = _sharded(api, "alone")
    chunks = my_part(make_batch(16)).chunk(NUM_CHUNKS)
    model(my_part(make_batch(16)), hidden=True)
    for index, chunk in enumerate(chunks):
        is_last = index == NUM_CHUNKS - 1
        model.head.set_requires_gradient_sync(is_last, recurse=False)
        _loss(model.head(chunk)).backward()
        assert (model.head.weight.grad is not None) == is_last
    assert local(model.head.weight.grad).shape[0] == 40 // world_size()


# A group of which the root's forward runs one module, and the loss the other


@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("evaluates", [False, True])
@on_ranks(4)
def test_head_called_alone_keeps_what_earlier_microbatches_accumulated(
    api: Api, shape: tuple[int, ...], evaluates: bool
) -> None:
    mesh = mesh_of(*shape) if len(shape) == 2 else mesh_of(world_size())
    model, alone = _sharded(api, "with the norm", mesh=mesh)
    for step in range(2):
        parts = make_batch(16, seed=step).chunk(3)
        for index, part in enumerate(parts):
            model.set_requires_gradient_sync(index == len(parts) - 1)
            hidden = model(part, hidden=True)
            detached = hidden.detach().requires_grad_()
            _loss(model.head(detached)).backward()
            hidden.backward(detached.grad)
            if evaluates and index == 0:
                with torch.no_grad():
                    model.head(detached)
            _loss(alone(part)).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@on_ranks(2)
def test_backward_of_the_head_alone_sets_its_gradient(api: Api) -> None:
    model, alone = _sharded(api, "with the norm")
    hidden = alone(make_batch(16), hidden=True).detach()
    model(my_part(make_batch(16)), hidden=True)
    _loss(alone.head(hidden)).backward()
    _loss(model.head(my_part(hidden).requires_grad_())).backward()
    expected = full_gradients(alone)
    torch.testing.assert_close(
        model.head.weight.grad.full_tensor(), expected["head.weight"], rtol=1e-5, atol=1e-6
    )
