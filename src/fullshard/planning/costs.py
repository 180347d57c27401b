"""How long the actions of a step take on a machine.

Measured figures of kernels and collectives (`planning.measured`), scaled to the machine's nominal rates; and
`Constants`, which say how a training step differs from the benchmark of a kernel. Those are fitted on published
runs, and each is a physical quantity.
"""

import dataclasses
import math
from collections.abc import Iterable

from fullshard.errors import FullshardError
from fullshard.plan.actions import Action, ActionKind
from fullshard.plan.step import PlannedStep
from fullshard.plan.workload import Stretch, Work, WorkKind, Workload
from fullshard.planning.machines import Machine
from fullshard.planning.measured import CollectiveFigures, GpuFigures, figures_of, moved_share


@dataclasses.dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted: fractions without a unit, unless said otherwise.

    matmul: of the sustained rate of a benchmark that matrix products reach within a step.
    attention: of the rate of FlashAttention-2 forward that attention reaches, forward and backward together.
    attention_triton: the same for kernels written in Triton.
    traffic: of the memory's nominal rate that operators reach which move bytes alone. rows: where they pick single rows.
    fp8: of the rate at which a benchmark rounds inputs to 8 bits.
    power: of the nominal rate that parts with less power reach.
    network: of the rate between hosts.
    contention: seconds by which computing takes longer for each second of communication beside it.
    reserved: bytes that an allocator has for each byte that its pools have given out at their peaks.
    reserved_growing: the same where segments grow in place ("expandable segments" of PyTorch).
    device: of which the driver says that they are in use, for each such byte.
    """

    matmul: float = 1.01
    attention: float = 0.602
    attention_triton: float = 0.473
    traffic: float = 0.872
    rows: float = 0.332
    fp8: float = 1.94
    power: float = 0.847
    network: float = 1.0
    contention: float = 0.681
    reserved: float = 1.14
    reserved_growing: float = 1.04
    device: float = 1.36


FITTED = Constants()
# Nine of ten published steps took between these multiples of what is predicted.
SPREAD = (0.83, 1.44)
# What the driver has on a device beside tensors: its own context, with kernels of torch and cuBLAS. An A100 whose
# memory tensors filled (fms-acceleration's benchmarks) had 0.99 GB more in use, the allocator's rounding included.
CONTEXT_NBYTES = 600_000_000


class CostError(FullshardError, ValueError):
    """Work of which nobody can say how long it takes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Manner:
    """How a program runs what it computes.

    attention: "flash", "sdpa", "triton", "cudnn" or "eager".
    copied: bytes that COMPUTE copies for each byte of a collective. unit_s, kernel_s: seconds of the host for
    a unit and step, and for a kernel. optimizer_nbytes: read and written for each element that is trained.
    stride, replica_stride: distances of neighbours among the ranks of a unit, and among its replicas.
    """

    attention: str = "sdpa"
    copied: float = 0.0
    unit_s: float = 2e-4
    kernel_s: float = 8e-6
    optimizer_nbytes: float = 28.0
    stride: int = 1
    replica_stride: int = 1


