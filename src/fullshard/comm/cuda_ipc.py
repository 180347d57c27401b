"""CUDA memory and events that other processes of the host can open.

Memory comes from PyTorch's caching allocator, which knows how to share a block and keeps what peers
have open from being used again. GPUs are told apart by their UUID: each process counts those
that it can see.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.exchange import exchange_through_store
from fullshard.comm.shared_memory import host_identity


class CudaIpc:
    """One CUDA device, as `device_memory.PeerDevice` asks for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uuid = _uuid(device.index)

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)

    def export(self, memory: torch.Tensor) -> Any:
        # The allocator counts who has it open, so each receiver needs an export of its own.
        storage: Any = memory.untyped_storage()
        return (self._uuid, storage._share_cuda_()[1:])

    def open(self, handle: Any) -> torch.Tensor:
        uuid, shared = handle
        index = self._visible(uuid)
        storage = torch.UntypedStorage._new_shared_cuda(index, *shared)
        empty = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", index))
        return empty.set_(storage)

    def create_event(self) -> torch.cuda.Event:
        return torch.cuda.Event(interprocess=True)

    def export_event(self, event: torch.cuda.Event) -> Any:
        with torch.cuda.device(self._device):
            return (self._uuid, event.ipc_handle())

    def open_event(self, handle: Any) -> torch.cuda.Event:
        uuid, shared = handle
        return torch.cuda.Event.from_ipc_handle(torch.device("cuda", self._visible(uuid)), shared)

    def record(self, event: torch.cuda.Event) -> None:
        event.record(torch.cuda.current_stream(self._device))

    def wait(self, event: torch.cuda.Event) -> None:
        event.wait(torch.cuda.current_stream(self._device))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        self.record(event)
        return event

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)

    def _visible(self, uuid: str) -> int:
        """Return this process's number of a peer's GPU. Raises RuntimeError if it cannot reach it."""
        for index in range(torch.cuda.device_count()):
            if _uuid(index) != uuid:
                continue
            own = self._device.index
            if index == own or torch.cuda.can_device_access_peer(own, index):
                return index
            raise RuntimeError(f"cuda:{own} cannot access the memory of cuda:{index}")
        raise RuntimeError(
            "a peer's GPU is not visible to this process. Let CUDA_VISIBLE_DEVICES name the GPUs of "
            "all of the host's ranks"
        )


def ranks_share_a_gpu(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether two ranks of the group compute on one GPU. Every rank has to call it.

    Where there is a visible GPU for every rank, nobody is asked: then it would be a mistake, which
    NCCL reports.
    """
    if group.size() <= torch.cuda.device_count():
        return False
    places = exchange_through_store((host_identity(), _uuid(device.index)), group)
    return len(set(places)) < len(places)


@functools.cache
def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
