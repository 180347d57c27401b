"""Ranks that take different paths: paired by unit, or an error on every rank that names both."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.api import OURS, Api, use_api
from tests.harness import Fate, mesh_of, on_ranks, rank, run_fresh
from tests.models import mlp
from tests.training import full_gradients, make_batch, mean_square, my_part

pytestmark = pytest.mark.ours("adds gradients of one unit to those of another, or hangs")
WITHIN_S = 10.0


class Routed(nn.Module):
    """Runs some of its experts, one after the other."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(16, 16)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16)) for width in widths
        )

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        x = self.inlet(x)
        for number in route:
            x = self.experts[number](x)
        return x


def _sharded(api: Api, model: Routed, face: str = "fully_shard") -> nn.Module:
    if face == "fully_shard":
        for expert in model.experts:
            api.fully_shard(expert)
        return api.fully_shard(model)
    options = {"use_orig_params": True, "device_id": torch.device("cpu")}
    for number, expert in enumerate(model.experts):
        model.experts[number] = api.FullyShardedDataParallel(expert, **options)
    return api.FullyShardedDataParallel(model, **options)


ROUTES = {
    "another unit": ((8, 8), [[0], [1]]),
    "another order": ((8, 8), [[0, 1], [1, 0]]),
    "one more": ((8, 8), [[0], [0, 1]]),
    "another size": ((8, 64), [[0], [1]]),
    "its parts": ((8, 8), [[0, 1], None]),
}


def _diverge(path: str, face: str, case: str) -> None:
    with use_api(path) as api:
        widths, routes = ROUTES[case]
        model = _sharded(api, Routed(*widths), face)
        for _ in range(3):  # it takes one step to know that nobody writes
            mean_square(model(my_part(make_batch(16)), [0, 1])).backward()
        route, x = routes[rank() % 2], my_part(make_batch(16))
        if route is None:
            mean_square(model.experts[1](model.experts[0](x))).backward()
        else:
            mean_square(model(x, route)).backward()


@pytest.mark.parametrize("case", ROUTES)
@pytest.mark.parametrize("path", OURS)
def test_divergence_is_an_error_on_every_rank_that_names_both_units(path: str, case: str) -> None:
    face = "wrapper" if case in ("another unit", "one more") else "fully_shard"
    for outcome in run_fresh(2, _diverge, path=path, face=face, case=case):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "DivergenceError" in outcome.error, outcome.text
        assert "rank 0: " in outcome.text
        assert "rank 1: " in outcome.text
        # Calls of parts are one step, of which the first is another than the other rank's.
        parted = "step 4: rank 0 called root (forward); rank 1 called experts.0 (forward)"
        assert (parted if case == "its parts" else "experts.1") in outcome.text
        assert outcome.seconds < WITHIN_S


@on_ranks(2, 3)
@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize("needs_grad", [False, True])
def test_units_that_only_some_ranks_run_are_reduced_by_unit_on_request(
    api: Api, needs_grad: bool
) -> None:
    alone = Routed(8, 8, 8)
    model = _sharded(api, copy.deepcopy(alone))
    model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
    size = torch.distributed.get_world_size()
    routes = [[2, 0], [1], [0, 1]]
    for step in range(4):
        batch = make_batch(16, seed=step)
        parts = batch.chunk(size)
        alone.zero_grad()
        model.zero_grad()
        for number, part in enumerate(parts):
            inputs = part.clone().requires_grad_(needs_grad)
            (mean_square(alone(inputs, routes[number])) / size).backward()
        for expert in alone.experts:
            for parameter in expert.parameters():
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        inputs = parts[rank()].clone().requires_grad_(needs_grad)
        mean_square(model(inputs, routes[rank()])).backward()
        torch.testing.assert_close(full_gradients(model), full_gradients(alone))


@on_ranks(2)
def test_rank_may_evaluate_alone_what_is_whole_everywhere(api: Api) -> None:
    replicated = api.fully_shard(mlp(), mesh=mesh_of(2, 1))
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        whole = api.FullyShardedDataParallel(
            mlp(),
            sharding_strategy=api.ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    kept = api.fully_shard(mlp(), reshard_after_forward=False)
    with torch.no_grad():
        kept(make_batch(16))
    for model in (replicated, whole, kept):
        if rank() == 0:
            with torch.no_grad():
                model(make_batch(16))
        for _ in range(3):
            mean_square(model(my_part(make_batch(16)))).backward()
