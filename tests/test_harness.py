"""The harness itself: failures, hangs and deaths are named, and the next test is not disturbed."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import Fate, Pools, RankError, Task, on_ranks, rank, run_fresh, world_size


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


def test_fault_outside_python_is_shown_with_its_native_stack(pools: Pools) -> None:
    pools.run(2, _task(_pid))
    with pytest.raises(RankError, match=r"(?s)rank 1 died.*exit code -6.*Ran before: .*_pid") as found:
        pools.run(2, _task(_end_in_a_thread_of_c_on_rank_1))
    assert "terminate called without an active exception" in str(found.value)
    assert "libc.so" in str(found.value)


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


def _end_in_a_thread_of_c_on_rank_1() -> None:
    if rank() == 1:
        os.write(2, b"terminate called without an active exception")
        ctypes.CDLL(None).abort()


def _kill_rank_1() -> None:
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
