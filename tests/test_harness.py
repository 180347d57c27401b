"""The harness itself: failures, hangs and deaths are named, and the next test is not disturbed."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.harness import (
    FAULT,
    Fate,
    Pools,
    RankError,
    Task,
    on_ranks,
    rank,
    run_fresh,
    world_size,
)


def _task(body: object) -> Task:
    return Task(__name__, body.__name__, {})  # type: ignore[attr-defined]


@on_ranks(2, 3)
def test_every_rank_runs_the_body() -> None:
    total = torch.tensor([rank()])
    dist.all_reduce(total)
    assert total.item() == sum(range(world_size()))
    assert torch.get_num_threads() == 1


def test_pool_is_reused_after_success(pools: Pools) -> None:
    assert pools.run(2, _task(_pid)) == pools.run(2, _task(_pid))


def test_failure_names_the_rank_and_shows_its_values(pools: Pools) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 raised.*surprise = 41"):
        pools.run(2, _task(_fail_on_rank_1))
    assert len(set(pools.run(2, _task(_pid)))) == 2


def test_hang_names_the_rank_and_the_place(pools: Pools) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 hung.*in _sleep_on_rank_0"):
        pools.run(2, _task(_sleep_on_rank_0), 1.0)
    assert len(set(pools.run(2, _task(_pid)))) == 2


def test_unequal_numbers_of_collectives_fail_in_the_guilty_test(pools: Pools) -> None:
    with pytest.raises(RankError, match=r"hung|raised"):
        pools.run(2, _task(_extra_collective_on_rank_0), 2.0)


def test_fresh_run_reports_a_killed_rank() -> None:
    outcomes = run_fresh(2, _kill_rank_1)
    # Rank 0 returns from the body and raises at the barrier after it.
    assert [outcome.fate for outcome in outcomes] == [Fate.RAISED, Fate.DIED]
    assert outcomes[1].text == "exit code -9"


@pytest.fixture
def own_pools() -> Iterator[Pools]:
    pools = Pools(num_repeats=1)
    yield pools
    pools.close()


def test_fault_outside_python_is_shown_with_its_native_stack(own_pools: Pools) -> None:
    own_pools.run(2, _task(_pid))
    with (
        pytest.warns(UserWarning, match="_abort_on_rank_1") as warned,
        pytest.raises(RankError, match=r"(?s)rank 1 died.*exit code -6"),
    ):
        own_pools.run(2, _task(_abort_on_rank_1))
    shown = str(warned[0].message)
    assert "terminate called" in shown
    assert "libc.so" in shown
    assert shown.endswith("Ran before: tests.test_harness._pid")


def test_fault_that_does_not_come_again_fails_no_test(own_pools: Pools, tmp_path: Path) -> None:
    task = Task(__name__, "_abort_on_rank_1", {"once": tmp_path / "once"})
    with pytest.warns(UserWarning, match=FAULT):
        own_pools.run(2, task)
    with pytest.raises(RankError):  # once in a session, not once in a test
        own_pools.run(2, _task(_abort_on_rank_1))


def test_a_rank_that_ends_by_itself_is_not_run_again(own_pools: Pools) -> None:
    with pytest.raises(RankError, match="exit code 3"):
        own_pools.run(2, _task(_exit_on_rank_1))


def _pid() -> int:
    return os.getpid()


def _fail_on_rank_1() -> None:
    surprise = 40 + rank()
    assert surprise == 40


def _sleep_on_rank_0() -> None:
    if rank() == 0:
        time.sleep(60)


def _extra_collective_on_rank_0() -> None:
    if rank() == 0:
        dist.all_reduce(torch.ones(3))


def _abort_on_rank_1(once: Path | None = None) -> None:
    if rank() == 1 and not (once and once.exists()):
        if once:
            once.touch()
        os.write(2, b"terminate called")
        ctypes.CDLL(None).abort()


def _exit_on_rank_1() -> None:
    if rank() == 1:
        os._exit(3)


def _kill_rank_1() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
