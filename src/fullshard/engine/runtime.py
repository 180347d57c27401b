"""Streams and events of a device, with a form for the CPU where they are no-ops.

Three lanes. COMPUTE is the user's current stream. ALL_GATHER carries unshards, so that one may run
beside compute; REDUCE carries gradient reductions, which must not wait behind the next unshard.

[Note: Lanes] Nothing calls ``record_stream``. Three rules make it safe to free memory while the
device may still use it; the host waits for nothing:

    1  Memory is allocated on the lane that frees it: unsharded buffers on COMPUTE, what exists only
       during a collective on that collective's lane.
    2  A side lane waits for COMPUTE before it begins (`Runtime.following`), so that all that
       COMPUTE has written, freed or still reads before that point is over.
    3  COMPUTE waits for a side lane before anything that the lane reads is dropped.
"""

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import torch

from fullshard.comm.packing import Scratch
from fullshard.process_hooks import raise_heap_threshold, skip_frames
from fullshard.torch_private import (
    WithoutTransforms,
    are_transforms_active,
    compile_callback,
    disable_dynamo,
    set_grad_enabled,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Lane(enum.Enum):
    """A stream by its purpose."""

    COMPUTE = enum.auto()
    ALL_GATHER = enum.auto()
    REDUCE = enum.auto()


class Runtime:
    """The lanes of one device. See [Note: Lanes].

    has_streams: whether the device works asynchronously to the host. If so, one lane waits for an
        event of another; if not, the host waits for a collective when its result is needed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type != "cpu"
        self._streams: dict[Lane, torch.Stream] = {}
        if not self.has_streams:
            raise_heap_threshold()

    @staticmethod
    @functools.cache
    def of(device: torch.device) -> "Runtime":
        """Return the device's lanes, the same for every model on it."""
        # Never dropped: the caching allocator keeps free memory by stream, and would not give that
        # of old lanes to new ones.
        return Runtime(device)

    @property
    def scratch(self) -> Scratch:
        """The device's scratch memory, which lives as long as anybody refers to it: each unit."""
        return Scratch.of(self.device)

    @property
    def allocated_nbytes(self) -> int | None:
        """Bytes that tensors occupy on the device; None where no allocator counts them."""
        if self.device.type == "cpu":
            return None
        return torch.accelerator.memory_allocated(self.device)

    @property
    def reserved_nbytes(self) -> int | None:
        """Bytes that the device's allocator has: those of tensors, and its cache; None as above."""
        if self.device.type == "cpu":
            return None
        return torch.accelerator.memory_reserved(self.device)

    @property
    def num_alloc_retries(self) -> int | None:
        """How often the allocator has given back its cache and tried again; None as above."""
        if self.device.type == "cpu":
            return None
        retries: int | None = torch.accelerator.memory_stats(self.device).get("num_alloc_retries")
        return retries

    def on(self, lane: Lane) -> contextlib.AbstractContextManager[Any]:
        """Make a lane the current stream, without waiting for anything."""
        if not self.has_streams or lane is Lane.COMPUTE:
            return _NOTHING
        return self._stream(lane)

    @contextlib.contextmanager
    def following(self, lane: Lane) -> Iterator[None]:
        """Make a lane the current stream, and let it wait for what was current: rule 2."""
        before = self.record()
        with self.on(lane):
            self.wait(before)
            yield

    def record(self) -> torch.Event | None:
        """Return an event at the current stream's position; None without streams."""
        if not self.has_streams:
            return None
        event = torch.Event(self.device.type)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def wait(self, event: torch.Event | None) -> None:
        """Let the current stream wait for an event; the host goes on. None: nothing to wait for."""
        if event is not None:
            torch.accelerator.current_stream(self.device).wait_event(event)

    def finish(self, event: torch.Event | None) -> None:
        """Let the host wait for an event. None: nothing to wait for."""
        if event is not None:
            event.synchronize()

    def _stream(self, lane: Lane) -> torch.Stream:
        if lane not in self._streams:
            # High priority: a collective that is ready goes before compute's queued kernels.
            self._streams[lane] = torch.Stream(self.device, priority=-1)
        return self._streams[lane]


class no_grad:  # noqa: N801  (torch's name)
    """``torch.no_grad`` as a context alone, at a third of its cost."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        if self._before:
            set_grad_enabled(False)

    def __exit__(self, *exception: object) -> None:
        if self._before:
            set_grad_enabled(True)


_NOTHING = contextlib.nullcontext()


def eager(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Never compile a function: `torch.compiler.disable`, at a third of its cost where none is.

    The compiler, which takes a second to import, is not imported for it before something is
    compiled: torch's own decorator for this is private, but the public one imports it at once.

    Called by what is not compiled itself (``nn.Module.__call__``, autograd), it interrupts no graph.
    """
    disabled: Callable[_P, _R] = disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        # A callback is set while dynamo looks at frames of this thread.
        if torch.compiler.is_dynamo_compiling() or compile_callback() is not None:
            return disabled(*args, **kwargs)
        return function(*args, **kwargs)

    # Dynamo compiles every Python frame that it meets, this one too, and would end the graph at the
    # call of `disabled`: a graph break, or an error under fullgraph=True.
    return passing_through(call)


def passing_through(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Never begin a graph with a function; what it calls may be compiled.

    For what stands between ``nn.Module.__call__`` and the module's own forward. A caller that is
    compiled itself traces through this function like any other. Rejected:
    ``torch.compiler.disable(recursive=False)``, which costs one more Python frame per call.
    """
    skip_frames(function)
    return function


def outside_transforms(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Switch transforms off for a function, so that it sees plain tensors inside ``torch.func``."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not are_transforms_active():
            return function(*args, **kwargs)
        with WithoutTransforms():
            return function(*args, **kwargs)

    return call


def out_of_context(function: Callable[[], _R]) -> _R:
    """Call a function in a thread of its own, where grad mode is on and nothing else is.

    What a program has entered (hooks on saved tensors, inference mode, dispatch modes, transforms)
    holds for its thread. Costs 0.1 ms.
    """
    with ThreadPoolExecutor(1) as thread:
        try:
            future = thread.submit(function)
        except RuntimeError:  # Python is about to exit and starts no thread any more
            return function()
        return future.result()
