"""A device in host memory for `fullshard.comm.device_memory`, so that its protocol runs without a GPU.

Every event is a word that all ranks see. A wait for one that nobody has recorded yet would be passed
over by a real device, and is an error here. Ranks dawdle at random, so that an order that only seems
to hold is found out.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch

from fullshard.comm.shared_memory import _create_file, _open_peer_file

Memory = tuple[int, int, int]  # pid, descriptor, bytes


class Event:
    """Times recorded, in shared memory."""

    def __init__(self, memory: memoryview, handle: Memory) -> None:
        self.word = memory.cast("q")
        self.handle = handle


class HostPeers:
    """What `DeviceMemoryComm` asks of a device. `waits` and `exports` count what was done."""

    name = "test"

    def __init__(self, seed: int = 0, dawdle_s: float = 0.0) -> None:
        self.waits = self.exports = 0
        self._random = random.Random(seed)
        self._dawdle_s = dawdle_s
        self._handles: dict[int, Memory] = {}

    def allocate(self, nbytes: int) -> torch.Tensor:
        memory, handle = self._create(nbytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)[:nbytes]
        self._handles[tensor.data_ptr()] = handle
        return tensor

    def export(self, memory: torch.Tensor) -> Memory:
        self.exports += 1
        return self._handles[memory.data_ptr()]

    def open(self, handle: Memory) -> torch.Tensor:
        return torch.frombuffer(_open_peer_file(*handle), dtype=torch.uint8)

    def create_event(self) -> Event:
        return Event(*self._create(8))

    def export_event(self, event: Event) -> Memory:
        return event.handle

    def open_event(self, handle: Memory) -> Event:
        return Event(_open_peer_file(*handle), handle)

    def record(self, event: Event) -> None:
        self._dawdle()
        event.word[0] += 1

    def wait(self, event: Event) -> None:
        self._dawdle()
        self.waits += 1
        assert event.word[0] > 0, "waited for an event that was never recorded"

    def mark(self) -> Event:
        event = self.create_event()
        self.record(event)
        return event

    def finish(self) -> None:
        self._dawdle()

    def _create(self, nbytes: int) -> tuple[memoryview, Memory]:
        fd = _create_file(nbytes)
        handle = (os.getpid(), fd, nbytes)
        return _open_peer_file(*handle), handle

    def _dawdle(self) -> None:
        if self._dawdle_s:
            time.sleep(self._random.random() * self._dawdle_s)


class NoPeers(HostPeers):
    """A device whose memory other processes cannot open."""

    def open(self, handle: Any) -> torch.Tensor:
        raise RuntimeError("invalid device context")
