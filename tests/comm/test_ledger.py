"""What ranks enter before they exchange anything, in one process."""

from __future__ import annotations

import pytest

from fullshard.comm import ledger
from fullshard.comm.ledger import Ledger
from fullshard.errors import DivergenceError


def _ledgers(size: int) -> list[Ledger]:
    memory = memoryview(bytearray(size * ledger.NBYTES))
    ranks = [10 + rank for rank in range(size)]
    return [Ledger(rank, ranks, memory, lambda: None) for rank in range(size)]


def test_equal_entries_pass_whoever_is_ahead() -> None:
    one, two = _ledgers(2)
    for number in range(500):
        one.enter(f"unit {number % 7}", 16)
        if number >= 5:
            two.enter(f"unit {(number - 5) % 7}", 16)
        one.compare()
        two.compare()


def test_second_of_two_ranks_refuses_before_it_moves_anything_and_first_while_it_waits() -> None:
    one, two, three = _ledgers(3)
    for each in (one, two, three):
        each.enter("before forward")
    one.enter("a: reduce-scatter", 64)
    three.enter("a: reduce-scatter", 64)
    with pytest.raises(DivergenceError) as late:
        two.enter("b: reduce-scatter", 64)
    with pytest.raises(DivergenceError) as waiting:
        one.compare()
    for error in (late, waiting):
        assert "ranks 10, 12: a: reduce-scatter (64 bytes)" in str(error.value)
        assert "rank 11: b: reduce-scatter (64 bytes)" in str(error.value)


def test_another_size_of_the_same_unit_is_refused() -> None:
    one, two = _ledgers(2)
    one.enter("a", 64)
    with pytest.raises(DivergenceError, match=r"a \(128 bytes\)"):
        two.enter("a", 128)


def test_entries_of_other_places_say_nothing() -> None:
    one, two = _ledgers(2)
    for number in range(200):  # far beyond what is kept
        one.enter(f"{number}")
    two.enter("0")
    two.compare()


def test_names_longer_than_an_entry_are_compared_whole() -> None:
    one, two = _ledgers(2)
    one.enter("x" * 300 + "1")
    with pytest.raises(DivergenceError, match="xxx"):
        two.enter("x" * 300 + "2")
