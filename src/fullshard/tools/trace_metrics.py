"""From traces to numbers: pure functions, and beside each what the report says about it.

All figures are means over the recorded ranks and the steps that all of them recorded, so the parts
of a step add up to it.
"""

import bisect
import collections
import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from fullshard.plan.trace import (
    Kind,
    Pause,
    RankTrace,
    Sample,
    Segment,
    TracedStep,
    Transfer,
)

GATHER_KINDS = (Kind.ALL_GATHER, Kind.WAIT_ALL_GATHER)
REDUCE_KINDS = (Kind.REDUCE_SCATTER, Kind.WAIT_REDUCE_SCATTER)


_Span = TypeVar("_Span", Segment, Transfer, Pause)

HOW: dict[str, str] = {}
"""What the report says of how a figure is computed, by its name."""


class Share(NamedTuple):
    """How long a step does something: mean, and the ranks with the least and the most of it."""

    kind: Kind
    ns: float
    share: float
    least_ns: float
    most_ns: float


HOW["time"] = (
    "On the CPU a rank's thread does one thing at a time, and the recorder reads the clock "
    "whenever that changes; on a GPU the same points are timing events on the compute stream. "
    "Every moment belongs to the innermost thing that has begun and not ended, so the parts add up "
    "to the step. Forward and backward are a unit's own, without the units inside it. Other is what "
    "lies outside of units: data, loss, clipping, logging. Mean over recorded steps and ranks; least "
    "and most are single ranks."
)


def shares(traces: Sequence[RankTrace]) -> list[Share]:
    """Return where a step's time goes, in the order of `Kind`, without what takes none."""
    steps = common_steps(traces)
    per_rank = []
    for trace in traces:
        of_rank = collections.Counter[Kind]()
        for segment in in_steps(trace, trace.timeline, *steps):
            of_rank[segment.kind] += segment.end - segment.start
        per_rank.append(of_rank)
    total = step_ns(traces)
    found = []
    for kind in Kind:
        figures = [of_rank[kind] / len(steps) for of_rank in per_rank]
        mean = sum(figures) / len(figures)
        if mean:
            found.append(Share(kind, mean, mean / total, min(figures), max(figures)))
    return found


def kind_ns(traces: Sequence[RankTrace], *kinds: Kind) -> float:
    """Return how long a step does something of these kinds."""
    return sum(share.ns for share in shares(traces) if share.kind in kinds)


HOW["step"] = (
    "From one step's end to the next on each rank, as marked by the training loop or by the "
    "optimizer. Mean over recorded steps and ranks."
)


def step_ns(traces: Sequence[RankTrace]) -> float:
    """Return how long a step takes."""
    steps = set(common_steps(traces))
    lengths = [s.end - s.start for t in traces for s in t.steps if s.number in steps]
    return sum(lengths) / len(lengths)


HOW["exposed"] = (
    "Time of a step in which compute stands still for communication: starting or waiting for an "
    "all-gather or a reduce-scatter, and waiting for other ranks at a barrier. On the CPU, ranks of one "
    "host copy and sum themselves, so that work counts as well. Mean over recorded steps and ranks."
)


def exposed_ns(traces: Sequence[RankTrace]) -> float:
    """Return how much of a step is exposed communication."""
    return sum(share.ns for share in shares(traces) if share.kind.is_communication)


class UnitCost(NamedTuple):
    """What a step communicates for one unit, in nanoseconds and bytes a step and rank.

    exposed_ns: gather_ns and reduce_ns. in_flight_ns: from start to result, whatever ran beside it.
    """

    name: str
    gather_ns: float
    reduce_ns: float
    num_gathers: float
    num_reduces: float
    gather_nbytes: float
    reduce_nbytes: float
    in_flight_ns: float
    exposed_ns: float


HOW["units"] = (
    "Exposed: the parts of the timeline in which compute stands still for this unit's all-gather "
    "or reduce-scatter, starting it and waiting for it. In flight: from start to result, whatever ran "
    "beside it. Size: the unit's unsharded parameters, or full gradients, times how often they were "
    "communicated. Fences belong to no unit and are left out. Mean over recorded steps and ranks."
)


