"""Backwards that the program ends: `set_manual_backward_finalization`, `finalize_backward`."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank
from tests.models import mlp
from tests.releases import unless_newest
from tests.selection import one_way
from tests.training import (
    assert_equal,
    full,
    full_gradients,
    full_parameters,
    local,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = [
    unless_newest(pytest.mark.ours("PyTorch's engine has it from 2.15 on")),
    one_way("the other files of this folder; tests/parity/test_pipeline.py"),
]

NUM_BATCHES = 3


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert_equal(actual, expected, rtol=1e-5, atol=1e-6)


def batches(step: int = 0) -> list[Tensor]:
    return [make_batch(16, seed=10 * step + number) for number in range(NUM_BATCHES)]


def sharded(api: Api, model: nn.Module, **options: Any) -> nn.Module:
    """Shard a copy of a model, each layer a unit, with backwards that the program ends."""
    model = copy.deepcopy(model)
    for layer in model.children():
        api.fully_shard(layer, **options)
    api.fully_shard(model, **options)
    model.set_manual_backward_finalization(True)
    return model


def backward(model: nn.Module, batch: Tensor) -> None:
    mean_square(model(my_part(batch))).backward()


def accumulate(model: nn.Module, all_batches: list[Tensor]) -> None:
    """Run backwards that keep their gradients, then let `finalize_backward` reduce them."""
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    for batch in all_batches:
        backward(model, batch)
    model.set_requires_gradient_sync(requires_gradient_sync=True)


def sums_alone(model: nn.Module, all_batches: list[Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    for batch in all_batches:
        mean_square(model(batch)).backward()
    return full_gradients(model)


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks(2)
def test_one_backward_is_reduced_at_the_programs_call(api: Api, asynchronous: bool) -> None:
    alone = mlp()
    expected = sums_alone(alone, batches()[:1])
    model = sharded(api, alone)
    backward(model, batches()[0])
    handle = model.finalize_backward(async_op=asynchronous)
    assert isinstance(handle, api.GradientReductionHandle if asynchronous else type(None))
    if asynchronous:
        handle.wait()
        handle.wait()  # again: nothing to wait for
    assert_close(full_gradients(model), expected)


@pytest.mark.parametrize("reshards", [True, False])
@on_ranks(2)
def test_several_backwards_are_reduced_once(api: Api, reshards: bool) -> None:
    alone = mlp()
    expected = sums_alone(alone, batches())
    model = sharded(api, alone)
    counts: Counter[int] = Counter()
    for number, layer in enumerate(model.children()):
        layer.set_all_reduce_hook(lambda _, number=number: counts.update([number]))
    model.set_reshard_after_backward(reshards)
    accumulate(model, batches())
    assert not counts
    model.finalize_backward()
    model.reshard()
    for layer in model.children():
        layer.reshard()
    assert counts == dict.fromkeys(range(len(list(model.children()))), 1)
    assert_close(full_gradients(model), expected)


@on_ranks(2)
def test_forwards_may_all_come_before_the_backwards(api: Api) -> None:
    alone = mlp()
    expected = sums_alone(alone, batches())
    model = sharded(api, alone)
    model.set_requires_gradient_sync(False)
    losses = [mean_square(model(my_part(batch))) for batch in batches()]
    for loss in losses:
        loss.backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    assert_close(full_gradients(model), expected)


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2, 3)
def test_steps_train_as_one_process(api: Api, offload: bool) -> None:
    alone = mlp()
    options = {"offload_policy": api.CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model = sharded(api, alone, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (alone, model)]
    for step in range(3):
        sums_alone(alone, batches(step))
        accumulate(model, batches(step))
        handle = model.finalize_backward(async_op=step % 2 == 1)
        if handle is not None:
            handle.wait()
        with torch.no_grad():
            model(my_part(batches(step)[0]))  # an evaluation before the step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(full_parameters(model), full_parameters(alone))


@on_ranks(2)
def test_unused_parameters_are_reduced_at_the_programs_call(api: Api) -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.both, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x: Tensor) -> Tensor:
            x = self.both(x)
            return self.second(x) if rank() else x

    model = Branches()
    for layer in (model.both, model.second):
        api.fully_shard(layer)
    api.fully_shard(model)
    model.second.set_reduce_scatter_unused_params(True)
    model.second.set_reshard_after_forward(False)
    model.set_manual_backward_finalization(True)
    # Every rank gathers it, though one alone uses it.
    model.second.unshard()
    model(make_batch(16)).sum().backward()
    model.finalize_backward()
    model.second.reshard()
    x = make_batch(16)
    with torch.no_grad():
        inner = nn.functional.linear(x, *(full(p) for p in model.both.parameters()))
    expected = torch.ones(16, 1) @ inner.sum(0, keepdim=True) / 2
    torch.testing.assert_close(full(model.second.weight.grad), expected)


@on_ranks(2)
def test_parameters_are_freed_as_the_settings_say_then(api: Api) -> None:
    model = sharded(api, mlp())
    model.set_reshard_after_backward(False)
    accumulate(model, batches()[:1])
    shapes = {name: local(p).shape for name, p in model.named_parameters()}
    assert shapes == {name: p.shape for name, p in mlp().named_parameters()}
    model.set_reshard_after_backward(True)
    model.finalize_backward()
    assert shapes != {name: local(p).shape for name, p in model.named_parameters()}


# Wrong moments


@on_ranks(2)
def test_nothing_may_run_before_the_reduction_was_waited_for(api: Api) -> None:
    alone = mlp()
    model = sharded(api, alone)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(2):
        backward(model, batches(step)[0])
        handle = model.finalize_backward(async_op=True)
        with pytest.raises(RuntimeError, match="before forward"):
            backward(model, batches(step)[1])
        with pytest.raises(RuntimeError, match="before finalizing backward"):
            model.finalize_backward()
        handle.wait()
        sums_alone(alone, batches(step)[:1])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_close(full_parameters(model), full_parameters(alone))


@pytest.mark.ours("PyTorch's steps with gradients of one rank, or none")
@pytest.mark.parametrize("when", ["before the first forward", "later"])
@on_ranks(2)
def test_no_optimizer_steps_before_gradients_are_reduced(api: Api, when: str) -> None:
    alone = mlp()
    model = sharded(api, alone)
    other = api.fully_shard(mlp())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model, other)]
    if when == "later":
        model.set_manual_backward_finalization(False)
        backward(model, batches()[1])
        model.zero_grad()
        model.set_manual_backward_finalization(True)
    backward(model, batches()[0])
    backward(other, batches()[0])
    optimizers[2].step()
    with pytest.raises(
        api.errors.StateError, match=r"SGD.step\(\) \(rank \d\).*finalize_backward\(\)"
    ):
        optimizers[1].step()
    handle = model.finalize_backward(async_op=True)
    with pytest.raises(api.errors.StateError, match=r"wait\(\) of the handle"):
        optimizers[1].step()
    handle.wait()
    optimizers[1].step()
    sums_alone(alone, batches()[:1])
    optimizers[0].step()
    assert_close(full_parameters(model), full_parameters(alone))
    backward(model, batches()[1])
    model.reset_iter_state()
    optimizers[1].step()


@on_ranks(2)
def test_optimizers_may_step_as_gradients_come(api: Api) -> None:
    alone = mlp()
    model = sharded(api, alone)
    for parameter in model.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    sums_alone(alone, batches()[:1])
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    backward(model, batches()[0])
    model.finalize_backward()
    assert_close(full_parameters(model), full_parameters(alone))


@on_ranks(2)
def test_sums_survive_an_exception_in_a_later_forward(api: Api) -> None:
    alone = mlp()
    model = sharded(api, alone)
    model.set_requires_gradient_sync(False)
    backward(model, batches()[0])
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(2, 3))
    model.set_requires_gradient_sync(True)
    model.reset_iter_state() if api.is_torch else None
    backward(model, batches()[1])
    model.finalize_backward()
    if not api.is_torch:  # which drops them
        assert_close(full_gradients(model), sums_alone(alone, batches()[:2]))


@on_ranks(2)
def test_reset_invalidates_a_handle(api: Api) -> None:
    alone = mlp()
    model = sharded(api, alone)
    backward(model, batches()[0])
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(RuntimeError, match="handle was invalidated"):
        handle.wait()
    expected = sums_alone(alone, batches()[:1])
    backward(model, batches()[0])
    model.finalize_backward()
    assert_close(full_gradients(model), expected)


@on_ranks(2)
def test_finalizing_needs_the_root_and_the_mode(api: Api) -> None:
    alone = mlp()
    model = sharded(api, alone)
    assert model.finalize_backward() is None  # before the first forward: nothing to do
    model.finalize_backward(async_op=True).wait()
    backward(model, batches()[0])
    with pytest.raises(RuntimeError, match=r"finalize_backward .*root"):
        model[1].finalize_backward()
    with pytest.raises(RuntimeError, match="on the root"):
        model[1].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="after backward starts"):
        model.set_manual_backward_finalization(False)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match="requires manual backward finalization"):
        model.finalize_backward()
    model.zero_grad()
    expected = sums_alone(alone, batches()[:1])
    backward(model, batches()[0])
    assert_close(full_gradients(model), expected)


@on_ranks(2)
def test_a_module_below_the_root_may_not_ask_for_it_before_the_first_forward(api: Api) -> None:
    model = mlp()
    for layer in model.children():
        api.fully_shard(layer)
    api.fully_shard(model)
    model[0].set_manual_backward_finalization(True)
    with pytest.raises(RuntimeError, match="on the root"):
        backward(model, batches()[0])


@on_ranks(2)
def test_finalizing_during_backward_is_refused(api: Api) -> None:
    class Hooked(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            x = self[0](x)
            x.register_hook(finalize)
            return self[2](self[1](x))  # type: ignore[no-any-return]

    model = sharded(api, Hooked(*mlp()))
    seen: list[str] = []

    def finalize(grad: Tensor) -> None:
        for call in (
            model.finalize_backward,
            lambda: model.set_manual_backward_finalization(False),
        ):
            with pytest.raises(RuntimeError) as error:
                call()
            seen.append(str(error.value))

    backward(model, batches()[0])
    assert "after backward completes" in seen[0]
    assert "cannot change mode" in seen[1]
    model.finalize_backward()


@on_ranks(4)
def test_sums_that_wait_for_their_all_reduce_are_refused(api: Api) -> None:
    alone = mlp()
    model = api.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2, 2))
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    backward(model, batches()[0])
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    with pytest.raises(RuntimeError, match="requires all-reduce"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    model.finalize_backward()
    assert_close(full_gradients(model), sums_alone(alone, batches()[:1]))
