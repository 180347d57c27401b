"""Which units a plan keeps: those with which a planned step is shortest, in every bit of a budget."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fullshard.errors import ShardingError
from fullshard.plan.actions import ActionKind, Holding
from fullshard.plan.step import StepSettings
from fullshard.plan.unit_plan import Sharding, plan_unit
from fullshard.plan.ways import GLOO, NCCL, PEER_MEMORY, Way
from fullshard.planning.costs import Costs, Manner
from fullshard.planning.estimate import estimate_step
from fullshard.planning.keeping import plan_keeping
from fullshard.planning.machines import machine_named
from fullshard.planning.shapes import MicroBatch, TransformerShape, shape_workload

SHAPE = TransformerShape(5, 4096, 32, 32, 11008, 32000, 128)
COSTS = Costs(machine_named("A100-40GB-SXM", network_rate=12e9), Manner())


def _settings(way: Way, **more: object) -> StepSettings:
    return StepSettings(Sharding(16, way), has_streams=way is NCCL, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [512, 4096])
@pytest.mark.parametrize("way", [NCCL, GLOO], ids=lambda way: way.name)
def test_no_other_units_make_a_planned_step_shorter(way: Way, tokens: int) -> None:
    workload, settings = shape_workload(SHAPE, MicroBatch(1, tokens)), _settings(way)
    before = estimate_step(workload, settings, COSTS).step_s
    size = plan_unit(workload.units[1].params, settings.sharding).gathered_nbytes
    saved = {}
    for kept in itertools.product((None, False), repeat=SHAPE.num_layers):
        with_them = dataclasses.replace(settings, reshard_after_forward=(None, *kept))
        num = kept.count(False)
        gain = before - estimate_step(workload, with_them, COSTS).step_s
        saved[num] = max(gain, saved.get(num, 0.0))
    for num in range(SHAPE.num_layers + 1):
        plan = plan_keeping(workload, settings, COSTS, num * size + num)
        best = max(gain for others, gain in saved.items() if others <= num)
        assert plan.saved_s == pytest.approx(best, rel=0.01)
        assert plan.nbytes == size * sum(plan.kept) <= num * size


def test_a_plan_for_settings_has_a_gather_less_for_each_and_its_bytes_more() -> None:
    workload = shape_workload(SHAPE, MicroBatch(1, 512))
    settings = _settings(GLOO, num_microbatches=2)
    size = plan_unit(workload.units[1].params, settings.sharding).gathered_nbytes
    plan = plan_keeping(workload, settings, COSTS, 3 * size)
    assert (sum(plan.kept), plan.kept[0]) == (3, False)  # the root stays anyway
    estimates = [
        estimate_step(workload, dataclasses.replace(settings, reshard_after_forward=each), COSTS)
        for each in (None, plan.reshard_after_forward)
    ]
    gathers, peaks = zip(
        *(
            (
                sum(action.kind is ActionKind.ALL_GATHER for action in each.step.actions),
                max(level[[*Holding].index(Holding.UNSHARDED)] for level in each.memory.levels),
            )
            for each in estimates
        ),
        strict=True,
    )
    assert gathers[0] - gathers[1] == 2 * 3
    assert peaks[0] < peaks[1] <= peaks[0] + plan.nbytes


def test_a_budget_below_one_unit_is_refused_with_what_it_takes() -> None:
    workload, settings = shape_workload(SHAPE, MicroBatch(1, 512)), _settings(NCCL)
    size = plan_unit(workload.units[1].params, settings.sharding).gathered_nbytes
    with pytest.raises(ShardingError, match=f"layers.0, takes {size} bytes"):
        plan_keeping(workload, settings, COSTS, size - 1)


@pytest.mark.parametrize(
    "settings",
    [_settings(GLOO, reshard_after_forward=False), StepSettings(Sharding(16, PEER_MEMORY))],
    ids=["stays anyway", "read in place"],
)
def test_nothing_is_kept_where_nothing_is_gathered_again(settings: StepSettings) -> None:
    batch = MicroBatch(1, 512, param_dtype=torch.bfloat16)
    plan = plan_keeping(shape_workload(SHAPE, batch), settings, COSTS, 1)
    assert (any(plan.kept), plan.nbytes, plan.saved_s) == (False, 0, 0.0)
