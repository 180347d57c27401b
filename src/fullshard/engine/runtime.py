"""Streams and events of a device, with a form for the CPU where they are no-ops.

Three lanes. COMPUTE is the user's current stream. ALL_GATHER carries unshards, so that one may run
beside compute; REDUCE carries gradient reductions, which must not wait behind the next unshard.
Memory is allocated on the lane that frees it: unsharded buffers on COMPUTE, what exists only
during a collective on that collective's lane.
"""

import contextlib
import enum
import functools
import mmap
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from fullshard.comm.scratch import Scratch

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LARGEST_THRESHOLD = 32 << 20  # glibc's DEFAULT_MMAP_THRESHOLD_MAX


class Lane(enum.Enum):
    COMPUTE = enum.auto()
    ALL_GATHER = enum.auto()
    REDUCE = enum.auto()


class Runtime:
    """The lanes of one device.

    has_streams: whether work runs behind the host's back. Without streams a collective is waited
    for when its result is needed; with them, waiting is an event between two lanes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type != "cpu"
        self._streams: dict[Lane, torch.Stream] = {}
        if not self.has_streams:
            _raise_heap_threshold()

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> "Runtime":
        """Return the device's lanes, the same for every model on it."""
        return Runtime(device)

    @property
    def scratch(self) -> Scratch:
        """The device's scratch memory, which lives as long as a unit that holds it."""
        return Scratch.of(self.device)

    @property
    def allocated_nbytes(self) -> int | None:
        """What tensors occupy on the device; None where no allocator counts it."""
        if self.device.type == "cpu":
            return None
        return torch.accelerator.memory_allocated(self.device)

    def on(self, lane: Lane) -> contextlib.AbstractContextManager[Any]:
        """Make a lane the current stream."""
        if not self.has_streams or lane is Lane.COMPUTE:
            return _NOTHING
        return self._stream(lane)

    @contextlib.contextmanager
    def following(self, lane: Lane) -> Iterator[None]:
        """Make a lane the current stream, which first waits for the stream that was."""
        before = self.record()
        with self.on(lane):
            self.wait(before)
            yield

    def record(self) -> torch.Event | None:
        """Mark the current stream's position."""
        if not self.has_streams:
            return None
        event = torch.Event(self.device.type)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def wait(self, event: torch.Event | None) -> None:
        """Let the current stream wait for an event; the host does not."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    def finish(self, event: torch.Event | None) -> None:
        """Let the host wait for an event."""
        if event is not None:
            event.synchronize()

    def _stream(self, lane: Lane) -> torch.Stream:
        if lane not in self._streams:
            self._streams[lane] = torch.Stream(self.device, priority=-1)
        return self._streams[lane]


def _raise_heap_threshold() -> None:
    """Let the C library take large blocks from its heap, and keep more of what is freed there.

    Blocks above a threshold come from the system, with a page fault for every page, and go back to
    it. In glibc the threshold is the size of the largest such block that was freed, up to 32 MiB,
    and twice as much may stay on top of the heap (mallopt(3), M_MMAP_THRESHOLD). Freeing one
    explicitly takes training there from the first step on; nothing touches the block, so it
    costs nothing. Settings by the user (MALLOC_MMAP_THRESHOLD_) stay in force.
    """
    torch.empty(_LARGEST_THRESHOLD - 2 * mmap.PAGESIZE, dtype=torch.uint8, device="cpu")


class no_grad:  # noqa: N801  (torch's name)
    """``torch.no_grad`` as a context alone, at a third of its cost."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        if self._before:
            torch._C._set_grad_enabled(False)

    def __exit__(self, *exception: object) -> None:
        if self._before:
            torch._C._set_grad_enabled(True)


_NOTHING = contextlib.nullcontext()
_in_transforms = torch._C._are_functorch_transforms_active
_compile_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
_never_compile = torch._dynamo.eval_frame.skip_code


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """``torch.compiler.disable``, at a third of its cost where nothing is compiled.

    Called by what is not compiled itself (``nn.Module.__call__``, autograd), it interrupts no graph.
    """
    disabled: Callable[_P, _R] = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if torch.compiler.is_dynamo_compiling() or _compile_callback() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    # Dynamo compiles every Python frame that it meets, this one too, and would end the graph at the
    # call of `disabled`: a graph break, or an error under fullgraph=True.
    return passing_through(call)


def passing_through(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Never compile a function where a graph could begin with it; what it calls may be compiled.

    For what stands between ``nn.Module.__call__`` and the module's own forward. A function that is
    compiled itself and calls this one takes it in like any other.
    """
    _never_compile(function.__code__)
    return function


def outside_transforms(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Let a function see plain tensors where it is called inside ``torch.func`` transforms."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not _in_transforms():
            return function(*args, **kwargs)
        with torch._C._DisableFuncTorch():
            return function(*args, **kwargs)

    return call
