"""What a run's numbers depend on beside its options: versions, hardware, and the size of its model.

Written into config.json when a run begins or goes on, on rank 0, of its host.
"""

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fullshard.versions import VERSION

if TYPE_CHECKING:  # a report needs no torch, which takes seconds
    import torch

# Dense bfloat16 in FLOP/s, from the makers' data sheets, by a part of the name that torch gives a device.
_PEAKS = (
    ("B200", 2250e12),
    ("H200", 989.4e12),
    ("GH200", 989.4e12),
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989.4e12),
    ("A100", 311.8e12),
    ("L40S", 362e12),
    ("L4", 121e12),
    ("A10", 125e12),
    ("RTX 4090", 165.2e12),
)


def gather_facts(
    *, num_parameters: int, flops_per_token: int | None, device: "torch.device"
) -> dict[str, Any]:
    """Return what stays true for a whole run, as JSON takes it."""
    import torch

    name = ""
    if device.type != "cpu":
        name = str(torch.get_device_module(device).get_device_properties(device).name)
    versions = {
        "fullshard": VERSION,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if device.type == "cuda" and torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {
        "versions": versions,
        "hardware": {
            "host": platform.node(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "processor": _processor(),
            "processors": os.cpu_count(),
            "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            "device": name,
        },
        "num_parameters": num_parameters,
        "flops_per_token": flops_per_token,
    }


def peak_flops(device: str, dtype: str) -> float | None:
    """Return what a device is said to reach; None if that is not known here."""
    if dtype != "bf16":
        return None
    return next((peak for part, peak in _PEAKS if part in device), None)


def _processor() -> str:
    """Return the processor's name as the system has it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()
