import doctest
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan import schedule
from fullshard.plan.schedule import (
    Op,
    Recorder,
    ScheduleError,
    Step,
    check_steps,
    first_difference,
    format_steps,
    parse_steps,
    plan_steps,
    prefetch,
)

orders = st.lists(st.integers(0, 5), min_size=1, max_size=12)
resharded_units = st.sets(st.integers(0, 5))


def test_the_docstring_example_holds() -> None:
    assert doctest.testmod(schedule).failed == 0


@given(orders, resharded_units)
def test_text_parses_back(order: list[int], resharded: set[int]) -> None:
    steps = plan_steps(order, resharded=resharded)
    assert parse_steps(format_steps(steps)) == steps


@given(orders, resharded_units, st.integers(0, 3))
def test_prefetch_keeps_a_schedule_valid_and_complete(
    order: list[int], resharded: set[int], ahead: int
) -> None:
    steps = plan_steps(order, resharded=resharded)
    moved = prefetch(steps, ahead=ahead)
    assert check_steps(steps) == ()
    assert check_steps(moved) == ()
    assert sorted(map(str, moved)) == sorted(map(str, steps))
    compute = [step for step in steps if step.op in (Op.FORWARD, Op.BACKWARD)]
    assert [step for step in moved if step.op in (Op.FORWARD, Op.BACKWARD)] == compute


def test_prefetch_moves_an_unshard_before_the_compute_that_precedes_it() -> None:
    steps = parse_steps("0:unshard 0:forward 1:unshard 1:forward")
    assert format_steps(prefetch(steps)) == "0:unshard 1:unshard 0:forward 1:forward"


def test_prefetch_does_not_pass_the_same_units_reshard() -> None:
    steps = parse_steps("1:unshard 1:forward 1:reshard 1:unshard 1:backward")
    assert prefetch(steps) == steps


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0:forward", "unit 0 is sharded"),
        ("0:unshard 0:unshard", "unsharded already"),
        ("0:reshard", "sharded already"),
        ("0:unshard 0:forward 0:reduce", "no backward"),
    ],
)
def test_contradictions_are_found(text: str, problem: str) -> None:
    (found,) = check_steps(parse_steps(text))
    assert problem in found


@pytest.mark.parametrize("text", ["forward", "x:forward", "0:sideways", "0:"])
def test_text_that_is_no_schedule_is_refused_by_word(text: str) -> None:
    with pytest.raises(ScheduleError, match="schedule word 1"):
        parse_steps(f"0:unshard {text}")


def test_the_first_difference_is_named() -> None:
    planned = parse_steps("0:unshard 0:forward 1:unshard")
    observed = parse_steps("0:unshard 0:forward 2:unshard")
    assert first_difference(planned, observed) == "step 2: planned 1:unshard, observed 2:unshard"
    assert first_difference(planned, planned) is None
    assert first_difference(planned[:1], planned) == (
        "step 1: planned nothing more, observed 0:forward"
    )


def run_pass(recorder: Recorder, order: list[int]) -> list[int | None]:
    recorder.start_pass()
    return [recorder.next_unit(unit) for unit in order]


def test_a_recorder_knows_what_follows_from_the_second_pass_on() -> None:
    recorder = Recorder()
    assert run_pass(recorder, [0, 1, 2]) == [None, None, None]
    assert run_pass(recorder, [0, 1, 2]) == [1, 2, None]


def test_a_recorder_stops_guessing_after_a_divergence() -> None:
    recorder = Recorder()
    run_pass(recorder, [0, 1, 2, 3])
    assert run_pass(recorder, [0, 2, 3]) == [1, None, None]
    assert run_pass(recorder, [0, 2, 3]) == [2, 3, None]


def test_a_recorder_gives_the_backward_order() -> None:
    recorder = Recorder()
    for unit in (4, 5, 4):
        recorder.expect_backward(unit)
    assert [recorder.start_backward(unit) for unit in (4, 5, 4, 4)] == [5, 4, None, None]
    recorder.expect_backward(4)
    recorder.end_iteration()
    assert recorder.start_backward(4) is None


@pytest.mark.parametrize("num_passes", [1, 2, 5])
def test_a_recorder_knows_what_ran_before_in_every_pass_that_is_not_differentiated(
    num_passes: int,
) -> None:
    recorder = Recorder()
    for _ in range(num_passes):
        for unit in (0, 1, 2):
            recorder.expect_backward(unit)
    for number in reversed(range(num_passes)):
        assert recorder.start_backward(2) == 1
        assert recorder.start_backward(1) == 0
        assert recorder.start_backward(0) == (2 if number else None)


def test_passes_without_a_backward_leave_nothing_that_grows() -> None:
    sizes = []
    for num_passes, num_orders in [(3, 1), (300, 1), (3000, 7), (30_000, 7)]:
        recorder = Recorder()
        orders = random.Random(0)
        for _ in range(num_passes):
            recorder.start_pass()
            shift = orders.randrange(num_orders)
            for unit in range(10):
                recorder.next_unit(shift * unit % 11)
                recorder.expect_backward(shift * unit % 11)
        sizes.append(len(pickle.dumps(recorder)))
    assert sizes[1] < 1.2 * sizes[0]
    assert sizes[3] < 1.2 * sizes[2]


def test_a_step_prints_as_unit_and_op() -> None:
    assert str(Step(3, Op.UNSHARD)) == "3:unshard"
