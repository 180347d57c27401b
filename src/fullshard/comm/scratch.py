"""Memory that is needed for short times, again and again.

On the CPU, an allocator returns large blocks to the system, and getting them back costs a page
fault per page: more than the copy that they are used for. Other devices have caching allocators.
"""

import threading
import weakref

import torch


class Scratch:
    """A pool of 1-D memory: ``take`` some, and ``give`` it back once nothing refers to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.Tensor] = []  # bytes, smallest first
        self._lock = threading.Lock()  # ranks may be threads

    @staticmethod
    def of(device: torch.device) -> "Scratch":
        """Return the device's pool. All models share it, and it ends with the last of them."""
        scratch = _scratch.get(device)
        return _scratch.setdefault(device, Scratch(device)) if scratch is None else scratch

    @property
    def free(self) -> list[torch.Tensor]:
        """Memory in the pool that nobody has taken."""
        with self._lock:
            return list(self._free)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory: part of the smallest free block that is large enough."""
        if self._device.type != "cpu":
            return torch.empty(numel, dtype=dtype, device=self._device)  # a caching allocator
        nbytes = numel * dtype.itemsize
        with self._lock:
            for position, memory in enumerate(self._free):
                if memory.numel() >= nbytes:
                    return self._free.pop(position)[:nbytes].view(dtype)
            if self._free:
                # None is large enough. The largest is freed, since the new one serves its uses too.
                self._free.pop()
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu").view(dtype)

    def give(self, tensor: torch.Tensor) -> None:
        """Return what `take` returned, itself or a view with elements.

        An empty view is ignored, and its block lost to the pool, so give back all that was taken.
        """
        if self._device.type == "cpu" and tensor.numel():
            storage = tensor.untyped_storage()
            with self._lock:
                self._free.append(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
                self._free.sort(key=torch.Tensor.numel)


# Weak: units and their communication hold the pool. With the last of them its memory is freed.
_scratch: "weakref.WeakValueDictionary[torch.device, Scratch]" = weakref.WeakValueDictionary()
