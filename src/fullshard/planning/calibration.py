"""A machine as it was measured: `fullshard plan --calibrate` writes it, and plans for it use it.

kernels       of the models that it was measured with: exactly those, each in the middle of its step
other sizes   between two measured sizes of the same operator and dtype, on a line through both in logarithms;
              beyond the measured sizes at the rate of the nearest
collectives   by the bytes of the unit that they gather or reduce, between measured sizes in the same way
the engine    seconds of the host for each unit and each parameter, once in forward and once in backward
"""

import bisect
import collections
import dataclasses
import math
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from fullshard.errors import FullshardError
from fullshard.json_files import json_text, read_json, write_whole
from fullshard.plan.actions import Action, ActionKind
from fullshard.plan.step import PlannedStep
from fullshard.plan.units import first_names
from fullshard.plan.workload import Work, WorkKind, Workload, WorkloadUnit
from fullshard.planning.costs import Constants, CostError
from fullshard.planning.kernels import FILLS, dtype_name
from fullshard.planning.machines import Gpu, Machine

SCHEMA = "fullshard-machine/1"
_CIRCUMSTANCES = ("host", "device", "torch", "ranks", "threads")
_FiguresT = TypeVar("_FiguresT")


class CalibrationError(FullshardError, ValueError):
    """A file of a machine that cannot be used here."""


class Point(NamedTuple):
    """What a size takes. size: bytes, elements or FLOPs."""

    size: float
    seconds: float


class KernelTime(NamedTuple):
    """One kernel, as `Work` describes it, and its seconds."""

    kind: str
    name: str
    dtype: str
    shape: tuple[int, int, int]
    flops: float
    nbytes: float
    seconds: float

    @property
    def work(self) -> Work:
        return Work(
            WorkKind(self.kind), self.flops, self.nbytes, self.shape, self.dtype, name=self.name
        )


@dataclasses.dataclass(frozen=True)
class EngineFigures:
    """What the engine takes with one way to communicate, one dtype to compute in and one of shards, in seconds.

    gather, reduce: of a unit, by the bytes of its unsharded parameters. fence: a barrier of all ranks.
    unit_s, param_s: of the host, for each unit and each of its parameters, once in forward and once in backward.
    contention: by which computing takes longer for each second of communication beside it.
    """

    gather: tuple[Point, ...]
    reduce: tuple[Point, ...]
    fence_s: float
    unit_s: float
    param_s: float
    contention: float = 0.0


@dataclasses.dataclass(frozen=True)
class MachineFigures:
    """What ranks of a machine take, measured while all of them ran.

    threads: of each rank. date: in ISO form, UTC.
    kernel_s: seconds of the host for a kernel. engine: by `engine_key`.
    optimizers: by `optimizer_key`, seconds of a parameter by its elements.
    """

    schema: str
    host: str
    device: str
    torch: str
    date: str
    ranks: int
    threads: int
    kernel_s: float
    kernels: tuple[KernelTime, ...]
    engine: Mapping[str, EngineFigures]
    optimizers: Mapping[str, tuple[Point, ...]]

    def __post_init__(self) -> None:
        if self.schema != SCHEMA:
            raise ValueError(f"has the schema {self.schema!r:.60}, not {SCHEMA!r}")
        kinds = [kind.value for kind in WorkKind]
        if unknown := sorted({each.kind for each in self.kernels} - {*kinds}):
            raise ValueError(
                f"has kernels of the kind {unknown[0]!r:.60}, not of {', '.join(kinds)}"
            )
        numbers = [self.kernel_s, *(each.seconds for each in self.kernels)]
        for figures in self.engine.values():
            numbers += [figures.fence_s, figures.unit_s, figures.param_s, figures.contention]
            numbers += [each for point in (*figures.gather, *figures.reduce) for each in point]
        numbers += [n for points in self.optimizers.values() for point in points for n in point]
        if not all(0 <= each < math.inf for each in numbers):
            raise ValueError("has a time or a size that is negative or no number")

    def has_way(self, way: str) -> bool:
        """Return whether the engine was measured with a way to communicate."""
        return any(key.startswith(f"{way} ") for key in self.engine)

    def with_way(self, way: str) -> "MachineFigures":
        """Return these figures without those of the engine with other ways."""
        engine = {key: each for key, each in self.engine.items() if key.startswith(f"{way} ")}
        return dataclasses.replace(self, engine=engine)

    def write(self, path: Path) -> None:
        """Write it to a file, which appears when it is complete."""
        write_whole(path, json_text(dataclasses.asdict(self), indent=1) + "\n")

    def merged(self, other: "MachineFigures") -> "MachineFigures":
        """Return these figures, and of another measurement what these do not have, if that was of the same."""
        if any(getattr(self, name) != getattr(other, name) for name in _CIRCUMSTANCES):
            return self
        known = {each.work for each in self.kernels}
        more = tuple(each for each in other.kernels if each.work not in known)
        return dataclasses.replace(
            self,
            kernels=self.kernels + more,
            engine={**other.engine, **self.engine},
            optimizers={**other.optimizers, **self.optimizers},
        )


