"""Run `fullshard train` as a user does, and look at the processes it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fullshard.tools.loggers import RunLogger
from tests.shared_memory import inodes_of, still_mapped

LIMIT_S = 10.0  # within which a run that loses a process has to end

TINY = (
    *("--model", "tiny", "--seq", "32", "--batch", "2", "--device", "cpu", "--sample-length", "0"),
    *("--lr", "2e-3", "--warmup", "30"),  # gentle enough that sums in another order stay close
)
# A text that takes no time to measure, as Python's own source does.
PAGES = ("--data", str(Path(__file__).parents[2] / "docs" / "training.md"))
DAWDLE_AFTER = "DAWDLE_AFTER"  # a variable: the step after which `Dawdling` takes its time
FOREVER = (*TINY, *PAGES, "--steps", "1000000", "--save-every", "0")


class Dawdling(RunLogger):
    """Has steps take long from a step on: so that a run is not over before it is stopped."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > int(os.environ.get(DAWDLE_AFTER, "1000000")):
            time.sleep(0.1)


class Result(NamedTuple):
    """Exit code and output of a command that has ended."""

    code: int
    out: str
    err: str


def command(*options: str, torchrun: int = 0) -> list[str]:
    """Return the command line of a run, under torchrun with that many ranks if asked."""
    launcher = [sys.executable, "-m"]
    if torchrun:
        launcher += ["torch.distributed.run", "--standalone", f"--nproc-per-node={torchrun}", "-m"]
    return [*launcher, "fullshard", "train", *options]


def environment() -> dict[str, str]:
    """Return an environment without what decides ranks, threads and terminals."""
    dropped = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "FORCE_COLOR", "FULLSHARD_LAUNCHER_PID")
    return {k: v for k, v in os.environ.items() if k not in dropped}


class Run:
    """A training run that is under way, in a process group of its own."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, before: int) -> None:
        self.process = process
        self.folder = folder
        self._before = before

    def losses(self) -> list[float]:
        return losses(self.folder)

    def wait_for_step(self, step: int, *, limit_s: float = 60) -> None:
        """Wait until this run, not the one that it goes on with, has done a step."""

        def is_there() -> bool:
            return _written(self.folder) != self._before and len(self.losses()) >= step

        wait_until(lambda: is_there() or self.process.poll() is not None, limit_s)
        assert self.process.poll() is None, self.finish()

    def wait_for_checkpoint(self, step: int, *, limit_s: float = 60) -> None:
        """Wait until the checkpoint of a step, which is written in the background, is complete."""
        folder = self.folder / "checkpoints" / f"step-{step:08d}"
        wait_until(lambda: folder.is_dir() or self.process.poll() is not None, limit_s)
        assert self.process.poll() is None, self.finish()

    def kill_rank(self, rank: int) -> Result:
        """Kill a rank, and check that it takes everything with it."""
        pid = self.ranks()[rank]
        with self._ends():
            kill(pid)
        return self.finish()

    def kill_launcher(self) -> None:
        """Kill the process that started the ranks, and check that they go with it."""
        with self._ends():
            self.process.kill()

    @contextmanager
    def _ends(self) -> Iterator[None]:
        """Check that no process is left, nor memory that they shared."""
        pids = [self.process.pid, *descendants(self.process.pid)]
        assert sorted(self.ranks()) == [0, 1]
        shared = inodes_of(pids)
        yield
        wait_until(lambda: not alive(pids), LIMIT_S)
        assert shared
        assert not still_mapped(shared)

    def ranks(self) -> dict[int, int]:
        """Return the process id of each rank: of the launcher's forks, in their order, or as their environment says."""
        found = dict(enumerate(descendants(self.process.pid)))
        for pid in descendants(self.process.pid):
            for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = pid
        return found

    def finish(self, *, limit_s: float = 60) -> Result:
        out, err = self.process.communicate(timeout=limit_s)
        return Result(self.process.returncode, out, err)


@contextmanager
def running(folder: Path, *options: str, torchrun: int = 0, resumes: bool = False) -> Iterator[Run]:
    """Start a run, or go on with it, and make sure that nothing of it is left afterwards."""
    option = "--resume" if resumes else "--out"
    before = _written(folder)
    process = subprocess.Popen(
        command(option, str(folder), *options, torchrun=torchrun),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Run(process, folder, before)
    finally:
        if process.poll() is None:
            for pid in [*descendants(process.pid), process.pid]:
                kill(pid)
        process.communicate(timeout=10)


def losses(folder: Path) -> list[float]:
    """Return the loss of every step written so far."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line)["loss"] for line in lines if line.endswith("\n")]


def _written(folder: Path) -> int:
    """Return when a run's losses were last written, in nanoseconds; 0 if never."""
    path = folder / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def descendants(pid: int) -> list[int]:
    """Return children, their children and so on."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for child in map(int, children):
            found += [child, *descendants(child)]
    return found


def alive(pids: Sequence[int]) -> list[int]:
    """Return those that still run; a zombie does not."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z":
            found.append(pid)
    return found


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def wait_until(condition: Callable[[], bool], limit_s: float) -> float:
    """Poll until the condition holds and return the seconds it took; fail after the limit."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < limit_s, f"not within {limit_s} s"
        time.sleep(0.005)
    return time.monotonic() - started
