"""What of the wrapper's tests takes too long for every change.

How bytes travel is tested in full by the engine's tests. Here one way is enough by default, and the
others run in `make test-all`. So do the combinations of settings that `REPEATED` tells: in what is
left of each test, every two (of an exception, every three) values of different settings still meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Settings = Mapping[str, Any]


def _is_odd(*facts: bool) -> bool:
    return sum(facts) % 2 == 1


REPEATED: dict[str, Callable[[Settings], bool]] = {
    "test_torch_s_states_are_ours": lambda s: _is_odd(
        s["optimizer"] == "sgd", s["use_orig_params"], s["into_orig_params"]
    ),
    "test_torch_s_state_dicts_are_ours": lambda s: _is_odd(
        s["direction"] == "to_torch", s["use_orig_params"], s["into_orig_params"]
    ),
    "test_any_kind_loads_whatever_the_settings": lambda s: _is_odd(
        s["settings"] == "FULL", s["saved"] in ("full", "sharded", "dtensor"), s["use_orig_params"]
    ),
    "test_training_goes_on_after_an_exception": lambda s: _is_odd(
        s["strategy"] == "FULL_SHARD",
        s["use_orig_params"],
        s["when"] == "forward",
        s["where"] == "root",
    ),
}


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what differs from another test in how bytes travel, in sizes or repeats."""
    for item in items:
        if item.path.parent != Path(__file__).parent:
            continue
        assert isinstance(item, pytest.Function)
        repeats = REPEATED.get(item.originalname)
        if repeats is not None and repeats(item.callspec.params):
            item.add_marker(pytest.mark.long)
        if item.path.name == "test_collectives.py":
            continue
        # SHARD_GRAD_OP differs from FULL_SHARD in collectives alone; four ranks from two in sizes.
        if any(part in item.name for part in ("process_group", "SHARD_GRAD_OP", "4ranks")):
            item.add_marker(pytest.mark.long)