def engine_key(way: str, computes: torch.dtype, stored: torch.dtype) -> str:
    """Return under which name a file has figures of the engine, such as "peer memory bfloat16 of float32"."""
    return f"{way} {dtype_name(computes)} of {dtype_name(stored)}"


def optimizer_key(name: str, stored: torch.dtype) -> str:
    """Return under which name a file has figures of an optimizer, such as "adamw fused of float32"."""
    return f"{name} of {dtype_name(stored)}"


def machine_file(ranks: int) -> Path:
    """Return where the figures of this machine are for so many ranks, unless somebody says otherwise."""
    # By its name: hosts may share a home.
    return Path.home() / ".cache" / "fullshard" / f"{platform.node()}-{ranks}-ranks.json"


def read_machine(path: Path, ranks: int) -> MachineFigures:
    """Read what `MachineFigures.write` wrote. Raises CalibrationError, which names the file.

    ranks: to measure, if the file cannot be used.
    """

    def refuse(why: str) -> CalibrationError:
        return CalibrationError(
            f"{path}: {why}. Measure: fullshard plan MODEL --calibrate --ranks {ranks} --out {path}"
        )

    return read_json(path, MachineFigures, refuse)


def machine_of(figures: MachineFigures, memory_nbytes: float) -> Machine:
    """Return a measured machine; its rates are the best that its kernels and collectives reached.

    memory_nbytes: of each rank.
    """
    rates: dict[WorkKind, float] = dict.fromkeys(WorkKind, 1.0)
    for each in figures.kernels:
        amount = each.flops if each.kind == WorkKind.MATMUL.value else each.nbytes
        if each.seconds > 0:
            rates[WorkKind(each.kind)] = max(rates[WorkKind(each.kind)], amount / each.seconds)
    points = [p for engine in figures.engine.values() for p in engine.reduce if p.seconds > 0]
    link = max((point.size / point.seconds for point in points), default=1.0)
    cpu = Gpu(
        f"{figures.device} of {figures.host}",
        rates[WorkKind.MATMUL],
        memory_nbytes,
        rates[WorkKind.MEMORY],
        link,
        figures="",
        per_host=figures.ranks,
    )
    return Machine(cpu, figures.ranks, link, link, figures)


def at_size(points: Sequence[Point], size: float) -> float:
    """Return the seconds of a size.

    Between two measured ones on the line through both in logarithms; above all of them at the rate of the largest;
    below all of them as long as the smallest. points: by size, none equal.
    """
    sizes = [point.size for point in points]
    above = bisect.bisect_left(sizes, size)
    if above == 0:
        return points[0].seconds
    if above == len(points):
        return points[-1].seconds * (size / sizes[-1])
    low, high = points[above - 1], points[above]
    if low.size <= 0 or low.seconds <= 0 or high.seconds <= 0:
        return low.seconds + (high.seconds - low.seconds) * (size - low.size) / (
            high.size - low.size
        )
    share = math.log(size / low.size) / math.log(high.size / low.size)
    return math.exp(math.log(low.seconds) * (1 - share) + math.log(high.seconds) * share)


