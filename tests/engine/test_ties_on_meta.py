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
        self.third = nn.Sequential(nn.Linear(16, 16, bias=False))
        self.third[0].weight = self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()))


def _on_meta() -> Any:
    with torch.device("meta"):
        return _Tied()


pytestmark = pytest.mark.ours("unties them")


@pytest.mark.parametrize("shards", ["root", "all", "apart", "none"])
@on_ranks(2)
def test_to_empty_of_a_sharded_module(api: Api, shards: str) -> None:
    model = _on_meta()
    if shards in ("all", "apart"):
        for module in (model.second, model.first, model.third):  # the first owns the weight
            api.fully_shard(module, mesh=mesh_of(2))
    if shards != "apart":
        ignored = set(model.parameters()) if shards == "none" else None
        api.fully_shard(model, mesh=mesh_of(2), ignored_params=ignored)
    outputs = []
    for emptied in (model, model, model.third, model.third[0]):
        if shards in ("root", "none") and emptied is not model:
            continue  # which unties what is in no unit of its own
        emptied.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        assert len(list(model.parameters())) == 2
        outputs.append(model(make_batch(16)).sum())
        outputs[-1].backward()
        assert model.first.weight is model.second.weight is model.third[0].weight
    assert len({output.item() for output in outputs}) == 1


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
    assert model.first.weight is model.second.weight is model.third[0].weight
    assert len(list(model.parameters())) == 2
