"""A rank or the launcher that is killed takes everything with it, quickly and by name."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from tests.shared_memory import inodes_of, still_mapped
from tests.tools.processes import (
    FOREVER,
    Run,
    alive,
    descendants,
    kill,
    running,
    wait_until,
)

LIMIT_S = 10.0


def start(run: Run) -> list[int]:
    """Wait until training is under way; return every process of the run."""
    run.wait_for_step(3)
    assert sorted(run.ranks()) == [0, 1]
    return [run.process.pid, *descendants(run.process.pid)]


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_others_and_is_named(tmp_path: Path, rank: int) -> None:
    with running(tmp_path / "run", *FOREVER, "--save-every", "2") as run:
        pids = start(run)
        shared = inodes_of(pids)
        kill(run.ranks()[rank])
        assert wait_until(lambda: not alive(pids), LIMIT_S) < LIMIT_S
        result = run.finish()
    assert shared
    assert not still_mapped(shared)
    assert result.code == 3, result.err
    assert f"rank {rank} died" in result.err, "said by the rank that is left"
    said = re.search(r"complete checkpoint is of step (\d+) \((.*)\); continue with", result.err)
    assert said, result.err
    assert int(said[1]) in range(2, len(run.losses()) + 1, 2)
    assert said[2] == str(run.folder / "checkpoints" / f"step-{int(said[1]):08d}")
    assert f"rank {rank} (pid " in result.err, "said by the launcher"
    assert "was killed by SIGKILL" in result.err
    assert "Traceback" not in result.err


def test_a_killed_rank_is_named_under_torchrun_too(tmp_path: Path) -> None:
    with running(tmp_path / "run", *FOREVER, torchrun=2) as run:
        pids = start(run)
        kill(run.ranks()[1])
        assert wait_until(lambda: not alive(pids), LIMIT_S) < LIMIT_S
        result = run.finish()
    assert result.code != 0
    assert "rank 1 died" in result.err
    assert "no complete checkpoint yet" in result.err


def test_a_killed_launcher_leaves_no_process(tmp_path: Path) -> None:
    with running(tmp_path / "run", *FOREVER) as run:
        pids = start(run)
        shared = inodes_of(pids)
        os.kill(run.process.pid, signal.SIGKILL)
        assert wait_until(lambda: not alive(pids[1:]), LIMIT_S) < LIMIT_S
    assert shared
    assert not still_mapped(shared)
