"""Who waits for whom: from the traces of several ranks, at each place where they meet.

Ranks meet in a unit's collectives and at barriers. Each time, one arrives last; until then the others may
compute, or stand still, which is what counts here:

    rank 0   backward | wait for reduce-scatter ......|       waits from its arrival until rank 1's
    rank 1   backward .................| reduce-scatter |
"""

import collections
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fullshard.plan.amounts import nanoseconds
from fullshard.plan.trace import NO_UNIT, Kind, RankTrace, Segment
from fullshard.tools import trace_metrics as metrics

_FAMILY = {Kind.ALL_GATHER: metrics.GATHER_KINDS, Kind.REDUCE_SCATTER: metrics.REDUCE_KINDS}
_OWN_WORK = (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER, Kind.OTHER)

metrics.HOW["waits"] = (
    "Each time that ranks meet, in a unit's all-gather or reduce-scatter or at a barrier, one of them begins it last. "
    "What counts is how long others stand still in it before that moment; computing meanwhile does not count, nor "
    "does what is less than the clocks' error. Sums of a step, mean over recorded steps."
)


class Wait(NamedTuple):
    """A unit, or a barrier, at which ranks wait for each other; in nanoseconds a step.

    last: the rank for which the others wait most here. waits_ns: of each rank for that one, in the order of
    traces. late_ns: their mean, over the others.
    """

    name: str
    last: int
    late_ns: float
    waits_ns: tuple[float, ...]


class Straggler(NamedTuple):
    """A rank for which others wait more than it waits for them.

    waited_ns: how long the others wait for it in a step, in the mean. net_ns: less what ranks wait for another
    one, in the mean. place: where they wait most. kind, unit: the work of its own that takes most longer than
    that of the others, by extra_ns a step; unit is "" outside of units.
    """

    rank: int
    waited_ns: float
    net_ns: float
    place: str
    kind: Kind
    unit: str
    extra_ns: float

    @property
    def where(self) -> str:
        """Where they wait most, in a sentence."""
        return f"the {self.place}" if self.place.startswith("barrier") else _unit(self.place)

    @property
    def why(self) -> str:
        """What it takes longer for, as a sentence; "" if it takes longer for nothing."""
        if self.extra_ns <= 0:
            return ""
        what = f"the {self.kind.value} of {_unit(self.unit)}" if self.unit else _OUTSIDE[self.kind]
        longer = f"{nanoseconds(self.extra_ns)} longer than the others"
        if self.extra_ns < self.net_ns / 2:
            return f"It is slower in many places, most in {what} ({longer}): see what else runs on its processor."
        return f"It takes {longer} for {what}."


def _unit(name: str) -> str:
    return "the root unit" if name == "(root)" else f"unit {name}"


_OUTSIDE = {
    Kind.OTHER: "what is outside of the model (reading batches, the loss, logging)",
    Kind.OPTIMIZER: "the optimizer",
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
}


def waits(traces: Sequence[RankTrace]) -> list[Wait]:
    """Return where ranks wait, the longest wait first; nothing of a single rank."""
    found = []
    num_steps, num_others = len(metrics.common_steps(traces)), len(traces) - 1
    for name, waited in _tables(traces).items():
        late = _late(waited)
        if late:
            last = max(late, key=late.__getitem__)
            each = tuple(waited[rank, last] / num_steps for rank in range(len(traces)))
            mean = late[last] / num_steps / num_others
            found.append(Wait(name, traces[last].rank, mean, each))
    return sorted(found, key=lambda wait: -wait.late_ns)


def straggler(traces: Sequence[RankTrace]) -> Straggler | None:
    """Return the rank that is waited for most; None where no rank waits."""
    tables = _tables(traces)
    late = _late(sum(tables.values(), _Table()))
    if not late:
        return None
    index = max(late, key=late.__getitem__)
    num_others, num_steps = len(traces) - 1, len(metrics.common_steps(traces))
    waited = late[index] / num_others / num_steps
    of_others = (late.total() - late[index]) / num_others**2 / num_steps
    place = max(tables, key=lambda name: _late(tables[name])[index])
    (kind, unit), extra = _most_extra(traces, index)
    return Straggler(
        traces[index].rank,
        waited,
        waited - of_others,
        place,
        kind,
        traces[index].unit_name(unit),
        extra,
    )


def waiting_lead(traces: Sequence[RankTrace]) -> str:
    """Say in a sentence or two who waits for whom."""
    found = straggler(traces)
    if found is None:
        return "No rank stands still for another one."
    text = f"Rank {found.rank} is waited for most: {nanoseconds(found.waited_ns)} a step, most at {found.where}."
    if found.net_ns < found.waited_ns / 2:
        return f"{text} Others are waited for nearly as long, so that ranks take turns."
    return f"{text} {found.why}" if found.why else text


