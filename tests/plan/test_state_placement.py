"""Which units' optimizer state stays on the device: within every budget, and as much as there is room for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fullshard.plan.state_placement import NUM_SLOTS, least_budget, plan_state

SIZES = st.lists(st.integers(0, 50), max_size=8)


def _taken(sizes: list[int], stays: tuple[bool, ...]) -> int:
    leaving = [size for size, stay in zip(sizes, stays, strict=True) if not stay]
    return sum(sizes) - sum(leaving) + NUM_SLOTS * max(leaving, default=0)


@given(SIZES, st.integers(0, 120))
def test_a_budget_holds_and_no_other_unit_would_fit(sizes: list[int], more: int) -> None:
    budget = least_budget(sizes) + more
    plan = plan_state(sizes, budget)
    assert _taken(sizes, plan.stays) <= budget
    leaving = [size for size, stay in zip(sizes, plan.stays, strict=True) if not stay]
    assert plan.slot_nbytes == max(leaving, default=0)
    for number, stay in enumerate(plan.stays):
        if not stay:
            also = tuple(each or index == number for index, each in enumerate(plan.stays))
            assert _taken(sizes, also) > budget


@given(SIZES)
def test_the_least_budget_is_what_some_division_takes_and_no_other_takes_less(
    sizes: list[int],
) -> None:
    divisions = [
        tuple(bool(number >> bit & 1) for bit in range(len(sizes)))
        for number in range(2 ** len(sizes))
    ]
    assert least_budget(sizes) == min(_taken(sizes, each) for each in divisions)


def test_without_a_budget_all_leave() -> None:
    assert plan_state([3, 0, 5], None) == ((False, False, False), 5)


def test_a_budget_for_all_keeps_all() -> None:
    assert plan_state([3, 2, 5], 10) == ((True, True, True), 0)
