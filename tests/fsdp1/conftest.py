"""What of the wrapper's tests takes too long for every change.

How bytes travel is tested in full by the engine's tests. Here one way is enough by default, and the
others run in `make test-all`.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what differs from another test in how bytes travel, or in sizes."""
    for item in items:
        if item.path.parent != Path(__file__).parent or item.path.name == "test_collectives.py":
            continue
        # SHARD_GRAD_OP differs from FULL_SHARD in collectives alone; four ranks from two in sizes.
        if any(part in item.name for part in ("process_group", "SHARD_GRAD_OP", "4ranks")):
            item.add_marker(pytest.mark.long)
