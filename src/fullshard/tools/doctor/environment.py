"""Which environment variables matter to training, and which values are known to hurt."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fullshard.tools.doctor.findings import Severity

_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "FULLSHARD_", "UCX_", "FI_", "KMP_")
_NAMES = {
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "LD_PRELOAD"),
}
_OWN = ("FULLSHARD_LAUNCHER_PID",)  # tools/launch.py

PER_RANK = ("CUDA_VISIBLE_DEVICES",)
"""Variables that launchers give each rank on purpose."""


class Harm(NamedTuple):
    """A value of a variable that hurts, how, and what to do instead."""

    name: str
    is_harmful: Callable[[str], bool]
    severity: Severity
    effect: str
    advice: str


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    """Choose the variables that training may depend on."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name.startswith(_PREFIXES) or name in _NAMES) and name not in _OWN
    }


def harms_in(environment: Mapping[str, str]) -> list[Harm]:
    """Return what hurts among the variables that are set."""
    return [
        harm
        for harm in _HARMS
        if harm.name in environment and harm.is_harmful(environment[harm.name])
    ]


def _is_on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "n", "no", "false", "off")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in values


def _has(part: str) -> Callable[[str], bool]:
    return lambda value: part in value


_ALLOCATOR = "ranks that share a GPU cannot share its memory with this allocator"
_HARMS = (
    Harm(
        "CUDA_LAUNCH_BLOCKING",
        _is_on,
        Severity.WARNING,
        "the host waits for every kernel, so nothing overlaps",
        "Unset it; it is for finding the kernel that fails.",
    ),
    Harm(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        _is("1"),
        Severity.WARNING,
        "one queue for all streams keeps communication from overlapping with compute",
        "Unset it; it is meant for tensor parallelism without sharded parameters.",
    ),
    Harm(
        "NCCL_P2P_DISABLE",
        _is_on,
        Severity.WARNING,
        "GPUs of a host exchange data through host memory",
        "Unset it, unless GPUs of this host hang without it.",
    ),
    Harm(
        "NCCL_SHM_DISABLE",
        _is_on,
        Severity.WARNING,
        "GPUs of a host that cannot reach each other exchange data through the network",
        "Unset it, and give /dev/shm room (docker: --shm-size=1g).",
    ),
    Harm(
        "NCCL_IB_DISABLE",
        _is_on,
        Severity.NOTE,
        "hosts exchange data over TCP, also where there is InfiniBand or RoCE",
        "Unset it where there is such a network.",
    ),
    Harm(
        "NCCL_DEBUG",
        _is("INFO", "TRACE"),
        Severity.NOTE,
        "every rank logs what NCCL does",
        "Set it to WARN once NCCL works.",
    ),
    Harm(
        "TORCH_DISTRIBUTED_DEBUG",
        _is("DETAIL"),
        Severity.WARNING,
        "torch compares every collective on all ranks before it runs, over Gloo",
        "Unset it; fullshard compares ranks by itself at a fraction of the cost.",
    ),
    Harm(
        "TORCH_NCCL_BLOCKING_WAIT",
        _is_on,
        Severity.WARNING,
        "the host waits for each collective of NCCL, so nothing overlaps",
        "Unset it.",
    ),
    Harm(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        _is("0"),
        Severity.WARNING,
        "ranks wait for ever in a collective of NCCL whose peer has failed",
        "Unset it.",
    ),
    Harm(
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        _is_on,
        Severity.WARNING,
        "every allocation on a GPU waits for it",
        "Unset it; it is for memory checkers.",
    ),
    Harm("PYTORCH_ALLOC_CONF", _has("cudaMallocAsync"), Severity.NOTE, _ALLOCATOR, "Unset it."),
    Harm(
        "PYTORCH_CUDA_ALLOC_CONF", _has("cudaMallocAsync"), Severity.NOTE, _ALLOCATOR, "Unset it."
    ),
    Harm(
        "FULLSHARD_DEBUG",
        _is_on,
        Severity.NOTE,
        "ranks compare what they do at every unit, which costs a small collective each",
        "Unset it once the place where ranks part is found.",
    ),
)
