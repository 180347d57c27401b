"""Which tests `make test` leaves to `make test-all`, because they repeat what others test.

Two ranks of one machine exchange bytes by peer memory or by collectives. Files that test what
happens before or after that say `pytestmark = one_way(...)` with what tests the other way. A test
with many combinations of settings says with `repeats` which of them are left out: in the rest, every
two values of different settings still meet. Or it says `each_value`: then as few cases stay as have
each value of each setting. The same goes for tests that run both ways and say nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.api import OURS

Settings = Mapping[str, Any]

MARKS = (
    "repeats(condition): long where this is true of the test's parameters",
    "each_value(): long but for as few cases as have each value of each parameter",
)


def repeats(condition: Callable[[Settings], bool]) -> pytest.MarkDecorator:
    """Mark as long those cases of a test of whose parameters ``condition`` is true."""
    # Called with a function alone, a mark would decorate that function.
    return pytest.mark.repeats.with_args(condition)


def one_way(tested_by: str) -> pytest.MarkDecorator:
    """Mark as long what runs over process groups, unless that is all that a test runs over.

    tested_by: where that way is tested in `make test`.
    """
    assert tested_by
    return repeats(lambda s: s.get("api") == "process_group")


each_value = pytest.mark.each_value


def is_odd(*facts: bool) -> bool:
    """Whether an odd number of facts is true: leaves out half, and no pair of values."""
    return sum(facts) % 2 == 1


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Give the mark `long` to those cases that repeat others."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        only = item.get_closest_marker("apis")
        if only is not None and "peer_memory" not in only.args:
            continue
        tests[item.nodeid.partition("[")[0]].append(item)
        if any(mark.args[0](_settings(item)) for mark in item.iter_markers("repeats")):
            item.add_marker(pytest.mark.long)
    for cases in tests.values():
        says_nothing = cases[0].get_closest_marker("repeats") is None
        runs_both_ways = {_settings(case).get("api") for case in cases} >= {*OURS}
        if cases[0].get_closest_marker("each_value") or (says_nothing and runs_both_ways):
            _leave_each_value(case for case in cases if not case.get_closest_marker("long"))


def _settings(item: pytest.Item) -> Settings:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _leave_each_value(cases: Iterable[pytest.Item]) -> None:
    """Mark as long what is not needed to have each value of each setting once.

    The next case that stays is always the one with most values that none has yet, of several the
    first: peer memory and the smallest number of ranks come first.
    """
    values = {case: {(n, id(value)) for n, value in _settings(case).items()} for case in cases}
    missing = {value for each in values.values() for value in each}
    while missing:
        case = max(values, key=lambda each: len(values[each] & missing))
        missing -= values.pop(case)
    for case in values:
        case.add_marker(pytest.mark.long)
