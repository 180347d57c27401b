"""Memory that is needed for moments, again and again.

On the CPU, memory that an allocator returns to the system costs a page fault for every page when it
comes back: more than the copy it is used for. Other devices have caching allocators.
"""

import threading
import weakref

import torch


class Scratch:
    """Lends 1-D memory: ``take`` some, and ``give`` it back once nothing refers to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []  # bytes, smallest first
        self._lock = threading.Lock()  # ranks may be threads

    @staticmethod
    def of(device: torch.device) -> "Scratch":
        """Return the device's scratch memory, the same for all models while one of them lives."""
        scratch = _scratch.get(device)
        return _scratch.setdefault(device, Scratch(device)) if scratch is None else scratch

    @property
    def free(self) -> list[torch.Tensor]:
        """What is kept and not lent."""
        with self._lock:
            return list(self._free)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        if self._device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=self._device)  # a caching allocator
        nbytes = numel * dtype.itemsize
        with self._lock:
            for position, memory in enumerate(self._free):
                if memory.numel() >= nbytes:
                    return self._free.pop(position)[:nbytes].view(dtype)
            if self._free:
                self._free.pop()  # the largest: what is allocated instead serves both uses
        return torch.empty(nbytes, dtype=torch.uint8).view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        if self._device.type == "cpu" and tensor.numel():
            storage = tensor.untyped_storage()
            with self._lock:
                self._free.append(torch.empty(0, dtype=torch.uint8).set_(storage))
                self._free.sort(key=torch.Tensor.numel)


# Units and their communication hold it: with the last of them the memory goes back to the system.
_scratch: "weakref.WeakValueDictionary[torch.device, Scratch]" = weakref.WeakValueDictionary()
