"""Measure one process: its machine, its GPUs, its limits, and the versions and variables that training depends on."""

import contextlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist

from fullshard.host import boot_id, pid_namespace, read_addresses, read_quotas
from fullshard.local_ranks import LAUNCHER_PID
from fullshard.tools.doctor.facts import Device, Devices, Limits, Machine, RankFacts
from fullshard.tools.launch import Place
from fullshard.versions import VERSION

T = TypeVar("T")

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_DRIVER = Path("/proc/driver/nvidia/version")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "FULLSHARD_", "UCX_", "FI_", "KMP_")
_NAMES = {
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD"),
}


def look_at_rank(place: Place, environment: Mapping[str, str]) -> RankFacts:
    """Gather the facts about this process, before it meets others."""
    return RankFacts(
        rank=place.rank,
        local_rank=place.local_rank,
        num_local_ranks=place.num_local_ranks,
        pid=os.getpid(),
        machine=_look_at_machine(),
        versions=_versions(),
        packages=_packages(),
        backends=tuple(name for name in _BACKENDS if dist.is_backend_available(name)),
        devices=look_at_devices(place.local_rank),
        limits=_limits(),
        threads=torch.get_num_threads(),
        environment=relevant(environment),
        has_py_spy=shutil.which("py-spy") is not None,
    )


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Choose the variables that training may depend on."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and name != LAUNCHER_PID
    }


def _if_told(read: Callable[[], T]) -> T | None:
    """Return what is read; None where the system does not tell."""
    try:
        return read()
    except (AttributeError, OSError, RuntimeError, ValueError, psutil.Error):
        return None


def count_open_files() -> int | None:
    """Count the descriptors that this process has open."""
    return _if_told(lambda: int(psutil.Process().num_fds()))


def _look_at_machine() -> Machine:
    """Gather the facts about this host, as this process's container shows it."""
    quotas = read_quotas()
    memory = _if_told(psutil.virtual_memory)
    shm = _if_told(lambda: psutil.disk_usage("/dev/shm"))
    cores = _if_told(lambda: len(psutil.Process().cpu_affinity()))  # not told on macOS
    name = socket.gethostname()
    found = _if_told(lambda: socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)) or ()
    return Machine(
        name=name,
        boot_id=_if_told(lambda: f"{boot_id()} {pid_namespace()}") or "",
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=cores or psutil.cpu_count() or 1,
        core_quota=quotas.cores,
        memory_nbytes=memory.total if memory else None,
        memory_free_nbytes=memory.available if memory else None,
        memory_limit_nbytes=quotas.memory_nbytes,
        memory_used_nbytes=quotas.memory_used_nbytes,
        shm_nbytes=shm.total if shm else None,
        shm_free_nbytes=shm.free if shm else None,
        overcommit=_if_told(lambda: int(_OVERCOMMIT.read_text())),
        tasks=quotas.tasks,
        max_tasks=quotas.max_tasks,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        addresses=tuple(dict.fromkeys(str(address[0]) for *_, address in found)),
        interfaces=read_addresses(),
    )


def _limits() -> Limits:
    def finite(limit: int) -> int | None:
        return None if limit == resource.RLIM_INFINITY else limit

    open_files, open_files_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        open_files=finite(open_files),
        open_files_hard=finite(open_files_hard),
        locked_nbytes=finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        processes=finite(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
    )


def _versions() -> dict[str, str]:
    """Return versions by name: of fullshard, torch, Python, and of CUDA, NCCL and the driver as far as there are any."""
    found = {"fullshard": VERSION, "torch": torch.__version__, "Python": platform.python_version()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["NumPy"] = metadata.version("numpy")
    if torch.version.cuda:
        found["CUDA"] = str(torch.version.cuda)
    if torch.cuda.is_available() and dist.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(OSError, StopIteration):
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ..."
        words = _DRIVER.read_text().split()
        found["driver"] = next(word for word in words if word[:1].isdigit() and "." in word)
    return found


def _packages() -> dict[str, str]:
    found: dict[str, str] = {}
    for each in metadata.distributions():
        name = each.metadata["Name"]
        if name:  # a folder that a broken uninstall has left has none
            found.setdefault(name.lower().replace("_", "-"), each.version)
    return found


def look_at_devices(local_rank: int) -> Devices:
    """Look at every CUDA device, and at which ones reach each other's memory."""
    has_driver = _DRIVER.exists()
    if not torch.cuda.is_available():
        return Devices(has_driver=has_driver)
    count = torch.cuda.device_count()
    current = local_rank % count
    try:
        free_nbytes = torch.cuda.mem_get_info(current)[0]
    except RuntimeError:  # out of memory: not even a context fits
        free_nbytes = 0
    return Devices(
        found=tuple(_device(index) for index in range(count)),
        current=current,
        free_nbytes=free_nbytes,
        no_access=tuple(
            (i, j)
            for i in range(count)
            for j in range(count)
            if i != j and not torch.cuda.can_device_access_peer(i, j)
        ),
        has_driver=has_driver,
    )


def _device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    capability = f"{found.major}.{found.minor}"
    return Device(found.name, found.total_memory, capability, str(getattr(found, "uuid", index)))
