"""CUDA memory and events that other processes of the host can open.

Memory comes from PyTorch's caching allocator. It can share a block with other processes, and does
not use it again while one of them has it open. Processes name a GPU by its UUID: the number of a
GPU counts those that a process can see, so it may differ from process to process.
"""

import functools
from typing import Any

import torch


class CudaIpc:
    """The operations on one CUDA device that reading other processes' memory needs. name: for messages.

    Events are recorded on the current stream, and waited for by the current stream; the host waits in `finish` alone.
    """

    name = "CUDA IPC"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uuid = gpu_uuid(device.index)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory, 1-D in bytes, that can be exported."""
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def export(self, memory: torch.Tensor) -> Any:
        """Return a handle, which can be pickled, by which one other process can open the memory."""
        # Each receiver needs an export of its own: the allocator counts who has it open. The first
        # element, this process's number of the device, means nothing elsewhere.
        storage: Any = memory.untyped_storage()
        return (self._uuid, storage._share_cuda_()[1:])

    def open(self, handle: Any) -> torch.Tensor:
        """Return another process's memory. Raises an exception that says why if it cannot."""
        uuid, shared = handle
        index = self._visible(uuid)
        storage = torch.UntypedStorage._new_shared_cuda(index, *shared)
        empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
        return empty.set_(storage)

    def create_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(interprocess=True)

    def export_event(self, event: torch.cuda.Event) -> Any:
        """Return a handle by which other processes can open the event, any number of them."""
        # An event belongs to the device that is current when it is first used.
        with torch.cuda.device(self._device):
            return (self._uuid, event.ipc_handle())

    def open_event(self, handle: Any) -> torch.cuda.Event:
        uuid, shared = handle
        return torch.cuda.Event.from_ipc_handle(torch.device("cuda", self._visible(uuid)), shared)

    def record(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._device))

    def wait(self, event: torch.cuda.Event) -> None:
        """Let the current stream wait for the event's latest record."""
        event.wait(torch.cuda.current_stream(self._device))

    def mark(self) -> torch.cuda.Event:
        """Record a new event for this process alone, and return it."""
        event = torch.cuda.Event()
        self.record(event)
        return event

    def finish(self) -> None:
        """Wait on the host for all work of the device. Used while memory is set up."""
        torch.cuda.synchronize(self._device)

    def _visible(self, uuid: str) -> int:
        """Return the number that a peer's GPU has in this process.

        Raises RuntimeError if this process does not see the GPU or cannot access its memory.
        """
        for index in range(torch.cuda.device_count()):
            if gpu_uuid(index) != uuid:
                continue
            own = self._device.index
            if index == own or torch.cuda.can_device_access_peer(own, index):
                return index
            raise RuntimeError(f"cuda:{own} cannot access the memory of cuda:{index}")
        raise RuntimeError(
            "a peer's GPU is not visible to this process. Let CUDA_VISIBLE_DEVICES name the GPUs of "
            "all of the host's ranks"
        )


@functools.cache
def gpu_uuid(index: int) -> str:
    """Return the UUID of one of the GPUs that this process sees."""
    return str(torch.cuda.get_device_properties(index).uuid)
