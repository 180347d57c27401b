"""`fullshard.debug(nan=True)`: the first value that is not finite is an error that says where it is made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.errors import StateError
from tests.api import Api
from tests.fresh import in_warm_forks
from tests.harness import mesh_of, on_ranks, rank
from tests.training import assert_equal, full_gradients

pytestmark = pytest.mark.ours("has no such switch")


class _Divides(nn.Module):
    """Is finite, and has a gradient that is not, where its input is 0: sqrt."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


class _Logs(nn.Module):
    """Is not finite where its input is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()


def _model(api: Api, middle: nn.Module) -> Any:
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Identity()) for _ in range(3))
    blocks[1][1] = middle
    model = nn.Sequential(*blocks, nn.Linear(4, 1))
    for part in (*model, model):
        api.fully_shard(part, mesh=mesh_of(2))
    return model


def _zero_second_block(model: Any) -> None:
    with torch.no_grad():
        for parameter in model[1].parameters():
            parameter.zero_()


@on_ranks(2)
def test_what_is_finite_is_left_alone(api: Api) -> None:
    grads = []
    for nan in (False, True):
        model = _model(api, nn.Tanh())
        with fullshard.debug(steps=False, nan=nan):
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()
        grads.append(full_gradients(model))
    assert_equal(*grads)


@on_ranks(2)
def test_forward_of_the_module_that_makes_it(api: Api) -> None:
    model = _model(api, _Logs())
    _zero_second_block(model)
    with (
        fullshard.debug(nan=True),
        pytest.raises(
            StateError,
            match=rf"forward, rank {rank()}, .*1\.1 \(_Logs\) has 0 NaN and 8 infinite of 8 .*largest values 0",
        ),
    ):
        model(torch.ones(2, 4))
    assert not model(torch.ones(2, 4)).isfinite().all()  # outside of the block nobody looks


@on_ranks(2)
def test_backward_of_the_module_that_makes_it(api: Api) -> None:
    model = _model(api, _Divides())
    _zero_second_block(model)
    with fullshard.debug(nan=True):
        out = model(torch.ones(2, 4))
        with pytest.raises(
            StateError,
            match=r"backward, rank \d, .* an input of 1\.1 \(_Divides\)",
        ):
            out.sum().backward()


@on_ranks(2)
def test_the_loss_the_data_and_parameters(api: Api) -> None:
    model = _model(api, nn.Tanh())
    with fullshard.debug(nan=True):
        loss = model(torch.ones(2, 4)).mul(0.0).abs().sqrt().sum()
        with pytest.raises(StateError, match=r"the output of 3 .*loss"):
            loss.backward()
        with pytest.raises(StateError, match=r"of 0\.0 .*input 0 has 8 NaN"):
            model(torch.full((2, 4), float("nan")))
        with torch.no_grad():
            model[2][0].bias.fill_(float("inf"))
        with pytest.raises(StateError, match=r"output of 2\.0 .*bias has 0 NaN and 4 inf"):
            model(torch.ones(2, 4))


@on_ranks(2)
def test_a_gradient_of_a_parameter_alone(api: Api) -> None:
    class Spoils(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad, torch.full((4,), float("inf"))

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return Spoils.apply(x, self.scale)  # type: ignore[no-untyped-call]

    model = _model(api, Scales())
    with fullshard.debug(nan=True):
        out = model(torch.ones(2, 4, requires_grad=True))
        with pytest.raises(StateError, match=r"1\.1\.scale has 0 NaN and 4 inf"):
            out.sum().backward()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("nan", "False True"),
        ("steps,nan", "True True"),
        ("1", "True False"),
        ("0", "False False"),
        ("", "False False"),
    ],
)
def test_the_environment_switches_it_on_and_debug(value: str, said: str) -> None:
    """The variable is read when fullshard.debug is first used."""
    (done,) = in_warm_forks(_PROGRAM, variables=[{"FULLSHARD_DEBUG": value}])
    assert done.out.strip() == said, done.err


def test_what_the_environment_asks_for_and_is_not_there_is_refused() -> None:
    (done,) = in_warm_forks(_PROGRAM, variables=[{"FULLSHARD_DEBUG": "nans"}])
    assert "FULLSHARD_DEBUG=nans: nans is none of" in done.err


_PROGRAM = """
import sys
for name in ("fullshard.compare.switches", "fullshard.public"):  # read once, by whoever forked this
    sys.modules.pop(name)
import fullshard
hunt = fullshard.debug._hunt
from fullshard.engine.checks.path import StepChecks
print(StepChecks.are_on, hunt.is_on)
"""
