"""A plan of training: `plan_training` says what a rank will hold, how long a step will take, and why.

    machine = machine_named("H100-80GB-SXM")
    print(plan_training("8b", TrainingSetup(machine, ranks=64, batch=2)))

A plan is a value: numbers, what they are made of, and what to change first. It prints as a text, and
`TrainingPlan.as_dict` is for machines.
"""

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from fullshard.plan import amounts
from fullshard.plan.actions import ActionKind, Holding, Lane
from fullshard.plan.unit_plan import Sharding, plan_unit
from fullshard.plan.ways import PEER_MEMORY
from fullshard.plan.workload import Leave, Run, WorkKind, Workload
from fullshard.planning.alternatives import alternatives
from fullshard.planning.calibration import CalibratedCosts
from fullshard.planning.costs import CONTEXT_NBYTES, SPREAD, CostError, Costs
from fullshard.planning.estimate import Estimate, estimate_step
from fullshard.planning.keeping import keepable_units, kept_units
from fullshard.planning.machines import Machine
from fullshard.planning.setup import TrainingSetup
from fullshard.planning.subject import Inputs, Model, Subject
from fullshard.planning.traced import TraceError, Units

_MIB, _GIB = 1 << 20, 1 << 30
# A buffer of 4 MiB (NCCL_BUFFSIZE) to and one from the neighbour in each of 32 channels.
_COMMUNICATOR_NBYTES = 256 * _MIB


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """A rank's memory, in bytes, when it is highest.

    parts: by what it is used for, the largest first; they add up to `total_nbytes`. when: in words: "backward of layers.31".
    tensors_nbytes: of tensors alone, without the allocator's slack and the driver's context.
    host_nbytes: of tensors in host memory, for each of `ranks_per_host` ranks, where something is offloaded.
    """

    parts: tuple[tuple[str, int], ...]
    when: str
    tensors_nbytes: int
    total_nbytes: int
    capacity_nbytes: int
    host_nbytes: int = 0
    ranks_per_host: int = 1

    @property
    def per_host_nbytes(self) -> int:
        """What all ranks of a host keep in its memory."""
        return self.host_nbytes * self.ranks_per_host

    @property
    def needed_nbytes(self) -> int:
        """What cannot be done without: an allocator gives back what it only keeps."""
        return self.total_nbytes - dict(self.parts).get("allocator slack", 0)

    @property
    def fits(self) -> bool:
        return self.total_nbytes <= self.capacity_nbytes


@dataclasses.dataclass(frozen=True)
class TimePlan:
    """A step's time, in seconds.

    parts: what it goes to; they add up to `step_s`: compute, recomputation, exposed all-gather, exposed reduce-scatter,
    exposed all-reduce, optimizer, host, and contention. low_s, high_s: nine of ten runs are between them.
    """

    parts: tuple[tuple[str, float], ...]
    step_s: float
    low_s: float
    high_s: float


@dataclasses.dataclass(frozen=True)
class KeepingPlan:
    """Units that stay unsharded from forward to backward within a budget of bytes, as `keep_unsharded` chooses them.

    units: their names. nbytes: that they take on each rank. saved_s: by which a step is shorter than without them.
    """

    units: tuple[str, ...]
    nbytes: int
    budget_nbytes: int
    saved_s: float

    def __str__(self) -> str:
        if not self.units:
            return "no unit, as none is gathered again"
        return (
            f"{len(self.units)}, {_ends(self.units)}; {amounts.nbytes(self.nbytes)} of {amounts.nbytes(self.budget_nbytes)}; "
            f"a step takes {amounts.seconds(abs(self.saved_s))} "
            f"{'less' if self.saved_s >= 0 else 'more'}"
        )


