"""Tied parameters on the meta device stay tied when they get memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import mesh_of, on_ranks
from tests.training import make_batch


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())


def _on_meta() -> Any:
    with torch.device("meta"):
        return _Tied()


pytestmark = pytest.mark.ours("unties them")


@pytest.mark.parametrize("shards", ["root", "both", "none"])
@on_ranks(2)
def test_to_empty_of_a_sharded_module(api: Api, shards: str) -> None:
    model = _on_meta()
    if shards == "both":
        api.fully_shard(model.first, mesh=mesh_of(2))
        api.fully_shard(model.second, mesh=mesh_of(2))
    api.fully_shard(
        model, mesh=mesh_of(2), ignored_params=set(model.parameters()) if shards == "none" else None
    )
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.1)
    assert len(list(model.parameters())) == 2
    model(make_batch(16)).sum().backward()
    assert model.first.weight is model.second.weight


@pytest.mark.parametrize("how", ["reset_parameters", "param_init_fn"])
@on_ranks(2)
def test_the_wrapper(api: Api, how: str) -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.1)

    with quiet():
        options = {"param_init_fn": init} if how == "param_init_fn" else {}
        _Tied.reset_parameters = lambda _: None  # type: ignore[attr-defined]
        model = api.FullyShardedDataParallel(_on_meta(), use_orig_params=True, **options)
    model(make_batch(16)).sum().backward()
    assert model.first.weight is model.second.weight
    assert len(list(model.parameters())) == 2
