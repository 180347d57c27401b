"""`CPUOffloadPolicy` where the compute device is the CPU: accepted, and without effect."""

from __future__ import annotations

import torch

from tests.api import Api
from tests.harness import on_ranks
from tests.models import mlp
from tests.training import (
    assert_gradients_are_parts_of,
    full_parameters,
    gradients_alone,
    make_batch,
    mean_square,
    my_part,
)


@on_ranks(2)
def test_offloaded_model_trains_like_any_other(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    # PyTorch's engine pins memory even where there is no accelerator to pin it for.
    policy = api.CPUOffloadPolicy(pin_memory=False) if api.is_torch else api.CPUOffloadPolicy()
    for layer in model:
        api.fully_shard(layer, offload_policy=policy)
    api.fully_shard(model, offload_policy=policy)
    before = full_parameters(model)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, before[name] - 0.1 * expected[name])
    assert all(p.device.type == "cpu" for p in model.parameters())
