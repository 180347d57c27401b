"""Traces of steps that did not run agree with the plans that they are made of."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from fullshard.plan.actions import ActionKind, Holding
from fullshard.plan.step import StepSettings
from fullshard.plan.trace import Kind, RankTrace
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import GLOO, NCCL, PEER_MEMORY, Way
from fullshard.planning.costs import Costs, Manner
from fullshard.planning.estimate import Estimate, estimate_step
from fullshard.planning.machines import machine_named
from fullshard.planning.shapes import MicroBatch, TransformerShape, shape_workload
from fullshard.planning.traces import planned_trace, planned_traces
from fullshard.tools.perfetto import chrome_trace
from fullshard.tools.trace_metrics import peaks, shares

SHAPE = TransformerShape(4, 1024, 8, 8, 2816, 32000, 128)
NS = 1e-9


@functools.cache
def make_estimate(
    ranks: int = 16, *, way: Way = NCCL, replicas: int = 1, network: float = 5e9, num: int = 1
) -> Estimate:
    """Plan a small transformer on slow links, so that something is exposed and something is hidden."""
    workload = shape_workload(SHAPE, MicroBatch(sequences=2, seq=2048, checkpointing="full"))
    sharding = Sharding(ranks, way, replicate_size=replicas)
    settings = StepSettings(sharding, has_streams=way is NCCL, num_microbatches=num)
    machine = machine_named("H100-80GB-SXM", network_rate=network)
    return estimate_step(workload, settings, Costs(machine, Manner()))


def _seconds(trace: RankTrace) -> dict[Kind, float]:
    return {share.kind: share.ns * NS for share in shares([trace])}


CASES = [
    make_estimate(),
    make_estimate(network=50e9),
    make_estimate(num=3),
    make_estimate(8, replicas=2),
    make_estimate(2, way=GLOO),
    make_estimate(2, way=PEER_MEMORY),
    make_estimate(1),
]


@pytest.mark.parametrize("estimate", CASES, ids=range(len(CASES)))
def test_parts_of_a_planned_timeline_are_those_of_the_plan(estimate: Estimate) -> None:
    trace, simulated = planned_trace(estimate), estimate.simulated
    parts = _seconds(trace)
    computing = sum(parts.get(kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.OPTIMIZER))
    close = functools.partial(pytest.approx, abs=1e-6)
    assert sum(parts.values()) == close(estimate.step_s)
    assert computing == close(simulated.computing_s + estimate.contention_s)
    gathers = parts.get(Kind.ALL_GATHER, 0) + parts.get(Kind.WAIT_ALL_GATHER, 0)
    assert gathers == close(simulated.exposed(ActionKind.ALL_GATHER))
    reduces = parts.get(Kind.REDUCE_SCATTER, 0) + parts.get(Kind.WAIT_REDUCE_SCATTER, 0)
    kinds = (ActionKind.REDUCE_SCATTER, ActionKind.ALL_REDUCE)
    assert reduces == close(sum(map(simulated.exposed, kinds)))
    assert parts.get(Kind.OTHER, 0) == close(simulated.host_bound_s)
    assert sum(pause.end - pause.start for pause in trace.starved) * NS == close(
        simulated.host_bound_s
    )


@pytest.mark.parametrize("estimate", CASES, ids=range(len(CASES)))
def test_the_peak_of_a_planned_trace_is_that_of_the_plan(estimate: Estimate) -> None:
    (peak,) = peaks([planned_trace(estimate, beyond_nbytes=1000)])
    memory = estimate.memory
    assert peak.total == memory.peak_nbytes + 1000
    held = dict(zip(planned_trace(estimate).categories, peak.nbytes, strict=True))
    assert held["other"] == memory.at_peak_of(Holding.UNMANAGED) + 1000
    assert held["unsharded parameters"] == memory.at_peak_of(Holding.UNSHARDED)
    kept = sum(map(memory.at_peak_of, (Holding.SHARDS, Holding.GRADIENT_SHARDS)))
    assert held["sharded parameters"] + held["gradient shards"] == kept


def test_every_collective_of_the_plan_is_in_flight_once() -> None:
    estimate = make_estimate(8, replicas=2)
    trace = planned_trace(estimate)
    kinds = [action.kind for action in estimate.step.actions]
    found = [transfer.kind for transfer in trace.transfers]
    assert found.count(Kind.ALL_GATHER) == kinds.count(ActionKind.ALL_GATHER)
    # What is summed over replicas is a part of its reduction, as in a recording.
    assert kinds.count(ActionKind.ALL_REDUCE) == kinds.count(ActionKind.REDUCE_SCATTER)
    assert found.count(Kind.REDUCE_SCATTER) == kinds.count(ActionKind.REDUCE_SCATTER)
    reduced = [t for t in trace.transfers if t.kind is Kind.REDUCE_SCATTER]
    ends = [
        span.end_s
        for action, span in zip(estimate.step.actions, estimate.simulated.spans, strict=True)
        if action.kind is ActionKind.ALL_REDUCE
    ]
    assert max(t.end for t in reduced) * NS >= max(ends)


def test_computing_takes_longer_where_bytes_travel_beside_it() -> None:
    estimate = make_estimate()
    assert estimate.contention_s > 0
    undisturbed = dataclasses.replace(estimate, contention_s=0.0)
    slowed, plain = _seconds(planned_trace(estimate)), _seconds(planned_trace(undisturbed))
    longer = {kind for kind in plain if slowed[kind] > plain[kind] + 1e-6}
    assert longer <= {Kind.FORWARD, Kind.BACKWARD}
    assert longer


def test_the_last_rank_is_shown_where_it_holds_something_else() -> None:
    assert [trace.rank for trace in planned_traces(make_estimate(16))] == [0]
    first, last = planned_traces(make_estimate(7))
    assert (first.rank, last.rank) == (0, 6)
    of_first, of_last = (trace.samples[0].nbytes[1] for trace in (first, last))
    assert of_last < of_first  # optimizer state: buffers of shards are padded to one size


def test_other_viewers_take_a_planned_trace() -> None:
    trace = planned_trace(make_estimate())
    events = chrome_trace([trace])["traceEvents"]
    units = {event["args"]["unit"] for event in events if event.get("cat") == "forward"}
    assert {trace.unit_name(number) for number in range(len(trace.units))} <= units
