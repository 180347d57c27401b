"""Outputs of a unit that are views, which programs may change in place or not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.api import Api
from tests.harness import on_ranks
from tests.selection import one_way
from tests.training import assert_equal, full_gradients, make_batch, mean_square

pytestmark = [
    pytest.mark.ours("a view that is changed in place fails in backward there"),
    one_way("the other files of this folder; tests/parity; tests/differential"),
]

Cut = Callable[[Tensor, Tensor], Any]  # of what the layers made, and the input
Change = Callable[[Any], Tensor]


class Layers(nn.Module):
    """Two layers, of whose output something is returned. (n, 16) -> a view."""

    def __init__(self, cut: Cut) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)
        self.down = nn.Linear(16, 16)
        self.cut = cut

    def forward(self, x: Tensor) -> Any:
        """Apply the layers and return a part."""
        return self.cut(self.down(self.up(x).tanh()), x)


class Net(nn.Module):
    """Layers between a layer before and a change of what they return. (n, 16) -> a tensor."""

    def __init__(self, cut: Cut, change: Change) -> None:
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.layers = Layers(cut)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers and change their output."""
        return self.change(self.layers(self.stem(x).tanh() * 1))


def _halves(out: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
    return out[:3], out[3:]


def _zero_some(view: Tensor) -> Tensor:
    view[:3].zero_()
    return view


def _change_one(views: tuple[Tensor, Tensor]) -> Tensor:
    views[0].mul_(2)
    return views[1]


def _change_both(views: tuple[Tensor, Tensor]) -> Tensor:
    return views[0].mul_(2).sum() + views[1].sin_()


CASES: dict[str, tuple[Cut, Change]] = {
    "added to": (lambda out, _: out.view(-1, 4, 4), lambda view: view.add_(torch.ones(4))),
    "part scaled": (lambda out, _: out[:2], lambda view: view.mul_(2)),
    "changed twice": (lambda out, _: out.t(), lambda view: view.add_(1).sin_()),
    "overwritten": (lambda out, _: out.view(-1), lambda view: view.copy_(view.detach() * 2)),
    "zeroed in part": (lambda out, _: out.view(-1), _zero_some),
    "input returned": (lambda _, x: x, lambda view: view.mul_(3)),
    "sum in the input": (lambda out, x: x.mul_(2).add_(out), lambda view: view.mul_(3)),
    "another view changed": (_halves, _change_one),
    "both views changed": (_halves, _change_both),
    "left alone": (lambda out, _: out.view(-1), lambda view: view * 2),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_view_that_is_changed_in_place_has_the_gradients_of_one_process(
    api: Api, case: str
) -> None:
    model = Net(*CASES[case])
    if case == "sum in the input":  # what is saved of an input must not change
        model.layers.up.requires_grad_(False)
    alone = copy.deepcopy(model)
    api.fully_shard(model.layers, reshard_after_forward=True)
    api.fully_shard(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            batch = make_batch(16, seed=seed)
            mean_square(alone(batch)).backward()
            mean_square(model(batch)).backward()
            assert_equal(full_gradients(model), full_gradients(alone))


@on_ranks(2)
def test_changed_view_is_right_in_every_backward_through_a_retained_graph(api: Api) -> None:
    model = Net(*CASES["added to"])
    alone = copy.deepcopy(model)
    api.fully_shard(model.layers, reshard_after_forward=True)
    api.fully_shard(model)
    batch = make_batch(16)
    losses = [mean_square(each(batch)) for each in (alone, model)]
    for retain_graph in (True, False):
        for loss in losses:
            loss.backward(retain_graph=retain_graph)
        assert_equal(full_gradients(model), full_gradients(alone))


@on_ranks(2)
def test_wrapped_module_may_return_a_view_that_is_changed(api: Api) -> None:
    model = Net(*CASES["added to"])
    alone = copy.deepcopy(model)
    wrapper = api.FullyShardedDataParallel
    model.layers = wrapper(model.layers, device_id=torch.device("cpu"), use_orig_params=True)
    model = wrapper(model, device_id=torch.device("cpu"), use_orig_params=True)
    batch = make_batch(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean_square(model(batch)).backward()
    mean_square(alone(batch)).backward()
    with wrapper.summon_full_params(model, with_grads=True):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, alone.get_parameter(name).grad)


@on_ranks(4)
def test_model_with_tensor_parallel_is_not_warned(api: Api) -> None:
    """A layer's output in the form of a plain tensor is a view of the distributed one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    api.fully_shard(model[2], mesh=mesh["dp"])
    api.fully_shard(model, mesh=mesh["dp"])
    batch = make_batch(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean_square(model(batch)).backward()
    mean_square(alone(batch)).backward()
    assert_equal(full_gradients(model), full_gradients(alone), rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_distributed_view_may_be_changed_in_place(api: Api) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(16, 8), nn.Unflatten(1, (2, 4)))
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
    api.fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
    batch = make_batch(16)
    out = model(batch)
    assert isinstance(out, DTensor)
    out.mul_(2)
    mean_square(out.full_tensor()).backward()
    mean_square(alone(batch).mul_(2)).backward()
    assert_equal(full_gradients(model), full_gradients(alone), rtol=1e-4, atol=1e-6)
