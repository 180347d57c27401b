"""Which units stay unsharded: within every budget, what saves the most, and the same whatever else there is."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan.keeping import (
    LATENCY_NBYTES,
    BackwardGathers,
    backward_gathers,
    backward_order,
    choose_kept,
    exposed_of_all,
    weigh_by_bytes,
)
from fullshard.plan.trace import Clock, Kind, RankTrace, Segment, TracedStep, TracedUnit, Transfer

UNITS = st.lists(st.tuples(st.integers(0, 20), st.integers(-2, 30)), max_size=8)


def _totals(units: list[tuple[int, int]], kept: tuple[bool, ...]) -> tuple[int, int]:
    """Bytes and savings of a choice."""
    chosen = [unit for unit, stays in zip(units, kept, strict=True) if stays]
    return sum(nbytes for nbytes, _ in chosen), sum(saved for _, saved in chosen)


def _choose(units: list[tuple[int, int]], budget: int) -> tuple[bool, ...]:
    return choose_kept([nbytes for nbytes, _ in units], [saved for _, saved in units], budget)


@given(UNITS, st.integers(0, 100))
def test_the_set_stays_that_saves_most_then_with_fewest_bytes_then_of_later_units(
    units: list[tuple[int, int]], budget: int
) -> None:
    def rank(kept: tuple[bool, ...]) -> tuple[int, int, tuple[bool, ...]]:
        nbytes, saved = _totals(units, kept)
        return -saved, nbytes, kept

    every = itertools.product((False, True), repeat=len(units))
    fitting = (kept for kept in every if _totals(units, kept)[0] <= budget)
    assert _choose(units, budget) == min(fitting, key=rank)


@given(UNITS, st.integers(0, 100), st.integers(0, 20))
def test_more_bytes_never_save_less(units: list[tuple[int, int]], budget: int, more: int) -> None:
    saved = [_totals(units, _choose(units, each))[1] for each in (budget, budget + more)]
    assert saved[0] <= saved[1]


@given(UNITS, st.integers(0, 100))
def test_what_saves_nothing_does_not_stay(units: list[tuple[int, int]], budget: int) -> None:
    kept = _choose(units, budget)
    assert not any(stays and saved <= 0 for (_, saved), stays in zip(units, kept, strict=True))


def test_of_units_alike_the_last_stay() -> None:
    assert _choose([(5, 2)] * 5, 12) == (False, False, False, True, True)


def test_units_of_very_many_sizes_are_chosen_to_within_the_bound() -> None:
    units = [(1 << number, (1 << number) + number % 3) for number in range(24)]
    budget = (1 << 24) * 2 // 3
    nbytes, saved = _totals(units, _choose(units, budget))
    assert nbytes <= budget
    # No set saves more than its bytes and 2 for each unit.
    assert saved >= budget - sum(saved for _, saved in units) * len(units) / 4096


def test_a_hundred_layers_alike_and_a_few_others_are_chosen_exactly() -> None:
    units = [(7, 3)] * 100 + [(40, 30), (64, 1)]
    assert _totals(units, _choose(units, 7 * 50 + 40)) == (390, 180)


# By bytes


def test_beside_a_unit_of_its_time_half_of_a_gather_is_exposed() -> None:
    size = 3 * LATENCY_NBYTES
    alone, beside = weigh_by_bytes([size, size], [0, size + LATENCY_NBYTES])
    assert (alone, beside) == (size + LATENCY_NBYTES, (size + LATENCY_NBYTES) // 2)


def test_small_units_and_the_last_one_save_most_per_byte() -> None:
    sizes = [8 << 20, 8 << 20, 1 << 10, 8 << 20]
    weights = weigh_by_bytes(sizes, [8 << 20, 1 << 10, 8 << 20, 0])
    kept = choose_kept(sizes, weights, (8 << 20) + (1 << 10))
    assert kept == (False, False, True, True)


def test_backward_comes_to_outer_units_before_those_inside_them() -> None:
    names = ["", "embed", "blocks.1", "blocks.1.mlp", "blocks.10", "head"]
    order = [names[number] for number in backward_order(names)]
    assert order == ["", "head", "blocks.10", "blocks.1", "blocks.1.mlp", "embed"]


# By a trace


def _trace(*spans: tuple[Kind, int, int], transfers: tuple[tuple[int, int], ...]) -> RankTrace:
    """A trace of one step. spans: kind, unit, duration. transfers: unit and start of all-gathers."""
    ends = [*itertools.accumulate(duration for *_, duration in spans)]
    return RankTrace(
        recording="one",
        rank=0,
        num_ranks=1,
        device="cpu",
        clock=Clock(0, 0, "host"),
        units=(TracedUnit("", 0, 0, "gloo"), TracedUnit("a", 8, 4, "gloo")),
        steps=(TracedStep(1, 0, ends[-1]),),
        timeline=tuple(
            Segment(kind, unit, end - duration, end)
            for (kind, unit, duration), end in zip(spans, ends, strict=True)
        ),
        transfers=tuple(Transfer(Kind.ALL_GATHER, unit, at, at + 1, 8) for unit, at in transfers),
        categories=(),
        samples=(),
    )


STEP = (
    (Kind.WAIT_ALL_GATHER, 0, 2),
    (Kind.FORWARD, 0, 10),
    (Kind.WAIT_ALL_GATHER, 1, 3),  # at 12
    (Kind.FORWARD, 1, 10),
    (Kind.FORWARD, 0, 10),
    (Kind.OTHER, -1, 5),
    (Kind.ALL_GATHER, 1, 1),  # at 40
    (Kind.BACKWARD, 0, 10),
    (Kind.WAIT_ALL_GATHER, 1, 6),
    (Kind.BACKWARD, 1, 20),
    (Kind.WAIT_REDUCE_SCATTER, 1, 7),
    (Kind.OPTIMIZER, -1, 4),
)


def test_only_gathers_of_backward_count() -> None:
    seen = backward_gathers(_trace(*STEP, transfers=((0, 0), (1, 12), (1, 40))))
    assert seen == BackwardGathers(((0, 7),), (False, True), (True, True))


def test_a_unit_that_stayed_is_seen_as_one_that_nobody_gathered() -> None:
    stayed = tuple(each for place, each in enumerate(STEP) if place not in (6, 8))
    seen = backward_gathers(_trace(*stayed, transfers=((0, 0), (1, 12))))
    assert (seen.are_gathered[1], seen.are_used[1]) == (False, True)


@pytest.mark.parametrize("late", [0, 100])
def test_the_rank_that_waits_least_and_the_median_step_count(late: int) -> None:
    ranks = [
        BackwardGathers(((7, 2), (9, 3), (100, 4)), (True, True), (True, True)),
        BackwardGathers(((7 + late, 2), (8, 9), (90, 1)), (True, True), (True, True)),
    ]
    assert exposed_of_all(ranks) == (8, 2)
