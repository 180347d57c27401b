"""The page of a run that did not happen: `fullshard plan --page`. It is drawn as the page of `fullshard report` is."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.json_files import json_text
from fullshard.plan.amounts import nbytes, seconds
from fullshard.plan.trace import RankTrace
from fullshard.planning.search import SearchResult
from fullshard.planning.traces import planned_traces
from fullshard.planning.training import Suggestion, TrainingPlan
from fullshard.tools.report import Written, render, trace_leads, write_file, write_page
from fullshard.tools.report_data import Figure, option_text, trace_data
from fullshard.tools.trace_metrics import HOW

# How the page says that figures are computed, where a plan has them from elsewhere than a recording.
_HOW = HOW | {
    "time": "The schedule that the engine executes, run on clocks: how long a kernel or a collective takes on this machine "
    "is from measured figures of such kernels, scaled to its nominal rates. Computing takes longer while bytes "
    "travel (contention). Every moment belongs to one part, so the parts add up to the step.",
    "memory": "By the layouts, buffers and schedule that the engine has, and by what autograd saves for backward, when the "
    "host issues each action. Temporary results: what kernels need while they run. Other: buffers, and on a device the slack "
    "of its allocator and the driver's context, which are there all the time.",
    "plan_memory": "What a rank's memory is used for at the moment when most of it is in use. Allocator slack: what a caching "
    "allocator has beyond what it has given out. Context: of the driver and of communicators.",
    "units": "Exposed: the parts of the simulated timeline in which compute stands still for this unit's all-gather or "
    "reduce-scatter. In flight: from start to result. Size: the unit's unsharded parameters, or full gradients, times how "
    "often they are communicated.",
    "step": "Time until all is over, with contention. Nine of ten published runs took between the two times beside it, as "
    "shares of what was planned for them.",
    "speed": "Tokens of a step over all ranks, divided by the time of the step.",
    "mfu": "Operations of forward and backward without what is computed again, divided by the time of the step and the nominal "
    "dense bfloat16 rate of the device.",
    "bound": "The largest part of a step, with computing divided into what matrix products and what memory traffic take.",
    "exposed": "Time of a step in which compute stands still for communication.",
    "alternatives": "Each point is a way that a search found to train as many sequences a step on the same machine; the plan above is "
    "of the options as they were given. Memory is what a rank needs, without the slack of its allocator, which gives way.",
}  # fmt: skip
_COLOURS = {
    "compute": "forward", "recomputation": "backward", "exposed all-gather": "wait for all-gather", "optimizer": "optimizer", "host": "other",
    "exposed reduce-scatter": "wait for reduce-scatter", "exposed all-reduce": "reduce-scatter", "contention": "all-gather",
    "parameters": "m0", "communication": "m1", "optimizer state": "m2", "full gradients": "m3", "unsharded units": "m4",
    "activations": "m5", "gradient shards": "m6", "logits and loss": "m8",
}  # fmt: skip


class Alternative(NamedTuple):
    """Another way to train, as a point of the page.

    said: why it is not better, or what it is. is_front: nothing is both smaller and faster. rank: its place among
    the best, 0 without one. memory, time: its parts, in bytes and seconds, if they are known. code: that trains so.
    """

    name: str
    said: str
    step_s: float
    nbytes: int
    fits: bool
    is_front: bool
    rank: int
    settings: Mapping[str, Any]
    memory: Sequence[tuple[str, float]] = ()
    time: Sequence[tuple[str, float]] = ()
    code: str = ""


def alternatives_of(found: SearchResult) -> list[Alternative]:
    """Return what a search found as points: the best, each with why it is not better, the front, and what is too large."""
    said = dict(zip(found.best, found.reasons, strict=True))
    for each in found.front:
        said.setdefault(each, "No other way is faster and smaller.")
    for each in found.excluded:
        over = nbytes(each.memory.needed_nbytes - found.limit_nbytes)
        said.setdefault(each, f"Faster than the best, and {over} too large.")
    ranks = {each: number for number, each in enumerate(found.best, start=1)}
    return [
        Alternative(
            name=str(each.choice),
            said=text,
            step_s=each.step_s,
            nbytes=each.memory.needed_nbytes,
            fits=each.memory.needed_nbytes <= found.limit_nbytes,
            is_front=each in found.front,
            rank=ranks.get(each, 0),
            settings={
                **each.choice._asdict(),
                "unsharded": each.unsharded,
                "host memory of a rank": nbytes(each.memory.host_nbytes),
            },
            memory=[part for part in each.memory.parts if part[0] != "allocator slack"],
            time=each.time,
            code=f"# {found.launch}\n\n{found.program}" if each == found.best[0] else "",
        )
        for each, text in said.items()
    ]


def write_plan(plan: TrainingPlan, out: Path) -> None:
    """Write a plan with its simulated step, which `fullshard report` lays beside a run. Raises OptionError.

    Of tensors alone, as a recording counts them.
    """
    traces = [trace.as_json() for trace in planned_traces(plan.estimate)]
    write_file(out, json_text({**plan.as_dict(), "traces": traces}))


def write_plan_page(
    plan: TrainingPlan, out: Path, alternatives: Sequence[Alternative] = ()
) -> Written:
    """Write the page of a plan, and `trace.json` beside it. Raises OptionError where they cannot be written."""
    data, more = plan_data(plan, alternatives)
    text = render("report.html", data, **more)
    return write_page(out, text, _traces(plan), option="--page")


def _traces(plan: TrainingPlan) -> list[RankTrace]:
    beyond_nbytes = plan.memory.total_nbytes - plan.memory.tensors_nbytes
    return planned_traces(plan.estimate, beyond_nbytes=beyond_nbytes)


def plan_data(
    plan: TrainingPlan, alternatives: Sequence[Alternative] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the page shows, and what of it no script reads."""
    memory, time, settings = plan.memory, plan.time, plan.settings
    traces = _traces(plan)
    trace = trace_data(traces, capacity_nbytes=memory.capacity_nbytes) | {"missing": 0}
    name = str(settings.get("model", "a model"))
    points = [
        {
            "name": each.name,
            "step_ns": 1e9 * each.step_s,
            "nbytes": each.nbytes,
            "fits": each.fits,
            "is_front": each.is_front,
        }
        for each in alternatives
    ]
    data = {
        "name": name,
        "title": f"{name} on {traces[0].num_ranks} x {plan.machine.gpu.name}",
        "facts": ["planned, not run", f"bound by {plan.bound_by}"],
        "advice": _advice(plan),
        "switch": None,
        "planned": None,
        "refresh_s": None,
        "figures": [figure._asdict() for figure in _figures(plan)],
        "about": [*_machine(plan), *([("Kept unsharded", str(plan.kept))] if plan.kept else [])],
        "options": [(key, option_text(value)) for key, value in settings.items()],
        "series": None,
        "trace": trace,
        "plan": {
            "memory": {
                "lead": f"{nbytes(memory.total_nbytes)} of {nbytes(memory.capacity_nbytes)}, in the {memory.when}.",
                "parts": _parts(memory.parts, nbytes),
            },
            "time": {
                "lead": f"{seconds(time.step_s)}, bound by {plan.bound_by}.",
                "parts": _parts(time.parts, seconds),
            },
            "timeline_lead": _timeline_lead(plan, traces),
            "alternatives": points,
        },
    }
    more = {
        "how_texts": _HOW,
        "stalls_lead": "",
        "alternatives_lead": f"{len(alternatives)} ways to train on the same machine.",
        "alternatives": [
            {
                **point,
                "number": number,
                "rank": each.rank,
                "said": each.said,
                "settings": [(key, option_text(value)) for key, value in each.settings.items()],
                "memory": _parts(each.memory, nbytes),
                "time": _parts(each.time, seconds),
                "code": each.code,
            }
            for number, (each, point) in enumerate(zip(alternatives, points, strict=True))
        ],
        **trace_leads(trace),
    }
    return data, more