@dataclasses.dataclass(frozen=True)
class PaddingPlan:
    """What each rank holds beside parameters, on average: a parameter takes as much of all ranks as of the first.

    nbytes: of `of_nbytes` for all parameters. param: the one with most of it, which has so many rows along the dim
    that is cut. shard_size: ranks.
    """

    nbytes: int
    of_nbytes: int
    param: str
    num_rows: int
    shard_size: int

    def __str__(self) -> str:
        fewer = math.gcd(self.num_rows, self.shard_size)
        change = f"--shard-size {fewer} (shard_size), or " if fewer > 1 else ""
        return (
            f"padding: {amounts.nbytes(self.nbytes)} of {amounts.nbytes(self.of_nbytes)} of parameters on a rank\n"
            f"  {self.param} has {self.num_rows} rows for {self.shard_size} ranks\n"
            f"  to change: {change}another dim of it to shard by (shard_placement_fn)"
        )


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A change that helps, in words, and what it saves a step and a rank; what it costs is negative.

    saved_s: for as many tokens as a step of the plan has.
    """

    text: str
    saved_s: float
    saved_nbytes: int


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """What training will need and take. `settings`: all that it was planned for, by name.

    tokens_per_s: of all ranks; samples where the first input is no numbers of tokens. mfu: model FLOPs utilization, of the machine's nominal rate.
    bound_by: what most of the step waits for: "compute", "memory traffic", "exchange", "all-gather",
        "reduce-scatter", "all-reduce", "optimizer", "host", "contention".
    suggestions: what to change first, the best first. estimate: the step, of at most three micro-batches.
    kept: None without a budget for units that stay unsharded.
    """

    settings: dict[str, Any]
    machine: Machine
    memory: MemoryPlan
    time: TimePlan
    tokens_per_s: float
    mfu: float
    bound_by: str
    suggestions: tuple[Suggestion, ...]
    estimate: Estimate = dataclasses.field(repr=False, compare=False)
    kept: KeepingPlan | None = None

    @property
    def padding(self) -> PaddingPlan | None:
        """What is held as padding, if that is a part of parameters to speak of."""
        return _padding(self.estimate.workload, self.estimate.settings.sharding)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as numbers and texts; names end in their unit."""
        gpu, memory, time = self.machine.gpu, self.memory, self.time
        return {
            "settings": self.settings,
            "machine": {
                "gpu": gpu.name,
                "flops_per_s": gpu.flops,
                "memory_nbytes": round(gpu.memory_nbytes),
                "memory_nbytes_per_s": gpu.memory_rate,
                "per_host": self.machine.per_host,
                "link_nbytes_per_s": self.machine.link_rate,
                "network_nbytes_per_s": self.machine.network_rate,
            },
            "memory": {
                "parts_nbytes": dict(memory.parts),
                "when": memory.when,
                "tensors_nbytes": memory.tensors_nbytes,
                "total_nbytes": memory.total_nbytes,
                "capacity_nbytes": memory.capacity_nbytes,
                "fits": memory.fits,
                "in_host_memory_nbytes": memory.host_nbytes,
                "in_host_memory_per_host_nbytes": memory.per_host_nbytes,
            },
            "time": {
                "parts_s": dict(time.parts),
                "step_s": time.step_s,
                "low_s": time.low_s,
                "high_s": time.high_s,
            },
            "tokens_per_s": self.tokens_per_s,
            "mfu": self.mfu,
            "bound_by": self.bound_by,
            "kept_unsharded": None if self.kept is None else dataclasses.asdict(self.kept),
            "padding": None if self.padding is None else dataclasses.asdict(self.padding),
            "suggestions": [dataclasses.asdict(each) for each in self.suggestions],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def plan_training(
    model: Model | Subject,
    setup: TrainingSetup,
    *,
    inputs: Inputs | None = None,
    units: Units | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    progress: Callable[[str], object] | None = None,
) -> TrainingPlan:
    """Return what training a model will need and take, without a machine and without its memory.

    model: a module, on any device or none ("meta"), not sharded, and left as it is; a function that returns one; a
        size of `fullshard train`; a `config.json` of Transformers or its folder; a `TransformerShape`.
    setup: the machine, ranks, micro-batch, and how it is trained.
    inputs, units, loss: of a module, see `Subject`. progress: is told what is planned now.

    Raises SetupError for what does not fit together, and TraceError for a model that cannot be traced, with the path
    of the module.
    """
    if not isinstance(model, Subject):
        model = Subject(model, inputs=inputs, units=units, loss=loss)
    say = progress or str  # which says nothing
    say(model.name)
    plan = planned(model, setup)
    return replace(plan, suggestions=_suggestions(plan, model, setup, say))


def planned(subject: Subject, setup: TrainingSetup) -> TrainingPlan:
    """Return the plan of one way to train, without suggestions."""
    workload = subject.workload(setup)
    costs = setup.costs(workload)
    step, gpu = plan_steps(workload, setup, costs), setup.machine.gpu
    time = _time(step.parts)
    done = workload.model_flops * setup.accumulation
    return TrainingPlan(
        settings=_settings(subject, setup, workload),
        machine=setup.machine,
        memory=step.memory,
        time=time,
        tokens_per_s=workload.tokens * setup.accumulation * setup.ranks / time.step_s,
        mfu=done / time.step_s / gpu.flops,
        bound_by=_bound_by(time, step.estimate, workload, costs),
        suggestions=(),
        estimate=step.estimate,
        kept=_kept(workload, setup, costs, time.step_s) if setup.keep_unsharded_nbytes else None,
    )


def _kept(
    workload: Workload, setup: TrainingSetup, costs: Costs | CalibratedCosts, step_s: float
) -> KeepingPlan:
    """Return which units stay. step_s: of a step with them."""
    without = replace(setup, keep_unsharded_nbytes=0)
    budget = setup.keep_unsharded_nbytes
    units = kept_units(workload, without.step_settings(workload), budget)
    saved_s = sum(plan_steps(workload, without, costs).parts.values()) - step_s
    names, nbytes = tuple(unit.name for unit in units), sum(unit.nbytes for unit in units)
    return KeepingPlan(names, nbytes, budget, saved_s)


class PlannedSteps(NamedTuple):
    """A step. parts: its seconds, by what they go to. estimate: of a step with at most three micro-batches."""

    parts: dict[str, float]
    memory: MemoryPlan
    estimate: Estimate


def plan_steps(
    workload: Workload, setup: TrainingSetup, costs: Costs | CalibratedCosts
) -> PlannedSteps:
    """Return the time and the memory of a step of any number of micro-batches."""

    def estimated(num: int) -> Estimate:
        settings = replace(setup, accumulation=num).step_settings(workload)
        return estimate_step(workload, settings, costs, offload=setup.offload)

    num = min(setup.accumulation, _MOST_SIMULATED)
    estimate = estimated(num)
    parts = _time_parts(estimate)
    if more := setup.accumulation - num:  # as the last but one: neither the first nor the last
        fewer = _time_parts(estimated(num - 1))
        parts = {name: s + more * (s - fewer[name]) for name, s in parts.items()}
    return PlannedSteps(parts, _memory(estimate, workload, setup, costs), estimate)


_MOST_SIMULATED = 3  # micro-batches of a step; more are like the second
_MOST_SUGGESTED = 5
_LEAST_SAVED = 0.01  # of the time


def _suggestions(
    plan: TrainingPlan, subject: Subject, setup: TrainingSetup, say: Callable[[str], object]
) -> tuple[Suggestion, ...]:
    """Return what helps: what makes it fit, or, if it does, what is faster and fits; else what takes less memory."""
    tokens = setup.batch * setup.accumulation
    found: list[tuple[bool, Suggestion]] = []
    room_nbytes = _room_nbytes(plan)
    for other in alternatives(setup, takes_batch=subject.takes_batch, room_nbytes=room_nbytes):
        say(other.text)
        try:
            made = planned(subject, other.setup)
        except (TraceError, CostError):  # such as of a model without units to recompute
            continue
        more = other.setup.batch * other.setup.accumulation / tokens
        saved_s = plan.time.step_s - made.time.step_s / more
        saved_nbytes = plan.memory.total_nbytes - made.memory.total_nbytes
        found.append((made.memory.fits, Suggestion(other.text, saved_s, saved_nbytes)))
    least = _LEAST_SAVED * plan.time.step_s if plan.memory.fits else -math.inf
    useful = [each for fits, each in found if fits and each.saved_s > least]
    useful.sort(key=lambda each: -each.saved_s)
    if not useful and not plan.memory.fits:
        useful = [each for _, each in found if each.saved_nbytes > 0]
        useful.sort(key=lambda each: -each.saved_nbytes)
    return tuple(useful[:_MOST_SUGGESTED])


def _room_nbytes(plan: TrainingPlan) -> int:
    """Return the bytes that are left for units to stay unsharded; 0 if no unit fits, or all of them."""
    estimate, free = plan.estimate, plan.memory.capacity_nbytes - plan.memory.total_nbytes
    units = keepable_units(estimate.workload, estimate.settings)
    sizes = [unit.nbytes for unit in units if unit.may_stay]
    room = int(free / estimate.costs.constants.reserved)
    return room if sizes and min(sizes) <= room < sum(sizes) else 0


# Memory

_LEAST_PADDING = 0.1  # of parameters


def _padding(workload: Workload, sharding: Sharding) -> PaddingPlan | None:
    if sharding.shard_way is PEER_MEMORY:  # whose shards have none
        return None
    plans = [plan_unit(unit.params, sharding) for unit in workload.units]
    params = [param for plan in plans for bucket in plan.layout.buckets for param in bucket.params]
    taken = [param.chunk_numel * param.spec.dtype.itemsize for param in params]
    own = [p.spec.numel * p.spec.dtype.itemsize // sharding.shard_size for p in params]
    nbytes = sum(taken) - sum(own)
    if nbytes <= _LEAST_PADDING * sum(taken):
        return None
    most = params[max(range(len(params)), key=lambda n: taken[n] - own[n])].spec
    return PaddingPlan(nbytes, sum(taken), most.name, most.extents[1], sharding.shard_size)


_NAMES = {
    Holding.SHARDS: "parameters",
    Holding.FULL_GRADIENTS: "full gradients",
    Holding.GRADIENT_SHARDS: "gradient shards",
    Holding.OPTIMIZER: "optimizer state",
    Holding.OPTIMIZER_TEMPORARIES: Holding.OPTIMIZER_TEMPORARIES.value,
    Holding.UNSHARDED: "unsharded units",
    Holding.ACTIVATIONS: "activations",
    Holding.COMMUNICATION: "communication",
    Holding.UNMANAGED: "not sharded",
}


def _memory(
    estimate: Estimate, workload: Workload, setup: TrainingSetup, costs: Costs | CalibratedCosts
) -> MemoryPlan:
    memory = estimate.memory
    parts = {name: memory.at_peak_of(holding) for holding, name in _NAMES.items()}
    logits = _logits_nbytes(estimate, workload)
    parts["logits and loss"] = logits
    parts["activations"] -= logits
    tensors = memory.peak_nbytes
    parts["context"] = context_nbytes(setup)
    capacity = round(setup.machine.gpu.memory_nbytes)
    # Before it fails, an allocator gives back what it only keeps.
    free = max(0, capacity - tensors - parts["context"])
    parts["allocator slack"] = min(free, round(tensors * (costs.constants.reserved - 1)))
    ordered = sorted(((name, n) for name, n in parts.items() if n), key=lambda each: -each[1])
    return MemoryPlan(
        tuple(ordered),
        _when(estimate, workload),
        tensors,
        sum(parts.values()),
        capacity,
        estimate.host_nbytes,
        min(setup.ranks, setup.machine.per_host),
    )


def context_nbytes(setup: TrainingSetup) -> int:
    """Return what the driver and communication have on a device beside tensors."""
    if setup.is_home:
        return 0
    num_groups = (setup.shards > 1) + (setup.shards < setup.ranks)
    return CONTEXT_NBYTES + num_groups * _COMMUNICATOR_NBYTES


def _when(estimate: Estimate, workload: Workload) -> str:
    place = estimate.memory.peak_action
    if place < 0:
        return "always"
    action = estimate.step.actions[place]
    if action.kind is ActionKind.OPTIMIZER:
        return "optimizer"
    kind = {ActionKind.RECOMPUTE: "recomputation"}.get(action.kind, action.kind.value)
    if action.stretch in _tail(workload):
        return f"{kind} of logits and loss"
    name = workload.units[action.unit].name if action.unit >= 0 else ""
    return f"{kind} of {name or 'the root'}"


def _tail(workload: Workload) -> set[int]:
    """Return the stretches after the last unit but the root, which make logits and loss; else those of the loss."""
    last = max(
        (place for place, e in enumerate(workload.events) if isinstance(e, Leave) and e.unit > 0),
        default=None,
    )
    runs = {e.stretch for e in workload.events if isinstance(e, Run) and e.unit < 0}
    if last is None:
        return runs
    after = {e.stretch for e in workload.events[last:] if isinstance(e, Run)}
    before = {e.stretch for e in workload.events[:last] if isinstance(e, Run)}
    return after - before


def _logits_nbytes(estimate: Estimate, workload: Workload) -> int:
    """Return the part of activations at the peak that logits and the loss have made."""
    tail, place, actions = _tail(workload), estimate.memory.peak_action, estimate.step.actions
    held: collections.Counter[bool] = collections.Counter()  # by whether the tail holds it
    for change in estimate.step.resident:
        if change.holding is Holding.ACTIVATIONS:
            held[False] += change.nbytes
    for action in actions[: max(0, place)]:
        for change in action.changes:
            if change.holding is Holding.ACTIVATIONS:
                held[action.stretch in tail] += change.nbytes
    total = estimate.memory.at_peak_of(Holding.ACTIVATIONS)
    if place >= 0 and actions[place].stretch in tail:
        return max(0, total - held[False])
    return min(max(0, held[True]), total)


# Time

_EXPOSED = {
    ActionKind.ALL_GATHER: "exposed all-gather",
    ActionKind.REDUCE_SCATTER: "exposed reduce-scatter",
    ActionKind.ALL_REDUCE: "exposed all-reduce",
}


def _time_parts(estimate: Estimate) -> dict[str, float]:
    simulated = estimate.simulated
    spans = zip(estimate.step.actions, simulated.spans, strict=True)
    again_s = sum(s.end_s - s.start_s for each, s in spans if each.kind is ActionKind.RECOMPUTE)
    parts = {
        "compute": simulated.computing_s - estimate.optimizer_s - again_s,
        "recomputation": again_s,
    }
    parts |= {name: simulated.exposed(kind) for kind, name in _EXPOSED.items()}
    parts["optimizer"] = estimate.optimizer_s
    parts["host"] = simulated.host_bound_s
    parts["contention"] = estimate.contention_s
    # What lanes still do when the host and COMPUTE have ended, and what else COMPUTE waits for.
    parts["other"] = estimate.step_s - sum(parts.values())
    return parts


def _time(parts: dict[str, float]) -> TimePlan:
    step_s = sum(parts.values())
    # Differences of rounded numbers are none.
    shown = {name: s for name, s in parts.items() if name != "other" or s > 1e-9 * step_s}
    low, high = SPREAD
    return TimePlan(tuple(shown.items()), step_s, low * step_s, high * step_s)


def _bound_by(
    time: TimePlan, estimate: Estimate, workload: Workload, costs: Costs | CalibratedCosts
) -> str:
    parts = {name.removeprefix("exposed "): s for name, s in time.parts}
    computing = parts.pop("compute") + parts.pop("recomputation")
    of_kinds = dict.fromkeys(WorkKind, 0.0)
    for action in estimate.step.actions:
        if action.lane is Lane.COMPUTE and action.stretch >= 0:
            stretch = workload.stretches[action.stretch]
            works = {
                ActionKind.FORWARD: stretch.forward,
                ActionKind.RECOMPUTE: stretch.recomputed,
                ActionKind.BACKWARD: stretch.backward,
            }
            for work in works[action.kind]:
                of_kinds[work.kind] += costs.work_seconds(work)
    total = sum(of_kinds.values()) or 1.0
    parts["memory traffic"] = (
        computing * (of_kinds[WorkKind.MEMORY] + of_kinds[WorkKind.ROWS]) / total
    )
    parts["exchange"] = computing * of_kinds[WorkKind.EXCHANGE] / total
    parts["compute"] = computing - parts["memory traffic"] - parts["exchange"]
    return max(parts, key=lambda name: parts[name])


# Words


def _settings(subject: Subject, setup: TrainingSetup, workload: Workload) -> dict[str, Any]:
    """Return what is planned for, as numbers and texts."""
    given = {field.name: getattr(setup, field.name) for field in dataclasses.fields(setup)}
    precision = given.pop("precision")
    dtypes = {
        "stored_dtype": given.pop("stored"),
        "compute_dtype": precision.param_dtype,
        "reduce_dtype": precision.reduce_dtype,
    }
    del given["machine"]
    return {
        "model": subject.name,
        "num_params": subject.num_params,
        "num_units": len(workload.units),
        "units": [unit.name for unit in workload.units[1:]],
        "hosts": setup.hosts,
        "counts": subject.counts,
        "tokens_per_microbatch": workload.tokens,
        **given,
        "shard_size": setup.shards,
        "unsharded": [*setup.unsharded],
        **{name: dtype and str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
    }


def _lines(plan: TrainingPlan) -> list[str]:
    settings, memory, time = plan.settings, plan.memory, plan.time
    size, unit = (_GIB, "GiB") if memory.tensors_nbytes >= _GIB else (_MIB, "MiB")
    hosts, counts = settings["hosts"], settings["counts"]
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    lines = [
        f"{settings['model']}: {_short(settings['num_params'])} parameters, on {settings['ranks']} x "
        f"{plan.machine.gpu.name} in {hosts} host{'s' if hosts > 1 else ''}",
        f"{settings['tokens_per_microbatch']:,} {counts} a rank and micro-batch, {settings['accumulation']} a step; "
        f"sharded over {settings['shard_size']}",
        *_joined_by(plan),
        _units(settings["units"]),
        *([f"kept unsharded: {plan.kept}"] if plan.kept else []),
        *([str(plan.padding)] if plan.padding else []),
        *(
            ["Adafactor: DTensors, so fully_shard, refuse it with an error"]
            if settings["optimizer"] == "adafactor"
            else []
        ),
        "",
        f"Memory of a rank at the peak: {memory.when}",
        *(_amount(name, n / size, unit) for name, n in memory.parts if n >= 0.005 * size),
        _amount("in all", memory.total_nbytes / size, unit)
        + f" of {memory.capacity_nbytes / size:,.1f}: {verdict}",
        *_on_host(memory, size, unit),
        "",
        "Time of a step",
        *(
            _amount(name, s * 1e3, "ms") + f" {s / time.step_s:>7.1%}"
            for name, s in time.parts
            if s >= 5e-6
        ),
        _amount("in all", time.step_s * 1e3, "ms")
        + f"; nine of ten within {_rounded(time.low_s * 1e3)} to {_rounded(time.high_s * 1e3)}",
        "",
        f"{plan.tokens_per_s:,.0f} {counts}/s, {plan.mfu:.1%} MFU, bound by {plan.bound_by}",
    ]
    if plan.suggestions:
        lines += ["", "What to change first"]
        lines += [f"  {_said(each, time.step_s, size, unit)}" for each in plan.suggestions]
    return lines


def _joined_by(plan: TrainingPlan) -> list[str]:
    """Return the rates between ranks, of which most are assumed, not given."""
    machine = plan.machine
    if plan.settings["ranks"] == 1 or machine.figures is not None:
        return []
    link, network = (_rounded(rate / 1e9) for rate in (machine.link_rate, machine.network_rate))
    count = machine.per_host
    text = f"hosts of {count} GPU{'s' if count > 1 else ''}"
    if count > 1:
        text += f", {link} GB/s between them"
    if plan.settings["hosts"] > 1:
        text += f"; {network} GB/s between hosts for each GPU"
    return [text]


def _on_host(memory: MemoryPlan, size: int, unit: str) -> list[str]:
    if not memory.host_nbytes:
        return []
    return [
        _amount("host memory of a rank", memory.host_nbytes / size, unit),
        _amount(f"of {memory.ranks_per_host} on a host", memory.per_host_nbytes / size, unit),
    ]


def _units(names: Sequence[str]) -> str:
    """Return how many units there are beside the root, and the names of the first and the last."""
    if not names:
        return "1 unit, the root, which is gathered whole: name units to shard by (units=, --units)"
    return f"{len(names) + 1} units: the root, {_ends(names)}"


def _ends(names: Sequence[str]) -> str:
    return " ... ".join(dict.fromkeys(_tail_of(name) for name in (names[0], names[-1])))


def _tail_of(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else "..." + name[3 - _NAME_WIDTH :]


_NAME_WIDTH = 35


def _amount(name: str, value: float, unit: str) -> str:
    return f"  {name:<24}{value:>12,.2f} {unit}"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _said(each: Suggestion, step_s: float, size: int, unit: str) -> str:
    seconds, nbytes = -each.saved_s / step_s, -each.saved_nbytes / size
    memory = f"{nbytes:+,.2f} {unit}" if abs(nbytes) >= 0.005 else "same memory"
    return f"{seconds:>+7.1%} time {memory:>14}  {each.text}"


def _short(count: int) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)
