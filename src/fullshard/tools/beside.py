"""A plan beside what was measured: what differs, by part, and where it comes from.

Both are traces. Of a plan `fullshard plan --out RUN/plan.json` wrote them; `fullshard report RUN` compares.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fullshard.plan.amounts import nanoseconds, nbytes
from fullshard.plan.trace import CATEGORIES, TEMPORARY, Kind, RankTrace
from fullshard.tools.doctor.findings import counted
from fullshard.tools.run_record import changed
from fullshard.tools.trace_metrics import (
    GATHER_KINDS,
    HOW,
    REDUCE_KINDS,
    UnitCost,
    peaks,
    shares,
    step_ns,
    unit_costs,
    unit_ns,
)

HOW["planned"] = (
    "Planned: the schedule of the engine, run on clocks. Measured: means over recorded steps and ranks. Parts add up to "
    "the step on both sides. Memory: of the rank that holds the most, at its peak; on the CPU without temporary results "
    "and buffers, which a recording does not count there."
)
_MATTERS = 0.02  # of the plan's step or peak: smaller differences are not explained
_MOST = 4  # differences that are explained
_OWN = 0.4  # of a difference: one unit's, beyond what all have alike
_HIDDEN = 0.05  # of the other side's exposed time, at most


class _Part(NamedTuple):
    """A part of a step: what it is called, what of a timeline it is, and the colour of its swatch."""

    name: str
    kinds: tuple[Kind, ...]
    colour: str


_PARTS = (
    _Part("forward", (Kind.FORWARD,), "forward"),
    _Part("backward", (Kind.BACKWARD,), "backward"),
    _Part("all-gather, exposed", GATHER_KINDS, "wait for all-gather"),
    _Part("reduce-scatter, exposed", REDUCE_KINDS, "wait for reduce-scatter"),
    _Part("barrier", (Kind.FENCE,), "barrier"),
    _Part("optimizer", (Kind.OPTIMIZER,), "optimizer"),
    _Part("host and other", (Kind.OTHER,), "other"),
)


def beside(planned: Sequence[RankTrace], measured: Sequence[RankTrace]) -> dict[str, Any]:
    """Return what the page shows of both: rows by part, sentences on what differs, and what does not compare."""
    own, of_plan = step_ns(measured), step_ns(planned)
    parts = [(part, _ns(planned, part), _ns(measured, part)) for part in _PARTS]
    alike = [_comparable(trace, measured[0].device) for trace in planned]
    most = [max(peaks(traces), key=lambda peak: peak.total) for traces in (alike, measured)]
    held = [
        (name, most[0].nbytes[index], most[1].nbytes[index])
        for index, name in enumerate(CATEGORIES)
    ]
    plan_peak, peak = most[0].total, most[1].total
    said = [
        f"A step took {nanoseconds(own)}, {_relative(of_plan, own)} planned ({nanoseconds(of_plan)})."
    ]
    for part, plan_ns, ns in sorted(parts, key=lambda each: -abs(each[2] - each[1]))[:_MOST]:
        if abs(ns - plan_ns) >= _MATTERS * of_plan:
            said.append(_explained(part, plan_ns, ns, planned, measured))
    said.append(
        f"At its peak a rank held {nbytes(peak)}, {_relative(plan_peak, peak)} planned ({nbytes(plan_peak)})."
    )
    apart = sorted(held, key=lambda each: -abs(each[2] - each[1]))[:_MOST]
    said[-1] += "".join(
        f" {name.capitalize()}: {nbytes(abs(ours - plan))} {'more' if ours > plan else 'less'} than planned."
        for name, plan, ours in apart
        if abs(ours - plan) >= _MATTERS * plan_peak
    )
    return {
        "said": said,
        "time": [
            *(_row(part.name, part.colour, a, b, nanoseconds) for part, a, b in parts if a or b),
            _row("in all", "", of_plan, own, nanoseconds),
        ],
        "memory": [
            *(_row(name, "", a, b, nbytes) for name, a, b in held if a or b),
            _row("in all", "", plan_peak, peak, nbytes),
        ],
        "notes": list(_notes(planned, measured)),
    }


def _ns(traces: Sequence[RankTrace], part: _Part) -> float:
    return sum(share.ns for share in shares(traces) if share.kind in part.kinds)


def _comparable(trace: RankTrace, device: str) -> RankTrace:
    """Return a planned trace with the categories of a recording, at moments at which one looks on such a device."""
    other, temporary = CATEGORIES.index("other"), trace.categories.index(TEMPORARY)
    samples = []
    for sample in trace.samples:
        counted = list(sample.nbytes[: len(CATEGORIES)])
        if not device.startswith("cpu"):
            counted[other] += sample.nbytes[temporary]
        elif sample.nbytes[temporary]:
            continue  # within an operation
        else:
            counted[other] = 0
        samples.append(sample._replace(nbytes=tuple(counted)))
    return dataclasses.replace(trace, categories=CATEGORIES, samples=tuple(samples))


def _row(
    name: str, colour: str, planned: float, measured: float, write: Callable[[float], str]
) -> dict[str, Any]:
    apart = measured - planned
    sign = "+" if apart > 0 else "-"
    ratio = f" ({changed(measured / planned)})" if planned else ""
    return {
        "name": name,
        "colour": colour,
        "planned": write(planned) if planned else "",
        "measured": write(measured) if measured else "",
        "difference": f"{sign}{write(abs(apart))}{ratio}" if apart else "",
        "values": [planned, measured],
    }


def _relative(planned: float, measured: float) -> str:
    said = changed(measured / planned)
    return "as" if said == "same" else f"{said} {'as' if said.endswith('much') else 'than'}"


# Why a part differs


def _explained(
    part: _Part,
    plan_ns: float,
    ns: float,
    planned: Sequence[RankTrace],
    measured: Sequence[RankTrace],
) -> str:
    """Say in a sentence or two where a difference comes from."""
    if part.kinds in (GATHER_KINDS, REDUCE_KINDS):
        return _exposed(part, planned, measured)
    if part.kinds in ((Kind.FORWARD,), (Kind.BACKWARD,)):
        return _computed(part, planned, measured, f"{nanoseconds(ns)}, not {nanoseconds(plan_ns)}")
    if part.kinds == (Kind.FENCE,):
        return f"Ranks waited {nanoseconds(ns)} a step for one another at barriers; the plan has ranks that are all alike."
    if part.kinds == (Kind.OTHER,):
        return (
            f"{nanoseconds(ns)} a step were outside of units: data, loss, clipping, logging, and waiting for the host; "
            f"the plan expected {nanoseconds(plan_ns)}."
        )
    return f"The optimizer took {nanoseconds(ns)}; the plan expected {nanoseconds(plan_ns)}."


def _exposed(part: _Part, planned: Sequence[RankTrace], measured: Sequence[RankTrace]) -> str:
    """Say of which units collectives are exposed for longer, or shorter, than planned."""
    is_gather = part.kinds == GATHER_KINDS
    what = "all-gather" if is_gather else "reduce-scatter"

    def of(cost: UnitCost) -> float:
        return cost.gather_ns if is_gather else cost.reduce_ns

    plans = {cost.name: of(cost) for cost in unit_costs(planned)}
    found = {cost.name: of(cost) for cost in unit_costs(measured)}
    apart = {name: found.get(name, 0.0) - plans.get(name, 0.0) for name in {*plans, *found}}
    is_more = sum(apart.values()) > 0
    less, more = (plans, found) if is_more else (found, plans)
    hidden = [name for name in more if less.get(name, 0.0) <= _HIDDEN * more[name] > 0]
    in_all = sum(more[name] for name in hidden)
    if in_all > abs(sum(apart.values())) / 2:
        name = max(hidden, key=lambda each: more[each])
        ns, others = nanoseconds(more[name]), len(hidden) - 1
        with_others = f" ({nanoseconds(in_all)} with {counted(others, 'other')})" if others else ""
        if is_more:
            said = f"The plan expected the {what} of {name} hidden; it was exposed for {ns} a step{with_others}."
        else:
            said = f"The plan expected the {what} of {name} exposed for {ns} a step{with_others}; it was hidden."
    else:
        name = max(apart, key=lambda each: abs(apart[each]))
        said = (
            f"The {what} of {name} was exposed for {nanoseconds(found.get(name, 0.0))} a step; the plan expected "
            f"{nanoseconds(plans.get(name, 0.0))}."
        )
    return said + _in_flight(what, planned, measured)


def _in_flight(what: str, planned: Sequence[RankTrace], measured: Sequence[RankTrace]) -> str:
    """Say how long collectives took beside the plan; nothing on the CPU, where their end is seen when they are waited for."""
    if measured[0].device.startswith("cpu"):
        return ""
    means = []
    for traces in (planned, measured):
        moved = [
            t.end - t.start for trace in traces for t in trace.transfers if t.kind.value == what
        ]
        if not moved:
            return ""
        means.append(sum(moved) / len(moved))
    return f" One took {nanoseconds(means[1])} from start to result; the plan expected {nanoseconds(means[0])}."


def _computed(
    part: _Part, planned: Sequence[RankTrace], measured: Sequence[RankTrace], took: str
) -> str:
    """Say whether computing took longer in one unit, or in all of them alike."""
    plans, found = (unit_ns(traces, part.kinds[0]) for traces in (planned, measured))
    in_all, plan_in_all = sum(found.values()), sum(plans.values())
    alike = in_all / plan_in_all if plan_in_all else 0.0
    apart = {name: found.get(name, 0.0) - alike * plans.get(name, 0.0) for name in {*plans, *found}}
    name = max(sorted(apart), key=lambda each: abs(apart[each]))
    said = f"{part.name.capitalize()} took {took}"
    if abs(apart[name]) < _OWN * abs(in_all - plan_in_all):
        return f"{said}, in all units alike."
    own, plan_ns = nanoseconds(found.get(name, 0.0)), nanoseconds(plans.get(name, 0.0))
    return f"{said}, most of all in {name}: {own}, not {plan_ns}."


def _notes(planned: Sequence[RankTrace], measured: Sequence[RankTrace]) -> Iterator[str]:
    """Say what of the plan and of the run is not the same."""
    plan, run = planned[0], measured[0]
    if plan.num_ranks != run.num_ranks:
        yield f"The plan is for {plan.num_ranks} ranks, and {run.num_ranks} ran."
    ways = [trace.units[0].comm for trace in (plan, run)]
    if not ways[1].startswith(ways[0]):
        yield f"The plan is for {plan.device}, with ranks that exchange bytes by {ways[0]}; those of the run did so by {ways[1]}."
    names = [{unit.name for unit in trace.units} for trace in (plan, run)]
    if names[0] != names[1]:
        yield (
            f"The plan has {len(plan.units)} units and the run {len(run.units)}, of which "
            f"{len(names[0] & names[1])} have the same name: differences by unit are of those."
        )
