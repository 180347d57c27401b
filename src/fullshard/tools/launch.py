"""Start the ranks of this machine as commands of `fullshard`, and say how they ended."""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from fullshard.launching.processes import Meeting, Process, end_all, wait_for_end
from fullshard.local_ranks import LAUNCHER_PID
from fullshard.tools.exits import Exit
from fullshard.tools.slurm import variables_of_rank

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


def place_in(environment: Mapping[str, str]) -> Place | None:
    """Read what torchrun or srun tells ranks, or None in a process that is to start its own.

    Raises OptionError for Slurm's variables in disorder.
    """
    started_by = "torchrun"
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        variables = variables_of_rank(environment)
        if variables is None:
            return None
        for name, value in variables.items():  # torch reads them too, to join the other ranks
            os.environ[name] = value
        environment = {**environment, **variables}
        started_by = "srun"
    num_ranks = int(environment["WORLD_SIZE"])
    launcher = environment.get(LAUNCHER_PID)
    return Place(
        rank=int(environment["RANK"]),
        num_ranks=num_ranks,
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        num_local_ranks=int(environment.get("LOCAL_WORLD_SIZE", num_ranks)),
        master_host=environment["MASTER_ADDR"],
        master_port=int(environment["MASTER_PORT"]),
        launcher_pid=int(launcher) if launcher else None,
        started_by=started_by,
    )


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
    with StopRequest() as stop:
        try:
            for rank in range(ranks):
                environment = _DEFAULTS | meeting.environment(rank) | _AS_TORCHRUN
                processes.append(Process(rank, command, environment))
            while not stop.asked:
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
                process.signal(stop.asked)
            wait_for_end(processes, _SAVE_TIMEOUT_S)
            return Ending(Exit.STOPPED)
        finally:
            for process in processes:
                process.kill()


class StopRequest:
    """Notes the first signal to stop that comes, instead of ending this process by it.

    Asking again changes nothing: a supervisor and the launcher may both pass on one request. What the process was
    started to ignore (SIGHUP under `nohup`) stays ignored. Processes that this one forks, such as workers that load
    data, have back what was there before: a signal is to end them. So has this one at the end of a `with`.
    """

    def __init__(self) -> None:
        self.asked = 0
        self._before: dict[int, Any] = {}
        for name in STOP_SIGNALS:
            number = signal.Signals[name]
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                self._before[number] = before or signal.SIG_DFL
                signal.signal(number, self._ask)
        os.register_at_fork(after_in_child=self.__exit__)

    def _ask(self, number: int, _: object) -> None:
        self.asked = self.asked or number

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


def leave(code: Exit) -> NoReturn:
    """End this rank, not by way of destroy_process_group, which may wait for ranks that will not come."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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
