"""Which tests `make test` leaves to `make test-all`, because they repeat what others test.

Two ranks of one machine exchange bytes by peer memory or by collectives. Files that test what
happens before or after that say `pytestmark = one_way(...)` with what tests the other way. A test
with many combinations of settings says with `repeats` which of them are left out: in the rest, every
two values of different settings still meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

Settings = Mapping[str, Any]

MARK = "repeats(condition): long where this is true of the test's parameters"


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


def is_odd(*facts: bool) -> bool:
    """Whether an odd number of facts is true: leaves out half, and no pair of values."""
    return sum(facts) % 2 == 1


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Give the mark `long` to those cases that repeat others."""
    for item in items:
        settings = item.callspec.params if hasattr(item, "callspec") else {}
        only = item.get_closest_marker("apis")
        alone = only is not None and "peer_memory" not in only.args
        for mark in () if alone else item.iter_markers("repeats"):
            if mark.args[0](settings):
                item.add_marker(pytest.mark.long)
