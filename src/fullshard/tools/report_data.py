"""What the report says, as data: figures with their explanations, and what the charts draw."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from fullshard.plan.amounts import nanoseconds, nbytes, scaled
from fullshard.plan.trace import Kind, RankTrace
from fullshard.tools.advice import verdict
from fullshard.tools.beside import beside
from fullshard.tools.doctor.findings import counted
from fullshard.tools.run_facts import peak_flops
from fullshard.tools.run_record import RunRecord, not_finite
from fullshard.tools.trace_metrics import (
    HOW,
    aligned,
    clock_error_ns,
    common_steps,
    exposed_ns,
    highest,
    kind_ns,
    peaks,
    rows,
    samples_of,
    shares,
    stalls,
    step_ns,
    unit_costs,
)
from fullshard.tools.waiting import waiting_lead, waits

_MOST_WAITS = 12  # on the page; --json has all
_LAST_STEPS = 20  # that the final loss averages, as in summary.json

HOW["speed"] = (
    "Tokens of a step over all ranks (bytes, without --tokenizer), divided by the seconds of that step on rank 0, "
    "from reading the text to the parameters' update. The figure is the median of all steps but the "
    "first, which allocates memory."
)
HOW["loss"] = (
    "Cross entropy in nats per token (a byte, without --tokenizer): the mean over all of a step. The figure is the mean of the last "
    f"{_LAST_STEPS} steps. The running mean gives a step the weight 0.95 for each step since. Unigram "
    "entropy is the loss of a model that knows only how frequent each token is."
)
HOW["peak"] = (
    "The most memory that any rank has held during the run: resident host memory of the process on "
    "the CPU, with Python and libraries; allocated device memory on a GPU."
)
HOW["flops"] = (
    "Operations of forward and backward for a token (6 for every weight of a matrix, and 12 x layers x width x "
    "tokens for attention; what is computed again is not counted; arXiv 2204.02311, appendix B), times the tokens "
    "per second, divided by the ranks. Utilization is the share of what the device's maker says for dense bfloat16."
)
HOW["norm"] = "The norm of all gradients together, before they are clipped to --clip."
HOW["lr"] = (
    "The learning rate of each step: it rises for --warmup steps and falls as a cosine to --min-lr."
)
HOW["val"] = (
    "Cross entropy on text that is never trained on (--val-fraction, --val-data): the mean of the same "
    "sequences each time."
)
HOW["tensors"] = (
    "The most that the categories under Memory over a step add up to, in the recorded steps, on any "
    "rank."
)


class Figure(NamedTuple):
    """One number: raw with its unit for programs, as text for people, and how it is computed.

    better: of two runs, the one whose number is "lower" or "higher".
    """

    name: str
    label: str
    value: float
    unit: str
    text: str
    note: str
    how: str
    better: str = "lower"


def figures(run: RunRecord) -> list[Figure]:
    """Return the headline figures that this run has."""
    return [*_times(run), *_memory(run), *_losses(run), *_flops(run)]


def _times(run: RunRecord) -> Iterator[Figure]:
    if run.metrics:
        unit = f"{_unit(run)}s/s"
        typical = "median of all but the first step" if run.metrics[1:] else "its only step"
        speed = statistics.median(_after_first(run.metrics, "tokens_per_second"))
        yield Figure(
            "tokens_per_second", "Speed", speed, unit, f"{speed:,.0f} {unit}",
            typical, HOW["speed"], "higher",
        )  # fmt: skip
        seconds = statistics.median(_after_first(run.metrics, "seconds"))
        yield Figure(
            "step_seconds", "Step", seconds, "s", nanoseconds(seconds * 1e9),
            typical, "Seconds of a step on rank 0, from reading the text to the parameters' update.",
        )  # fmt: skip
    if run.traces:
        total, exposed = step_ns(run.traces), exposed_ns(run.traces)
        span = recorded(run)
        if not run.metrics:
            yield Figure(
                "step_seconds", "Step", total / 1e9, "s", nanoseconds(total), f"mean of {span}", HOW["step"]
            )  # fmt: skip
        yield Figure(
            "exposed_share", "Exposed communication", exposed / total, "of the step",
            f"{100 * exposed / total:.1f} %", f"{nanoseconds(exposed)} of {nanoseconds(total)}, the mean of {span}",
            HOW["exposed"],
        )  # fmt: skip


def recorded(run: RunRecord) -> str:
    """Name the steps of the trace: "steps 29 to 31"."""
    steps = common_steps(run.traces)
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"


def _memory(run: RunRecord) -> Iterator[Figure]:
    tensors = 0
    if run.traces:
        most = highest(run.traces)
        tensors = most.total
        yield Figure(
            "peak_tensor_bytes", "Peak of tensors", tensors, "bytes", nbytes(tensors),
            f"rank {most.rank}, step {most.step}", HOW["tensors"],
        )  # fmt: skip
    if run.metrics:
        peak = (run.summary or {}).get("peak_memory_per_rank") or max(
            entry["peak_memory"] for entry in run.metrics
        )
        note = "most of any rank"
        if 0 < tensors < peak and run.config:
            rest = "Python, libraries, temporary results"
            if run.config.device != "cpu":
                rest = "temporary results"
            note += f"; {nbytes(peak - tensors)} of it are {rest}"
        yield Figure(
            "peak_memory", "Peak of a process", peak, "bytes", nbytes(peak), note, HOW["peak"]
        )


def parts(run: RunRecord) -> list[Figure]:
    """Return where the time of a recorded step goes, and the memory of its peak; nothing without a trace."""
    if not run.traces:
        return []
    total, exposed = step_ns(run.traces), exposed_ns(run.traces)
    times = [("step", "a recorded step", total, HOW["step"])]
    times.append(("exposed", "exposed communication", exposed, HOW["exposed"]))
    times += [(s.kind.value, s.kind.value, s.ns, HOW["time"]) for s in shares(run.traces)]
    most = highest(run.traces)
    held = [("peak", "peak of tensors", most.total), *zip(
        run.traces[0].categories, run.traces[0].categories, most.nbytes, strict=True
    )]  # fmt: skip
    return [
        *(
            Figure(f"time of {name}", label, ns, "ns", nanoseconds(ns), "", how)
            for name, label, ns, how in times
        ),
        *(
            Figure(f"memory of {name}", label, size, "bytes", nbytes(size), "", HOW["memory"])
            for name, label, size in held
        ),
    ]


def _losses(run: RunRecord) -> Iterator[Figure]:
    if not run.metrics:
        return
    losses = [loss for entry in run.metrics if math.isfinite(loss := entry["loss"])][-_LAST_STEPS:]
    loss = sum(losses) / len(losses) if losses else math.nan
    note, unit = f"nats per {_unit(run)}", f"nats/{_unit(run)}"
    if entropy := (run.summary or {}).get("unigram_entropy"):
        note += f"; unigram entropy {entropy:.2f}"
    if len(losses) < min(len(run.metrics), _LAST_STEPS):
        note += "; without steps where it is not finite"
    yield Figure("loss", "Loss", loss, unit, f"{loss:.3f}", note, HOW["loss"])
    for entry in [entry for entry in run.metrics if "val_loss" in entry][-1:]:
        held, note = entry["val_loss"], f"step {entry['step']}"
        yield Figure("val_loss", "Loss held out", held, unit, f"{held:.3f}", note, HOW["val"])


def _flops(run: RunRecord) -> Iterator[Figure]:
    """Give what a rank computes in a second, if the run says how large its model is."""
    per_token = run.facts.get("flops_per_token")
    if not (per_token and run.metrics and run.config):
        return
    of_rank = (
        entry["tokens_per_second"] / (run.config_at(entry["step"]) or run.config).ranks
        for entry in run.metrics[1:] or run.metrics
    )
    own = per_token * statistics.median(of_rank)
    device = run.facts["hardware"]["device"]
    peak = peak_flops(device, run.config.dtype)
    note = "forward and backward"
    if peak is not None:
        note += f"; utilization {100 * own / peak:.1f} % of {peak / 1e12:.0f} TFLOP/s"
    text = scaled(own, {"T": 1e12, "G": 1e9, "M": 1e6})
    yield Figure("flops", "Model FLOP/s, a rank", own, "FLOP/s", text, note, HOW["flops"], "higher")
    if peak is not None:
        text = f"{100 * own / peak:.1f} %"
        yield Figure(
            "mfu", "Utilization (MFU)", own / peak, "of the peak", text, device, HOW["flops"], "higher"
        )  # fmt: skip


def _unit(run: RunRecord) -> str:
    """Return what a loss is for."""
    return run.config.unit if run.config else "byte"


def summary_data(run: RunRecord) -> dict[str, Any]:
    """Return what ``fullshard report --json`` prints."""
    data: dict[str, Any] = {
        "run": run.name,
        "figures": {f.name: {"value": f.value, "unit": f.unit, "how": f.how} for f in figures(run)},
        "advice": _advice(run),
        "resumes": resumes(run),
    }
    if not run.traces:
        return data
    data["steps"] = common_steps(run.traces)
    data["ranks"] = [trace.rank for trace in run.traces]
    data["clock_error_ns"] = clock_error_ns(run.traces)
    data["time"] = {
        "how": HOW["time"],
        "step_ns": step_ns(run.traces),
        "kinds": _shares(run.traces),
    }
    for name, listed, find in (
        ("waits", "units", waits),
        ("units", "units", unit_costs),
        ("stalls", "ranks", stalls),
        ("memory", "peaks", peaks),
    ):
        data[name] = {"how": HOW[name], listed: [each._asdict() for each in find(run.traces)]}
    data["memory"]["categories"] = list(run.traces[0].categories)
    if run.planned:
        data["planned"] = {"how": HOW["planned"], **beside(run.planned, run.traces)}
    return data


def _shares(traces: Sequence[RankTrace]) -> list[dict[str, Any]]:
    return [{**share._asdict(), "kind": share.kind.value} for share in shares(traces)]


def _advice(run: RunRecord) -> list[dict[str, Any]]:
    return [{"rule": each.rule, "text": each.text, "gain": each.gain} for each in verdict(run)]


def page_data(run: RunRecord, *, refresh_s: int | None = None) -> dict[str, Any]:
    """Return everything that the page shows. refresh_s: after how many seconds it loads itself again."""
    data: dict[str, Any] = {
        "name": run.name,
        "title": run.title,
        "facts": facts(run),
        "advice": _advice(run),
        "switch": run.switch,
        "refresh_s": refresh_s,
        "figures": [figure._asdict() for figure in figures(run)],
        "about": about(run),
        "options": options(run),
        "series": series(run),
        "plan": None,
        "planned": None,
        "trace": None,
    }
    if run.traces:
        data["trace"] = trace_data(run.traces)
        if len(run.traces) > 1:
            data["trace"]["waits"] = {
                "lead": waiting_lead(run.traces),
                "ranks": [trace.rank for trace in run.traces],
                "units": [wait._asdict() for wait in waits(run.traces)[:_MOST_WAITS]],
            }
        data["planned"] = beside(run.planned, run.traces) if run.planned else None
    return data


def trace_data(
    traces: Sequence[RankTrace], *, capacity_nbytes: int | None = None
) -> dict[str, Any]:
    """Return what the page shows of traces. capacity_nbytes: of the device, where the chart of memory has a line."""
    return {
        "steps": common_steps(traces),
        "missing": traces[0].num_ranks - len(traces),
        "clock_error": nanoseconds(clock_error_ns(traces)),
        "one_host": clock_error_ns(traces) == 0,
        "step_ns": step_ns(traces),
        "exposed_ns": exposed_ns(traces),
        "fence_ns": kind_ns(traces, Kind.FENCE),
        "shares": _shares(traces),
        "units": [cost._asdict() for cost in unit_costs(traces)],
        "waits": None,
        "peaks": [peak._asdict() for peak in peaks(traces)],
        "capacity": capacity_nbytes,
        "kinds": [kind.value for kind in Kind],
        "communication": [kind.value for kind in Kind if kind.is_communication],
        "categories": list(traces[0].categories),
        "names": [traces[0].unit_name(unit) for unit in range(len(traces[0].units))],
        "ranks": [_rank_data(trace) for trace in aligned(traces)],
    }


def facts(run: RunRecord) -> list[str]:
    """Say in a few words what was run."""
    config, traces = run.config, run.traces
    said = []
    if config is not None:
        said += [
            f"model {config.model_name}",
            counted(config.ranks, f"{config.device} rank"),
            config.dtype,
            f"{config.global_batch} x {config.seq} {config.unit}s a step",
        ]
    elif traces:
        said.append(f"{traces[0].num_ranks} ranks on {traces[0].device.split(':')[0]}")
    if run.metrics:
        said.append(counted(len(run.metrics), "step"))
    if marks := not_finite(run.metrics):
        others = f" and {len(marks) - 1} more" if len(marks) > 1 else ""
        said.append(f"not finite: {marks[0][1]} in step {marks[0][0]}{others}")
    if traces:
        comm = dict.fromkeys(unit.comm for unit in traces[0].units)
        said.append(f"{counted(len(traces[0].units), 'unit')} over {', '.join(comm)}")
    status = (run.summary or {}).get("status")
    if run.config is not None and status != "finished":
        said.append("stopped early" if status == "stopped" else "not finished")
    return said


def about(run: RunRecord) -> list[tuple[str, str]]:
    """Return what the run was made of, as rows: hardware, versions, the model's size."""
    if not run.facts:
        return []
    hardware, versions = run.facts["hardware"], run.facts["versions"]
    processor = f"{hardware['processor']}, {hardware['processors']} processors"
    flops = run.facts["flops_per_token"]
    of_flops = "FLOPs a token not known" if flops is None else f"{flops:,} FLOPs a token"
    rows = [
        ("Model", f"{run.facts['num_parameters']:,} parameters, {of_flops}"),
        ("Device", hardware["device"]),
        ("Host", f"{processor}, {nbytes(hardware['memory_nbytes'])} of memory"),
        ("System", hardware["system"]),
        ("Versions", ", ".join(f"{name} {version}" for name, version in versions.items())),
    ]
    return [(name, text) for name, text in rows if text]