class Costs:
    """Seconds of actions on one machine, for one manner of computing. Equal work is looked up once."""

    def __init__(self, machine: Machine, manner: Manner, constants: Constants = FITTED) -> None:
        self.machine, self.constants = machine, constants
        self._manner = manner
        gpu = machine.gpu
        self._power = constants.power if gpu.is_power_limited else 1.0
        self._figures = _figures(machine, constants, self._power)
        self._works: dict[Work, float] = {}
        self._stretches: dict[tuple[int, str], tuple[float, int]] = {}

    # Kernels

    def work_seconds(self, work: Work) -> float:
        """Return the device's time for all kernels of one work."""
        found = self._works.get(work)
        if found is None:
            found = self._works[work] = work.count * self._kernel_seconds(work)
        return found

    def _kernel_seconds(self, work: Work) -> float:
        match work.kind:
            case WorkKind.MATMUL:
                return self._matmul_seconds(work)
            case WorkKind.ATTENTION:
                return self._attention_seconds(work)
            case WorkKind.MEMORY:
                return work.nbytes / (self.machine.gpu.memory_rate * self.constants.traffic)
            case WorkKind.ROWS:
                return work.nbytes / (self.machine.gpu.memory_rate * self.constants.rows)
            case WorkKind.EXCHANGE:
                return self.collective_seconds(
                    ActionKind.ALL_GATHER, work.nbytes, work.shape[0], stride=work.shape[1]
                )
        raise CostError(f"{work.kind} is no kind of work that is known here.")

    def _matmul_seconds(self, work: Work) -> float:
        m, n, k = work.shape
        times = work.flops / (2.0 * m * n * k)  # of the same size, in one launch
        is_small = work.dtype.startswith("float8") and self.machine.gpu.fp8 > 1
        dtype = "float32" if work.dtype == "float32" else "bfloat16"
        return self._figures.matmul_seconds(m, n, k, "float8_e4m3fn" if is_small else dtype, times)

    def _attention_seconds(self, work: Work) -> float:
        gpu, constants = self.machine.gpu, self.constants
        share = gpu.attention * constants.attention
        if self._manner.attention == "triton":
            share = gpu.attention * constants.attention_triton
        elif self._manner.attention == "cudnn":
            share = constants.attention
        slower = gpu.float32 if work.dtype == "float32" else 1 / gpu.matmul
        flops = work.flops / self._power * slower
        return self._figures.attention_seconds(flops, work.nbytes, work.shape[2]) / share

    # Actions

    def durations(
        self, step: PlannedStep, workload: Workload, trained_numel: int
    ) -> tuple[list[float], list[float]]:
        """Return the seconds of each action on its lane, and those of the host before each.

        trained_numel: elements of this rank's shards that the optimizer updates.
        """
        seconds, host = [], []
        arriving: dict[int, int] = {}  # bytes of each unit's last gather
        for action in step.actions:
            on_lane, on_host = self._action_seconds(action, workload, trained_numel)
            if action.kind is ActionKind.ALL_GATHER:
                arriving[action.unit] = action.nbytes
            elif action.kind is ActionKind.WAIT:
                copied = self._manner.copied * arriving.pop(action.unit, 0)
                on_lane += copied / (self.machine.gpu.memory_rate * 0.8)
            seconds.append(on_lane)
            host.append(on_host)
        return seconds, host

    def _action_seconds(
        self, action: Action, workload: Workload, trained_numel: int
    ) -> tuple[float, float]:
        manner, rate = self._manner, self.machine.gpu.memory_rate
        match action.kind:
            case ActionKind.FORWARD | ActionKind.RECOMPUTE | ActionKind.BACKWARD:
                stretch = workload.stretches[action.stretch]
                on_lane, kernels = self._stretch_seconds(stretch, action.kind.value)
                return on_lane, kernels * manner.kernel_s
            case ActionKind.ALL_GATHER | ActionKind.REDUCE_SCATTER | ActionKind.ALL_REDUCE:
                stride = manner.stride
                if action.kind is ActionKind.ALL_REDUCE:
                    stride = manner.replica_stride
                took = self.collective_seconds(
                    action.kind, action.nbytes, action.num_ranks, stride=stride
                )
                return took, manner.unit_s / 4
            case ActionKind.WAIT:
                return 0.0, manner.unit_s / 4
            case ActionKind.OPTIMIZER:
                return trained_numel * manner.optimizer_nbytes / (rate * 0.8), 0.0
        return 0.0, 0.0

    def _stretch_seconds(self, stretch: Stretch, part: str) -> tuple[float, int]:
        key = id(stretch), part
        found = self._stretches.get(key)
        if found is None:
            works = {
                "forward": stretch.forward,
                "recompute": stretch.recomputed,
                "backward": stretch.backward,
            }[part]
            found = self._stretches[key] = self.seconds_of(works), sum(w.count for w in works)
        return found

    def seconds_of(self, works: Iterable[Work]) -> float:
        return sum(map(self.work_seconds, works))

    def collective_seconds(
        self, kind: ActionKind, nbytes: float, ranks: int, *, stride: int = 1
    ) -> float:
        """Return the time of a collective of `nbytes` in all.

        stride: the distance of neighbours among its ranks: those of other groups lie between them.
        """
        if ranks <= 1:
            return 0.0
        machine = self.machine
        known = self._figures.collectives.get(kind.value) or _H100_LINKS[kind.value]
        reach = min(ranks, machine.per_host)
        figures = known[min(known, key=lambda each: (int(each) < reach, abs(int(each) - reach)))]
        nominal = _NOMINAL_LINK.get(machine.gpu.figures)
        rate = machine.link_rate * (figures.bytes_per_s / nominal if nominal else _LINK_SHARE)
        moved = nbytes * moved_share(kind.value, ranks)
        latency, fill = figures.latency_s, figures.fill_s
        per_host = max(1, machine.per_host // stride)
        if ranks > per_host:
            hosts = math.ceil(ranks / per_host)
            rate = min(rate, machine.network_rate * per_host * self.constants.network)
            latency += _HOP_S * math.log2(hosts)
            fill += _HOP_S
        return CollectiveFigures(latency, rate, fill).seconds(moved)


_HOP_S = 15e-6  # from host to host
_LINK_SHARE = 0.77
_NOMINAL_LINK = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9, "GB200": 900e9}
_H100_LINKS = {
    kind: figures_of("H100").collectives[kind]  # type: ignore[union-attr]
    for kind in ("all-gather", "reduce-scatter", "all-reduce")
}


def _figures(machine: Machine, constants: Constants, power: float) -> GpuFigures:
    """Return the figures of a machine's GPU within a training step. power: of its rates, that it reaches."""
    gpu, figures = machine.gpu, figures_of(machine.gpu.figures)
    if figures is None:
        raise CostError(f"{gpu.name}: no figures of a {gpu.figures} are there.")
    matmul = {}
    for dtype, own in figures.matmul.items():
        efficiency, share = own.efficiency, own.memory_share * constants.fp8
        if (
            dtype == "bfloat16"
        ):  # those of 8 bits throttle less: rounding their inputs leaves pauses
            efficiency, share = (
                min(figures.sustained_efficiency[dtype], efficiency),
                own.memory_share,
            )
        matmul[dtype] = own._replace(
            efficiency=efficiency * constants.matmul * power * gpu.matmul, memory_share=share
        )
    own = matmul["bfloat16"]
    matmul["float32"] = own._replace(efficiency=own.efficiency / gpu.matmul)
    return dataclasses.replace(
        figures,
        peak_flops={
            "bfloat16": gpu.flops,
            "float32": gpu.flops / gpu.float32,
            "float8_e4m3fn": gpu.flops * gpu.fp8,
        },
        memory_bytes_per_s=gpu.memory_rate,
        matmul=matmul,
    )
