"""Runs a plan's job on real processes, and says how each rank ended and what it left behind.

Unlike in `tests.harness`, a rank's process ends as a program's does: an exception that nobody catches
is printed, and gives the exit code.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.faults import job
from tests.faults.job import Plan
from tests.harness import PRELOADED, processes_of_group
from tests.shared_memory import inodes_of, still_mapped


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    exit_code: None if it hung; minus the number of a signal. kinds: names of the exception's class and
    of its bases. seconds: from the fault to the end of the program. stderr: all it wrote there.
    """

    rank: int
    exit_code: int | None
    kinds: list[str] = field(default_factory=list)
    text: str = ""
    seconds: float = 0.0
    stderr: str = ""
    parameters: dict[str, Tensor] | None = None

    @property
    def words(self) -> str:
        """All that the rank said of the fault: its error, and what is on stderr."""
        return f"{self.text}\n{self.stderr}"


def run(plan: Plan, limit_s: float) -> list[Ending]:
    """Run a plan's job; ranks that still run after the limit, or after all but one that stalls, are killed.

    Asserts that nothing outlives the ranks: no process, and no memory that they shared.
    """
    folder = Path(tempfile.mkdtemp(prefix="fullshard-faults-"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ranks = [
        context.Process(target=_rank_main, args=(plan, rank, folder), daemon=False)
        for rank in range(plan.size)
    ]
    inodes: set[str] = set()
    try:
        for each in ranks:
            each.start()
        deadline = time.monotonic() + limit_s
        last = None if plan.fault not in job.STALLS else ranks[plan.rank]
        while (
            any(each.is_alive() for each in ranks if each is not last)
            and time.monotonic() < deadline
        ):
            inodes |= inodes_of(each.pid for each in ranks if each.pid is not None)
            time.sleep(0.05)
        endings = [_ending(rank, each.exitcode, folder) for rank, each in enumerate(ranks)]
        orphans = [
            pid
            for each in ranks
            if not each.is_alive() and each.pid is not None
            for pid in processes_of_group(each.pid)
        ]
        assert not orphans, f"processes outlive their rank: {orphans}"
    finally:
        for each in ranks:
            if each.pid is not None:
                _kill_group(each.pid)
            each.join(10)
        shutil.rmtree(folder, ignore_errors=True)
    assert not still_mapped(inodes)
    return endings


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _ending(rank: int, exit_code: int | None, folder: Path) -> Ending:
    noted: dict[str, Any] = {}
    if (path := folder / f"noted-{rank}").exists():
        noted = json.loads(path.read_text())
    parameters = folder / f"parameters-{rank}"
    return Ending(
        rank,
        exit_code,
        stderr=(folder / f"stderr-{rank}").read_text(errors="replace"),
        parameters=torch.load(parameters) if parameters.exists() else None,
        **noted,
    )


def _rank_main(plan: Plan, rank: int, folder: Path) -> None:
    """Be one rank: what the parent's `run` starts."""
    os.setpgid(0, 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (folder / f"{name}-{rank}").open("w") as file:
            os.dup2(file.fileno(), number)

    def note(parameters: dict[str, Tensor] | None = None, **noted: Any) -> None:
        if parameters is not None:
            torch.save(parameters, folder / f"parameters-{rank}")
        if noted:
            (folder / f"noted-{rank}").write_text(json.dumps(noted))

    try:
        job.main(plan, rank, folder, note)
    except Exception:
        traceback.print_exc()
        raise
