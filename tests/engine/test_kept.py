"""Unsharded parameters that somebody keeps after their reshard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.engine.hooks import state_of
from tests.api import Api
from tests.harness import on_ranks
from tests.models import mlp
from tests.training import make_batch, mean_square, my_part

sizes = pytest.mark.parametrize("dim", [16, 1024])  # small buffers stay allocated
MESSAGE = r"weight was kept while its module was resharded, and used after"


class Keeper(nn.Module):
    """A layer that keeps its weight. x: (n, dim) -> same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        self.kept[:] = [self.layer.weight]
        return self.layer(x).tanh()


def _model(api: Api, dim: int, face: str) -> Any:
    model = nn.Sequential(Keeper(dim), mlp(1, dim))
    if face == "fully_shard":
        api.fully_shard(model[0])
        return api.fully_shard(model)
    options = {"use_orig_params": face == "orig", "device_id": torch.device("cpu")}
    model[0] = api.FullyShardedDataParallel(model[0], **options)
    return api.FullyShardedDataParallel(model, **options)


@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@pytest.mark.parametrize("is_training", [True, False])
@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_weight_kept_by_a_forward_may_not_be_used_after_its_reshard(
    api: Api, dim: int, is_training: bool, face: str
) -> None:
    model, x = _model(api, dim, face), make_batch(dim)
    with torch.set_grad_enabled(is_training):
        for _ in range(2):
            output = model(x)
            keeper = model[0] if face == "fully_shard" else model[0].module
            (weight,) = keeper.kept
            with pytest.raises(RuntimeError, match=MESSAGE):
                weight.sum()
            assert weight.shape == (dim, dim)
            assert weight.requires_grad
            if is_training:
                mean_square(output).backward()
                with pytest.raises(RuntimeError, match=MESSAGE):
                    weight + 1


@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_weight_kept_over_an_explicit_reshard_may_be_used_once_unsharded_again(
    api: Api, dim: int
) -> None:
    model = mlp(1, dim)
    expected = model[0][0].weight.detach().clone()
    api.fully_shard(model)
    model.unshard()
    weight = model[0][0].weight
    torch.testing.assert_close(weight, expected)
    model.reshard()
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.nn.functional.linear(make_batch(dim), weight)
    model.unshard()
    assert type(weight) is nn.Parameter
    torch.testing.assert_close(weight, expected)


@on_ranks(2)
def test_parameters_that_nobody_keeps_stay_what_they_are(api: Api) -> None:
    model = mlp(3)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    for seed in range(2):
        mean_square(model(my_part(make_batch(16, seed=seed)))).backward()
        model(make_batch(16))
    model.unshard()
    types = {type(p) for p in model.parameters()}
    if not api.is_torch:
        states = [state_of(layer) for layer in model]
        units = [unit for state in states if state for unit in state.units]
        types |= {type(param.unsharded) for unit in units for param in unit.params}
        assert nn.Parameter in types
    assert not [each for each in types if each.__name__ == "ReshardedParameter"]