class CalibratedCosts:
    """Seconds of actions on a measured machine; the same interface as `costs.Costs`.

    way: of the ranks ("peer memory", "gloo"). dtypes: of a unit's whole parameters, and of their shards.
    optimizer: "adamw", "adamw fused".

    Raises CostError for what was not measured.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        way: str,
        dtypes: tuple[torch.dtype, torch.dtype],
        optimizer: str,
        shard_size: int,
    ) -> None:
        figures = machine.figures
        if figures is None:
            raise CostError(f"{machine.gpu.name} was not measured.")
        self.machine, self.kernel_s, self._shard_size = machine, figures.kernel_s, shard_size
        self.engine = _found(figures.engine, engine_key(way, *dtypes))
        self._optimizer = _found(figures.optimizers, optimizer_key(optimizer, dtypes[1]))
        self.constants = Constants(contention=self.engine.contention, reserved=1.0)
        self._known = {each.work: each.seconds for each in figures.kernels}
        self._curves = _curves(figures.kernels)

    def work_seconds(self, work: Work) -> float:
        """Return the time of all kernels of one work."""
        one = work._replace(count=1)
        if one not in self._known:
            self._known[one] = self._between(one)
        return work.count * self._known[one]

    def _between(self, work: Work) -> float:
        self.check([work])
        return at_size(self._curve(work), _size(work))

    def _curve(self, work: Work) -> Sequence[Point]:
        """Return what kernels like this one took; of one without a name, the others of its kind tell how fast it is.

        So they do of copies, which a trace without values has where a run writes in place.
        """
        keys = _keys(work)[: 1 if work.name and work.name not in FILLS else None]
        return next((self._curves[key] for key in keys if key in self._curves), ())

    def check(self, works: Iterable[Work]) -> None:
        """Raise CostError, which names them, for kernels of which none was measured in any size."""
        missing = {
            " in ".join(filter(None, (w.name or w.kind.value, w.dtype)))
            for w in works
            if not self._curve(w)
        }
        if missing:
            raise CostError(
                f"The machine's file has no {first_names(sorted(missing), 4)}. Measure this model too, which adds to the file: "
                f"fullshard plan MODEL --calibrate --ranks {self.machine.per_host}, with its --out."
            )

    def durations(
        self, step: PlannedStep, workload: Workload, trained_numel: int
    ) -> tuple[list[float], list[float]]:
        """Return the seconds of each action on its lane, and those of the host before each."""
        story = _Story(self, workload)
        pairs = [story.tell(action) for action in step.actions]
        return [on_lane for on_lane, _ in pairs], [on_host for _, on_host in pairs]

    def optimizer_seconds(self, workload: Workload) -> float:
        sizes = [param.numel for unit in workload.units for param in unit.params if param.trainable]
        return sum(at_size(self._optimizer, numel / self._shard_size) for numel in sizes)

    def collective_seconds(self, kind: ActionKind, unit: WorkloadUnit) -> float:
        """Return the time of a collective of a unit: all of it is gathered, what is trained is reduced."""
        if kind is ActionKind.ALL_REDUCE:
            raise CostError(
                "Sums over replicas are not measured. Plan for one axis, or with a preset."
            )
        is_gather = kind is ActionKind.ALL_GATHER
        nbytes = sum(
            param.numel * param.compute_dtype.itemsize
            for param in unit.params
            if is_gather or param.trainable
        )
        return at_size(self.engine.gather if is_gather else self.engine.reduce, nbytes)


def _found(figures: Mapping[str, _FiguresT], key: str) -> _FiguresT:
    if key not in figures:
        raise CostError(
            f"The machine's file has no figures of {key}, but of {', '.join(sorted(figures)) or 'nothing'}. Measure "
            "again: fullshard plan MODEL --calibrate, with these settings."
        )
    return figures[key]


class _Story:
    """Goes through a step's actions, and remembers what tells how long the later ones take."""

    def __init__(self, costs: CalibratedCosts, workload: Workload) -> None:
        self._costs, self._workload = costs, workload
        self._stretches: dict[tuple[int, str], tuple[float, int]] = {}
        self._last = ActionKind.FENCE
        self._entered: set[int] = set()  # units whose hooks have run in this direction
        self._waiting: set[tuple[int, int]] = set()  # units and stretches whose gradients wait

    def tell(self, action: Action) -> tuple[float, float]:
        """Return the seconds of the next action, and those of the host before it."""
        match action.kind:
            case ActionKind.FORWARD | ActionKind.RECOMPUTE | ActionKind.BACKWARD:
                return self._computing(action)
            case ActionKind.ALL_GATHER | ActionKind.REDUCE_SCATTER | ActionKind.ALL_REDUCE:
                unit = self._workload.units[action.unit]
                if action.kind is ActionKind.REDUCE_SCATTER:
                    self._waiting = {each for each in self._waiting if each[0] != action.unit}
                return self._costs.collective_seconds(action.kind, unit), 0.0
            case ActionKind.FENCE:
                return self._costs.engine.fence_s, 0.0
            case ActionKind.OPTIMIZER:
                return self._costs.optimizer_seconds(self._workload), 0.0
        return 0.0, 0.0

    def _computing(self, action: Action) -> tuple[float, float]:
        part = action.kind.value
        key = action.stretch, part
        if key not in self._stretches:
            stretch = self._workload.stretches[action.stretch]
            works = {
                "forward": stretch.forward,
                "recompute": stretch.recomputed,
                "backward": stretch.backward,
            }[part]
            seconds = sum(map(self._costs.work_seconds, works))
            self._stretches[key] = seconds, sum(w.count for w in works)
        on_lane, kernels = self._stretches[key]
        if action.kind is ActionKind.BACKWARD:
            on_lane += self._adding(action)
        return on_lane, kernels * self._costs.kernel_s + self._hooks(action)

    def _adding(self, action: Action) -> float:
        """Return what it takes to add gradients to those of an earlier backward, which wait to be reduced."""
        nbytes = self._workload.stretches[action.stretch].gradient_nbytes
        key = action.unit, action.stretch
        if not nbytes or key not in self._waiting:
            self._waiting.add(key)
            return 0.0
        add = Work(WorkKind.MEMORY, 0.0, 3.0 * nbytes, dtype="float32")
        return self._costs.work_seconds(add)

    def _hooks(self, action: Action) -> float:
        """Return what the host does for a unit, once in each direction."""
        direction = ActionKind.FORWARD if action.kind is ActionKind.FORWARD else ActionKind.BACKWARD
        if direction is not self._last:
            self._entered.clear()
            self._last = direction
        if action.unit < 0 or action.unit in self._entered:
            return 0.0
        self._entered.add(action.unit)
        engine = self._costs.engine
        return engine.unit_s + engine.param_s * len(self._workload.units[action.unit].params)


def _size(work: Work) -> float:
    return work.flops or work.nbytes


def _keys(work: Work) -> tuple[tuple[str, ...], ...]:
    """Return which measured kernels are like a kernel, the most alike first."""
    kind = work.kind.value
    return (kind, work.name, work.dtype), (kind, work.dtype), (kind,)


def _curves(kernels: Iterable[KernelTime]) -> dict[tuple[str, ...], list[Point]]:
    """Return points of kernels that are alike, by size."""
    times: dict[tuple[str, ...], dict[float, list[float]]] = collections.defaultdict(
        lambda: collections.defaultdict(list)
    )
    for each in kernels:
        for key in _keys(each.work):
            times[key][_size(each.work)].append(each.seconds)
    return {
        key: [Point(size, statistics.fmean(found[size])) for size in sorted(found)]
        for key, found in times.items()
    }
