"""Start the ranks of this machine as commands of `fullshard`, and say how they ended."""

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from fullshard.launching.processes import Meeting, Process, end_all, wait_for_end
from fullshard.tools.exits import Exit

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""What is passed on to ranks, which save then and end."""

# What torchrun tells its ranks. They meet in a store of the launcher's, which torch has to know.
_AS_TORCHRUN = {
    "GROUP_RANK": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "fullshard",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
_DEFAULTS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}

_LOOK_S = 0.1  # how long an end can go unseen
_SAVE_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, as its launcher said in the environment."""

    rank: int
    num_ranks: int
    local_rank: int
    num_local_ranks: int
    master_host: str
    master_port: int
    launcher_pid: int | None
    started_by: str = "torchrun"


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the ranks ended; `message` is empty when they have said everything themselves.

    rank: the one that failed first; None if none did.
    """

    code: Exit
    message: str = ""
    rank: int | None = None


def launch(arguments: Sequence[str], *, ranks: int, threads: int) -> Ending:
    """Run `python -m fullshard ARGUMENTS` on `ranks` local ranks until all have ended.

    Raises OSError or RuntimeError if they cannot be started.
    """
    meeting = Meeting(ranks, threads)
    command = [sys.executable, "-u", "-m", "fullshard", *arguments]
    processes: list[Process] = []
    with _stop_signals() as asked:
        try:
            for rank in range(ranks):
                environment = _DEFAULTS | meeting.environment(rank) | _AS_TORCHRUN
                processes.append(Process(rank, command, environment))
            while not asked:
                codes = {process.rank: process.exit_code for process in processes}
                failed = {rank: code for rank, code in codes.items() if code}
                if failed:
                    end_all(processes, _SAVE_TIMEOUT_S)
                    pids = {process.rank: process.pid for process in processes}
                    return _ending_of(failed, pids)
                if None not in codes.values():
                    return Ending(Exit.OK)
                time.sleep(_LOOK_S)
            for process in processes:
                process.signal(asked[0])
            wait_for_end(processes, _SAVE_TIMEOUT_S)
            return Ending(Exit.STOPPED)
        finally:
            for process in processes:
                process.kill()


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Note the signals to stop that come within the body, instead of being ended by them.

    What this process was started to ignore (SIGHUP under `nohup`) stays ignored.
    """
    asked: list[int] = []
    before = {}
    for name in STOP_SIGNALS:
        number = signal.Signals[name]
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, lambda number, _: asked.append(number))
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending_of(exits: Mapping[int, int], pids: Mapping[int, int]) -> Ending:
    """Find the rank that ended first, not one that only followed it. exits: codes other than 0, by rank."""
    for rank, code in exits.items():
        # SIGTERM is what the others are ended with.
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            return Ending(
                Exit.RANK_LOST,
                f"rank {rank} (pid {pids[rank]}) was killed by {name}; the other ranks were ended.",
                rank,
            )
    first, code = next(iter(exits.items()))
    for meaning in (Exit.FAILED, Exit.USAGE, Exit.STOPPED):
        if meaning in exits.values():
            return Ending(meaning, rank=first)
    return Ending(Exit.RANK_LOST, f"rank {first} ended with exit code {code}.", first)