def options(run: RunRecord) -> list[tuple[str, str]]:
    """Return every option of the run, as rows."""
    if run.config is None:
        return []
    fields = {**dataclasses.asdict(run.config), "model": run.config.model_name}.items()
    return [(name, option_text(value)) for name, value in fields]


def option_text(value: Any) -> str:
    """Write an option's value for people."""
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    return str(value) or "none"


def series(run: RunRecord) -> dict[str, Any] | None:
    """Return what the charts of steps draw; None if no step is known.

    tokens, elapsed: of the training until each step, in tokens (or bytes) and in seconds of steps.
    """
    if not run.metrics:
        return None
    steps = common_steps(run.traces) if run.traces else []
    norm = _known(run.metrics, "grad_norm")
    done = [entry["step"] for entry in run.metrics]
    seconds = [entry["seconds"] for entry in run.metrics]
    if run.config is not None:  # a resume does not change how many there are in a step
        tokens = [step * run.config.tokens_per_step for step in done]
    else:
        tokens = [entry["tokens_per_second"] * entry["seconds"] for entry in run.metrics]
        tokens = list(itertools.accumulate(tokens))
    return {
        "unit": _unit(run),
        "steps": done,
        "tokens": tokens,
        "elapsed": list(itertools.accumulate(seconds)),
        "loss": [entry["loss"] for entry in run.metrics],
        "speed": [entry["tokens_per_second"] for entry in run.metrics],
        "loss_mean": running_mean([entry["loss"] for entry in run.metrics]),
        "norm": norm,
        "norm_mean": norm and running_mean(norm),
        "lr": _known(run.metrics, "lr"),
        "val": [[entry["step"], entry["val_loss"]] for entry in run.metrics if "val_loss" in entry],
        "entropy": (run.summary or {}).get("unigram_entropy"),
        "not_finite": not_finite(run.metrics),
        "traced": [steps[0], steps[-1]] if steps else None,
        "cost": _tracing_cost(run.metrics, steps),
        "resumes": resumes(run),
    }


