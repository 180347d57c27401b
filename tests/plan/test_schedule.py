import pickle
import random

import pytest

from fullshard.plan.schedule import Recorder


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


def test_a_forward_follows_none_that_had_its_backward() -> None:
    recorder = Recorder()
    for _ in range(3):  # micro-batches of one iteration, each with its backward
        for unit in (0, 1):
            recorder.expect_backward(unit)
        assert [recorder.start_backward(unit) for unit in (1, 0)] == [0, None]


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


def test_backwards_of_passes_in_other_orders_follow_each_pass() -> None:
    recorder = Recorder()
    for order in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 3)):
        for unit in order:
            recorder.expect_backward(unit)
    backwards = [3, 0, 3, 1, 2, 0, 3, 2, 1, 0]
    assert [recorder.start_backward(unit) for unit in backwards] == [*backwards[1:], None]


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
