"""What a way to train takes at least, found without planning a step: a search need not look at what this excludes.

A step takes at least what it computes, and what travels beside that as far as it slows computing down. Its memory is
at least what there is when a forward is over, and when the optimizer steps. Both are of the same layouts and costs as
a plan, so a search finds what looking at everything finds.
"""

import collections
from collections.abc import Iterable
from typing import NamedTuple

from fullshard.plan.actions import Action, ActionKind, Lane
from fullshard.plan.step import PlannedStep, StepSettings
from fullshard.plan.unit_plan import UnitPlan, plan_unit, smaller_gather
from fullshard.plan.workload import Run, Workload
from fullshard.planning.calibration import CalibratedCosts
from fullshard.planning.costs import Costs

_ROUNDED = 1 - 1e-9  # sums in another order


class Bound(NamedTuple):
    """The least that a step takes: seconds, and bytes of tensors.

    nbytes: at the peak. after_forward_nbytes: when backward begins.
    saved_s: at most, for each byte of units that stay whole after forward.
    """

    step_s: float
    nbytes: int
    after_forward_nbytes: int
    saved_s: float


class _Collective(NamedTuple):
    """num: in a step, at least. is_again: a gather for backward."""

    kind: ActionKind
    nbytes: int
    ranks: int
    num: int
    is_again: bool = False


def step_bound(
    workload: Workload,
    settings: StepSettings,
    costs: Costs | CalibratedCosts,
    *,
    offload: str = "none",
) -> Bound:
    """Return what a step takes at least. offload: see `planning.offloading`.

    Of a measured machine, whose ranks may have nothing to gather, that is what it computes.
    """
    plans = [plan_unit(unit.params, settings.sharding) for unit in workload.units]
    units = collections.Counter(
        (plans[number], settings.reshards(number, len(plans))) for number in workload.running
    )
    works, moves, trained = collections.Counter[Action](), collections.Counter[Action](), 0
    num, saving = settings.num_microbatches, {}
    for event in workload.events:
        if isinstance(event, Run):
            for kind in (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD):
                works[Action(kind, Lane.COMPUTE, stretch=event.stretch)] += num
    if settings.optimizer is not None:
        works[Action(ActionKind.OPTIMIZER, Lane.COMPUTE)] += 1
    for (plan, reshards), times in units.items():
        trained += times * plan.trained_numel
        for each in _collectives(settings, reshards, plan) if costs.machine.figures is None else ():
            move = Action(each.kind, Lane.COMPUTE, nbytes=each.nbytes, num_ranks=each.ranks)
            moves[move] += times * each.num
            if each.is_again:
                saving[move] = each.num / max(1, plan.gathered_nbytes)
    actions = (*works, *moves)
    took = dict(
        zip(
            actions,
            costs.durations(PlannedStep(actions, ()), workload, trained)[0],
            strict=True,
        )
    )
    lanes = collections.Counter[ActionKind]()
    for move, times in moves.items():
        lanes[move.kind] += times * took[move]  # type: ignore[assignment]  # seconds
    slowed = min(1.0, costs.constants.contention) * sum(lanes.values())
    computing = sum(times * took[work] for work, times in works.items())
    nbytes, after_forward = _nbytes(workload, settings, units, offload)
    return Bound(
        _ROUNDED * max(computing + slowed, *lanes.values(), 0.0),
        nbytes,
        after_forward,
        max((took[move] * share for move, share in saving.items()), default=0.0),
    )


def _collectives(
    settings: StepSettings, reshards: bool | int, plan: UnitPlan
) -> Iterable[_Collective]:
    """Yield a unit's collectives."""
    sharding, num = settings.sharding, settings.num_microbatches
    nbytes, ranks = plan.gathered_nbytes, sharding.shard_size
    first = 1 if settings.keeps_between else num
    yield _Collective(ActionKind.ALL_GATHER, nbytes, ranks, first)
    if not plan.trained_numel:
        return
    if reshards is not False and not settings.keeps_between:
        if reshards is not True:
            ranks = int(reshards)
            nbytes = sum(gather.buffer_nbytes for gather in smaller_gather(plan, ranks))
        yield _Collective(ActionKind.ALL_GATHER, nbytes, ranks, num, True)
    reductions = num if settings.reduces_each else 1
    sent = sum(min(b.first.sent_nbytes, b.summed.sent_nbytes) for b in plan.buckets)
    yield _Collective(ActionKind.REDUCE_SCATTER, sent, sharding.shard_size, reductions)
    summed = sum(bucket.all_reduced_nbytes for bucket in plan.buckets)
    reductions = 1 if settings.sums_replicas_last else reductions
    yield _Collective(ActionKind.ALL_REDUCE, summed, sharding.replicate_size, reductions)


def _nbytes(
    workload: Workload,
    settings: StepSettings,
    units: "collections.Counter[tuple[UnitPlan, bool | int]]",
    offload: str,
) -> tuple[int, int]:
    """Return the bytes at the peak and when backward begins, at least."""
    optimizer = settings.optimizer
    temporary = 0 if optimizer is None else optimizer.peak_per_element
    always = workload.held_nbytes + workload.input_nbytes
    stepping = whole = sums = 0
    for (plan, reshards), times in units.items():
        shard_nbytes = 0 if offload == "params" else plan.shard_nbytes
        always += times * shard_nbytes
        if optimizer is not None and offload == "none":
            always += times * optimizer.state_nbytes(plan)
        if plan.trained_numel:
            gradients = sum(bucket.shard_nbytes for bucket in plan.buckets)
            stepping += times * (gradients + round(plan.trained_numel * temporary))
            sums += times * plan.sums_nbytes
        whole += times * plan.gathered_nbytes if reshards is False else 0
    runs = [workload.stretches[e.stretch] for e in workload.events if isinstance(e, Run)]
    kept = sum(stretch.saved_nbytes for stretch in runs)
    last = runs[-1].recomputed_nbytes + runs[-1].backward_peak_nbytes if runs else 0
    waiting = sums if settings.num_microbatches > 1 and not settings.reduces_each else 0
    after_forward = always + kept + last + whole + waiting
    stepping = 0 if offload == "params" else stepping
    return max(always + stepping, after_forward), after_forward
