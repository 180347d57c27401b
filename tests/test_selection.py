"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.selection import is_odd, mark_long, one_way, repeats


def _left_out(request: pytest.FixtureRequest, *marks: pytest.MarkDecorator, **params: Any) -> bool:
    """Whether a case with these marks and parameters is long."""
    case = pytest.Function.from_parent(request.node.parent, name="case", callobj=lambda: None)
    case.callspec = type("CallSpec", (), {"params": params})  # type: ignore[assignment]
    for mark in marks:
        case.add_marker(mark)
    mark_long([case])
    return case.get_closest_marker("long") is not None


def test_one_way_leaves_process_groups_out(request: pytest.FixtureRequest) -> None:
    mark = one_way("elsewhere")
    assert _left_out(request, mark, api="process_group")
    assert not _left_out(request, mark, api="peer_memory")
    assert not _left_out(request, mark)


def test_what_runs_over_process_groups_alone_stays(request: pytest.FixtureRequest) -> None:
    only = pytest.mark.apis("process_group")
    assert not _left_out(request, one_way("elsewhere"), only, api="process_group")


def test_conditions_may_be_functions_with_names(request: pytest.FixtureRequest) -> None:
    def is_large(settings: Any) -> bool:
        return settings["size"] > 2

    assert _left_out(request, repeats(is_large), size=3)
    assert not _left_out(request, repeats(is_large), size=2)


def test_half_of_all_combinations_has_every_two_values() -> None:
    every = list(itertools.product((False, True), repeat=3))
    kept = [facts for facts in every if not is_odd(*facts)]
    assert len(kept) == len(every) / 2
    for first, second in itertools.combinations(range(3), 2):
        assert len({(facts[first], facts[second]) for facts in kept}) == 4
