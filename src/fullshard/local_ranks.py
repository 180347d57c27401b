"""Share a machine among its ranks, whoever starts them: processors, GPUs, and ending together."""

import ctypes
import os
import signal
import sys
from collections.abc import Mapping

import torch

LAUNCHER_PID = "FULLSHARD_LAUNCHER_PID"
"""Environment variable that tells a rank whose child it must be."""

_says_ends = [True]  # of this process

_PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def threads_for(ranks: int, environment: Mapping[str, str]) -> int:
    """Share this machine's cores among its ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" in environment:
        return max(1, int(environment["OMP_NUM_THREADS"]))
    return max(1, num_cores() // ranks)


def num_cores() -> int:
    """Count the cores that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def num_gpus() -> int:
    """Count the GPUs that are there, which is not what torch was built for."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_gpu = accelerator is not None and accelerator.type == "cuda"
    return torch.accelerator.device_count() if is_gpu else 0


def die_with_launcher(launcher_pid: int | None, *, says_ends: bool = False) -> None:
    """Have the kernel kill this rank when its launcher dies, even by `kill -9`.

    Without effect where there is no prctl (not Linux). `launcher_pid` closes the gap before the
    call: a launcher that is already gone is no longer the parent. says_ends: see `says_ends`; commands of ours
    that train say by themselves how another rank has ended.
    """
    _says_ends[:] = [says_ends]
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher_pid is not None and os.getppid() != launcher_pid:
        sys.exit(1)


def says_ends() -> bool:
    """Return whether this rank's watchdog is to say how others of its host have ended."""
    return _says_ends[0]
