"""What to do about a run: one function a rule, each from the run's own numbers.

A rule gives nothing, or one sentence with what it would gain at most. The thresholds are the smallest effects
that are worth a change of a program; each has its reason beside it.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fullshard.plan.amounts import nanoseconds, nbytes
from fullshard.plan.trace import Kind
from fullshard.tools import trace_metrics as metrics
from fullshard.tools.config import TrainConfig
from fullshard.tools.doctor.findings import counted
from fullshard.tools.run_record import RunRecord, not_finite
from fullshard.tools.waiting import Straggler, straggler

_MOST = 3  # more are not read
_TRACE_DEPENDS_ON = ("ranks", "batch", "grad_accum", "activation_checkpointing", "device")

_EXPOSED = 0.15  # of less, twice the batch saves 7 % at most, which is noise on many machines
_LATE = 0.05  # of a step: ranks that are equally fast take turns in being last, by a few per cent
_OPTIMIZER = 0.1  # DTensors take several times plain tensors, so that most of it can go
_STARVED = 0.3  # the host may be just behind at the start of each step, after it has read the loss
_SAVED = 0.4  # of the peak: below, parameters and optimizer state decide whether a model fits
_FREED = 0.1  # of what a process takes: less is not worth a third more compute
_MEMORY_WEIGHT = 0.1  # in the ranking: memory that is left over makes nothing faster by itself
_OUTSIDE = 0.25  # reading text, the loss and clipping take up to a fifth in small models
_SMALL_NBYTES = 2**18  # a gather of less costs its fixed time, whatever the bandwidth

_FELL = 0.8  # of the speed before: below that, and with quartiles apart, it is no noise
_LEAST = 10  # steps on each side of a fall, and in a window of losses: the mean of fewer follows single steps
_POINTS = 400  # of the curve in which a fall is looked for; of longer runs each is the median of some steps
_DIVERGED = 1.1  # times the lowest loss of a window; batches differ by a few per cent


class Advice(NamedTuple):
    """A sentence on a run. rule: its name. gain: for people. share: of a step at most, to rank by; inf comes first."""

    rule: str
    text: str
    gain: str
    share: float


def advise(run: RunRecord) -> list[Advice]:
    """Return what stands out in a run, what gains most first, at most three; nothing if it is healthy."""
    past = _outdated(run)
    if past:
        run = dataclasses.replace(run, traces=[])
    found = [*past, *(advice for rule in _RULES for advice in rule(run))]
    return sorted(found, key=lambda advice: -advice.share)[:_MOST]


def _outdated(run: RunRecord) -> list[Advice]:
    """Say that a trace tells nothing of what is to gain, as the run went on with other options."""
    if not run.traces or run.config is None:
        return []
    steps = metrics.common_steps(run.traces)
    then = run.config_at(steps[-1]) or run.config
    changed = ", ".join(
        f"--{name.replace('_', '-')} {getattr(run.config, name)} in place of {getattr(then, name)}"
        for name in _TRACE_DEPENDS_ON
        if getattr(run.config, name) != getattr(then, name)
    )
    text = (
        f"Steps {steps[0]} to {steps[-1]} were traced before the run went on with {changed}, so they do not tell what is "
        "to gain now: resume with --trace-steps to record others."
    )
    return [Advice("old trace", text, "", 0.0)] if changed else []


def verdict(run: RunRecord) -> list[Advice]:
    """Return `advise`, or one sentence that says that nothing stands out."""
    return advise(run) or [Advice("nothing", _healthy(run), "", 0.0)]


def stalled(run: RunRecord) -> str:
    """Say what held ranks up beside their own work."""
    found = [advice.text for rule in (_collector, _allocator) for advice in rule(run)]
    return (
        " ".join(found) or "Neither the garbage collector nor a device's allocator holds up a rank."
    )


def _healthy(run: RunRecord) -> str:
    if not run.traces:
        num = len(run.metrics)
        return (
            f"Loss and speed show nothing unusual in {counted(num, 'step')}. Where their time goes is not known, since none "
            "was traced."
        )
    total = metrics.step_ns(run.traces)
    work = metrics.kind_ns(run.traces, Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER) / total
    other = metrics.kind_ns(run.traces, Kind.OTHER) / total
    exposed = metrics.exposed_ns(run.traces) / total
    return (
        f"Nothing stands out: {_percent(work)} of a step computes, {_percent(exposed)} is exposed communication, "
        f"and {_percent(other)} lies outside of the model."
    )


# The loss


def _loss(run: RunRecord) -> Iterator[Advice]:
    config = run.config
    options = f" (--lr {config.lr}, --warmup {config.warmup})" if config else ""
    if marks := not_finite(run.metrics):
        step, what = marks[0]
        others = f", and {len(marks) - 1} more since" if len(marks) > 1 else ""
        before = [entry for entry in run.metrics if entry["step"] < step]
        last = (
            f" (step {before[-1]['step']} had a loss of {before[-1]['loss']:.3f})" if before else ""
        )
        yield Advice(
            "not finite",
            f"Step {step} is not finite: {what}{last}{others}. Lower the learning rate or raise the warmup{options}; "
            "FULLSHARD_DEBUG=nan names the layer in which it begins.",
            "",
            math.inf,
        )
        return
    size = max(_LEAST, len(run.metrics) // 10)
    windows = [run.metrics[first : first + size] for first in range(0, len(run.metrics), size)]
    means = [sum(e["loss"] for e in each) / size for each in windows if len(each) == size]
    if len(means) < 2:
        return
    lowest = min(range(len(means)), key=means.__getitem__)
    if means[-1] > _DIVERGED * means[lowest] > 0:
        step = windows[lowest][-1]["step"]
        yield Advice(
            "diverges",
            f"The loss rises from step {step} on: from {means[lowest]:.3f} to {means[-1]:.3f}, means of {size} steps. "
            f"Lower the learning rate or raise the warmup{options}.",
            "",
            math.inf,
        )


# Time


def _exposed(run: RunRecord) -> Iterator[Advice]:
    if not run.traces:
        return
    total, exposed, beside = metrics.step_ns(run.traces), metrics.exposed_ns(run.traces), ""
    if late := _straggler(run):  # no batch size would help against that
        exposed -= late.waited_ns * (len(run.traces) - 1) / len(run.traces)
        beside = f" beside the waits for rank {late.rank}"
    if exposed < _EXPOSED * total:
        return
    costs = metrics.unit_costs(run.traces)
    gathers = sum(cost.gather_ns for cost in costs)
    reduces = sum(cost.reduce_ns for cost in costs)
    num_gathers = sum(cost.num_gathers for cost in costs)
    num_reduces = sum(cost.num_reduces for cost in costs)
    num_units = sum(bool(cost.num_gathers) for cost in costs) or 1
    sizes = [unit.unsharded_nbytes for unit in run.traces[0].units]
    fences = metrics.kind_ns(run.traces, Kind.FENCE)
    if not beside and fences > exposed / 2:
        rule, free = "barriers", fences
        todo = (
            "In most of it ranks wait for each other in turn, at barriers: see whether other programs share their "
            "processors, and whether sequences differ in length"
        )
    elif run.config is not None:
        rule, todo, free = "batch", *_larger_batch(run.config, exposed)
    elif len({trace.clock.host for trace in run.traces}) > 1:
        rule, free = "hybrid", gathers
        todo = (
            "Shard among the ranks of a host only, with a mesh of (hosts, ranks of a host): then parameters "
            "never cross between hosts, if a host's memory suffices"
        )
    elif len(sizes) > 2 and statistics.median(sizes) < _SMALL_NBYTES:
        rule, free = "small units", exposed / 2
        todo = (
            f"Half of the {len(sizes)} units have no more than {nbytes(statistics.median(sizes))}, for which the host's "
            "time per unit counts, not the bytes: apply fully_shard to several layers together"
        )
    elif reduces > gathers and num_reduces >= 2 * num_units:
        rule, free = "accumulate", reduces * (1 - num_units / num_reduces)
        todo = (
            f"Gradients are reduced {num_reduces / num_units:.0f} times a step: set_requires_gradient_sync(False) until "
            "the last micro-batch reduces them once, for the memory of whole gradients"
        )
    elif gathers >= reduces and num_gathers >= 1.5 * num_units:
        rule, free = "reshard", gathers / 2
        todo = (
            "Parameters are gathered again for the backward: reshard_after_forward=False keeps them, for the memory "
            "of all unsharded parameters, and fullshard.keep_unsharded those that a budget of bytes holds"
        )
    else:
        rule, free = "batch", exposed / 2
        todo = "A batch of twice the size communicates as much for twice the samples"
    said = f"{_percent(exposed / total)} of a step is exposed communication{beside} ({nanoseconds(exposed)}). {todo}."
    yield _frees(rule, said, free, total)


def _larger_batch(config: TrainConfig, exposed: float) -> tuple[str, float]:
    """Say which options move fewer bytes for a token, and what that frees of a step at most."""
    if config.grad_accum > 1:
        # Each micro-batch gathers and reduces, so one of all sequences communicates once.
        free = exposed * (1 - 1 / config.grad_accum)
        wanted = f"--batch {config.batch * config.grad_accum} --grad-accum 1"
        return (
            f"{wanted} instead of --batch {config.batch} --grad-accum {config.grad_accum} trains on as many sequences "
            "and communicates once a step, if memory suffices",
            free,
        )
    return (
        f"--batch {2 * config.batch} instead of {config.batch} communicates as much for twice the {config.unit}s, if "
        "memory suffices",
        exposed / 2,
    )


def _straggler(run: RunRecord) -> Straggler | None:
    """Return the rank that holds up the others, if it does so by enough to be more than chance."""
    found = straggler(run.traces) if run.traces else None
    return found if found and found.net_ns >= _LATE * metrics.step_ns(run.traces) else None


def _late(run: RunRecord) -> Iterator[Advice]:
    if (found := _straggler(run)) is None:
        return
    others = "the other rank waits" if len(run.traces) == 2 else "the others wait"
    yield _frees(
        "late",
        f"Rank {found.rank} arrives late: {others} {nanoseconds(found.waited_ns)} a step for it, most at "
        f"{found.where}. {found.why or 'Look at what else its host does.'}",
        found.net_ns,
        metrics.step_ns(run.traces),
    )


def _optimizer(run: RunRecord) -> Iterator[Advice]:
    num_dtensors = max((trace.num_dtensors or 0 for trace in run.traces), default=0)
    if not num_dtensors:
        return
    total = metrics.step_ns(run.traces)
    ns = metrics.kind_ns(run.traces, Kind.OPTIMIZER)
    if ns >= _OPTIMIZER * total:
        yield _frees(
            "optimizer",
            f"The optimizer takes {_percent(ns / total)} of a step ({nanoseconds(ns)}) on {num_dtensors} DTensors. "
            "fullshard.step_on_shards(optimizer) steps on plain tensors, with equal results.",
            ns,
            total,
        )


def _host(run: RunRecord) -> Iterator[Advice]:
    if not run.traces:
        return
    ns, total = metrics.starved_ns(run.traces), metrics.step_ns(run.traces)
    if ns >= _STARVED * total:
        yield _frees(
            "host",
            f"The device waits for its host in {_percent(ns / total)} of a step ({nanoseconds(ns)}): Python queues kernels "
            "more slowly than they run. Take a larger batch, apply fully_shard to several layers together, or compile "
            "the layers (torch.compile).",
            ns,
            total,
        )


def _outside(run: RunRecord) -> Iterator[Advice]:
    if run.config is not None or not run.traces:  # of `fullshard train`, nobody can change it
        return
    total = metrics.step_ns(run.traces)
    ns = metrics.kind_ns(run.traces, Kind.OTHER)
    if ns >= _OUTSIDE * total:
        yield _frees(
            "outside",
            f"{_percent(ns / total)} of a step ({nanoseconds(ns)}) lies outside of the model and the optimizer: reading "
            "batches, the loss, clipping, logging. Read batches ahead (num_workers of a DataLoader), and log less often.",
            ns,
            total,
        )


def _slower(run: RunRecord) -> Iterator[Advice]:
    first = max((part["until"] for part in run.earlier), default=0)  # what changed then is known
    traced = {step.number for trace in run.traces for step in trace.steps}
    steps = [e for e in run.metrics[1:] if e["step"] > first + 1 and e["step"] not in traced]
    size = len(steps) // _POINTS + 1
    windows = [steps[at : at + size] for at in range(0, len(steps), size)]
    speeds = [statistics.median(e["tokens_per_second"] for e in window) for window in windows]
    splits = range(_LEAST, len(speeds) - _LEAST + 1)
    at = min(splits, key=lambda at: _spread(speeds[:at]) + _spread(speeds[at:]), default=0)
    if not at:
        return
    before, after = statistics.median(speeds[:at]), statistics.median(speeds[at:])
    low_before = statistics.quantiles(speeds[:at], n=4)[0]
    high_after = statistics.quantiles(speeds[at:], n=4)[2]
    if after > _FELL * before or high_after >= low_before:
        return
    late = _straggler(run) if traced and min(traced) > windows[at - 1][-1]["step"] else None
    why = (
        f"The steps recorded since then show that rank {late.rank} holds up the others"
        if late
        else "The options did not change: the machine became busier or was throttled, or text is read more slowly"
    )
    unit = run.config.unit if run.config else "token"
    yield Advice(
        "slower",
        f"The speed fell by {_percent(1 - after / before)} after step {windows[at - 1][-1]['step']}, from {before:,.0f} to "
        f"{after:,.0f} {unit}s/s (medians). {why}.",
        f"up to {_percent(1 - after / before)} of a step",
        1 - after / before,
    )


def _spread(values: Sequence[float]) -> float:
    """Return the sum of distances from the median, which one value that is far off does not change by much."""
    middle = statistics.median(values)
    return sum(abs(value - middle) for value in values)


def _collector(run: RunRecord) -> Iterator[Advice]:
    found = metrics.stalls(run.traces) if run.traces else []
    worst = max(found, key=lambda each: each.share, default=None)
    if worst is None or worst.share < metrics.COLLECTOR_MATTERS:
        return
    yield _frees(
        "collector",
        f"The garbage collector takes {100 * worst.share:.1f} % of a step on rank {worst.rank}, and the others wait for "
        "it. Call gc.freeze() after setting up, or gc.disable(), and gc.collect() on all ranks at one step in some "
        "hundreds.",
        worst.collector_ns,
        metrics.step_ns(run.traces),
    )


def _allocator(run: RunRecord) -> Iterator[Advice]:
    worst = max(run.traces, key=lambda trace: trace.num_alloc_retries or 0, default=None)
    if worst is None or not worst.num_alloc_retries:
        return
    yield Advice(
        "allocator",
        f"The allocator of rank {worst.rank} ran out of memory {worst.num_alloc_retries} times, gave its cache back and tried again: "
        "memory is nearly full, or in pieces. Take smaller micro-batches, or set "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.",
        "",
        1.0,  # each makes the device stand still, for how long nobody measures
    )


# Memory


def _activations(run: RunRecord) -> Iterator[Advice]:
    if not run.traces or (run.config and run.config.activation_checkpointing):
        return
    most = metrics.highest(run.traces)
    held = dict(zip(run.traces[0].categories, most.nbytes, strict=True))
    saved, num_layers = held.get("saved for backward", 0), len(run.traces[0].units) - 1
    if num_layers < 2 or saved < _SAVED * most.total:
        return
    # One layer's are there at a time, when its forward runs again; beside them its inputs stay.
    free = saved * (1 - 1 / num_layers)
    whole = max([most.total, *(entry["peak_memory"] for entry in run.metrics)])
    if free < _FREED * whole:
        return
    how = "--activation-checkpointing" if run.config else "activation checkpointing of each layer"
    yield Advice(
        "activations",
        f"Activations are {_percent(saved / most.total)} of the tensors at the peak ({nbytes(saved)} of "
        f"{nbytes(most.total)}, rank {most.rank}). If memory is short, {how} saves up to {nbytes(free)} a rank and computes "
        "each forward twice.",
        f"up to {nbytes(free)} a rank",
        free / whole * _MEMORY_WEIGHT,
    )


_RULES: Sequence[Callable[[RunRecord], Iterator[Advice]]] = (
    *(_loss, _exposed, _late, _optimizer, _host, _outside, _slower),
    *(_collector, _allocator, _activations),
)


def _frees(rule: str, text: str, ns: float, total: float) -> Advice:
    """Return advice that frees so much of a step at most."""
    gain = f"up to {nanoseconds(ns)} ({_percent(ns / total)}) of a step"
    return Advice(rule, text, gain, ns / total)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
