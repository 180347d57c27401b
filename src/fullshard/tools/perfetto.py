"""A trace in the Chrome trace event format, which chrome://tracing and Perfetto's viewer open.

A process for each rank, a thread for each lane, one counter track for memory. Times are in
microseconds since the first rank's zero.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from fullshard.plan.trace import Kind, RankTrace, Segment, Transfer
from fullshard.tools.trace_metrics import aligned, rows

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

    process = f"rank {trace.rank} ({trace.device})"
    yield event("M", "process_name", _COMPUTE, args={"name": process})
    yield event("M", "process_sort_index", _COMPUTE, args={"sort_index": trace.rank})
    yield lane_name(_COMPUTE, "compute")
    yield lane_name(_EXPOSED, "exposed communication")
    for segment in trace.timeline:
        yield of_unit(segment, _EXPOSED if segment.kind.is_communication else _COMPUTE)
    for kind, first in _LANES.items():
        moved = rows([transfer for transfer in trace.transfers if transfer.kind is kind])
        for lane, row in enumerate(moved, start=first):
            yield lane_name(lane, f"{kind.value} in flight")
            for transfer in row:
                yield of_unit(transfer, lane, nbytes=transfer.nbytes)
    if trace.pauses:
        yield lane_name(_COLLECTOR, "garbage collector")
    for pause in trace.pauses:
        yield span("garbage collector", _COLLECTOR, pause.start, pause.end)
    for step in trace.steps:
        yield event("i", f"step {step.number}", _COMPUTE, ts=step.start / 1e3, s="p")
    for sample in trace.samples:
        held = dict(zip(trace.categories, sample.nbytes, strict=True))
        yield event("C", "memory", _COMPUTE, ts=sample.time / 1e3, args=held)
