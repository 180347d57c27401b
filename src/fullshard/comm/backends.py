"""Which backend a process group has for a device.

What ``get_backend`` returns is what somebody typed, for all devices at once. Gloo on the CPU may be
"gloo", "cpu:gloo", a part of "cpu:gloo,cuda:nccl", or "undefined" after a bare
``init_process_group()``. So the group is asked instead: it has one object for each device.

[Note: Leaving Gloo] PyTorch's Gloo runs collectives on threads of its own. When one is done, its
thread lets go of the tensors, and takes the GIL for it. Once the interpreter has begun to end, who
asks for the GIL is ended instead (before Python 3.14), here in the midst of C++ that cannot be left
like that: "terminate called without an active exception", and exit code 134. So a program that ends
within milliseconds of a collective may abort, with or without fullshard. Destroying the group is a
remedy only if nothing refers to it any more, since that joins the threads; meshes and models do
refer to it. What always is: to sleep for a moment before the end, in which threads get the GIL.
"""

import atexit
import functools
import time
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import CommError

_LET_GO_S = 0.02
_NAMELESS = ("custom", "undefined")  # what C++ says of classes that it does not know


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the object that moves a device's bytes, out of the wrapper that debugging puts on it.

    Raises CommError if the group has none for the device.
    """
    try:
        backend: Any = group._get_backend(torch.device(device.type))
    except RuntimeError as error:
        known = ", ".join(f"{each.type}: {_name(group, each)}" for each in group._device_types)
        raise CommError(
            f"rank {dist.get_rank()}: the process group of ranks "
            f"{dist.get_process_group_ranks(group)} has no backend for {device.type} (it has "
            f"{known or 'none'}). Name one for each device, such as "
            "init_process_group('cpu:gloo,cuda:nccl'), or take a mesh of the devices it has."
        ) from error
    return getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return what the backend calls itself: gloo, nccl, fake, ...

    Of a group that is its own backend, as classes in Python are, its name or its class's. Raises
    CommError if a group of torch's has no backend for the device.
    """
    kind: type = type(group)
    if kind is dist.ProcessGroup:
        return _name(group, device)
    name = group.name() if issubclass(kind, dist.ProcessGroup) else _NAMELESS[0]
    return kind.__name__ if name in _NAMELESS else name


def backend_names(group: dist.ProcessGroup) -> set[str]:
    """Return the names of all the group's backends."""
    devices = group._device_types or [torch.device("cpu")]
    return {backend_name(group, device) for device in devices}


def any_device(group: dist.ProcessGroup | None) -> torch.device:
    """Return a device whose tensors the group can move: the CPU if it can. None is all ranks."""
    group = dist.group.WORLD if group is None else group
    types = [device.type for device in getattr(group, "_device_types", ())]
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return how long the group's collectives wait for a rank."""
    for device in group._device_types:
        options = getattr(backend_of(group, device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return 1800.0  # what torch waits by default


@functools.cache
def let_go_at_exit() -> None:
    """Let Gloo's threads finish before the interpreter ends: see [Note: Leaving Gloo]."""
    atexit.register(time.sleep, _LET_GO_S)


def _name(group: dist.ProcessGroup, device: torch.device) -> str:
    return str(backend_of(group, device).name())
