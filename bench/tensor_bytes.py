"""Bytes of live tensors in one process, counted by following their storages.

`LiveTensors` sees every operator while it is active. It keeps a weak reference to each storage
that an operator reads or returns; a storage lives exactly as long as its memory, whoever holds it.
All sizes are read anew when what operators have met since, new or larger, could make the sum a new
peak, so a storage that was resized to nothing since counts nothing.

Two kinds of memory are told apart:

private   storages in this process's own memory
shared    memory that several processes map: counted by mapping, in full and once per host, because
          tensors over it come and go while it stays

Not seen: buffers that C++ code allocates for itself within one operator or on its own threads
(Gloo's send buffers, a matmul's workspace). `bench.resident` sees those.
"""

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Mapping(NamedTuple):
    """A shared mapping of this process; `identity` is the same in every process that maps it."""

    identity: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def shared_mappings() -> list[Mapping]:
    """List the writable memory that this process shares with others (Linux)."""
    mappings = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _offset, device, inode, *_ = line.split()
        if permissions.startswith("rw") and permissions.endswith("s"):
            start, _, stop = addresses.partition("-")
            mappings.append(Mapping(f"{device}:{inode}", int(start, 16), int(stop, 16)))
    return mappings


class LiveTensors(TorchDispatchMode):
    """Count the bytes of live tensors, and their highest sum since `reset_peak`.

    `less_nbytes`, if given, is subtracted from every sum before the peak is taken; `bench.memory`
    takes out with it what is not an activation.
    """

    def __init__(self, *, less_nbytes: Callable[[], int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_nbytes = 0
        self.peak_phase = ""
        self.phase = ""
        self._less_nbytes = less_nbytes
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._nbytes: dict[int, int] = {}  # at last sight
        self._most_nbytes = 0  # the sum when it was last formed, and all that has risen since
        self._shared: list[Mapping] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor first: its operators on local tensors come back here
        result = func(*args, **(kwargs or {}))
        self._most_nbytes += self._follow((args, kwargs, result))
        if self._most_nbytes > self.peak_nbytes:
            less = self._less_nbytes() if self._less_nbytes else 0
            if self._most_nbytes - less > self.peak_nbytes:
                self._most_nbytes = self.live_nbytes()
                if self._most_nbytes - less > self.peak_nbytes:
                    self.peak_nbytes = self._most_nbytes - less
                    self.peak_phase = self.phase
        return result

    def live_nbytes(self) -> int:
        """Sum the private memory under the storages that are alive now.

        Storages may lie within another (a shard with a storage of its own over its unit's
        buffer); every byte counts once.
        """
        ranges = []
        for key, reference in [*self._storages.items()]:
            if (storage := reference()) is not None:
                self._nbytes[key] = nbytes = storage.nbytes()
                if nbytes:
                    ranges.append((start := storage.data_ptr(), start + nbytes))
        ranges.sort()
        total = reached = 0
        for start, stop in ranges:
            total += max(stop - max(start, reached), 0)
            reached = max(reached, stop)
        return total

    def reset_peak(self) -> None:
        """Begin a new peak, and look up anew which memory is shared."""
        self._shared = shared_mappings()
        self._storages = {
            key: reference
            for key, reference in self._storages.items()
            if (storage := reference()) is not None and not self._is_shared(storage)
        }
        self.peak_nbytes = 0
        self._most_nbytes = self.live_nbytes()

    def _follow(self, values: Any) -> int:
        """Follow the storages of all tensors in values; return by how much their sum can have risen."""
        nbytes = 0
        for leaf in tree_leaves(values):
            # DTensors come back as local tensors, and fake ones (of DTensor's shape propagation)
            # have no memory.
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, (DTensor, FakeTensor)):
                nbytes += self._follow_storage(leaf.untyped_storage())
        return nbytes

    def _follow_storage(self, storage: torch.UntypedStorage) -> int:
        # The address of the C++ object: the Python object may be another at every look.
        key = storage._cdata
        if key in self._storages:
            known, self._nbytes[key] = self._nbytes[key], storage.nbytes()
            return max(self._nbytes[key] - known, 0)
        if storage.device.type == "meta" or self._is_shared(storage):
            return 0

        def forget(_reference: object) -> None:
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, forget)
        self._nbytes[key] = storage.nbytes()
        return self._nbytes[key]

    def _is_shared(self, storage: torch.UntypedStorage) -> bool:
        address = storage.data_ptr()
        return any(mapping.start <= address < mapping.stop for mapping in self._shared)
