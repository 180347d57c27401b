"""Captures of a virtual device: what a CUDA graph refuses is an error here too, and what it holds is replayed.

As on a device, work that is captured is not done: memory from before has its contents back when the
capture ends. A replay does all of it again, in order, at the addresses of the capture. These are errors:

    wait        the host waits, for an event or a value; it also ends the capture
    event       a captured lane waits for an event from outside of the capture, or a lane outside of it
                for one from a capture that is over
    lane        an operation, or an allocation, on a lane that is not part of the capture. A lane becomes
                one when it waits for an event of the capture
    join        a lane was given work that the capture's own stream does not follow in the end
    lost        memory from before the capture that a replay would use is there no more

What was allocated inside belongs to the graph (its pool): nothing else is ever given that memory. All of it is filled with ones when the capture ends (NaN
in every float dtype), and before each replay what nobody refers to any more: so whoever reads there what no replay
has written, or only the last one, is found by values.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fullshard.torch_private import swap_memory
from tests.streams.lanes import Stream
from tests.streams.memory import Block, Place, name_of

if TYPE_CHECKING:
    from tests.streams.lab import Lab
    from tests.streams.recording import Recorder


class HostWaitError(RuntimeError):
    """The host would wait in a capture, which ends it."""


class _Node(NamedTuple):
    """One operation: on tensors over raw addresses, and where its new results belong."""

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: list[tuple[int, Tensor]]  # by the place among the tensors that it returns

    def run(self) -> None:
        """Do it again."""
        returned = self.function(*self.args, **self.kwargs)
        if self.results:
            found = [each for each in pytree.tree_leaves(returned) if isinstance(each, Tensor)]
            for position, target in self.results:
                target.copy_(found[position])


class Capture:
    """What lanes were given between a beginning and an end. lanes: those that are part of it."""

    def __init__(self, recorder: Recorder, origin: Hashable) -> None:
        if swap_memory is None:  # torch 2.11; the engine does without
            pytest.skip("this torch cannot swap memory, by which a capture keeps it")
        self.lanes = {origin}
        self._recorder = recorder
        self._origin = origin
        self._nodes: list[_Node] = []
        self._pool: dict[int, torch.UntypedStorage] = {}  # by address; keeps the memory
        self._outside: dict[Block, bool] = {}  # memory from before, and whether it is written
        self._before: dict[Block, bytes] = {}  # contents, before the first write
        self._lost: list[str] = []
        self._random = torch.get_rng_state()

    # While it is under way

    def check_lane(self, lane: Hashable, what: str) -> None:
        """Report work on a lane that is not part of the capture."""
        if lane not in self.lanes:
            self._recorder.report(
                f"capture: {what} on {name_of(lane)}, which is not part of the capture"
            )

    def refuse_wait(self, what: str) -> None:
        """Report that the host waits, and raise as CUDA does."""
        problem = f"capture: the host waits for {what}"
        self._recorder.report(problem)
        raise HostWaitError(problem)

    def keep(self, storage: torch.UntypedStorage) -> None:
        """Let memory stay as long as the graph, whatever becomes of the storage that has it now."""
        address, nbytes = storage.data_ptr(), storage.nbytes()
        owner, borrowed = torch.UntypedStorage(0), _storage_at(address, nbytes)
        swap_memory(owner, storage)
        swap_memory(borrowed, storage)
        self._pool[address] = owner

    def has(self, address: int) -> bool:
        """Whether this is the beginning of memory of the pool."""
        return address in self._pool

    def note_use(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Take note of memory from before that an operation is about to use, and of its contents."""
        for tensors, is_written in ((reads, False), (writes, True)):
            for block in self._recorder.memory.blocks_of(tensors):
                if block.start in self._pool or block.place is Place.HOST:
                    continue
                self._outside[block] = self._outside.get(block, False) or is_written
                block.graphs[self] = None
                if is_written and block not in self._before:
                    self._before[block] = ctypes.string_at(block.start, block.stop - block.start)

    def add(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        results: Sequence[Tensor] = (),
        fresh: Sequence[Tensor] = (),
    ) -> None:
        """Add an operation. fresh: those of its results that have memory of their own."""
        place_of = self._recorder.place_of

        def fixed(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if not value.dim() and place_of(value) is not Place.DEVICE:
                return value.clone()  # a number, which travels with the launch
            return _raw(value)

        new = {id(each) for each in fresh}
        targets = [(place, _raw(each)) for place, each in enumerate(results) if id(each) in new]
        self._nodes.append(
            _Node(function, pytree.tree_map(fixed, args), pytree.tree_map(fixed, kwargs), targets)
        )

    def note_freed(self, block: Block) -> None:
        """Take note that memory from before, which the graph uses, is there no more."""
        used = block.accesses[-1].what if block.accesses else "an operation"
        self._lost.append(used)

    # When it is over

    def end(self, *, is_whole: bool) -> None:
        """Give memory from before its contents back. is_whole: no exception has ended it."""
        lanes, memory = self._recorder.lanes, self._recorder.memory
        own = lanes.clock(self._origin)
        for lane in self.lanes - {self._origin} if is_whole else ():
            if own.get(lane, 0) < lanes.clock(lane).get(lane, 0):
                self._recorder.report(f"capture: {name_of(lane)} was forked, and is not joined")
        for block, contents in self._before.items():
            if memory.is_there(block):
                ctypes.memmove(block.start, contents, len(contents))
        self._before.clear()
        for address, owner in self._pool.items():
            ctypes.memset(address, 0xFF, owner.nbytes())  # nothing has written there yet
        torch.set_rng_state(self._random)

    def replay(self) -> None:
        """Do all that was captured, as one operation on the current lane."""
        recorder = self._recorder
        if self._lost:
            recorder.report(f"capture: lost is memory that a replay uses: of {self._lost[0]}")
            return
        moment = recorder.lanes.run()
        for start, stop, is_written in self._used():
            recorder.memory.use_range(start, stop, moment, writes=is_written, what="a replay")
        with recorder.paused(), torch.no_grad(), torch._C.DisableTorchFunction():
            for address, owner in self._pool.items():
                if not recorder.memory.is_allocated(address):
                    ctypes.memset(address, 0xFF, owner.nbytes())
            for node in self._nodes:
                node.run()

    def _used(self) -> Iterator[tuple[int, int, bool]]:
        for block, is_written in self._outside.items():
            yield block.start, block.stop, is_written
        for address, owner in self._pool.items():
            yield address, address + owner.nbytes(), True


def _storage_at(address: int, nbytes: int) -> torch.UntypedStorage:
    """Return a storage over memory that it does not own."""
    return torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)  # type: ignore[no-any-return,attr-defined]


def _raw(tensor: Tensor) -> Tensor:
    """Return a tensor over the same addresses, which stay its own whatever becomes of the storage."""
    storage = tensor.untyped_storage()
    with torch.no_grad():
        raw = torch.empty(0, dtype=tensor.dtype)
        raw.set_(
            _storage_at(storage.data_ptr(), storage.nbytes()),
            tensor.storage_offset(),
            tensor.size(),
            tensor.stride(),
        )
    return raw


class Graph:
    """What `Runtime.make_graph` returns on a virtual device."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._stream = Stream(lab.lanes, "the graph's stream")
        self.capture: Capture | None = None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Run what is not captured on the graph's stream."""
        lanes = self._lab.lanes
        lanes.follow(self._stream, lanes.current)
        with self._stream:
            yield
        lanes.follow(lanes.current, self._stream)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what is done within the body."""
        with self._lab.capturing(self._stream) as capture:
            yield
        self.capture = capture

    def replay(self) -> None:
        """Do it on the current lane."""
        assert self.capture is not None
        self.capture.replay()
