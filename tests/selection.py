"""Which tests `make test` leaves to `make test-all`, because they repeat what others test.

Of the cases of one test, as few stay as have each value of each setting; what one `parametrize` lists
is one setting, also where it names several arguments. A test says with `repeats` which cases can go
altogether. Two ranks of one machine exchange bytes by peer memory or by collectives: files that test
what happens before or after that say `pytestmark = one_way(...)` with what tests the other way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Settings = Mapping[str, Any]

MARKS = ("repeats(condition): long where this is true of the test's parameters",)


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


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Give the mark `long` to those cases that repeat others."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        only = item.get_closest_marker("apis")
        runs_one_way = only is not None and "peer_memory" not in only.args
        if not runs_one_way and any(
            m.args[0](_settings(item)) for m in item.iter_markers("repeats")
        ):
            item.add_marker(pytest.mark.long)
        if not item.get_closest_marker("long"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        if len(cases) > 1:
            _leave_each_value(cases)


def _settings(item: pytest.Item) -> Settings:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _values(item: pytest.Item) -> set[tuple[Any, ...]]:
    """Return the value of each setting: the arguments' names, and which objects they are."""
    params = dict(_settings(item))
    listed = [mark.args[0] for mark in item.iter_markers("parametrize")]
    names = [n.replace(",", " ").split() if isinstance(n, str) else list(n) for n in listed]
    groups = [each for each in names if params.keys() >= set(each)]
    groups += [[name] for name in params.keys() - {name for each in groups for name in each}]
    return {(*each, *(id(params[name]) for name in each)) for each in groups}


def _leave_each_value(cases: Iterable[pytest.Item]) -> None:
    """Mark as long what is not needed to have each value of each setting once.

    The next case that stays is always the one with most values that none has yet, of several the
    first: peer memory and the smallest number of ranks come first.
    """
    values = {case: _values(case) for case in cases}
    missing = {value for each in values.values() for value in each}
    while missing:
        case = max(values, key=lambda each: len(values[each] & missing))
        missing -= values.pop(case)
    for case in values:
        case.add_marker(pytest.mark.long)
