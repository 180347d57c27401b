"""Make traces of steps that did not run, so that what draws and reads a recording does so with a plan.

A planned trace has one step, and the categories of a recording with one more. Contention is not in the
simulation: here time passes more slowly where COMPUTE computes while bytes travel, so that the segments add up
to the whole step.
"""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from fullshard.plan.actions import Action, ActionKind, Change, Holding, Lane
from fullshard.plan.simulator import Piece, highest_of, pieces
from fullshard.plan.step import StepSettings
from fullshard.plan.trace import (
    CATEGORIES,
    TEMPORARY,
    Clock,
    Kind,
    Pause,
    RankTrace,
    Sample,
    Segment,
    TracedStep,
    TracedUnit,
    Transfer,
)
from fullshard.plan.unit_plan import plan_unit
from fullshard.plan.workload import Workload
from fullshard.planning.estimate import Estimate, estimate_step

_OF_HOLDING = {holding: holding.value for holding in Holding} | {
    Holding.ACTIVATIONS: "saved for backward",
    Holding.UNMANAGED: "other",
}
_WAITS = {
    ActionKind.ALL_GATHER: Kind.WAIT_ALL_GATHER,
    ActionKind.REDUCE_SCATTER: Kind.WAIT_REDUCE_SCATTER,
    ActionKind.ALL_REDUCE: Kind.WAIT_REDUCE_SCATTER,  # of the same gradients
}
_DOES = {
    ActionKind.FORWARD: Kind.FORWARD,
    ActionKind.RECOMPUTE: Kind.BACKWARD,
    ActionKind.BACKWARD: Kind.BACKWARD,
    ActionKind.OPTIMIZER: Kind.OPTIMIZER,
    ActionKind.ALL_GATHER: Kind.ALL_GATHER,
    ActionKind.REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    ActionKind.ALL_REDUCE: Kind.REDUCE_SCATTER,
    ActionKind.FENCE: Kind.FENCE,
}


def planned_traces(estimate: Estimate, *, beyond_nbytes: int = 0) -> list[RankTrace]:
    """Return the trace of the first rank of a shard group, and of its last where that holds something else.

    beyond_nbytes: what the device has in use beyond tensors, which counts as "other".
    """
    settings = estimate.settings
    last = dataclasses.replace(settings.sharding, shard_rank=settings.sharding.shard_size - 1)
    of_last = dataclasses.replace(settings, sharding=last)
    estimates = [estimate]
    if _shards(estimate.workload, of_last) != _shards(estimate.workload, settings):
        estimates.append(
            estimate_step(estimate.workload, of_last, estimate.costs, offload=estimate.offload)
        )
    return [planned_trace(each, beyond_nbytes=beyond_nbytes) for each in estimates]


def _shards(workload: Workload, settings: StepSettings) -> list[tuple[int, int]]:
    plans = [plan_unit(unit.params, settings.sharding) for unit in workload.units]
    return [(plan.shard_nbytes, plan.trained_numel) for plan in plans]


def planned_trace(estimate: Estimate, *, beyond_nbytes: int = 0) -> RankTrace:
    """Return the trace of the rank that was planned; see `planned_traces`."""
    sharding = estimate.settings.sharding
    plans = [plan_unit(unit.params, sharding) for unit in estimate.workload.units]
    at = _clock(estimate)
    end = at(estimate.simulated.step_s)
    waits = [each for each in _pieces(estimate) if each.kind is None]
    return RankTrace(
        recording="a plan",
        rank=sharding.shard_rank,
        num_ranks=sharding.data_parallel_size,
        device=estimate.costs.machine.gpu.name,
        clock=Clock(0, 0, "simulated"),
        units=tuple(
            TracedUnit(unit.name, plan.gathered_nbytes, plan.shard_nbytes, sharding.shard_way.name)
            for unit, plan in zip(estimate.workload.units, plans, strict=True)
        ),
        steps=(TracedStep(1, 0, end),),
        timeline=tuple(_timeline(estimate, at)),
        transfers=tuple(_transfers(estimate, at)),
        categories=(*CATEGORIES, TEMPORARY),
        samples=tuple(_samples(estimate, at, beyond_nbytes)),
        starved=tuple(Pause(at(each.start_s), at(each.end_s)) for each in waits),
    )


def _pieces(estimate: Estimate) -> Iterator[Piece]:
    return pieces(estimate.step.actions, estimate.simulated.spans)


