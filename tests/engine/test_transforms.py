"""Sharded models inside `torch.func` transforms, forward-mode and double differentiation."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn

from tests.api import Api
from tests.harness import on_ranks
from tests.models import mlp
from tests.selection import one_way
from tests.training import assert_gradients_are_parts_of, full_gradients, make_batch, my_part

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

Loss = Callable[[nn.Module, Tensor], Tensor]


def _jvp(model: nn.Module, x: Tensor) -> Tensor:
    outputs, tangents = torch.func.jvp(model, (x,), (x.flip(0),))
    return outputs.square().mean() + tangents.square().mean()


def _jvp_of_tangent_alone(model: nn.Module, x: Tensor) -> Tensor:
    _, tangents = torch.func.jvp(model, (x.clone().requires_grad_(),), (x.flip(0),))
    return tangents.square().mean()


def _vmap(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x.clone().requires_grad_()).square().mean()


def _vjp(model: nn.Module, x: Tensor) -> Tensor:
    outputs, pull_back = torch.func.vjp(model, x)
    return outputs.square().mean() + pull_back(torch.ones_like(outputs))[0].square().mean()


def _grad(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda z: model(z).square().sum())(x).square().mean()


def _forward_mode(model: nn.Module, x: Tensor) -> Tensor:
    with fwd.dual_level():
        outputs, tangents = fwd.unpack_dual(model(fwd.make_dual(x, x.flip(0))))
        return outputs.square().mean() + tangents.square().mean()


def _double(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return gradient.square().mean()


def _load_decompositions() -> None:
    """Do what forward mode does when it is first used, without PyTorch's own deprecations."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)  # the same one since torch 2.14
        fwd._maybe_load_decompositions()  # type: ignore[attr-defined]


def _check(api: Api, loss: Loss) -> None:
    _load_decompositions()
    model, batch = mlp(2, dim=8), make_batch(8, size=4)
    sum(loss(model, part) for part in batch.chunk(2)).backward()  # type: ignore[union-attr]
    expected = {name: grad / 2 for name, grad in full_gradients(model).items()}
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        loss(model, my_part(batch)).backward()
        assert_gradients_are_parts_of(model, expected)


@pytest.mark.parametrize("loss", [_jvp, _jvp_of_tangent_alone, _vmap])
@on_ranks(2)
def test_transforms_give_the_gradients_of_the_unwrapped_model(api: Api, loss: Loss) -> None:
    _check(api, loss)


@pytest.mark.ours("frees the parameters before the second use")
@pytest.mark.parametrize("loss", [_vjp, _grad, _forward_mode, _double])
@on_ranks(2)
def test_a_second_use_gives_the_gradients_of_the_unwrapped_model(api: Api, loss: Loss) -> None:
    _check(api, loss)