def resumes(run: RunRecord) -> list[dict[str, Any]]:
    """Return after which steps the run was resumed, and with which options that it did not have before."""
    if run.config is None:
        return []
    configs = [*(part["options"] for part in run.earlier), run.config]
    found = []
    for part, before, after in zip(run.earlier, configs, configs[1:], strict=False):
        old, new = dataclasses.asdict(before), dataclasses.asdict(after)
        changed = [
            f"{name} {option_text(old[name])} -> {option_text(new[name])}"
            for name in new
            if new[name] != old[name]
        ]
        found.append({"step": part["until"], "changed": ", ".join(changed)})
    return found


def running_mean(values: Sequence[float], *, weight: float = 0.95) -> list[float]:
    """Average exponentially, without the pull towards zero at the start.

    With weight 0.5, (4, 2) gives 4 and (0.5 * 4 + 2) / (0.5 + 1) = 2.67. What is not finite stays so, and
    counts in no other mean.
    """
    total = count = 0.0
    means = []
    for value in values:
        if not math.isfinite(value):
            means.append(value)
            continue
        total = weight * total + value
        count = weight * count + 1
        means.append(total / count)
    return means


def _known(metrics: Sequence[dict[str, Any]], name: str) -> list[float] | None:
    """Return a number of every step; None if one lacks it."""
    return [entry[name] for entry in metrics] if all(name in entry for entry in metrics) else None


def _tracing_cost(metrics: Sequence[dict[str, Any]], traced: Sequence[int]) -> float | None:
    """Return by which factor recording made steps longer."""
    others = [e["seconds"] for e in metrics[1:] if e["step"] not in traced]
    own = [e["seconds"] for e in metrics if e["step"] in traced]
    return statistics.median(own) / statistics.median(others) if own and others else None


def _rank_data(trace: RankTrace) -> dict[str, Any]:
    kinds = list(Kind)
    lanes = {
        kind: rows([moved for moved in trace.transfers if moved.kind is kind])
        for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
    }
    return {
        "rank": trace.rank,
        "steps": trace.steps,
        "timeline": [(kinds.index(s.kind), *s[1:]) for s in trace.timeline],
        "lanes": [
            {"kind": kind.value, "rows": [[moved[1:] for moved in row] for row in found]}
            for kind, found in lanes.items()
        ],
        "samples": [
            [(sample.time, *sample.nbytes) for sample in samples_of(trace, step)]
            for step in trace.steps
        ],
    }


def _after_first(metrics: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in metrics[1:] or metrics]
