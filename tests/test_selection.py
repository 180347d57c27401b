"""What `make test` leaves to `make test-all`."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.selection import mark_long, one_way, repeats


def _case(
    request: pytest.FixtureRequest, *marks: pytest.MarkDecorator, **params: Any
) -> pytest.Function:
    case = pytest.Function.from_parent(request.node.parent, name="case", callobj=lambda: None)
    case.callspec = type("CallSpec", (), {"params": params})  # type: ignore[assignment]
    for mark in marks:
        case.add_marker(mark)
    return case


def _left_out(request: pytest.FixtureRequest, *marks: pytest.MarkDecorator, **params: Any) -> bool:
    """Whether a case with these marks and parameters is long."""
    case = _case(request, *marks, **params)
    mark_long([case])
    return case.get_closest_marker("long") is not None


def _kept(
    request: pytest.FixtureRequest, *marks: pytest.MarkDecorator, **settings: Any
) -> list[tuple[Any, ...]]:
    """Return those combinations of settings of a test that are not long."""
    every = list(itertools.product(*settings.values()))
    cases = [_case(request, *marks, **dict(zip(settings, each, strict=True))) for each in every]
    mark_long(cases)
    return [
        each for each, case in zip(every, cases, strict=True) if not case.get_closest_marker("long")
    ]


WAYS = ["peer_memory", "process_group"]


def test_a_test_that_runs_both_ways_has_each_value_once(request: pytest.FixtureRequest) -> None:
    assert _kept(request, api=WAYS) == [("peer_memory",), ("process_group",)]
    kept = _kept(request, api=WAYS, face=["a", "b", "c"], ranks=[2, 3])
    assert kept == [("peer_memory", "a", 2), ("peer_memory", "c", 2), ("process_group", "b", 3)]


def test_a_test_that_says_what_it_leaves_out_has_the_rest(request: pytest.FixtureRequest) -> None:
    mark = repeats(lambda settings: settings["face"] == "b")
    assert len(_kept(request, mark, api=WAYS, face=["a", "b"])) == 2


def test_what_one_parametrize_lists_is_one_setting(request: pytest.FixtureRequest) -> None:
    listed = pytest.mark.parametrize(("face", "ranks"), [(1, 3), (1, 4), (2, 3), (2, 4)])
    assert len(_kept(request, listed, face=[1, 2], ranks=[3, 4])) == 4


def test_what_is_long_by_itself_counts_for_none(request: pytest.FixtureRequest) -> None:
    mark = repeats(lambda settings: settings["face"] == settings["ranks"] == 0)
    kept = _kept(request, mark, face=[0, 1], ranks=[0, 1])
    assert kept == [(0, 1), (1, 0)]


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
