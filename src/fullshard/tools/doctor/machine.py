"""Measure one process: its machine, its GPUs, its limits, and the versions and variables that training depends on."""

import contextlib
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

from fullshard.host import boot_id, pid_namespace, read_addresses, read_quotas
from fullshard.local_ranks import LAUNCHER_PID
from fullshard.tools.doctor.facts import Device, Devices, Limits, Machine, RankFacts
from fullshard.tools.launch import Place
from fullshard.versions import VERSION

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
_DRIVER = Path("/proc/driver/nvidia/version")
_SHM = Path("/dev/shm")
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


def count_open_files() -> int | None:
    """Count the descriptors that this process has open."""
    with contextlib.suppress(OSError, psutil.Error):
        return int(psutil.Process().num_fds())
    return None


def _look_at_machine() -> Machine:
    """Gather the facts about this host, as this process's container shows it."""
    quotas = read_quotas()
    memory = shm = None
    with contextlib.suppress(OSError, RuntimeError):
        memory = psutil.virtual_memory()
    with contextlib.suppress(OSError):
        shm = psutil.disk_usage(str(_SHM))
    name = socket.gethostname()
    return Machine(
        name=name,
        boot_id=_boot_id(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        cores=_cores(),
        core_quota=quotas.cores,
        memory_nbytes=memory.total if memory else None,
        memory_free_nbytes=memory.available if memory else None,
        memory_limit_nbytes=quotas.memory_nbytes,
        memory_used_nbytes=quotas.memory_used_nbytes,
        shm_nbytes=shm.total if shm else None,
        shm_free_nbytes=shm.free if shm else None,
        overcommit=_overcommit(),
        tasks=quotas.tasks,
        max_tasks=quotas.max_tasks,
        has_infiniband=any(Path("/sys/class/infiniband").glob("*")),
        addresses=_addresses(name),
        interfaces=read_addresses(),
    )


def _boot_id() -> str:
    """Return what tells this machine and its containers from others."""
    with contextlib.suppress(OSError):
        return f"{boot_id()} {pid_namespace()}"
    return ""


def _cores() -> int:
    """Count the cores that this process may run on."""
    try:
        return len(psutil.Process().cpu_affinity())
    except AttributeError:  # not on macOS
        return psutil.cpu_count() or 1


def _overcommit() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/vm/overcommit_memory").read_text())
    return None


def _addresses(name: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(address[0]) for *_, address in found))


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
