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
    rank = trace.rank
    yield _name("process_name", rank, 0, f"rank {rank} ({trace.device})")
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    yield _name("thread_name", rank, _COMPUTE, "compute")
    yield _name("thread_name", rank, _EXPOSED, "exposed communication")
    for segment in trace.timeline:
        lane = _EXPOSED if segment.kind.is_communication else _COMPUTE
        yield _complete(trace, segment, lane)
    for kind, first in _LANES.items():
        moved = rows([transfer for transfer in trace.transfers if transfer.kind is kind])
        for number, row in enumerate(moved):
            yield _name("thread_name", rank, first + number, f"{kind.value} in flight")
            for transfer in row:
                yield _complete(trace, transfer, first + number, nbytes=transfer.nbytes)
    if trace.pauses:
        yield _name("thread_name", rank, _COLLECTOR, "garbage collector")
    for pause in trace.pauses:
        yield {
            "ph": "X",
            "name": "garbage collector",
            "pid": rank,
            "tid": _COLLECTOR,
            "ts": pause.start / 1e3,
            "dur": (pause.end - pause.start) / 1e3,
        }
    for step in trace.steps:
        yield {
            "ph": "i",
            "name": f"step {step.number}",
            "pid": rank,
            "tid": _COMPUTE,
            "ts": step.start / 1e3,
            "s": "p",
        }
    for sample in trace.samples:
        yield {
            "ph": "C",
            "name": "memory",
            "pid": rank,
            "tid": _COMPUTE,
            "ts": sample.time / 1e3,
            "args": dict(zip(trace.categories, sample.nbytes, strict=True)),
        }


def _complete(trace: RankTrace, span: Segment | Transfer, lane: int, **args: int) -> dict[str, Any]:
    unit = trace.unit_name(span.unit)
    return {
        "ph": "X",
        "name": f"{span.kind.value} {unit}".rstrip(),
        "cat": span.kind.value,
        "pid": trace.rank,
        "tid": lane,
        "ts": span.start / 1e3,
        "dur": (span.end - span.start) / 1e3,
        "args": {"unit": unit, **args},
    }


def _name(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": lane, "args": {"name": name}}
