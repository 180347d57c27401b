"""The backend of a process group for a device, and what Gloo needs at the end of a program.

``get_backend`` returns what somebody typed, for all devices together. For Gloo on the CPU that may
be "gloo", "cpu:gloo", a part of "cpu:gloo,cuda:nccl", or "undefined" after a bare
``init_process_group()``. So the group itself is asked, which has one backend object per device.

[Note: Leaving Gloo] PyTorch's Gloo runs collectives on threads of its own. When a collective is
done, its thread releases the tensors, for which it takes the GIL. Once the interpreter has begun to
end, a thread that asks for the GIL is ended instead (before Python 3.14). Here that happens inside
C++ code that cannot be left this way: "terminate called without an active exception", and exit code
134. So a program that ends within milliseconds of a collective may abort, also without fullshard.
Destroying the group joins the threads, but only if nothing refers to the group any more, and meshes
and models do. A short sleep before the end always helps: the threads get the GIL meanwhile.
"""

import atexit
import functools
import time
from typing import Any

import torch
import torch.distributed as dist

from fullshard.errors import CommError

_LET_GO_S = 0.02
_NAMELESS = ("custom", "undefined")  # names that C++ gives to classes that it does not know


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend object that moves a device's bytes, without any debugging wrapper.

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
    # With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps the backend in one that compares collectives.
    return getattr(backend, "wrapped_pg", backend)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend's own name: gloo, nccl, fake, ...

    A group of a Python class is its own backend; for it, return its name or else that of its class.
    Raises CommError if a group of torch's own class has no backend for the device.
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
    """Return a device whose tensors the group can move, the CPU if possible.

    group: None means the default group, of all ranks.
    """
    group = dist.group.WORLD if group is None else group
    types = [device.type for device in getattr(group, "_device_types", ())]
    if not types or "cpu" in types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())


def moves(group: dist.ProcessGroup | None, device_type: str) -> bool:
    """Return whether a group can move tensors of a type of device. None is the default group."""
    group = dist.group.WORLD if group is None else group
    return device_type in {device.type for device in getattr(group, "_device_types", ())}


def timeout_s(group: dist.ProcessGroup) -> float:
    """Return how many seconds the group's collectives wait for a rank."""
    for device in group._device_types:
        options = getattr(backend_of(group, device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return float(timeout.total_seconds())
    return 1800.0  # what torch waits by default


def abort(group: dist.ProcessGroup) -> None:
    """End the collectives of a group that a device waits in, if it is NCCL's. They cannot go on.

    What the host calls next on that device raises, or returns what was never computed.
    """
    for device in group._device_types:
        if backend_name(group, device) == "nccl":
            backend: Any = backend_of(group, device)
            backend.abort()


@functools.cache
def let_go_at_exit() -> None:
    """Sleep a moment at the program's end, for Gloo's threads: see [Note: Leaving Gloo]."""
    atexit.register(time.sleep, _LET_GO_S)


def _name(group: dist.ProcessGroup, device: torch.device) -> str:
    return str(backend_of(group, device).name())
