"""Traces: where one rank's time and memory went in some steps, as data.

    timeline    |  forward 0  | gather 1 | forward 1 | ... | fence |   one after the other, no gaps
    transfers        |----- all-gather 1 -----|                        in parallel, may overlap
    samples     .    .        .          .           .         .       bytes by category

The timeline is what the rank's thread does on the CPU, or what the compute stream does on other
devices. So all communication in it is exposed (not hidden behind compute), and the segments of a
step add up to its duration. Times are in nanoseconds since `Clock.origin_ns`.

`fullshard.trace` records this and writes one file per rank; `fullshard report` reads them.
"""

import dataclasses
import enum
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from fullshard.errors import FullshardError
from fullshard.json_files import as_typed, read_json, write_whole
from fullshard.plan.actions import Holding

SCHEMA = "fullshard-trace/1"
NO_UNIT = -1  # in place of a unit's index: the span belongs to no unit
CATEGORIES = (
    Holding.SHARDS.value,
    Holding.OPTIMIZER.value,
    Holding.GRADIENT_SHARDS.value,  # and what is kept for them
    Holding.COMMUNICATION.value,
    Holding.UNSHARDED.value,
    Holding.FULL_GRADIENTS.value,
    "saved for backward",
    "other",
)
"""What each sample of a recording has bytes of."""
TEMPORARY = "temporary results"
"""What a plan has beside them: what kernels need while they run, and what activation checkpointing computes again.

In a recording it is in "other", on the CPU nowhere."""


class TraceError(FullshardError, ValueError):
    """A file that is not a trace which this version reads, or a trace that contradicts itself.

    trouble: what is wrong, without the advice: a sentence that says what to do.
    """

    def __init__(self, trouble: str, advice: str = "") -> None:
        super().__init__(f"{trouble}. {advice}" if advice else trouble)
        self.trouble = trouble


class Kind(enum.Enum):
    """An activity of a rank; the values are the names in files and reports."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    ALL_GATHER = "all-gather"
    WAIT_ALL_GATHER = "wait for all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    WAIT_REDUCE_SCATTER = "wait for reduce-scatter"
    FENCE = "barrier"
    OTHER = "other"

    @property
    def is_communication(self) -> bool:
        # The rank moves bytes or waits for them; in a timeline, what is shown of that is exposed.
        return self in _COMMUNICATION


_COMMUNICATION = frozenset(
    (
        *(Kind.ALL_GATHER, Kind.WAIT_ALL_GATHER),
        *(Kind.REDUCE_SCATTER, Kind.WAIT_REDUCE_SCATTER, Kind.FENCE),
    )
)


class Segment(NamedTuple):
    """A segment of a timeline. unit: an index into the trace's units, or NO_UNIT."""

    kind: Kind
    unit: int
    start: int
    end: int


class Transfer(NamedTuple):
    """An all-gather or reduce-scatter, from its start until its result was available.

    nbytes: size of the unit's unsharded parameters, or of their full gradients.
    """

    kind: Kind
    unit: int
    start: int
    end: int
    nbytes: int


class TracedStep(NamedTuple):
    """A training step; numbers count on from the first one that `fullshard.trace` was given."""

    number: int
    start: int
    end: int


class Sample(NamedTuple):
    """Bytes in use at a moment, one number per category of the trace."""

    time: int
    nbytes: tuple[int, ...]


class Pause(NamedTuple):
    """A span in which a process or its device computes nothing, such as a run of Python's garbage collector."""

    start: int
    end: int


class TracedUnit(NamedTuple):
    """A unit at the time of recording. comm: name of the way its ranks communicate."""

    name: str
    unsharded_nbytes: int
    shard_nbytes: int
    comm: str


@dataclasses.dataclass(frozen=True, slots=True)
class Clock:
    """The relation of this rank's times to those of other ranks.

    origin_ns: reading of the rank's own clock at time zero, when it left a barrier.
    error_ns: how long it had been in that barrier. All ranks were in it at one moment, so their
        zeros differ by no more than the longest of these times.
    host: name of the host's clock. Ranks with the same name are compared exactly, by their origins.
    """

    origin_ns: int
    error_ns: int
    host: str