def _most_extra(traces: Sequence[RankTrace], index: int) -> tuple[tuple[Kind, int], float]:
    """Return the kind and unit of the work in which a rank takes most longer than the others."""
    steps = metrics.common_steps(traces)
    of_ranks = []
    for trace in traces:
        work = collections.Counter[tuple[Kind, int]]()
        for number in steps:
            for segment in metrics.in_steps(trace, trace.timeline, number):
                if segment.kind in _OWN_WORK:
                    work[segment.kind, segment.unit] += segment.end - segment.start
        of_ranks.append(work)
    own = of_ranks.pop(index)
    extra = {
        each: (own[each] - statistics.mean(work[each] for work in of_ranks)) / len(steps)
        for each in own
    }
    most = max(extra, key=extra.__getitem__, default=(Kind.OTHER, NO_UNIT))
    return most, extra.get(most, 0.0)


# How many nanoseconds a rank waits for another one, by the indices of both.
_Table = collections.Counter[tuple[int, int]]


def _late(table: _Table) -> collections.Counter[int]:
    """Return how long others wait for each rank, all of them together."""
    late = collections.Counter[int]()
    for (_, last), waited in table.items():
        late[last] += waited
    return late


def _tables(traces: Sequence[RankTrace]) -> dict[str, _Table]:
    """Return who waits for whom in all recorded steps, by the name of a place."""
    if len(traces) < 2:
        return {}
    error, together = metrics.clock_error_ns(traces), metrics.aligned(traces)
    tables = collections.defaultdict[str, _Table](_Table)
    for number in metrics.common_steps(traces):
        places = collections.defaultdict[tuple[object, ...], dict[int, list[_Visit]]](dict)
        for index, trace in enumerate(together):
            for place, found in _visits(trace, number).items():
                places[place][index] = found
        for visits in places.values():
            if len({len(each) for each in visits.values()}) > 1:
                continue  # ranks went different ways in this step
            for meeting in zip(*visits.values(), strict=True):
                last, latest = max(
                    zip(visits, meeting, strict=True), key=lambda each: each[1].start
                )
                for index, visit in zip(visits, meeting, strict=True):
                    waited = visit.still_before(latest.start)
                    if waited > error:
                        tables[visit.name][index, last] += waited
    return tables


class _Visit(NamedTuple):
    """A rank at a place: from when, and the segments in which it stands still there."""

    name: str
    start: int
    still: Sequence[Segment]

    def still_before(self, moment: int) -> int:
        return sum(
            max(0, min(segment.end, moment) - max(segment.start, self.start))
            for segment in self.still
        )


def _visits(trace: RankTrace, number: int) -> dict[tuple[object, ...], list[_Visit]]:
    """Return a rank's visits in a step, in order, by what tells places apart, and who meets there.

    Fences are among the ranks of a host, collectives among those that a unit is sharded over. The trace does not
    name these: they follow each other in the order of ranks, and are as many as shards make up the largest unit.
    """
    timeline = metrics.in_steps(trace, trace.timeline, number)
    largest = max(trace.units, key=lambda unit: unit.unsharded_nbytes)
    num_shards = round(largest.unsharded_nbytes / max(1, largest.shard_nbytes)) or 1
    group = trace.rank // num_shards
    found = collections.defaultdict[tuple[object, ...], list[_Visit]](list)
    for fence, name in _fences(timeline):
        found[name, trace.clock.host].append(_Visit(name, fence.start, (fence,)))
    still = collections.defaultdict[tuple[object, int], list[Segment]](list)
    for segment in timeline:
        for family in _FAMILY.values():
            if segment.kind in family:
                still[family, segment.unit].append(segment)
    for moved in metrics.in_steps(trace, trace.transfers, number):
        # What stands still in this one, not in the next of the same unit.
        own = still[_FAMILY[moved.kind], moved.unit]
        inside = metrics.between(own, moved.start, max(moved.end, moved.start + 1))
        name = trace.unit_name(moved.unit)
        found[moved.kind, moved.unit, group].append(_Visit(name, moved.start, inside))
    return found


def _fences(timeline: Sequence[Segment]) -> Iterator[tuple[Segment, str]]:
    """Give fences with names: by the work that comes behind each."""
    behind = "the end"
    found = []
    for segment in reversed(timeline):
        if segment.kind is Kind.FENCE:
            found.append((segment, f"barrier before {behind}"))
        elif segment.kind in _OWN_WORK and segment.kind is not Kind.OTHER:
            behind = segment.kind.value
    return reversed(found)
