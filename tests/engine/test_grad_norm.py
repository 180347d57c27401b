"""The global gradient norm."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.api import Api
from tests.harness import mesh_of, on_ranks
from tests.models import UnevenMLP
from tests.training import (
    assert_gradients_are_parts_of,
    full,
    full_gradients,
    make_batch,
    mean_square,
    my_part,
)


def _sharded_after_backward(api: Api, **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    alone = UnevenMLP()
    torch.manual_seed(1)
    model = UnevenMLP()
    batch = 10 * make_batch(7)
    mean_square(alone(batch)).backward()
    api.fully_shard(model[0], **options)
    api.fully_shard(model, **options)
    mean_square(model(my_part(batch))).backward()
    return model, alone


@pytest.mark.ours("not part of the API")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@on_ranks(2, 4)
def test_norm_and_clipping_equal_the_unwrapped_models(
    api: Api, norm_type: float, max_norm: float
) -> None:
    model, alone = _sharded_after_backward(api)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
    norm = api.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert isinstance(norm, torch.Tensor)
    assert not isinstance(norm, DTensor)
    assert norm.shape == ()
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))


@pytest.mark.ours("not part of the API")
@on_ranks(4)
def test_replicas_are_counted_once(api: Api) -> None:
    model, alone = _sharded_after_backward(api, mesh=mesh_of(2, 2))
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    norm = api.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_parameters_without_gradient_do_not_count(api: Api) -> None:
    model, alone = _sharded_after_backward(api)
    model[4].zero_grad()
    alone[4].zero_grad()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    torch.testing.assert_close(api.clip_grad_norm_(model.parameters(), 1e-3), expected)
    model.zero_grad()
    assert api.clip_grad_norm_(model.parameters(), 1e-3).item() == 0.0


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_plain_parameters_may_be_among_them(api: Api) -> None:
    model, alone = _sharded_after_backward(api)
    extra, extra_alone = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    extra.grad, extra_alone.grad = torch.full((3,), 2.0), torch.full((3,), 2.0)
    expected = nn.utils.clip_grad_norm_([*alone.parameters(), extra_alone], 1e-3)
    norm = api.clip_grad_norm_([*model.parameters(), extra], 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(extra.grad, extra_alone.grad)


@on_ranks(2, 4)
def test_clipping_of_torch_works_on_sharded_parameters(api: Api) -> None:
    model, alone = _sharded_after_backward(api)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))