def unit_costs(traces: Sequence[RankTrace]) -> list[UnitCost]:
    """Return every unit's communication, the most exposed first."""
    steps = common_steps(traces)
    count = len(traces) * len(steps)
    names = [trace.unit_name(unit) for trace in traces[:1] for unit in range(len(trace.units))]
    segments = collections.defaultdict[int, list[Segment]](list)
    moved = collections.defaultdict[int, list[Transfer]](list)
    for trace in traces:
        for segment in in_steps(trace, trace.timeline, *steps):
            segments[segment.unit].append(segment)
        for transfer in in_steps(trace, trace.transfers, *steps):
            moved[transfer.unit].append(transfer)
    costs = []
    for unit, name in enumerate(names):
        gathers = [m for m in moved[unit] if m.kind is Kind.ALL_GATHER]
        reduces = [m for m in moved[unit] if m.kind is Kind.REDUCE_SCATTER]
        gather_ns = _length(s for s in segments[unit] if s.kind in GATHER_KINDS) / count
        reduce_ns = _length(s for s in segments[unit] if s.kind in REDUCE_KINDS) / count
        costs.append(
            UnitCost(
                name,
                gather_ns=gather_ns,
                reduce_ns=reduce_ns,
                num_gathers=len(gathers) / count,
                num_reduces=len(reduces) / count,
                gather_nbytes=sum(m.nbytes for m in gathers) / count,
                reduce_nbytes=sum(m.nbytes for m in reduces) / count,
                in_flight_ns=_length(moved[unit]) / count,
                exposed_ns=gather_ns + reduce_ns,
            )
        )
    return sorted(costs, key=lambda cost: -cost.exposed_ns)


def unit_ns(traces: Sequence[RankTrace], kind: Kind) -> dict[str, float]:
    """Return by unit how long a step does something, such as the forward of each."""
    steps = common_steps(traces)
    found = collections.Counter[str]()
    for trace in traces:
        for segment in in_steps(trace, trace.timeline, *steps):
            if segment.kind is kind:
                found[trace.unit_name(segment.unit)] += segment.end - segment.start
    return {name: ns / len(steps) / len(traces) for name, ns in found.items()}


COLLECTOR_MATTERS = 0.02  # of a step: it comes in few long runs, each of which all ranks wait for


class Stalls(NamedTuple):
    """What holds up one rank beside its own work: runs of the garbage collector, and of its allocator.

    collector_ns, num_collections: a step. share: of the rank's step. longest_ns: of one run.
    num_alloc_retries: in the whole recording; None on the CPU. matters: whether it is worth a line.
    """

    rank: int
    collector_ns: float
    share: float
    num_collections: float
    longest_ns: int
    num_alloc_retries: int | None
    matters: bool


HOW["stalls"] = (
    "Garbage collector: from Python's own callbacks before and after each run, of any generation; while "
    "one runs, no thread of the process runs Python. They are within the parts above, wherever they fell, "
    "and those of one rank make the others wait. Mean over recorded steps of one rank. Retries: how often "
    "the device's allocator found no block, gave all of its cache back to the device, which waits for it, and "
    "tried again, from the start of the recording to its end."
)


def stalls(traces: Sequence[RankTrace]) -> list[Stalls]:
    """Return what held up each rank, by rank."""
    steps = common_steps(traces)
    found = []
    for trace in traces:
        pauses = in_steps(trace, trace.pauses, *steps)
        total = _length(pauses) / len(steps)
        share = total / step_ns([trace])
        found.append(
            Stalls(
                trace.rank,
                total,
                share,
                len(pauses) / len(steps),
                max((pause.end - pause.start for pause in pauses), default=0),
                trace.num_alloc_retries,
                # Any retry does: the device stands still for it.
                matters=share >= COLLECTOR_MATTERS or bool(trace.num_alloc_retries),
            )
        )
    return found


def starved_ns(traces: Sequence[RankTrace]) -> float:
    """Return how long a device waits for its host in a step: the mean of ranks; 0 on the CPU."""
    steps = common_steps(traces)
    waited = sum(_length(in_steps(trace, trace.starved, *steps)) for trace in traces)
    return waited / len(steps) / len(traces)


class Peak(NamedTuple):
    """The moment at which a rank's categories add up to the most."""

    rank: int
    step: int
    offset_ns: int  # since the step began
    nbytes: tuple[int, ...]  # by category
    total: int


HOW["memory"] = (
    "Counted by the engine whenever a unit's memory changes, from the sizes of the tensors "
    "themselves. Sharded parameters, gradient shards (in use, or kept for the next step) and optimizer "
    "state: this rank's part. Unsharded parameters: private copies; what ranks of one host read in "
    "place takes no memory. Full gradients: what autograd has left on unsharded parameters. Saved for "
    "backward: distinct storages that autograd keeps, without parameters; what activation "
    "checkpointing recomputes is not in it. Communication: this rank's part of the memory in "
    "which gradients are staged, and scratch, as they are between steps. Temporary results inside an "
    "operation are not counted. On a GPU, other is what the allocator holds beyond these."
)


