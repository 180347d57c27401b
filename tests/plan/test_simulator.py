"""Clocks: actions in the order of their lanes and of what they wait for, time that is lost to whom, and memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan.actions import Action, ActionKind, Change, Holding, Lane
from fullshard.plan.simulator import SimulationError, follow_memory, simulate
from fullshard.plan.step import PlannedStep
from fullshard.plan.step_state import ActionLog

AG, C = Lane.ALL_GATHER, Lane.COMPUTE
NO_HOST = 0.0


def gather(unit: int = 0, **options: Any) -> Action:
    return Action(ActionKind.ALL_GATHER, AG, unit, **options)


def compute(*after: int, **options: Any) -> Action:
    return Action(ActionKind.FORWARD, C, 0, after=after, **options)


def wait(*after: int, **options: Any) -> Action:
    return Action(ActionKind.WAIT, C, 0, after=after, **options)


def ends(actions: list[Action], seconds: list[float]) -> list[float]:
    simulated = simulate(actions, seconds, [NO_HOST] * len(actions))
    return [span.end_s for span in simulated.spans]


def test_lanes_run_beside_each_other_and_wait_where_they_are_told() -> None:
    actions = [compute(), gather(), wait(1), compute()]
    assert ends(actions, [2.0, 3.0, 0.0, 4.0]) == [2.0, 3.0, 3.0, 7.0]


def test_time_that_compute_waits_is_exposed() -> None:
    actions = [compute(), gather(unit=5), wait(1), compute()]
    simulated = simulate(actions, [2.0, 3.0, 0.0, 4.0], [0.0] * 4)
    assert simulated.exposed_s == {(ActionKind.ALL_GATHER, 5): 1.0}
    assert (simulated.computing_s, simulated.host_bound_s, simulated.step_s) == (6.0, 0.0, 7.0)


def test_a_late_host_is_to_blame_only_until_it_came() -> None:
    actions = [gather(unit=5), wait(0), compute()]
    # Issued at 1, 3 and 6: compute waits for the host until 3, for the gather until 5, for the host until 6.
    simulated = simulate(actions, [4.0, 0.0, 1.0], [1.0, 2.0, 3.0])
    assert [span.issued_s for span in simulated.spans] == [1.0, 3.0, 6.0]
    assert simulated.host_bound_s == 3.0 + 1.0
    assert simulated.exposed(ActionKind.ALL_GATHER) == 2.0
    assert simulated.step_s == 7.0


def test_the_host_issues_nothing_while_it_waits() -> None:
    actions = [compute(host_waits=True), gather(), wait(1, host_waits=True)]
    assert ends(actions, [2.0, 3.0, 0.5]) == [2.0, 5.0, 5.5]
    simulated = simulate(actions, [2.0, 3.0, 0.5], [0.0] * 3)
    assert simulated.exposed(ActionKind.ALL_GATHER) == 3.5  # what finishes it is the host's work


durations = st.floats(0, 10, allow_nan=False)


@st.composite
def programs(draw: Any) -> tuple[list[Action], list[float], list[float]]:
    num = draw(st.integers(1, 20))
    actions = [
        Action(
            ActionKind.FORWARD,
            draw(st.sampled_from(list(Lane))),
            after=tuple(draw(st.sets(st.integers(0, n - 1), max_size=3))) if n else (),
            host_waits=draw(st.booleans()),
        )
        for n in range(num)
    ]
    times = st.lists(durations, min_size=num, max_size=num)
    return actions, draw(times), draw(times)


@given(programs())
def test_every_action_keeps_its_order(
    program: tuple[list[Action], list[float], list[float]],
) -> None:
    actions, seconds, host_s = program
    simulated = simulate(actions, seconds, host_s)
    last: dict[Lane, float] = {}
    host = 0.0
    for action, span, took, host_took in zip(
        actions, simulated.spans, seconds, host_s, strict=True
    ):
        assert span.issued_s == pytest.approx(host + host_took)
        earliest = [
            span.issued_s,
            last.get(action.lane, 0.0),
            *(simulated.spans[n].end_s for n in action.after),
        ]
        assert span.start_s == pytest.approx(max(earliest))
        assert span.end_s - span.start_s == pytest.approx(took)
        last[action.lane] = span.end_s
        host = span.end_s if action.host_waits else span.issued_s
    assert simulated.step_s == max(span.end_s for span in simulated.spans)
    compute_ends = [s.end_s for a, s in zip(actions, simulated.spans, strict=True) if a.lane is C]
    known = simulated.computing_s + simulated.host_bound_s + sum(simulated.exposed_s.values())
    assert known == pytest.approx(max(compute_ends, default=0.0), abs=1e-6)


@pytest.mark.parametrize("bad", [[1.0], [1.0, -1.0], [1.0, math.inf], [1.0, math.nan]])
def test_durations_that_do_not_fit_are_refused(bad: list[float]) -> None:
    actions = [compute(), compute()]
    with pytest.raises(SimulationError, match="seconds"):
        simulate(actions, bad, [0.0, 0.0])
    with pytest.raises(SimulationError, match="host_s"):
        simulate(actions, [0.0, 0.0], bad)


def test_actions_that_wait_for_later_ones_are_refused() -> None:
    with pytest.raises(SimulationError, match="Action 0"):
        simulate([compute(1), compute()], [1.0, 1.0], [0.0, 0.0])


def test_memory_is_followed_in_the_order_of_the_host() -> None:
    saved, freed = Change(Holding.ACTIVATIONS, 10, 0), Change(Holding.ACTIVATIONS, -10, 0)
    gradient = Change(Holding.FULL_GRADIENTS, 4, 0)
    step = PlannedStep(
        (
            compute(changes=(saved,), peak_nbytes=15),
            Action(ActionKind.BACKWARD, C, 0, changes=(freed, gradient), peak_nbytes=6),
        ),
        (Change(Holding.SHARDS, 100, 0),),
    )
    memory = follow_memory(step)
    assert memory.highest == (115, 116)
    assert (memory.peak_nbytes, memory.peak_action) == (116, 1)
    used = {
        holding: memory.at_peak_of(holding) for holding in Holding if memory.at_peak_of(holding)
    }
    assert used == {Holding.SHARDS: 100, Holding.ACTIVATIONS: 12, Holding.FULL_GRADIENTS: 4}
    assert sum(memory.levels[-1]) == 104


def test_what_goes_before_an_action_is_not_in_use_while_it_runs() -> None:
    gathered, left = Change(Holding.UNSHARDED, 30, 0), Change(Holding.FULL_GRADIENTS, 8, 0)
    kept = Change(Holding.GRADIENT_SHARDS, 16, 0)
    log = ActionLog(has_streams=True)
    log.issue(Action(ActionKind.BACKWARD, C, 0), [gathered, left])
    log.carry(each._replace(nbytes=-each.nbytes) for each in (gathered, left))
    log.carry([kept])
    log.issue(Action(ActionKind.OPTIMIZER, C, peak_nbytes=50), [kept._replace(nbytes=-kept.nbytes)])
    shards, state = Change(Holding.SHARDS, 20, 0), Change(Holding.OPTIMIZER, 40, 0)
    memory = follow_memory(PlannedStep(tuple(log.actions), (shards, state)))
    assert {each.holding: each.nbytes for each in memory.at_peak} == {
        Holding.SHARDS: 20,
        Holding.OPTIMIZER: 40,
        Holding.GRADIENT_SHARDS: 16,
        Holding.OPTIMIZER_TEMPORARIES: 50,
    }
    assert memory.peak_nbytes == 126
