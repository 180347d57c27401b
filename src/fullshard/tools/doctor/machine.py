"""Measure one process and the machine that it runs on."""

import contextlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.host import boot_id, pid_namespace, read_addresses, read_memory, read_quotas
from fullshard.tools.doctor.devices import look_at_devices, versions_of_cuda
from fullshard.tools.doctor.environment import relevant
from fullshard.tools.doctor.facts import Limits, Machine, RankFacts
from fullshard.tools.launch import Place
from fullshard.versions import VERSION

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def look_at_rank(place: Place, environment: Mapping[str, str]) -> RankFacts:
    """Gather the facts about this process, before it meets others."""
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        num_local_ranks=place.num_local_ranks,
        pid=os.getpid(),
        machine=look_at_machine(),
        versions=_versions(),
        packages=_packages(),
        backends=tuple(name for name in _BACKENDS if dist.is_backend_available(name)),
        devices=look_at_devices(place.local_rank),
        limits=_limits(),
        threads=torch.get_num_threads(),
        environment=relevant(environment),
        has_py_spy=shutil.which("py-spy") is not None,
    )


def look_at_machine() -> Machine:
    """Gather the facts about this host, as this process's container shows it."""
    quotas = read_quotas()
    memory = read_memory()
    shm_nbytes, shm_free_nbytes = _shared_memory()
    name = socket.gethostname()
    return Machine(
        name=name,
        boot_id=_boot_id(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=_cores(),
        core_quota=quotas.cores,
        memory_nbytes=memory.get("MemTotal"),
        memory_free_nbytes=memory.get("MemAvailable"),
        memory_limit_nbytes=quotas.memory_nbytes,
        memory_used_nbytes=quotas.memory_used_nbytes,
        shm_nbytes=shm_nbytes,
        shm_free_nbytes=shm_free_nbytes,
        overcommit=_number("/proc/sys/vm/overcommit_memory"),
        tasks=quotas.tasks,
        max_tasks=quotas.max_tasks,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        addresses=_addresses(name),
        interfaces=read_addresses(),
    )


def count_open_files() -> int | None:
    """Count the descriptors that this process has open."""
    try:
        return len(list(Path("/proc/self/fd").iterdir()))
    except OSError:
        return None


def _versions() -> dict[str, str]:
    found = {"fullshard": VERSION, "torch": torch.__version__, "Python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["NumPy"] = metadata.version("numpy")
    return found | versions_of_cuda()


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name:  # a folder that a broken uninstall has left has none
            found.setdefault(name.lower().replace("_", "-"), each.version)
    return found


def _limits() -> Limits:
    open_files, open_files_hard = map(_finite, resource.getrlimit(resource.RLIMIT_NOFILE))
    return Limits(
        open_files=open_files,
        open_files_hard=open_files_hard,
        locked_nbytes=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        processes=_finite(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
        # A mapping of Python's keeps its descriptor open before 3.13 (comm/shared_memory.py).
    )


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _shared_memory() -> tuple[int | None, int | None]:
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _boot_id() -> str:
    """Return what tells this machine and its containers from others."""
    found = []
    with contextlib.suppress(OSError):
        found.append(boot_id())
        found.append(pid_namespace())
    return " ".join(found)


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))
