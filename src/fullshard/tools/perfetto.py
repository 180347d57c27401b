"""A trace in the Chrome trace event format, which chrome://tracing and Perfetto's viewer open.

A process for each rank, a thread for each lane, one counter track for memory. Times are in
microseconds since the first rank's zero. In the lane of computing spans nest:

    | forward                                  |
    |  forward (root)                        |
    |   | forward layers.0 |  forward layers.1 |

An arrow leads from the start of a collective to each wait for it, in the lane of exposed communication.
"""

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

from fullshard.plan.trace import NO_UNIT, Kind, RankTrace, Segment, Transfer
from fullshard.tools.trace_metrics import aligned, between, rows

_COMPUTE, _EXPOSED, _COLLECTOR = 0, 1, 2
_LANES = {Kind.ALL_GATHER: 10, Kind.REDUCE_SCATTER: 20}  # and the rows that follow


def chrome_trace(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the whole as what `json` writes."""
    events = [event for trace in aligned(traces) for event in _events(trace)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(trace: RankTrace) -> Iterator[dict[str, Any]]:
    def event(kind: str, name: str, lane: int, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": trace.rank, "tid": lane, **more}

    def lane_name(lane: int, name: str) -> dict[str, Any]:
        return event("M", "thread_name", lane, args={"name": name})

    def span(name: str, lane: int, start: int, end: int, **more: Any) -> dict[str, Any]:
        return event("X", name, lane, ts=start / 1e3, dur=(end - start) / 1e3, **more)

    def of_unit(found: Segment | Transfer, lane: int, **args: int) -> dict[str, Any]:
        kind, unit = found.kind.value, trace.unit_name(found.unit)
        name, args_too = f"{kind} {unit}".rstrip(), {"unit": unit, **args}
        return span(name, lane, found.start, found.end, cat=kind, args=args_too)

    arrows = itertools.count()
    process = f"rank {trace.rank} ({trace.device})"
    yield event("M", "process_name", _COMPUTE, args={"name": process})
    yield event("M", "process_sort_index", _COMPUTE, args={"sort_index": trace.rank})
    yield lane_name(_COMPUTE, "compute")
    yield lane_name(_EXPOSED, "exposed communication")
    for segment in trace.timeline:
        if segment.kind.is_communication:
            yield of_unit(segment, _EXPOSED)
    for segment in _nested(trace.timeline):
        yield of_unit(segment, _COMPUTE)
    for kind, first in _LANES.items():
        moved = rows([transfer for transfer in trace.transfers if transfer.kind is kind])
        for lane, row in enumerate(moved, start=first):
            yield lane_name(lane, f"{kind.value} in flight")
            for transfer in row:
                yield of_unit(transfer, lane, nbytes=transfer.nbytes)
                waited = between(
                    trace.timeline, transfer.start, max(transfer.end, transfer.start + 1)
                )
                for wait in waited:
                    if wait.kind is not _WAIT[transfer.kind] or wait.unit != transfer.unit:
                        continue
                    number = next(arrows)
                    arrow = {"cat": "wait", "id": f"{trace.rank}.{number}"}
                    yield event("s", "wait", lane, ts=transfer.start / 1e3, **arrow)
                    yield event("f", "wait", _EXPOSED, ts=wait.start / 1e3, bp="e", **arrow)
    if trace.pauses:
        yield lane_name(_COLLECTOR, "garbage collector")
    for pause in trace.pauses:
        yield span("garbage collector", _COLLECTOR, pause.start, pause.end)
    for step in trace.steps:
        yield event("i", f"step {step.number}", _COMPUTE, ts=step.start / 1e3, s="p")
    for sample in trace.samples:
        held = dict(zip(trace.categories, sample.nbytes, strict=True))
        yield event("C", "memory", _COMPUTE, ts=sample.time / 1e3, args=held)


def _nested(timeline: Sequence[Segment]) -> Iterator[Segment]:
    """Give the forward and backward of a step and of each unit as one span, and what else computes as it is.

    A timeline has the innermost alone, so a unit's span is from its first segment to its last, as long as
    forward follows forward: root, a, root, b is root around a and b.
    """
    kinds = itertools.accumulate(
        (segment.kind for segment in timeline),
        lambda phase, kind: phase if kind.is_communication else kind,
        initial=Kind.OTHER,
    )
    next(kinds)  # communication belongs to the phase that it interrupts
    of_phases = zip(kinds, timeline, strict=True)
    for phase, together in itertools.groupby(of_phases, key=operator.itemgetter(0)):
        segments = [each for _, each in together if not each.kind.is_communication]
        if phase not in _PHASES:
            yield from segments
            continue
        spans: dict[int, Segment] = {}
        for segment in segments:
            first = spans.setdefault(segment.unit, segment)
            spans[segment.unit] = first._replace(end=segment.end)
        yield Segment(phase, NO_UNIT, segments[0].start, segments[-1].end)
        open_until: list[int] = []
        for span in sorted(spans.values(), key=lambda each: (each.start, -each.end)):
            while open_until and open_until[-1] <= span.start:
                open_until.pop()
            # A backward may begin before another ends: viewers draw what crosses nowhere.
            end = min([span.end, *open_until])
            open_until.append(end)
            yield span._replace(end=end)


_PHASES = (Kind.FORWARD, Kind.BACKWARD)
_WAIT = {
    Kind.ALL_GATHER: Kind.WAIT_ALL_GATHER,
    Kind.REDUCE_SCATTER: Kind.WAIT_REDUCE_SCATTER,
}