def _timeline_lead(plan: TrainingPlan, traces: Sequence[RankTrace]) -> str:
    ranks = " and ".join(f"rank {trace.rank}" for trace in traces)
    like = "the last one holds less" if len(traces) > 1 else "all are alike"
    said = f"A simulated step of {ranks} of {traces[0].num_ranks}: {like}."
    shown, num = plan.estimate.settings.num_microbatches, plan.settings.get("accumulation", 1)
    if shown < num:
        said += f" It shows {shown} of {num} micro-batches; the others are like them."
    return said


def _parts(parts: Iterable[tuple[str, float]], write: Any) -> list[dict[str, Any]]:
    shown = [(name, value) for name, value in parts if value > 0]
    total = sum(value for _, value in shown)
    return [
        {
            "name": name,
            "text": write(value),
            "share": value / total,
            "colour": _COLOURS.get(name, "m7"),
        }
        for name, value in shown
    ]


def _advice(plan: TrainingPlan) -> list[dict[str, Any]]:
    memory = plan.memory
    apart = nbytes(abs(memory.capacity_nbytes - memory.total_nbytes))
    first = (
        f"It fits: at the peak, in the {memory.when}, {apart} of {nbytes(memory.capacity_nbytes)} are left."
        if memory.fits
        else f"It does not fit: at the peak, in the {memory.when}, {apart} more are needed than the "
        f"{nbytes(memory.capacity_nbytes)} of {plan.machine.gpu.name}."
    )
    advice = [{"text": first, "gain": ""}]
    return advice + [
        {"text": each.text, "gain": _gain(each, plan.time.step_s)} for each in plan.suggestions
    ]


