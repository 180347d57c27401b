"""`fullshard.debug`: ranks are compared at every unit, and meet an error where they part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.engine.checks.path import StepChecks
from tests.api import OURS, Api, use_api
from tests.harness import Fate, on_ranks, rank, run_fresh
from tests.models import mlp
from tests.training import full_gradients, make_batch, mean_square, my_part

pytestmark = pytest.mark.ours("has no such switch")


@on_ranks(2)
def test_debug_changes_nothing_for_ranks_that_run_the_same(api: Api) -> None:
    alone = mlp()
    model = copy.deepcopy(alone)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    with fullshard.debug():
        for _ in range(2):
            mean_square(model(my_part(make_batch(16)))).backward()
            mean_square(alone(make_batch(16))).backward()
    torch.testing.assert_close(full_gradients(model), full_gradients(alone))


class Routed(nn.Module):
    """Runs two layers in one order or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, order: str) -> Tensor:
        for name in (order, "two" if order == "one" else "one"):
            x = getattr(self, name)(x)
        return x


def _part_in_forward(path: str) -> None:
    with use_api(path) as api, fullshard.debug():
        model = Routed()
        api.fully_shard(model.one)
        api.fully_shard(model.two)
        api.fully_shard(model)
        mean_square(model(my_part(make_batch(16)), "one")).backward()
        model(my_part(make_batch(16)), "one" if rank() == 0 else "two")


@pytest.mark.parametrize("path", OURS)
def test_debug_raises_where_paths_part(path: str) -> None:
    """Without it, ranks that read each other's memory meet only in backward."""
    for outcome in run_fresh(2, _part_in_forward, path=path):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "DivergenceError" in outcome.error, outcome.text
        assert "one: debug() compares ranks" in outcome.text
        assert "two: debug() compares ranks" in outcome.text
        assert "step 2, forward" in outcome.text
        assert "in _part_in_forward" in outcome.text


def test_a_block_of_debug_ends() -> None:
    before = StepChecks.are_on
    with fullshard.debug():
        assert StepChecks.are_on
        with fullshard.debug(steps=False):
            assert not StepChecks.are_on
        assert StepChecks.are_on
    assert StepChecks.are_on is before
