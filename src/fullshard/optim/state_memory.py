"""The memory of one unit's optimizer state: at home between steps, and in a slot while it is stepped on.

          home                     slot                       how bytes move
host      page-locked host memory  memory of the device       copies on two lanes, one each way
disk      a file                   memory of the device       as above, through host memory in the slot
disk      a file                   host memory, where it is stepped on    by threads
"""

import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from fullshard.engine.runtime import Lane, Runtime
from fullshard.optim.local_form import State
from fullshard.optim.unit_files import Ticket, UnitFile, UnitFiles

_ALIGNMENT = 256  # bytes, of what CUDA's allocator gives


class Entry(NamedTuple):
    """One tensor of a state. shard, key: where an optimizer keeps it. start: in bytes."""

    shard: torch.Tensor
    key: str
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.size) * self.dtype.itemsize


class Layout:
    """Where the tensors of a unit's state lie in one piece of memory, of ``nbytes``."""

    def __init__(self, shards: Iterable[torch.Tensor], state: Mapping[Any, Any]) -> None:
        self.entries: list[Entry] = []
        self.nbytes = 0
        self._shards = tuple(shards)
        for shard in self._shards:
            for key, value in state.get(shard, {}).items():
                if is_moved(value):
                    # As the optimizer has made it: of fused and `foreach` steps, strides choose the kernel.
                    stride = torch.empty_like(value, device="meta").stride()
                    self.entries.append(
                        Entry(shard, key, value.dtype, value.shape, stride, self.nbytes)
                    )
                    self.nbytes += padded(value.nbytes)

    def describes(self, state: Mapping[Any, Any]) -> bool:
        """Return whether a state has these tensors, wherever they are, and no others that move."""
        for entry in self.entries:
            value = state.get(entry.shard, {}).get(entry.key)
            if not is_moved(value) or (value.dtype, value.shape) != (entry.dtype, entry.size):
                return False
        values = (value for shard in self._shards for value in state.get(shard, {}).values())
        return sum(map(is_moved, values)) == len(self.entries)

    def fill(self, memory: torch.Tensor, state: Mapping[Any, Any]) -> None:
        """Copy a state to 1-D bytes. Of page-locked memory, the host goes on."""
        for entry, view in zip(self.entries, self.views(memory), strict=True):
            view.copy_(state[entry.shard][entry.key], non_blocking=True)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return each entry as a view of 1-D bytes."""
        return [
            memory[entry.start : entry.stop].view(entry.dtype).as_strided(entry.size, entry.stride)
            for entry in self.entries
        ]

    def apart(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return each entry over a part of 1-D bytes that is a storage of its own.

        ``torch.save`` writes whole storages, and takes no DTensor whose local tensor begins behind its storage's start.
        """
        storage = memory.untyped_storage()
        return [
            torch.empty(0, dtype=entry.dtype, device=memory.device).set_(
                storage[entry.start : entry.stop], 0, entry.size, entry.stride
            )
            for entry in self.entries
        ]


def is_moved(value: object) -> bool:
    """Return whether a value of a state is one that moves: a tensor with elements, and no scalar."""
    return type(value) is torch.Tensor and value.dim() > 0 and value.numel() > 0


