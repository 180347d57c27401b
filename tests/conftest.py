"""Fixtures and options of the test suite."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

# Before torch is imported, here and in the ranks, which inherit the environment: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from tests import recording, selection
from tests.api import OURS, TORCH
from tests.harness import Pools

WITHOUT_LONG = "not long"  # what `make test` selects
# Examples have no time limit: how long one takes beside other work says nothing.
settings.register_profile("all", deadline=None, max_examples=200)
settings.register_profile(WITHOUT_LONG, deadline=None, max_examples=25)
CHOICES = {"ours": OURS, "torch": (TORCH,), "all": (TORCH, *OURS), **{n: (n,) for n in OURS}}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose what is tested and how much."""
    parser.addoption(
        "--impl",
        choices=CHOICES,
        default="ours",
        help="run the behaviour and parity tests on this implementation (default: ours)",
    )
    parser.addoption(
        "--record-torch",
        metavar="FILE",
        type=Path,
        help="write the result into the row of this torch there, unless tests were selected other "
        "than by `-m 'not long'`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of this folder."""
    for mark in (
        "ours(reason): says what PyTorch's engine lacks for this test",
        *selection.MARKS,
        "apis(*names): the only implementations for which this test has a meaning",
    ):
        config.addinivalue_line("markers", mark)
    settings.load_profile(WITHOUT_LONG if config.option.markexpr == WITHOUT_LONG else "all")
    if not hasattr(config, "workerinput") and config.getoption("--record-torch"):
        config.pluginmanager.register(_Recorder())


class _Recorder:
    """Writes down how a run of all tests ended."""

    def __init__(self) -> None:
        self._began, self._clock = datetime.now(timezone.utc), time.monotonic()

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Write the row of this torch, unless some tests were left out."""
        option = config.option
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        is_whole = is_whole and not option.keyword and not getattr(option, "splits", None)
        if not is_whole or option.markexpr not in ("", WITHOUT_LONG):
            return
        row = recording.torch_row(
            torch.__version__,
            f"{self._began:%Y-%m-%d}",
            time.monotonic() - self._clock,
            {kind: len(reports) for kind, reports in terminalreporter.stats.items()},
            has_long=not option.markexpr,
        )
        file = config.getoption("--record-torch")
        file.write_text(recording.with_row(file.read_text(), row))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that takes `api` on every implementation under test."""
    if "api" not in metafunc.fixturenames:
        return
    names: list[object] = list(CHOICES[metafunc.config.getoption("--impl")])
    if only := metafunc.definition.get_closest_marker("apis"):
        names = [name for name in names if name in only.args]
    if TORCH in names and (ours := metafunc.definition.get_closest_marker("ours")):
        skip = pytest.mark.skip(reason=f"PyTorch: {ours.args[0]}")
        names[names.index(TORCH)] = pytest.param(TORCH, marks=skip)
    metafunc.parametrize("api", names)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as long what repeats other tests."""
    selection.mark_long(items)


def pytest_collection_finish() -> None:
    """Let collections, which many tests ask for, pass over what is there before the first test."""
    gc.freeze()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Yield the pools of ranks, and stop them at the end of the session."""
    pools = Pools(num_repeats=1)
    yield pools
    pools.close()
