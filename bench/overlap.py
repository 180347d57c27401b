"""What a trace of the profiler says of one step: what the host launched, and what ran beside what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

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


class Launches(NamedTuple):
    """What the device ran in a step, what the host gave it, and how often the host waited for it."""

    kernels: int
    copies: int
    launches: int
    waits: int


_LAUNCHING = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
_WAITING = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuCtxSynchronize",
)


def count_launches(trace: dict[str, Any], *, during: str) -> Launches:
    """Count a chrome trace's device activity, and the host's calls while a ``record_function`` block runs.

    Kernels of a replayed graph count one by one, the launch of the graph once.
    """
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e]
    (block,) = [
        _span(e) for e in events if e.get("cat") == "user_annotation" and e["name"] == during
    ]
    calls = [
        e["name"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and block[0] <= e["ts"] <= block[1]
    ]
    categories = [e.get("cat") for e in events]
    return Launches(
        kernels=categories.count("kernel"),
        copies=categories.count("gpu_memcpy") + categories.count("gpu_memset"),
        launches=sum(name.startswith(_LAUNCHING) for name in calls),
        waits=sum(name.startswith(_WAITING) for name in calls),
    )


class Issued(NamedTuple):
    """A collective that a unit's label names, and the matrix products that the host gave the device until its wait."""

    label: str
    num_products: int


_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm")


def collectives_issued(trace: dict[str, Any], kind: str) -> list[Issued]:
    """List labels like ``FSDP::all_gather (layers.1)`` in the order of the host. kind: without the prefix.

    Products between such a label and that of its wait are what can run beside it.
    """
    events = sorted(
        (e for e in trace["traceEvents"] if e.get("ph") == "X" and "dur" in e),
        key=lambda e: e["ts"],
    )
    labels = [e for e in events if e.get("cat") == "user_annotation"]
    products = [e["ts"] for e in events if e["name"] in _PRODUCTS]
    found = []
    for i, event in enumerate(labels):
        begin = f"FSDP::{kind} ("
        if event["name"].startswith(begin):
            wait = event["name"].replace(begin, f"FSDP::{kind}_wait (")
            until = next((e["ts"] for e in labels[i:] if e["name"] == wait), float("inf"))
            count = sum(_span(event)[1] <= ts <= until for ts in products)
            found.append(Issued(event["name"].removeprefix("FSDP::"), count))
    return found


class Lane(NamedTuple):
    """Where a collective's kernels ran, and how many of them ran beside kernels that are no collective's."""

    streams: set[int]
    num_kernels: int
    num_beside: int


def lane_of(trace: dict[str, Any], name: str) -> Lane:
    """Find the kernels of NCCL whose name has this part, e.g. ``AllGather``."""
    kernels = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e.get("cat") == "kernel"]
    ours = [e for e in kernels if "nccl" in e["name"] and name in e["name"]]
    busy = merge([_span(e) for e in kernels if "nccl" not in e["name"]])
    return Lane(
        {e["args"]["stream"] for e in ours},
        len(ours),
        sum(common([_span(e)], busy) > 0.0 for e in ours),
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
