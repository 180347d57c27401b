"""Fixtures and options of the test suite."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Before torch is imported, here and in the ranks, which inherit the environment: one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.api import OURS, TORCH
from tests.harness import Pools

CHOICES = {"ours": OURS, "torch": (TORCH,), "all": (TORCH, *OURS), **{n: (n,) for n in OURS}}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose what is tested and how much."""
    parser.addoption(
        "--impl",
        choices=CHOICES,
        default="ours",
        help="run the behaviour and parity tests on this implementation (default: ours)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marks of this folder."""
    for mark in (
        "ours(reason): says what PyTorch's engine lacks for this test",
        "apis(*names): the only implementations for which this test has a meaning",
    ):
        config.addinivalue_line("markers", mark)


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


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    """Yield the pools of ranks, and stop them at the end of the session."""
    pools = Pools()
    yield pools
    pools.close()
