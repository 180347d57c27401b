"""Start the ranks of this machine and say how they ended.

`torch.distributed.run` starts, watches and ends the processes; this file gives it arguments, and turns
its report into one sentence. No rank outlives its launcher: `die_with_launcher` of `local_ranks`.
"""

import dataclasses
import logging
import os
import signal
from collections.abc import Sequence

from torch.distributed import run as torch_run
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from fullshard.tools.exits import Exit

LAUNCHER_PID = "FULLSHARD_LAUNCHER_PID"
"""Environment variable that tells a rank whose child it must be."""

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""What `torch.distributed.run` passes on to ranks, which save then and end."""

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
    """Run `python -m fullshard ARGUMENTS` on `ranks` local ranks until all have ended."""
    # Its log repeats, in thirty lines, what the ranks and `Ending` say in one.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # The agent's own logger has a level, so that it does not inherit this one. At Ctrl-C it warns of
    # the signal, into the ranks' progress bar; its errors stay.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.environ[LAUNCHER_PID] = str(os.getpid())
    options = torch_run.parse_args(
        [
            f"--nproc-per-node={ranks}",
            "--nnodes=1",
            "--max-restarts=0",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            "--local-addr=127.0.0.1",
            "--module",
            "--",  # else it takes --log for an abbreviation of two options of its own
            "fullshard",
            *arguments,
        ]
    )
    config, command, command_arguments = torch_run.config_from_args(options)
    if hasattr(config, "shutdown_timeout"):  # torch 2.13; older ones give a checkpoint 30 s
        config.shutdown_timeout = _SAVE_TIMEOUT_S
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # `nohup`, which torch does not ask for
        config.signals_to_handle = ",".join(name for name in STOP_SIGNALS if name != "SIGHUP")
    try:
        elastic_launch(config=config, entrypoint=command)(*command_arguments)
    except ChildFailedError as error:
        return _ending_of(error)
    except SignalException:
        return Ending(Exit.STOPPED)
    return Ending(Exit.OK)


def _ending_of(error: ChildFailedError) -> Ending:
    """Find the rank that ended first, not one that only followed it."""
    exits = {rank: failure.exitcode for rank, failure in error.failures.items()}
    first = error.get_first_failure()[0]
    for rank, code in exits.items():
        # SIGTERM is what the agent ends the other ranks with.
        if code < 0 and code != -signal.SIGTERM:
            name = signal.Signals(-code).name
            pid = error.failures[rank].pid
            return Ending(
                Exit.RANK_LOST,
                f"rank {rank} (pid {pid}) was killed by {name}; the other ranks were ended.",
                rank,
            )
    for meaning in (Exit.FAILED, Exit.USAGE, Exit.STOPPED):
        if meaning in exits.values():
            return Ending(meaning, rank=first)
    rank, code = next(iter(exits.items()))
    return Ending(Exit.RANK_LOST, f"rank {rank} ended with exit code {code}.", rank)
