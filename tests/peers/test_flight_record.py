"""What ranks enter before they exchange anything, in one process."""

from __future__ import annotations

import contextlib
import types

import pytest

from fullshard.errors import DivergenceError, PeerTimeoutError
from fullshard.peers import flight_record, waits
from fullshard.peers.flight_record import FlightRecord
from fullshard.peers.waits import wait_comparing


def _records(size: int) -> list[FlightRecord]:
    memory = memoryview(bytearray(size * flight_record.NBYTES))
    ranks = [10 + rank for rank in range(size)]
    return [FlightRecord(rank, ranks, memory) for rank in range(size)]


def test_equal_entries_pass_whoever_is_ahead() -> None:
    one, two = _records(2)
    for number in range(500):
        one.enter(f"unit {number % 7}", 16)
        if number >= 5:
            two.enter(f"unit {(number - 5) % 7}", 16)
        one.compare()
        two.compare()


def test_second_of_two_ranks_refuses_before_it_moves_anything_and_first_while_it_waits() -> None:
    one, two, three = _records(3)
    for each in (one, two, three):
        each.enter("before forward")
    one.enter("a: reduce-scatter", 64)
    three.enter("a: reduce-scatter", 64)
    with pytest.raises(DivergenceError) as late:
        two.enter("b: reduce-scatter", 64)
    with pytest.raises(DivergenceError) as waiting:
        one.compare()
    for error in (late, waiting):
        assert "ranks 10, 12: before the first step: a: " in str(error.value)
        assert "rank 11: before the first step: b: " in str(error.value)


def test_another_size_of_the_same_unit_is_refused() -> None:
    one, two = _records(2)
    one.enter("a", 64)
    with pytest.raises(DivergenceError, match=r"a \(128 bytes\)"):
        two.enter("a", 128)


def test_entries_of_other_places_say_nothing() -> None:
    one, two = _records(2)
    for number in range(200):  # far beyond what is kept
        one.enter(f"{number}")
    two.enter("0")
    two.compare()


def test_names_longer_than_an_entry_are_compared_whole() -> None:
    one, two = _records(2)
    one.enter("x" * 300 + "1")
    with pytest.raises(DivergenceError, match="xxx"):
        two.enter("x" * 300 + "2")


class _Work:
    """A collective whose waits time out until it is over, as Gloo's may at the last moment."""

    def __init__(self, num_waits: int, error: str = "") -> None:
        self.num_waits, self.error = num_waits, error

    def wait(self, timeout: object = None) -> None:
        """Time out, or say how it ended."""
        self.num_waits -= 1
        if self.num_waits >= 0 and timeout is not None:
            raise RuntimeError("Operation timed out!")
        if self.error:
            raise RuntimeError(self.error)

    def is_completed(self) -> bool:
        """Whether it is over: from the last time-out on."""
        return self.num_waits <= 0


class _Watchdog:
    """A watchdog that finds nothing."""

    def waiting(self, *_: object, **options: object) -> contextlib.AbstractContextManager[None]:
        """Do nothing."""
        return contextlib.nullcontext()

    board = types.SimpleNamespace(
        unreached=frozenset(), read=lambda ranks: {}, processes=lambda ranks: {}
    )

    def check(self) -> None:
        """Do nothing."""


@pytest.fixture(autouse=True)
def _no_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the thread, which needs a process group."""
    monkeypatch.setattr(waits, "watchdog", _Watchdog)


def _wait(work: _Work) -> None:
    wait_comparing(work, _records(2)[0], "all-gather", 30.0)


@pytest.mark.parametrize("num_waits", [0, 1, 3])
def test_collective_that_ends_as_a_wait_times_out_has_not_failed(num_waits: int) -> None:
    _wait(_Work(num_waits))


@pytest.mark.parametrize("num_waits", [0, 1, 3])
def test_failure_of_a_collective_is_its_own_words(num_waits: int) -> None:
    with pytest.raises(RuntimeError, match="Connection closed"):
        _wait(_Work(num_waits, "Connection closed"))


@pytest.mark.parametrize("num_waits", [1, 3])
@pytest.mark.parametrize(
    "error",
    ["Timed out waiting 10000ms for recv", "Application timeout caused pair closure"],
    ids=["its-own", "of-another-wait-for-that-rank"],
)
def test_time_of_the_backend_is_over_for_the_ranks_that_are_late(
    num_waits: int, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of the backend's words say so, they are no sign that a rank has ended."""
    monkeypatch.setattr(waits.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(waits.dist, "get_world_size", lambda: 2)
    with pytest.raises(PeerTimeoutError, match="rank 1"):
        _wait(_Work(num_waits, error))
