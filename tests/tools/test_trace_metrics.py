"""From traces to numbers, on traces made by hand."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan.trace import (
    NO_UNIT,
    Clock,
    Kind,
    Pause,
    RankTrace,
    Sample,
    Segment,
    TracedStep,
    TracedUnit,
    TraceError,
    Transfer,
    read_trace,
    read_traces,
)
from fullshard.tools import trace_metrics
from fullshard.tools.perfetto import chrome_trace
from tests.counting import calls_of

ROOT, LAYER = 0, 1


def hand_made(rank: int = 0, *, fence: int = 100, origin: int = 1000) -> RankTrace:
    """One step of 1000 + fence nanoseconds: 400 forward, 300 backward, 200 exposed and a fence."""
    lengths = [
        (Kind.ALL_GATHER, LAYER, 30),
        (Kind.WAIT_ALL_GATHER, LAYER, 20),
        (Kind.FORWARD, LAYER, 300),
        (Kind.FORWARD, ROOT, 100),
        (Kind.BACKWARD, LAYER, 300),
        (Kind.REDUCE_SCATTER, LAYER, 90),
        (Kind.WAIT_REDUCE_SCATTER, ROOT, 60),
        (Kind.FENCE, NO_UNIT, fence),
        (Kind.OPTIMIZER, NO_UNIT, 80),
        (Kind.OTHER, NO_UNIT, 20),
    ]
    timeline, now = [], 0
    for kind, unit, length in lengths:
        timeline.append(Segment(kind, unit, now, now + length))
        now += length
    return RankTrace(
        recording="one",
        rank=rank,
        num_ranks=2,
        device="cpu",
        clock=Clock(origin, 7, "host"),
        units=(
            TracedUnit("", 400, 200, "peer memory"),
            TracedUnit("layer", 800, 400, "peer memory"),
        ),
        steps=(TracedStep(5, 0, now),),
        timeline=tuple(timeline),
        transfers=(
            Transfer(Kind.ALL_GATHER, LAYER, 0, 50, 800),
            Transfer(Kind.REDUCE_SCATTER, LAYER, 750, 900, 800),
            Transfer(Kind.REDUCE_SCATTER, ROOT, 800, 900, 400),
        ),
        categories=("shards", "saved"),
        samples=(Sample(-5, (10, 0)), Sample(350, (10, 30)), Sample(900, (10, 5))),
    )


def test_parts_of_a_step_are_what_was_put_in() -> None:
    shares = {share.kind: share for share in trace_metrics.shares([hand_made()])}
    assert shares[Kind.FORWARD].ns == 400
    assert shares[Kind.BACKWARD].ns == 300
    assert shares[Kind.FENCE].share == 100 / 1100
    assert sum(share.share for share in shares.values()) == pytest.approx(1)
    assert trace_metrics.step_ns([hand_made()]) == 1100


def test_ranks_are_averaged_and_their_extremes_kept() -> None:
    traces = [hand_made(0, fence=100), hand_made(1, fence=300)]
    fence = next(s for s in trace_metrics.shares(traces) if s.kind is Kind.FENCE)
    assert (fence.ns, fence.least_ns, fence.most_ns) == (200, 100, 300)
    assert trace_metrics.step_ns(traces) == 1200
    assert trace_metrics.exposed_ns(traces) == 200 + 200


def test_each_unit_has_its_own_communication() -> None:
    layer, root = trace_metrics.unit_costs([hand_made(0), hand_made(1)])
    assert (layer.name, layer.gather_ns, layer.reduce_ns, layer.exposed_ns) == (
        "layer",
        50,
        90,
        140,
    )
    assert (layer.num_gathers, layer.gather_nbytes, layer.reduce_nbytes) == (1, 800, 800)
    assert layer.in_flight_ns == 50 + 150
    assert (root.name, root.exposed_ns, root.num_gathers, root.num_reduces) == ("(root)", 60, 0, 1)


def test_steps_that_not_all_ranks_recorded_do_not_count() -> None:
    longer = hand_made(1)
    longer = dataclasses.replace(
        longer,
        steps=(*longer.steps, TracedStep(6, 1100, 9000)),
        timeline=(*longer.timeline, Segment(Kind.OTHER, NO_UNIT, 1100, 9000)),
    )
    assert trace_metrics.common_steps([hand_made(0), longer]) == [5]
    assert trace_metrics.step_ns([hand_made(0), longer]) == 1100


@functools.cache  # each figure is computed from them
def _large(factor: int) -> RankTrace:
    """So many times five units, each gathered once in each of so many times five steps."""
    count, length = 5 * factor, 100
    gathers = [
        Transfer(Kind.ALL_GATHER, unit, step * length, step * length + 1, 8)
        for step in range(count)
        for unit in range(count)
    ]
    return dataclasses.replace(
        hand_made(),
        units=tuple(TracedUnit(str(unit), 8, 4, "peer memory") for unit in range(count)),
        steps=tuple(TracedStep(n, n * length, (n + 1) * length) for n in range(count)),
        timeline=tuple(Segment(Kind.OTHER, NO_UNIT, n, n + 1) for n in range(count * length)),
        transfers=tuple(gathers),
        samples=tuple(Sample(n * length, (1, 1)) for n in range(count)),
    )


@pytest.mark.parametrize(
    "figure",
    [
        "unit_costs",
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in ("shares", "peaks", "exposed_ns", "step_ns")
        ),
    ],
)
def test_work_grows_with_the_spans_and_not_with_units_or_steps_as_well(figure: str) -> None:
    metric = getattr(trace_metrics, figure)
    small, large = _large(1), _large(4)
    few, many = (calls_of(lambda trace=trace: metric([trace])) for trace in (small, large))
    assert len(large.transfers) == 16 * len(small.transfers)
    assert many < 16.5 * few


def test_the_peak_is_the_largest_sum() -> None:
    (peak,) = trace_metrics.peaks([hand_made()])
    assert (peak.offset_ns, peak.nbytes, peak.total, peak.step) == (350, (10, 30), 40, 5)


def test_what_was_in_use_before_a_step_counts_from_its_start() -> None:
    trace = hand_made()
    assert [s.time for s in trace_metrics.samples_of(trace, trace.steps[0])] == [-5, 350, 900]


def test_ranks_of_one_host_are_aligned_by_their_clock() -> None:
    first, second = trace_metrics.aligned([hand_made(0, origin=1000), hand_made(1, origin=1250)])
    assert (first.steps[0].start, second.steps[0].start) == (0, 250)
    assert second.samples[1].time == 350 + 250
    assert trace_metrics.clock_error_ns([first, second]) == 0


def test_hosts_are_aligned_by_the_barrier_and_the_error_is_said() -> None:
    elsewhere = dataclasses.replace(hand_made(1), clock=Clock(999_999, 11, "another host"))
    first, second = trace_metrics.aligned([hand_made(0), elsewhere])
    assert first.steps[0].start == second.steps[0].start == 0
    assert trace_metrics.clock_error_ns([first, second]) == 11


spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30)


@given(spans)
def test_rows_hold_every_transfer_once_without_overlap(drawn: list[tuple[int, int]]) -> None:
    transfers = [Transfer(Kind.ALL_GATHER, 0, start, start + length, 1) for start, length in drawn]
    rows = trace_metrics.rows(transfers)
    assert sorted(moved for row in rows for moved in row) == sorted(transfers)
    for row in rows:
        for before, after in itertools.pairwise(row):
            assert before.end <= after.start


@given(st.lists(st.tuples(st.sampled_from(Kind), st.integers(1, 1000)), min_size=1, max_size=40))
def test_the_parts_always_add_up_to_the_step(drawn: list[tuple[Kind, int]]) -> None:
    timeline, now = [], 0
    for kind, length in drawn:
        timeline.append(Segment(kind, NO_UNIT, now, now + length))
        now += length
    trace = dataclasses.replace(
        hand_made(), steps=(TracedStep(1, 0, now),), timeline=tuple(timeline), transfers=()
    )
    shares = trace_metrics.shares([trace])
    assert sum(share.ns for share in shares) == pytest.approx(trace_metrics.step_ns([trace]))
    assert all(0 < share.share <= 1 for share in shares)


def test_what_holds_a_rank_up_is_counted_within_steps() -> None:
    # A step of 1100 ns; what ran before it or after it does not count.
    pauses = (Pause(-50, -10), Pause(100, 130), Pause(500, 525), Pause(1200, 1300))
    held_up = dataclasses.replace(hand_made(0), pauses=pauses, num_alloc_retries=3)
    first, second = trace_metrics.stalls([held_up, hand_made(1)])
    assert (first.collector_ns, first.num_collections, first.longest_ns) == (55, 2, 30)
    assert first.share == pytest.approx(55 / 1100)
    assert (first.num_alloc_retries, first.matters) == (3, True)
    assert (second.collector_ns, second.num_alloc_retries, second.matters) == (0, None, False)
    moved = trace_metrics.aligned([held_up, hand_made(1, origin=900)])[0]
    assert moved.pauses[1] == Pause(200, 230)


# Files


def test_files_that_know_no_pauses_are_read(tmp_path: Path) -> None:
    path = hand_made().write(tmp_path)
    fields = json.loads(path.read_text())
    del fields["pauses"], fields["num_alloc_retries"], fields["num_dtensors"]
    del fields["starved"]
    path.write_text(json.dumps(fields))
    assert read_trace(path) == hand_made()


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    trace = dataclasses.replace(
        hand_made(3),
        pauses=(Pause(1, 2),),
        num_alloc_retries=0,
        num_dtensors=3,
        starved=(Pause(3, 4),),
    )
    path = trace.write(tmp_path)
    assert path.name == "rank00003.json"
    assert read_trace(path) == trace
    path.write_text(path.read_text().replace('"barrier"', '"fence"'))  # its older name
    assert read_trace(path) == trace


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema": "fullshard-trace/9"}', '{"schema": "fullshard-trace/1"}']
)
def test_what_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rank00000.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=r"rank00000\.json: cannot be read as a trace"):
        read_trace(path)


def test_files_of_an_earlier_recording_are_left_out(tmp_path: Path) -> None:
    stale = dataclasses.replace(hand_made(1), recording="an earlier one").write(tmp_path)
    hand_made(0).write(tmp_path)
    os.utime(stale, ns=(0, 0))
    assert [trace.rank for trace in read_traces(tmp_path)] == [0]


@pytest.mark.parametrize(
    "change",
    [
        {"timeline": (Segment(Kind.FORWARD, 0, 0, 5), Segment(Kind.FORWARD, 0, 6, 7))},
        {"timeline": (Segment(Kind.FORWARD, 2, 0, 5),)},
        {"transfers": (Transfer(Kind.ALL_GATHER, 0, 9, 5, 1),)},
        {"samples": (Sample(0, (1, 2, 3)),)},
    ],
    ids=["gap", "unknown unit", "ends before it starts", "figures without a category"],
)
def test_a_trace_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(TraceError, match="rank 0"):
        dataclasses.replace(hand_made(), **change)


# For viewers


def test_viewers_get_what_their_format_asks_for() -> None:
    paused = dataclasses.replace(hand_made(0), pauses=(Pause(40, 90),))
    written = chrome_trace([paused, hand_made(1, origin=1250)])
    events = json.loads(json.dumps(written))["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "i", "s", "f"}
    assert all({"ph", "name", "pid"} <= event.keys() for event in events)
    spans = [event for event in events if event["ph"] == "X"]
    assert all({"ts", "dur", "tid"} <= event.keys() for event in spans)
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in spans} <= names
    forward = next(e for e in spans if e["name"] == "forward layer" and e["pid"] == 1)
    assert (forward["ts"], forward["dur"]) == ((250 + 50) / 1e3, 300 / 1e3)
    (pause,) = [event for event in spans if event["name"] == "garbage collector"]
    assert (pause["pid"], pause["ts"], pause["dur"]) == (0, 40 / 1e3, 50 / 1e3)
    counters = [event for event in events if event["ph"] == "C"]
    assert counters[1]["args"] == {"shards": 10, "saved": 30}


def test_units_nest_in_their_phase_and_arrows_lead_to_waits() -> None:
    # Of the root, with a layer inside; its second forward is of another micro-batch.
    kinds = [
        (Kind.FORWARD, ROOT),
        (Kind.FORWARD, LAYER),
        (Kind.FENCE, NO_UNIT),
        (Kind.FORWARD, ROOT),
    ]
    kinds += [(Kind.BACKWARD, ROOT), (Kind.FORWARD, ROOT), (Kind.OTHER, NO_UNIT)]
    timeline = tuple(Segment(*each, n * 1000, n * 1000 + 1000) for n, each in enumerate(kinds))
    events = chrome_trace([dataclasses.replace(hand_made(), timeline=timeline)])["traceEvents"]
    computed = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    assert [(event["name"], event["ts"], event["dur"]) for event in computed] == [
        ("forward", 0, 4), ("forward (root)", 0, 4), ("forward layer", 1, 1),
        ("backward", 4, 1), ("backward (root)", 4, 1), ("forward", 5, 1), ("forward (root)", 5, 1), ("other", 6, 1),
    ]  # fmt: skip
    events = chrome_trace([hand_made()])["traceEvents"]
    arrows = [[e["ts"], e["tid"]] for e in events if e["ph"] in "sf"]
    assert arrows == [[0, 10], [0.03, 1], [0.8, 21], [0.84, 1]]


def test_spans_of_one_thread_nest() -> None:
    threads: dict[int, list[tuple[float, float]]] = {}
    for event in chrome_trace([hand_made()])["traceEvents"]:
        if event["ph"] == "X":
            threads.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 5, "compute, exposed, one all-gather row and two of reduce-scatter"
    for spans in threads.values():
        for (_, end), (start, stop) in itertools.combinations(
            sorted(spans, key=lambda s: (s[0], -s[1])), 2
        ):
            assert end <= start + 1e-9 or stop <= end + 1e-9
