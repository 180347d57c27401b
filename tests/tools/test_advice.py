"""What a report advises: each rule on a run that provokes it, and none on a healthy one."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

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
    Transfer,
)
from fullshard.tools.advice import advise, verdict
from fullshard.tools.config import TrainConfig
from fullshard.tools.run_record import RunRecord
from fullshard.tools.waiting import straggler, waits

MS = 10**6


def trace(
    rank: int = 0,
    *,
    forward: int = 400,
    gather: int = 10,
    reduce: int = 10,
    fence: int = 10,
    optimizer: int = 40,
    other: int = 30,
    num_reduces: int = 1,
    nbytes: int = 2**22,
    saved: int = 100,
    num_ranks: int = 2,
    num_shards: int = 2,
    **more: Any,
) -> RankTrace:
    """Record a step of two layers in ms: gathers, forward, a fence, gathers, 500 backward, reductions, optimizer, other."""
    lengths = [
        *((Kind.WAIT_ALL_GATHER, layer, gather) for layer in (1, 2)),
        *((Kind.FORWARD, layer, forward / 2) for layer in (1, 2)),
        (Kind.FENCE, NO_UNIT, fence),
        *((Kind.WAIT_ALL_GATHER, layer, gather) for layer in (2, 1)),
        (Kind.BACKWARD, 1, 500),
        *(
            (Kind.WAIT_REDUCE_SCATTER, layer, reduce)
            for layer in (2, 1)
            for _ in range(num_reduces)
        ),
        (Kind.OPTIMIZER, NO_UNIT, optimizer),
        (Kind.OTHER, NO_UNIT, other),
    ]
    timeline, transfers, now = [], [], 0
    moved = {
        Kind.WAIT_ALL_GATHER: Kind.ALL_GATHER,
        Kind.WAIT_REDUCE_SCATTER: Kind.REDUCE_SCATTER,
    }
    for kind, unit, length in lengths:
        end = now + round(length * MS)
        timeline.append(Segment(kind, unit, now, end))
        if kind in moved:
            transfers.append(Transfer(moved[kind], unit, now, end, nbytes))
        now = end
    units = [TracedUnit(name, nbytes, nbytes // num_shards, "Gloo") for name in ("", "a", "b")]
    fields: dict[str, Any] = {
        "clock": Clock(0, 0, "host"),
        "categories": ("sharded parameters", "saved for backward"),
        "samples": (Sample(0, (1000, saved)),),
        **more,
    }
    return RankTrace(
        recording="one", rank=rank, num_ranks=num_ranks, device="cpu", units=tuple(units),
        steps=(TracedStep(20, 0, now),), timeline=tuple(timeline), transfers=tuple(transfers), **fields,
    )  # fmt: skip


def steps(speeds: Sequence[float], losses: Sequence[float] | None = None) -> list[dict[str, Any]]:
    return [
        {"step": n, "loss": loss, "seconds": 100 / speed, "tokens_per_second": speed, "peak_memory": 1000}
        for n, (speed, loss) in enumerate(zip(speeds, losses or [2.0] * len(speeds), strict=True), 1)
    ]  # fmt: skip


def noisy(level: float, count: int, *, seed: int = 0) -> Iterator[float]:
    """Speeds of a busy machine: a quarter up or down, and now and then a step that takes three times as long."""
    rng = random.Random(seed)
    return (
        level * rng.uniform(0.75, 1.25) / (3 if rng.random() < 0.1 else 1) for _ in range(count)
    )


def run(
    traces: Sequence[RankTrace] = (), metrics: Sequence[dict[str, Any]] = (), **more: Any
) -> RunRecord:
    return RunRecord(
        "run", metrics=list(metrics), traces=list(traces), summary=None, **{"config": None, **more}
    )


def pair(**fields: Any) -> list[RankTrace]:
    return [trace(rank, **fields) for rank in range(2)]


CONFIG = TrainConfig(steps=60, batch=4)

# Rule, what its sentence has to say, what it gains, and the run.
PROVOKED = {
    "batch": ("--batch 8 instead of 4", "16 %", run(pair(reduce=200), config=CONFIG)),
    "one micro-batch": (
        "--batch 16 --grad-accum 1",
        "24 %",
        run(pair(reduce=200), config=dataclasses.replace(CONFIG, grad_accum=4)),
    ),
    "old trace": (
        "traced before the run went on with --ranks 1 in place of 2, --batch 8 in place of 4",
        "",
        run(
            pair(reduce=200),
            config=dataclasses.replace(CONFIG, ranks=1, batch=8),
            earlier=[{"until": 40, "options": dataclasses.replace(CONFIG, ranks=2)}],
        ),
    ),
    "accumulate": ("reduced 4 times a step", "24 %", run(pair(reduce=60, num_reduces=4))),
    "reshard": ("reshard_after_forward=False", "14 %", run(pair(gather=100))),
    "barriers": ("in turn", "23 %", run(pair(fence=300), config=CONFIG)),
    "small units": ("no more than 1.00 KiB", "16 %", run(pair(reduce=200, nbytes=2**10))),
    "hybrid": (
        "mesh",
        "29 %",
        run([trace(rank, gather=100, clock=Clock(0, 5, str(rank))) for rank in range(2)]),
    ),
    "late": (
        "Rank 1 arrives late: the other rank waits 190 ms a step for it, most at the barrier before backward",
        "15 %",
        run([trace(0, fence=200), trace(1, forward=590)]),
    ),
    "optimizer": ("16 DTensors", "21 %", run(pair(optimizer=260, num_dtensors=16))),
    "host": ("40 % of a step", "40 %", run(pair(starved=(Pause(0, trace().steps[0].end * 2 // 5),)))),
    "outside": ("28 %", "28 %", run(pair(other=400))),
    "slower": (
        "after step 60, from 1,6",
        "80 %",
        run(metrics=steps([*noisy(1600, 60), *noisy(320, 40)])),
    ),
    "collector": (
        "5.0 % of a step on rank 1",
        "5 %",
        run([trace(0), trace(1, pauses=(Pause(0, trace().steps[0].end // 20),))]),
    ),
    "allocator": ("rank 1 ran out of memory 4 times", "", run([trace(0), trace(1, num_alloc_retries=4)])),
    "activations": ("saves up to 2.93 KiB", "2.93 KiB", run(pair(saved=6000))),
    "not finite": (
        "Step 3 is not finite: loss nan (step 2 had a loss of 2.000), and 1 more",
        "",
        run(metrics=steps([100] * 4, [2, 2, math.nan, math.nan])),
    ),
    "diverges": (
        "rises from step 20 on: from 2.000 to 3.000",
        "",
        run(metrics=steps([100] * 40, [3.0] * 10 + [2.0] * 10 + [3.0] * 20)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROVOKED)
def test_a_rule_speaks_where_it_is_provoked(name: str) -> None:
    said, gain, record = PROVOKED[name]
    (advice,) = advise(record)
    assert advice.rule == {"one micro-batch": "batch"}.get(name, name)
    assert said in advice.text
    assert gain in advice.gain


@pytest.mark.parametrize(
    "record",
    [
        run(pair(num_dtensors=0), config=CONFIG),
        run(pair(saved=6000), config=dataclasses.replace(CONFIG, activation_checkpointing=True)),
        run(pair(optimizer=260, num_dtensors=0)),
        run([trace(0, fence=30), trace(1, fence=30)]),
        run(metrics=steps([*noisy(1000, 100)])),
        run(metrics=steps([*noisy(1000, 100, seed=1)], [2 + random.Random(n).gauss(1 / n, 0.1) for n in range(1, 101)])),
        # Of other options, which somebody asked for.
        run(metrics=steps([1000] * 40 + [100] * 40), config=CONFIG, earlier=[{"until": 40, "options": CONFIG}]),
    ],
    ids=["healthy", "checkpointed", "on shards", "in turn", "noise", "noisy loss", "resumed"],
)  # fmt: skip
def test_nothing_is_advised_where_nothing_stands_out(record: RunRecord) -> None:
    assert advise(record) == []
    (sentence,) = verdict(record)
    assert (sentence.rule, sentence.gain) == ("nothing", "")


def test_what_gains_most_comes_first_and_what_is_wrong_before_all() -> None:
    traces = pair(optimizer=260, num_dtensors=16, reduce=300, other=900, saved=6000)
    found = advise(run(traces, steps([100] * 2, [2.0, math.inf])))
    assert [each.rule for each in found] == ["not finite", "outside", "batch"]


# Who waits for whom


def test_the_late_rank_is_found_with_its_unit_and_who_waits() -> None:
    ranks = [trace(0, fence=200), trace(1, forward=590), trace(2, fence=200)]
    (fence,) = waits(ranks)
    assert (fence.name, fence.last, fence.late_ns) == ("barrier before backward", 1, 190 * MS)
    assert fence.waits_ns == (190 * MS, 0, 190 * MS)
    found = straggler(ranks)
    assert found is not None
    assert (found.rank, found.net_ns) == (1, 190 * MS)
    assert (found.kind, found.unit, found.extra_ns) == (Kind.FORWARD, "a", 95 * MS)


def test_only_standing_still_is_a_wait() -> None:
    # Rank 0 starts its gather 50 ms before rank 1 does, and computes for 30 of them.
    early = dataclasses.replace(
        trace(0),
        timeline=(Segment(Kind.FORWARD, 1, 0, 30 * MS), Segment(Kind.WAIT_ALL_GATHER, 1, 30 * MS, 60 * MS)),
        transfers=(Transfer(Kind.ALL_GATHER, 1, 0, 60 * MS, 8),),
        steps=(TracedStep(20, 0, 60 * MS),),
    )  # fmt: skip
    late = dataclasses.replace(
        early,
        rank=1,
        timeline=(Segment(Kind.FORWARD, 1, 0, 50 * MS), Segment(Kind.WAIT_ALL_GATHER, 1, 50 * MS, 60 * MS)),
        transfers=(Transfer(Kind.ALL_GATHER, 1, 50 * MS, 60 * MS, 8),),
    )  # fmt: skip
    (wait,) = waits([early, late])
    assert (wait.name, wait.last, wait.waits_ns) == ("a", 1, (20 * MS, 0))


def test_who_shares_no_shards_waits_for_nobody() -> None:
    # The first gather of ranks 2 and 3 begins 5 ms after that of ranks 0 and 1, who wait for 10.
    def late(rank: int, by: int, num_shards: int) -> RankTrace:
        made = trace(rank, num_ranks=4, num_shards=num_shards)
        first, *others = made.transfers
        return dataclasses.replace(
            made, transfers=(first._replace(start=first.start + by), *others)
        )

    for num_shards, expected in ((2, 0), (4, 1)):
        ranks = [late(rank, by, num_shards) for rank, by in enumerate((0, 0, 5 * MS, 5 * MS))]
        assert len(waits(ranks)) == expected


def test_nothing_is_said_below_the_clocks_error() -> None:
    for error, expected in ((189 * MS, 1), (190 * MS, 0)):
        hosts = [Clock(0, error, str(rank)) for rank in range(2)]
        ranks = [
            trace(0, gather=200, clock=hosts[0]),
            dataclasses.replace(trace(1), clock=hosts[1]),
        ]
        early, late = (
            Transfer(Kind.ALL_GATHER, 1, 0, 200 * MS, 8),
            Transfer(Kind.ALL_GATHER, 1, 190 * MS, 200 * MS, 8),
        )
        ranks = [
            dataclasses.replace(each, transfers=(moved,))
            for each, moved in zip(ranks, (early, late), strict=True)
        ]
        assert len(waits(ranks)) == expected
    # A fence is among the ranks of a host.
    assert (
        waits(
            [
                trace(
                    rank,
                    fence=200 - 190 * rank,
                    forward=400 + 190 * rank,
                    clock=Clock(0, 0, str(rank)),
                )
                for rank in range(2)
            ]
        )
        == []
    )
    assert waits([trace(0)]) == []
    assert straggler([trace(0)]) is None