def padded(nbytes: int) -> int:
    """Return the bytes that a tensor takes in a `Layout`."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Home:
    """Where a unit's state is between steps. memory: its bytes, 1-D, on the host; of a file, mapped.

    files, file: on disk, the file that it is, and whose that is; None on the host.

    left: after this event, the last copy from the device is over; None if there is none to wait for.
    """

    left: torch.Event | None = None

    def __init__(
        self, layout: Layout, files: UnitFiles | None, file: UnitFile | None, *, pins: bool
    ) -> None:
        self.layout, self.files, self.file = layout, files, file
        if file is None:
            pins = pins and torch.accelerator.is_available()
            self.memory = torch.empty(
                layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pins
            )
        else:
            assert files is not None
            self.memory = files.view(file)
        self.values = layout.apart(self.memory)

    def is_in(self, state: State) -> bool:
        """Return whether a state consists of what this home has, and of nothing else that moves."""
        pairs = zip(self.layout.entries, self.values, strict=True)
        return self.layout.describes(state) and all(
            state[entry.shard][entry.key] is view for entry, view in pairs
        )

    def show(self, state: State) -> None:
        """Make the home's memory that of a state."""
        for entry, view in zip(self.layout.entries, self.values, strict=True):
            state[entry.shard][entry.key] = view

    def finish(self, runtime: Runtime) -> None:
        """Let the host wait until all bytes are here."""
        runtime.finish(self.left)
        self.left = None
        if self.file is not None:
            assert self.files is not None
            self.files.settle(self.file)

    def follow_writes(self) -> None:
        """Take over what somebody has written to the memory."""
        if self.file is not None:
            assert self.files is not None
            self.files.follow_view(self.file)


class Slot:
    """Memory where a unit's state is stepped on, and its way there and home.

    bounce: host memory between a file and a device; None if there is none between.
    """

    def __init__(
        self, nbytes: int, runtime: Runtime, files: UnitFiles | None, *, pins: bool
    ) -> None:
        self._runtime = runtime
        self.nbytes = nbytes
        self._bounce: torch.Tensor | None = None
        self._free: torch.Event | None = None  # after it, nothing uses the memory of the last state
        self._arrived: torch.Event | None = None
        self._read: Ticket | None = None
        self._written: Ticket | None = None
        if files is not None:
            host = files.new_buffer(nbytes, pin_memory=pins and runtime.has_streams)
            self._bounce, self.memory = (host, host) if runtime.has_streams else (None, host)
        if runtime.has_streams:
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=runtime.device)
            self._free = runtime.record()  # what compute did to this memory before

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.memory] if self._bounce is None else [self.memory, self._bounce]

    def begin_arrival(self, home: Home) -> None:
        """Start to bring a state here."""
        if home.file is None:
            self._copy_in(home.memory, home.left)
            return
        assert home.files is not None
        self.finish_writing()
        target = self.memory if self._bounce is None else self._bounce
        self._read = home.files.read(home.file, target)

    def arrive(self, home: Home) -> None:
        """Let compute wait until the state is here."""
        if self._read is not None:
            self._read.wait()
            self._read = None
            if self._bounce is not None:
                self._copy_in(self._bounce[: home.layout.nbytes], None)
        self._runtime.wait(self._arrived)

    def finish_arrival(self) -> None:
        """Let the host wait until the state is here."""
        if self._read is not None:
            self._read.wait()
            self._read = None
        self._runtime.finish(self._arrived)

    def _copy_in(self, source: torch.Tensor, after: torch.Event | None) -> None:
        runtime = self._runtime
        with runtime.on(Lane.STATE_IN):
            runtime.wait(self._free)
            runtime.wait(after)
            self.memory[: source.numel()].copy_(source, non_blocking=True)
            self._arrived = self._free = runtime.record()

    def begin_leaving(self, home: Home) -> None:
        """Start to bring the state home, after all that compute was given."""
        runtime, nbytes = self._runtime, home.layout.nbytes
        if runtime.has_streams:
            target = home.memory if self._bounce is None else self._bounce[:nbytes]
            with runtime.following(Lane.STATE_OUT):
                target.copy_(self.memory[:nbytes], non_blocking=True)
                self._free = runtime.record()
        if home.file is None:
            home.left = self._free
            return
        assert home.files is not None
        left = self._free
        source = self.memory if self._bounce is None else self._bounce
        self._written = home.files.write(home.file, source, ready=lambda: runtime.finish(left))

    def finish_writing(self) -> None:
        """Let the host wait until a file has the last state, whose copy from the device is over then, too."""
        if self._written is not None:
            self._written.wait()
            self._written = None

    def __del__(self) -> None:
        """Let compute wait until nothing uses the memory: rule 3 of [Note: Lanes]. Threads keep what they use."""
        if self._free is not None and not sys.is_finalizing():
            self._runtime.wait(self._free)