@dataclasses.dataclass(frozen=True, slots=True)
class RankTrace:
    """Everything that was recorded on one rank. Raises TraceError if it contradicts itself.

    recording: text that is the same on all ranks of one recording, and differs between recordings.
    categories: names of the numbers in each sample.
    pauses: of the garbage collector, on the host's clock. num_alloc_retries: how often the device's
        allocator had to give back its cache and try again during the recording; None where none counts.
    starved: when the device had done all that was queued, and waited for the host; empty on the CPU.
    num_dtensors: parameters that the optimizer steps on as DTensors, each at a cost; None without one.
    """

    recording: str
    rank: int
    num_ranks: int
    device: str
    clock: Clock
    units: tuple[TracedUnit, ...]
    steps: tuple[TracedStep, ...]
    timeline: tuple[Segment, ...]
    transfers: tuple[Transfer, ...]
    categories: tuple[str, ...]
    samples: tuple[Sample, ...]
    pauses: tuple[Pause, ...] = ()  # as in files of versions that did not record them
    num_alloc_retries: int | None = None
    num_dtensors: int | None = None
    starved: tuple[Pause, ...] = ()

    def __post_init__(self) -> None:
        bounds = [
            *((step.start, step.end) for step in self.steps),
            *((segment.start, segment.end) for segment in self.timeline),
            *((transfer.start, transfer.end) for transfer in self.transfers),
        ]
        if any(start > end for start, end in bounds):
            raise TraceError(f"rank {self.rank}: a span ends before it starts")
        for before, after in zip(self.timeline, self.timeline[1:], strict=False):
            if before.end != after.start:
                raise TraceError(f"rank {self.rank}: {before} and {after} do not follow each other")
        numbers = {segment.unit for segment in self.timeline}
        numbers.update(transfer.unit for transfer in self.transfers)
        if not numbers <= {NO_UNIT, *range(len(self.units))}:
            raise TraceError(f"rank {self.rank}: a span names a unit that is not listed")
        if any(len(sample.nbytes) != len(self.categories) for sample in self.samples):
            raise TraceError(f"rank {self.rank}: a sample does not have one number per category")

    def unit_name(self, unit: int) -> str:
        """Return a unit's name for people: "(root)" if it is the root, "" for NO_UNIT."""
        return "" if unit == NO_UNIT else self.units[unit].name or "(root)"

    def write(self, folder: Path) -> Path:
        """Write the trace to a file such as `rank00003.json`, and return its path.

        The file appears when it is complete.
        """
        path = folder / f"rank{self.rank:05d}.json"
        write_whole(path, json.dumps(self.as_json(), separators=(",", ":")))
        return path

    def as_json(self) -> dict[str, Any]:
        """Return what `trace_of` reads."""
        kinds = list(Kind)
        return {
            "schema": SCHEMA,
            **{name: getattr(self, name) for name in _PLAIN},
            "clock": dataclasses.asdict(self.clock),
            "kinds": [kind.value for kind in kinds],
            **{
                name: [(kinds.index(span.kind), *span[1:]) for span in getattr(self, name)]
                for name in ("timeline", "transfers")
            },
        }


_PLAIN = (
    *("recording", "rank", "num_ranks", "device", "units", "steps", "categories", "samples"),
    *("pauses", "num_alloc_retries", "num_dtensors", "starved"),
)


class _MaybeInFile(TypedDict, total=False):
    pauses: tuple[Pause, ...]
    num_alloc_retries: int | None
    num_dtensors: int | None
    starved: tuple[Pause, ...]


class _File(_MaybeInFile):
    recording: str
    rank: int
    num_ranks: int
    device: str
    clock: Clock
    units: tuple[TracedUnit, ...]
    steps: tuple[TracedStep, ...]
    kinds: list[str]
    timeline: list[tuple[int, int, int, int]]
    transfers: list[tuple[int, int, int, int, int]]
    categories: tuple[str, ...]
    samples: tuple[Sample, ...]


_FILE_NAME = re.compile(r"rank\d{5,}\.json")


def read_trace(path: Path) -> RankTrace:
    """Read a file that `RankTrace.write` wrote. Raises TraceError, which names the file."""

    def refuse(why: str) -> TraceError:
        return TraceError(
            f"{path}: cannot be read as a trace: {why}", "Record it again with `fullshard.trace`."
        )

    return trace_of(read_json(path, dict[str, Any], refuse), refuse)


def trace_of(fields: dict[str, Any], refuse: Callable[[str], Exception]) -> RankTrace:
    """Return the trace that `RankTrace.as_json` gave. refuse: makes the error to raise, of what is wrong."""
    if fields.get("schema") != SCHEMA:
        raise refuse(f"its schema is {fields.get('schema')!r:.60}, not {SCHEMA!r}")
    found = as_typed(fields, _File, refuse)
    try:
        kinds = [
            Kind("barrier" if name == "fence" else name) for name in found["kinds"]
        ]  # its older name
        return RankTrace(
            **{name: found[name] for name in _PLAIN if name in found},
            clock=found["clock"],
            timeline=tuple(Segment(kinds[kind], *rest) for kind, *rest in found["timeline"]),
            transfers=tuple(Transfer(kinds[kind], *rest) for kind, *rest in found["transfers"]),
        )
    except (ValueError, IndexError) as error:
        raise refuse(str(error)) from error


def trace_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are named as `RankTrace.write` names them."""
    return sorted(path for path in folder.glob("rank*.json") if _FILE_NAME.fullmatch(path.name))


def read_traces(folder: Path) -> list[RankTrace]:
    """Return the traces of the newest recording in a folder, by rank; none if there are no files.

    Raises TraceError if one of the files cannot be read.
    """
    paths = trace_files(folder)
    if not paths:
        return []
    newest = max(paths, key=lambda path: path.stat().st_mtime_ns)
    traces = {path: read_trace(path) for path in paths}
    # An earlier recording of more ranks may have left files, which this one did not overwrite.
    recording = traces[newest].recording
    return sorted(
        (trace for trace in traces.values() if trace.recording == recording),
        key=lambda trace: trace.rank,
    )