def _gain(each: Suggestion, step_s: float) -> str:
    """Say what a suggestion saves and costs: "saves 4.0 % of a step, costs 2.10 GiB"."""
    said = []
    for saved, text in (
        (each.saved_s, f"{100 * abs(each.saved_s) / step_s:.1f} % of a step"),
        (each.saved_nbytes, nbytes(abs(each.saved_nbytes))),
    ):
        if saved:
            said.append(f"{'saves' if saved > 0 else 'costs'} {text}")
    return ", ".join(said)


def _figures(plan: TrainingPlan) -> list[Figure]:
    memory, time = plan.memory, plan.time
    exposed_s = sum(s for name, s in time.parts if name.startswith("exposed"))
    exposed = exposed_s / time.step_s
    fits = "it fits" if memory.fits else "it does not fit"
    spread = f"nine of ten runs: {seconds(time.low_s)} to {seconds(time.high_s)}"
    return [
        Figure("step_seconds", "Step", time.step_s, "s", seconds(time.step_s), spread, _HOW["step"]),
        Figure("tokens_per_second", "Speed", plan.tokens_per_s, "tokens/s", f"{plan.tokens_per_s:,.0f} tokens/s", "all ranks", _HOW["speed"], "higher"),
        Figure("mfu", "Utilization (MFU)", plan.mfu, "of the peak", f"{100 * plan.mfu:.1f} %", plan.machine.gpu.name, _HOW["mfu"], "higher"),
        Figure("peak_memory", "Peak of a rank", memory.total_nbytes, "bytes", nbytes(memory.total_nbytes), f"of {nbytes(memory.capacity_nbytes)}: {fits}", _HOW["plan_memory"]),
        Figure("exposed_share", "Exposed communication", exposed, "of the step", f"{100 * exposed:.1f} %", seconds(exposed_s), _HOW["exposed"]),
        Figure("bound_by", "Bound by", 0, "", plan.bound_by, "the largest part of a step", _HOW["bound"]),
    ]  # fmt: skip


def _machine(plan: TrainingPlan) -> list[tuple[str, str]]:
    gpu, machine = plan.machine.gpu, plan.machine
    return [
        (
            "Device",
            f"{gpu.name}: {gpu.flops / 1e12:.0f} TFLOP/s, {gpu.memory_rate / 1e9:,.0f} GB/s, {nbytes(gpu.memory_nbytes)}",
        ),
        (
            "Hosts",
            f"{machine.per_host} devices each, joined by {machine.link_rate / 1e9:,.0f} GB/s; "
            f"{machine.network_rate / 1e9:,.1f} GB/s between hosts for each",
        ),
    ]
