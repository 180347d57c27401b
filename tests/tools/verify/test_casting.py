"""Modules that stay whole compute in the dtypes of mixed precision, and keep their parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard.tools.verify.casting import Casting, Precision

HALF = Precision(torch.bfloat16)


class Net(nn.Module):
    """Two layers with a norm between them; the first one may be checkpointed."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.checkpoints = checkpoints
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self.encode, x, use_reentrant=False) if self.checkpoints else self.encode(x)
        return self.second(self.norm(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.first.weight.dtype))
        return self.first(x).relu()


def _input() -> torch.Tensor:
    return torch.linspace(-1, 1, 12).reshape(3, 4)


def _cast(**options: bool) -> tuple[Casting, Net]:
    casting, net = Casting(), Net(**options)
    casting.add_float32(net.norm)
    casting.add(net, HALF)
    return casting, net


def test_gradients_are_those_of_low_precision_in_the_dtype_of_parameters() -> None:
    _, net = _cast()
    parameters = dict(net.named_parameters())
    output = net(_input())
    output.float().square().sum().backward()
    assert output.dtype is torch.bfloat16
    assert net.seen == [(torch.bfloat16, torch.bfloat16)]
    assert dict(net.named_parameters()).items() == parameters.items()
    low = Net()
    low.first.bfloat16()
    low.second.bfloat16()
    hidden = low.norm(low.first(_input().bfloat16()).relu().float()).bfloat16()
    low.second(hidden).float().square().sum().backward()
    for mine, other in zip(net.parameters(), low.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        assert mine.grad.dtype is torch.float32
        assert torch.equal(mine.grad, other.grad.float())


def test_a_module_that_runs_again_in_the_backward_is_cast() -> None:
    casting, net = _cast(checkpoints=True)
    loss = net(_input()).float().square().sum()
    casting.before_backward()
    loss.backward()
    casting.after_backward()
    assert net.seen == [(torch.bfloat16, torch.bfloat16)] * 2
    assert net.first.weight.grad is not None
    assert isinstance(net.first.weight, nn.Parameter)


def test_parameters_come_back_after_an_error() -> None:
    _, net = _cast()
    with pytest.raises(RuntimeError):
        net(torch.ones(3, 5))
    assert net.first.weight.dtype is torch.float32
    assert net(_input()).dtype is torch.bfloat16


def test_a_registered_method_is_cast_and_what_runs_can_be_set_aside() -> None:
    casting, net = _cast()
    net.first.register_forward_pre_hook(lambda *_: _set_to_one(casting, net))
    casting.register_method(net, "encode")
    output = net.encode(_input())
    assert net.seen == [(torch.bfloat16, torch.bfloat16)]
    assert torch.equal(output, output[:, :1].expand(3, 4))  # of new values
    assert net.first.weight.dtype is torch.float32


def _set_to_one(casting: Casting, net: Net) -> None:
    with casting.aside():
        assert isinstance(net.first.weight, nn.Parameter)
        for parameter in net.first.parameters():
            parameter.data.fill_(1.0)


def test_a_write_in_the_forward_stays() -> None:
    _, net = _cast()
    net.second.register_forward_pre_hook(_zero_bias)
    net(_input())
    assert not net.second.bias.any()


def _zero_bias(module: Any, _: Any) -> None:
    with torch.no_grad():
        module.bias.zero_()


def test_inputs_ignored_parameters_and_copies() -> None:
    casting, net = Casting(), Net()
    casting.add(net.second, HALF._replace(casts_inputs=False))
    ignored = frozenset(net.norm.parameters())
    casting.add(net, HALF._replace(output_dtype=torch.float64, buffer_dtype=None, ignored=ignored))
    dtypes: list[torch.dtype] = []
    net.norm.register_forward_pre_hook(lambda module, _: dtypes.append(module.weight.dtype))
    net.second.register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
    twin = copy.deepcopy(net)
    for each in (net, twin):
        dtypes.clear()
        assert each(_input()).dtype is torch.float64
        assert dtypes[0] is torch.float32
    assert twin.first.weight is not net.first.weight
