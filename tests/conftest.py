"""Fixtures and options of the test suite."""

from __future__ import annotations

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

# Examples have no time limit: how long one takes beside other work says nothing.
settings.register_profile("fullshard", deadline=None)
settings.load_profile("fullshard")

WITHOUT_LONG = "not long"  # what `make test` selects
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
        "--record",
        metavar="FILE",
        type=Path,
        help="write the result there, unless tests were selected",
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
    is_worker = hasattr(config, "workerinput")
    if not is_worker and (config.getoption("--record") or config.getoption("--record-torch")):
        config.pluginmanager.register(_Recorder())


class _Recorder:
    """Writes down how a run of all tests ended."""

    def __init__(self) -> None:
        self._began, self._clock = datetime.now(timezone.utc), time.monotonic()
        self._load, self._commit = os.getloadavg()[0], recording.commit()

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        """Write the records, unless some tests were left out."""
        stats = terminalreporter.stats
        marks = config.option.markexpr
        is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS
        if not is_whole or marks not in ("", WITHOUT_LONG) or config.option.keyword:
            return
        kinds = ("passed", "failed", "error", "skipped", "xfailed", "xpassed")
        run = recording.Run(
            began=f"{self._began:%Y-%m-%d %H:%M}",
            commit=self._commit,
            machine=recording.machine(),
            load=(self._load, os.getloadavg()[0]),
            seconds=time.monotonic() - self._clock,
            counts={kind: len(stats[kind]) for kind in kinds if kind in stats},
            failed=[
                report.nodeid for kind in ("failed", "error") for report in stats.get(kind, ())
            ],
        )
        if (file := config.getoption("--record")) and not marks:
            file.write_text(str(run))
        if file := config.getoption("--record-torch"):
            row = recording.torch_row(run, torch.__version__, has_long=not marks)
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


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Yield the pools of ranks, and stop them at the end of the session."""
    pools = Pools(num_repeats=1)
    yield pools
    pools.close()