def peaks(traces: Sequence[RankTrace]) -> list[Peak]:
    """Return each rank's peak, by rank."""
    steps = set(common_steps(traces))
    found = []
    for trace in traces:
        best: Peak | None = None
        for step in (step for step in trace.steps if step.number in steps):
            for sample in samples_of(trace, step):
                offset = max(sample.time, step.start) - step.start
                total = sum(sample.nbytes)
                if best is None or total > best.total:
                    best = Peak(trace.rank, step.number, offset, sample.nbytes, total)
        if best is not None:
            found.append(best)
    return found


def highest(traces: Sequence[RankTrace]) -> Peak:
    """Return the peak of the rank that holds most."""
    return max(peaks(traces), key=lambda peak: peak.total)


def samples_of(trace: RankTrace, step: TracedStep) -> list[Sample]:
    """Return a step's samples, beginning with the one in effect when it starts."""
    when = operator.attrgetter("time")
    first = max(bisect.bisect_right(trace.samples, step.start, key=when) - 1, 0)
    return list(trace.samples[first : bisect.bisect_left(trace.samples, step.end, key=when)])


HOW["timeline"] = (
    "Compute and exposed communication are one timeline, drawn in two rows: what is in the second row interrupts the "
    "first. All-gather and reduce-scatter in flight run beside it, from start to result; where a rank learns of the "
    "result only when it waits for it (CPU), up to that wait."
)
HOW["clock"] = (
    "Ranks of one host read the same clock. Hosts are aligned by a barrier at the start, in which "
    "all ranks were at one moment; the error is the longest time that any rank spent in it."
)


def clock_error_ns(traces: Sequence[RankTrace]) -> int:
    """Return by how much times of different ranks may be off."""
    if len({trace.clock.host for trace in traces}) == 1:
        return 0
    return max(trace.clock.error_ns for trace in traces)


def common_steps(traces: Sequence[RankTrace]) -> list[int]:
    """Return the numbers of the steps that every rank recorded."""
    return sorted(set.intersection(*({step.number for step in t.steps} for t in traces)))


def aligned(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces with all times since the first rank's zero.

    Ranks of one host share a clock, so differences are exact. With several hosts times stay as they are: the
    barrier alone aligns their ranks, with an error of up to `Clock.error_ns`.
    """
    if len({trace.clock.host for trace in traces}) > 1:
        return list(traces)
    first = min((trace.clock.origin_ns for trace in traces), default=0)
    return [_moved(trace, trace.clock.origin_ns - first) for trace in traces]


def _moved(trace: RankTrace, by: int) -> RankTrace:
    spans: dict[str, Any] = {
        name: tuple(span._replace(start=span.start + by, end=span.end + by) for span in found)
        for name in ("steps", "timeline", "transfers", "pauses", "starved")
        for found in (getattr(trace, name),)
    }
    samples = tuple(sample._replace(time=sample.time + by) for sample in trace.samples)
    return dataclasses.replace(trace, samples=samples, **spans)


def rows(transfers: Sequence[Transfer]) -> list[list[Transfer]]:
    """Lay transfers out in as few rows as possible without overlap: each in the first that is free.

    Starting at 0, 2 and 4 and lasting 3 each, they make rows (0, 4) and (2).
    """
    found: list[list[Transfer]] = []
    for transfer in sorted(transfers, key=lambda each: (each.start, each.end)):
        row = next((row for row in found if row[-1].end <= transfer.start), None)
        if row is None:
            found.append([transfer])
        else:
            row.append(transfer)
    return found


def in_steps(trace: RankTrace, spans: Sequence[_Span], *steps: int) -> list[_Span]:
    """Return what begins in one of these steps."""
    wanted = set(steps)
    return [
        span
        for step in trace.steps
        if step.number in wanted
        for span in between(spans, step.start, step.end)
    ]


def between(spans: Sequence[_Span], start: int, end: int) -> Sequence[_Span]:
    """Return what begins in a span of time. spans: in the order of their starts."""
    begins = operator.attrgetter("start")
    first, behind = (bisect.bisect_left(spans, moment, key=begins) for moment in (start, end))
    return spans[first:behind]


def _length(spans: Iterable[Segment | Transfer | Pause]) -> float:
    return float(sum(span.end - span.start for span in spans))
