"""Where the paths of ranks part, from what each of them ran."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fullshard.peers.paths import (
    Event,
    Moment,
    StepPhase,
    by_text,
    first_difference,
    name_ranks,
    without_gradients,
)


def _trail(*steps: tuple[int, str], phase: StepPhase = StepPhase.FORWARD) -> list[Event]:
    """Return a trail of units, one letter each, by step."""
    return [Event(Moment(step, phase), 0, unit) for step, units in steps for unit in units]


def test_the_first_unit_that_differs_is_named_with_its_step() -> None:
    said = first_difference({0: _trail((1, "abc"), (2, "abc")), 1: _trail((1, "abc"), (2, "acb"))})
    assert said.endswith("step 2: rank 0 ran b (forward); rank 1 ran c (forward).")


def test_a_rank_that_is_still_on_its_way_does_not_differ() -> None:
    assert first_difference({0: _trail((1, "abc")), 1: _trail((1, "ab"))}) is None
    assert first_difference({0: _trail((1, "abc")), 1: []}) is None


def test_a_rank_that_went_on_to_the_next_step_ran_nothing_more() -> None:
    said = first_difference({0: _trail((1, "abc")), 1: _trail((1, "ab"), (2, "a"))})
    assert said.endswith("step 1: rank 0 ran c (forward); rank 1 ran nothing more.")


def test_of_a_step_whose_beginning_is_lost_nothing_is_said() -> None:
    """A trail keeps a number of events, so it may begin in the middle of a step."""
    assert first_difference({0: _trail((5, "abc")), 1: _trail((5, "bc"))}) is None
    said = first_difference({0: _trail((5, "c"), (6, "ab")), 1: _trail((5, "bc"), (6, "b"))})
    assert said is not None
    assert "step 6" in said


def test_the_phase_tells_units_of_one_name_apart() -> None:
    one = _trail((1, "a")) + _trail((1, "a"), phase=StepPhase.BACKWARD)
    two = _trail((1, "a")) + _trail((1, "a"), phase=StepPhase.EVALUATION)
    said = first_difference({0: one, 1: two})
    assert said.endswith("step 1: rank 0 ran a (backward); rank 1 ran a (evaluation).")


def _backward(units: str, *, empty: str = "") -> list[Event]:
    return [
        event
        for unit in units
        for event in (
            Event(Moment(1, StepPhase.BACKWARD), 0, unit),
            Event(Moment(1, StepPhase.BACKWARD), 0, unit, has_gradients=False),
        )
        if event.has_gradients or unit in empty
    ]


def test_units_without_gradients_are_those_that_other_ranks_have_them_of() -> None:
    forward = _trail((1, "abc"))
    whole = forward + _backward("cba")
    # Gone past b, or ended without gradients of it.
    for own in (_backward("ca"), _backward("cab", empty="b")):
        assert without_gradients({0: whole, 1: forward + own}) == {"b": [1]}
        assert first_difference({0: whole, 1: forward + own}) is not None
    # The last one: where ranks ran the same, only that tells.
    last = forward + _backward("cba", empty="a")
    assert without_gradients({0: whole, 1: last, 2: last}) == {"a": [1, 2]}
    assert first_difference({0: whole, 1: last}) is None
    # On its way still, not run in forward, or lacking everywhere.
    assert without_gradients({0: whole, 1: forward + _backward("c")}) == {}
    assert without_gradients({0: whole, 1: _trail((1, "ac")) + _backward("ca")}) == {}
    assert without_gradients({0: last, 1: last}) == {}
    # Ahead by a unit that it has not run: the other is still on its way to b.
    ahead = _trail((1, "abd")) + _backward("db")
    assert without_gradients({0: _trail((1, "abcd")) + _backward("dc"), 1: ahead}) == {}


def test_ranks_of_one_text_are_named_together() -> None:
    assert by_text({2: "x", 0: "y", 1: "x"}) == [("rank 0", "y"), ("ranks 1, 2", "x")]
    assert name_ranks([3]) == "rank 3"


@given(st.lists(st.text("abc", max_size=4), max_size=4), st.integers(2, 4))
def test_equal_paths_never_part(units: list[str], num_ranks: int) -> None:
    trail = _trail(*enumerate(units, 1))
    assert first_difference(dict.fromkeys(range(num_ranks), trail)) is None


@given(
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_whole_paths_that_differ_part_where_they_first_differ(
    one: list[str], two: list[str]
) -> None:
    # One more step, so that both have ended all that are compared.
    trails = {0: _trail(*enumerate([*one, "x"], 1)), 1: _trail(*enumerate([*two, "x"], 1))}
    said = first_difference(trails)
    steps = zip([*one, "x"], [*two, "x"], strict=False)
    different = [step for step, (a, b) in enumerate(steps, 1) if a != b]
    if not different:
        assert said is None
    elif said is not None:  # else one trail has ended in the step, and may go on
        assert f"in step {different[0]}:" in said
