"""Plan which units stay unsharded from forward to backward, as `fullshard.keep_unsharded` chooses them in a run."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from fullshard.plan.actions import ActionKind
from fullshard.plan.keeping import check_budget, choose_kept
from fullshard.plan.step import Reshard, StepSettings
from fullshard.plan.unit_plan import plan_unit
from fullshard.plan.workload import Workload
from fullshard.planning.costs import Costs
from fullshard.planning.estimate import Estimate, estimate_step


class PlannedKeeping(NamedTuple):
    """Which units of a workload stay.

    kept: for each unit, whether it was chosen. nbytes: what these take on each rank. saved_s: by which a step is
    shorter. reshard_after_forward: for `StepSettings`.
    """

    kept: tuple[bool, ...]
    nbytes: int
    saved_s: float
    reshard_after_forward: tuple[Reshard, ...]


def plan_keeping(
    workload: Workload, settings: StepSettings, costs: Costs, nbytes: int
) -> PlannedKeeping:
    """Return the units that save the most by staying unsharded, within a budget of bytes on each rank.

    What a unit saves is the difference between two planned steps, in which all units stay that may, and none does.
    Units that are read in place, or stay by the settings, take nothing of the budget. No unit is chosen if the step
    with those that were is no shorter.

    Raises ShardingError for a budget that holds no unit, with what it takes.
    """
    num_units = len(workload.units)
    options = [settings.reshards(number, num_units) for number in range(num_units)]
    sizes = [plan_unit(unit.params, settings.sharding).gathered_nbytes for unit in workload.units]
    may_stay = [
        option is not False and size > 0 for option, size in zip(options, sizes, strict=True)
    ]
    before = estimate_step(workload, settings, costs)
    after = estimate_step(workload, _keeping(settings, options, may_stay), costs)
    costly, cheap = gather_seconds(before, costs), gather_seconds(after, costs)
    saved_ns = [
        round(1e9 * (costly.get(number, 0.0) - cheap.get(number, 0.0))) if stays else 0
        for number, stays in enumerate(may_stay)
    ]
    names = [unit.name for unit in workload.units]
    check_budget(
        nbytes, [(n, size) for n, size, s in zip(names, sizes, saved_ns, strict=True) if s > 0]
    )
    kept = choose_kept(sizes, saved_ns, nbytes)
    chosen = _keeping(settings, options, kept)
    saved_s = before.step_s - estimate_step(workload, chosen, costs).step_s
    if saved_s <= 0:
        kept, saved_s = (False,) * num_units, 0.0
        chosen = _keeping(settings, options, kept)
    assert isinstance(chosen.reshard_after_forward, tuple)
    taken = sum(size for size, stays in zip(sizes, kept, strict=True) if stays)
    return PlannedKeeping(kept, taken, saved_s, chosen.reshard_after_forward)


def _keeping(
    settings: StepSettings, options: Sequence[Reshard], kept: Sequence[bool]
) -> StepSettings:
    both = zip(options, kept, strict=True)
    return dataclasses.replace(
        settings, reshard_after_forward=tuple(False if stays else option for option, stays in both)
    )


def gather_seconds(estimate: Estimate, costs: Costs) -> dict[int, float]:
    """Return what all gathers of each unit cost a step: what is exposed, and what they hold up beside it."""
    moving: dict[int, float] = {}
    for action, span in zip(estimate.step.actions, estimate.simulated.spans, strict=True):
        if action.kind is ActionKind.ALL_GATHER:
            moving[action.unit] = moving.get(action.unit, 0.0) + span.end_s - span.start_s
    found = {}
    for unit, seconds in moving.items():
        exposed = estimate.simulated.exposed_s.get((ActionKind.ALL_GATHER, unit), 0.0)
        found[unit] = exposed + costs.constants.contention * max(0.0, seconds - exposed)
    return found
