"""A sharded model and its unwrapped copy, which have to train alike."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from tests.api import Api
from tests.collectives import Traffic, record_traffic
from tests.models import mlp
from tests.training import (
    assert_gradients_are_parts_of,
    full_gradients,
    full_parameters,
    make_batch,
    mean_square,
    my_part,
)


def shard_layers(
    api: Api, model: nn.Sequential, **options: Any
) -> tuple[nn.Sequential, nn.Sequential]:
    """Make each layer with parameters a unit; return the model and an unwrapped copy."""
    alone = copy.deepcopy(model)
    for layer in model:
        if any(True for _ in layer.parameters()):
            api.fully_shard(layer, **options)
    return api.fully_shard(model, **options), alone


def sharded_mlp(api: Api, **options: Any) -> tuple[nn.Sequential, nn.Sequential]:
    """Return `mlp()` with each layer a unit, and an unwrapped copy."""
    return shard_layers(api, mlp(), **options)


def run_step(model: nn.Module, features: int = 16) -> Traffic:
    """Run forward and backward on this rank's part of a batch; return what was sent."""
    with record_traffic() as traffic:
        mean_square(model(my_part(make_batch(features)))).backward()
    return traffic


def assert_train_alike(alone: nn.Module, model: nn.Module, features: int = 16) -> None:
    """Train both for three steps and compare gradients and parameters."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in (model, alone)]
    for step in range(3):
        batch = make_batch(features, seed=step)
        mean_square(alone(batch)).backward()
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(full_parameters(model), full_parameters(alone), rtol=1e-5, atol=1e-6)
