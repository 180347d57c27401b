"""What of the wrapper's tests takes too long for every change.

How bytes travel is tested in full by the engine's tests. Here one way is enough by default, and the
others run in `make test-all`.
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs over process groups as long, but for tests of the collectives."""
    for item in items:
        here = item.path.parent == Path(__file__).parent
        if here and "process_group" in item.name and item.path.name != "test_collectives.py":
            item.add_marker(pytest.mark.long)