def _clock(estimate: Estimate) -> Callable[[float], int]:
    """Return what says at which nanosecond a moment of the simulation is, with contention."""
    computing = [(each.start_s, each.end_s) for each in _pieces(estimate) if each.is_computing]
    actions = zip(estimate.step.actions, estimate.simulated.spans, strict=True)
    moving = [(s.start_s, s.end_s) for action, s in actions if action.lane is not Lane.COMPUTE]
    # Where nothing overlaps, and something is to be spread all the same, over all that computes.
    moments, seconds = _overlap(computing, moving)
    if not seconds[-1]:
        moments, seconds = _overlap(computing, [(0.0, estimate.simulated.step_s)])
    slower = estimate.contention_s / seconds[-1] if seconds[-1] else 0.0

    def at(moment: float) -> int:
        after = bisect.bisect_right(moments, moment)
        before = max(after - 1, 0)
        overlapped = seconds[before]
        if after < len(moments) and seconds[after] > overlapped:
            overlapped += moment - moments[before]
        return round(1e9 * (moment + slower * overlapped))

    return at


def _overlap(
    some: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> tuple[list[float], list[float]]:
    """Return moments, and until each for how long some and others went on at once."""
    edges = [
        (when, number, step)
        for number, spans in enumerate((some, others))
        for span in spans
        for when, step in zip(span, (1, -1), strict=True)
    ]
    moments, seconds, running = [0.0], [0.0], [0, 0]
    for when, number, step in sorted(edges):
        lasted = when - moments[-1] if min(running) > 0 else 0.0
        moments.append(when)
        seconds.append(seconds[-1] + lasted)
        running[number] += step
    return moments, seconds


def _timeline(estimate: Estimate, at: Callable[[float], int]) -> Iterator[Segment]:
    actions, over = estimate.step.actions, 0
    for piece in _pieces(estimate):
        end = at(piece.end_s)
        if end > over:
            yield Segment(_kind(estimate, piece), piece.unit, over, end)
        over = max(over, end)
    if at(estimate.simulated.step_s) > over:  # what lanes do after COMPUTE's last
        spans = estimate.simulated.spans
        last = max(range(len(actions)), key=lambda index: spans[index].end_s)
        kind = _WAITS.get(actions[last].kind, Kind.OTHER)
        yield Segment(kind, actions[last].unit, over, at(estimate.simulated.step_s))


def _kind(estimate: Estimate, piece: Piece) -> Kind:
    if piece.kind is None:
        return Kind.OTHER
    does = estimate.step.actions[piece.action].kind
    if piece.kind is not does and piece.kind in _WAITS:
        return _WAITS[piece.kind]
    return _DOES.get(piece.kind, Kind.OTHER)


def _transfers(estimate: Estimate, at: Callable[[float], int]) -> list[Transfer]:
    """Return all collectives; one that sums over replicas is the end of the reduce-scatter before it."""
    found: dict[int, Transfer] = {}
    spans = estimate.simulated.spans
    for index, (action, span) in enumerate(zip(estimate.step.actions, spans, strict=True)):
        if action.kind not in _WAITS:
            continue
        first = next((each for each in action.after if each in found), None)
        if action.kind is ActionKind.ALL_REDUCE and first is not None:
            found[first] = found[first]._replace(end=at(span.end_s))
        else:
            times = at(span.start_s), at(span.end_s)
            found[index] = Transfer(_DOES[action.kind], action.unit, *times, action.nbytes)
    return sorted(found.values(), key=lambda each: (each.start, each.end))


def _samples(
    estimate: Estimate, at: Callable[[float], int], beyond_nbytes: int
) -> Iterator[Sample]:
    """Give the memory when it changes: where COMPUTE is when the host issues an action, as in a recording."""
    places = {name: place for place, name in enumerate((*CATEGORIES, TEMPORARY))}
    held = [0] * len(places)
    held[places["other"]] = beyond_nbytes
    last: tuple[int, ...] = ()
    for change in estimate.step.resident:
        held[places[_OF_HOLDING[change.holding]]] += change.nbytes
    now, again = 0, Counter[int]()  # bytes that are computed again, by stretch
    for action, span in zip(estimate.step.actions, estimate.simulated.spans, strict=True):
        during, highest = list(held), highest_of(action)
        during[places[TEMPORARY]] += highest.within_nbytes
        for to, applied in ((during, highest.changes), (held, action.changes)):
            for name, nbytes in _parted(action, applied, again):
                to[places[name]] += nbytes
        begin, end = now, now
        if action.lane is Lane.COMPUTE:
            begin, end = at(span.start_s), at(span.end_s)
        for time, level in ((begin, tuple(during)), (end, tuple(held))):
            if level != last:
                yield Sample(time, level)
            last = level
        now = end


def _parted(
    action: Action, changes: Sequence[Change], again: Counter[int]
) -> Iterator[tuple[str, int]]:
    """Give changes by category. What checkpointing computes again is temporary: a recording does not take it for saved."""
    for change in changes:
        name, nbytes = _OF_HOLDING[change.holding], change.nbytes
        if change.holding is Holding.ACTIVATIONS and action.kind is ActionKind.RECOMPUTE:
            again[action.stretch] = nbytes
            name = TEMPORARY
        elif change.holding is Holding.ACTIVATIONS and action.kind is ActionKind.BACKWARD:
            yield TEMPORARY, -again[action.stretch]
            nbytes += again[action.stretch]
        yield name, nbytes
