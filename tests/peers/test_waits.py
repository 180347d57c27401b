"""What the system tells of a process that says nothing of itself, and which ranks are said to be gone."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard import host
from fullshard.comm.outside_steps import gather_objects
from fullshard.host import process_state
from fullshard.peers import stacks, status_board, waits
from fullshard.peers.status_board import StatusBoard
from fullshard.peers.store import StoreInTime
from fullshard.peers.watchdog import watchdog
from tests.harness import Fate, rank, run_fresh


@pytest.fixture
def stopped() -> object:
    """Yield a process that is stopped."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGSTOP)
    deadline = time.monotonic() + 5
    while process_state(process.pid) != "T" and time.monotonic() < deadline:
        time.sleep(0.01)
    yield process.pid
    process.kill()
    process.wait()


def test_a_stopped_process_is_said_to_be_stopped(
    stopped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks.shutil, "which", lambda _: None)
    said = waits.what_it_does(1, stopped, None)
    assert f"rank 1 (pid {stopped}): it is stopped" in said
    assert f"py-spy dump --pid {stopped}" in said  # what to do for its stack


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ('#!/bin/sh\necho "stack of $4"\n', "by py-spy:\nstack of"),
        ("not a program", "py-spy cannot tell"),
    ],
    ids=["works", "fails"],
)
def test_its_stack_comes_from_py_spy_if_that_works(
    stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    command = tmp_path / "py-spy"
    command.write_text(program)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert said in waits.what_it_does(1, stopped, None)


@pytest.fixture
def dead() -> int:
    """Return the number of a process that is gone."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_process_is_not_taken_for_gone_where_no_file_can_be_opened(
    dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert host.is_running(os.getpid())
    assert not host.is_running(dead)


@pytest.mark.parametrize(("how", "code"), [("kill -9 $$", -9), ("exit 3", 3)])
def test_how_a_process_ended_is_known_until_somebody_has_waited_for_it(how: str, code: int) -> None:
    process = subprocess.Popen(["sh", "-c", f"read line; {how}"], stdin=subprocess.PIPE)
    board = StatusBoard(0, 2)
    board.note_processes({1: process.pid})
    assert board.exited([1]) == set()
    assert board.exit_code(1) is None
    process.stdin.close()
    assert board.wait_for_exit([1], 10.0) or board.wait_for_exit([1], 10.0) == {1}  # first woken
    assert host.exit_code(process.pid) == board.exit_code(1) == code
    process.wait()
    assert host.exit_code(process.pid) is None
    assert board.exit_code(1) == code
    board.close()


@pytest.mark.parametrize(
    ("container", "lost"), [("boot pid:[1] 0", [1]), ("boot pid:[2] 0", [])], ids=["same", "other"]
)
def test_a_process_is_looked_for_where_its_number_means_something(
    dead: int, container: str, lost: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers of one node may share its name; process numbers are each one's own."""
    store = dist.HashStore()
    for module in (waits, status_board):
        monkeypatch.setattr(module, "store_in_time", lambda: StoreInTime(store, 5.0))
    world = type("World", (), {})()  # in which nobody was announced yet
    monkeypatch.setattr(waits, "default_group", lambda: world)
    monkeypatch.setattr(waits, "_GRACE_S", 0.1)
    monkeypatch.setattr(host, "identity", lambda: container)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(waits.os, "getpid", lambda: dead)
    waits.announce()
    monkeypatch.setattr(host, "identity", lambda: "boot pid:[1] 0")
    other = types.SimpleNamespace(board=StatusBoard(0, 2))
    monkeypatch.setattr(waits, "watchdog", lambda: other)
    assert waits.lost_ranks([1]) == lost


def _gather_without(first: bool) -> None:
    """Train over shared memory, and meet outside of a pass when one rank was killed."""
    model = fullshard.fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    dist.barrier()
    if rank() == (0 if first else 1):
        os.kill(os.getpid(), signal.SIGKILL)
    gather_objects(None, None, "a test")


@pytest.mark.parametrize("first", [False, True])
def test_a_rank_that_was_killed_is_named_outside_of_passes(first: bool) -> None:
    outcomes = run_fresh(2, _gather_without, first=first)
    killed, waiting = outcomes if first else reversed(outcomes)
    assert killed.fate is Fate.DIED
    assert waiting.error[0] == "PeerLostError", waiting.text
    assert f"rank {1 - first} died" in waiting.text


def _wait_for_the_last() -> list[str]:
    """Wait for rank 2, as two ranks do; return what this rank reports."""
    model = fullshard.fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    reports: list[str] = []
    waits._SLOW_S, waits._LONGER = 2.0 + rank(), 1.5

    def report(_: str, text: str) -> None:
        (status,) = watchdog()._waits.values()
        assert status["late"] == (2,)  # by which others know for whom this one waits
        reports.append(text)

    waits.logger.warning = report  # type: ignore[method-assign]
    if rank() == 2:
        time.sleep(3.8)
    model(torch.ones(2, 8)).sum().backward()
    return reports


def test_one_rank_reports_who_is_late_and_says_it_once() -> None:
    first, second, late = run_fresh(3, _wait_for_the_last)
    assert second.value == late.value == [], second
    whole, again = first.value
    assert "time.sleep(3.8)" in whole
    assert " frames of " in whole  # of libraries
    assert "for rank 2, alive but not here yet. Nothing has changed." in again
    assert "\n" not in again
