"""Which units of a plan stay unsharded within a budget of bytes: those that `fullshard.keep_unsharded` chooses in a run."""

import dataclasses

from fullshard.plan.keeping import Keepable, choose_units
from fullshard.plan.step import StepSettings
from fullshard.plan.unit_plan import plan_unit
from fullshard.plan.workload import Workload


def keepable_units(workload: Workload, settings: StepSettings) -> list[Keepable]:
    """Return the units of a workload, as a choice among them takes them."""
    hides = settings.sharding.shard_way.overlaps and settings.backward_prefetch is not None
    found = []
    for number, unit in enumerate(workload.units):
        plan = plan_unit(unit.params, settings.sharding)
        nbytes = plan.gathered_nbytes
        may_stay = nbytes > 0 and settings.reshards(number, len(workload.units)) is not False
        found.append(
            Keepable(unit.name, nbytes, plan.layout.unsharded_nbytes if hides else 0, may_stay)
        )
    return found


def kept_units(workload: Workload, settings: StepSettings, budget: int) -> list[Keepable]:
    """Return the units that stay. budget: bytes on each rank. Raises ShardingError for one that holds no unit."""
    units = keepable_units(workload, settings)
    chosen = choose_units(units, budget)
    return [unit for unit, stays in zip(units, chosen, strict=True) if stays]


def keeping(workload: Workload, settings: StepSettings, budget: int) -> StepSettings:
    """Return the same settings with units that stay. budget: as of `kept_units`."""
    names = {unit.name for unit in kept_units(workload, settings, budget)}
    num_units = len(workload.units)
    reshards = tuple(
        False if unit.name in names else settings.reshards(number, num_units)
        for number, unit in enumerate(workload.units)
    )
    return dataclasses.replace(settings, reshard_after_forward=reshards)
