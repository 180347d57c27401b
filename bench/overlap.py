"""How much of a trace's copies ran beside kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Shares of the time of copies during which a kernel ran on another stream.

    streams: how many had device activity. Shares are 0 where nothing was copied.
    """

    to_device: float
    to_host: float
    streams: int
    copy_ms: float
    kernel_ms: float

    def __str__(self) -> str:
        return (
            f"{self.to_device:.0%} of copies to the device and {self.to_host:.0%} to the host "
            f"overlap kernels; {self.copy_ms:.1f} ms of copies, {self.kernel_ms:.1f} ms of kernels, "
            f"{self.streams} streams"
        )


def overlap_of(trace: dict[str, Any]) -> Overlap:
    """Measure a chrome trace of ``torch.profiler``."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    kernels = [_span(e) for e in events if e.get("cat") == "kernel"]
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    busy = merge(kernels)
    streams = {e["args"].get("stream") for e in events if e.get("cat") in ("kernel", "gpu_memcpy")}

    def share(direction: str) -> float:
        spans = merge([_span(e) for e in copies if direction in e["name"]])
        total = length(spans)
        return common(spans, busy) / total if total else 0.0

    return Overlap(
        to_device=share("HtoD"),
        to_host=share("DtoH"),
        streams=len(streams),
        copy_ms=length(merge([_span(e) for e in copies])) / 1e3,
        kernel_ms=length(busy) / 1e3,
    )


def merge(spans: list[Span]) -> list[Span]:
    """Return disjoint spans in order that cover the same time."""
    merged: list[Span] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def length(spans: list[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def common(one: list[Span], other: list[Span]) -> float:
    """Return how long two lists of disjoint spans in order overlap."""
    total, i, j = 0.0, 0, 0
    while i < len(one) and j < len(other):
        total += max(0.0, min(one[i][1], other[j][1]) - max(one[i][0], other[j][0]))
        if one[i][1] <= other[j][1]:
            i += 1
        else:
            j += 1
    return total


def _span(event: dict[str, Any]) -> Span:
    return (event["ts"], event["ts"] + event["dur"])
