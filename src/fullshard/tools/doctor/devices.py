"""The CUDA devices that a process sees. None of this has run on a GPU yet."""

from pathlib import Path

import torch

from fullshard.tools.doctor.facts import Device, Devices

_DRIVER = Path("/proc/driver/nvidia/version")


def look_at_devices(local_rank: int) -> Devices:
    """Look at every device, and at which ones reach each other's memory."""
    has_driver = _DRIVER.exists()
    if not torch.cuda.is_available():
        return Devices(has_driver=has_driver)
    count = torch.cuda.device_count()
    current = local_rank % count
    return Devices(
        found=tuple(_device(index) for index in range(count)),
        current=current,
        free_nbytes=_free_nbytes(current),
        no_access=tuple(
            (i, j)
            for i in range(count)
            for j in range(count)
            if i != j and not torch.cuda.can_device_access_peer(i, j)
        ),
        has_driver=has_driver,
    )


def versions_of_cuda() -> dict[str, str]:
    """Return the versions of CUDA, NCCL and the driver, as far as there are any."""
    versions = {}
    if torch.version.cuda:
        versions["CUDA"] = str(torch.version.cuda)
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ..."
        words = _DRIVER.read_text().split()
        versions["driver"] = next(word for word in words if word[:1].isdigit() and "." in word)
    except (OSError, StopIteration):
        pass
    return versions


def wait_for_device(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    torch.cuda.synchronize(device)


def _device(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    capability = f"{found.major}.{found.minor}"
    return Device(found.name, found.total_memory, capability, str(getattr(found, "uuid", index)))


def _free_nbytes(index: int) -> int | None:
    try:
        return torch.cuda.mem_get_info(index)[0]
    except RuntimeError:  # out of memory: not even a context fits
        return 0
