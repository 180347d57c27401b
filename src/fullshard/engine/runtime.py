"""Streams and events of a device, with a form for the CPU where they are no-ops.

Six lanes. COMPUTE is the user's current stream. ALL_GATHER carries unshards, so that one may run
beside compute; REDUCE carries gradient reductions, which must not wait behind the next unshard;
ALL_REDUCE their sums over replicas, behind which the next reduce-scatter must not wait. STATE_IN and
STATE_OUT carry optimizer state from the host and back, both at once.

[Note: Lanes] Nothing calls ``record_stream``. Three rules make it safe to free memory while the
device may still use it; the host waits for nothing:

    1  Memory is allocated on the lane that frees it: unsharded buffers on COMPUTE, what exists only
       during a collective on that collective's lane.
    2  A side lane waits for COMPUTE before it begins (`Runtime.following`), so that all that
       COMPUTE has written, freed or still reads before that point is over. A gather whose memory is in
       `Rotation` waits for less.
    3  COMPUTE waits for a side lane before anything that the lane reads is dropped.
"""

import collections
import contextlib
import enum
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from fullshard.comm.packing import Scratch
from fullshard.errors import UnsupportedError
from fullshard.plan.ways import NUM_TURNS
from fullshard.process_hooks import raise_heap_threshold, skip_frames
from fullshard.torch_private import (
    WithoutTransforms,
    are_transforms_active,
    compile_callback,
    disable_dynamo,
    set_grad_enabled,
    swap_memory,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Lane(enum.Enum):
    """A stream by its purpose."""

    COMPUTE = enum.auto()
    ALL_GATHER = enum.auto()
    REDUCE = enum.auto()
    ALL_REDUCE = enum.auto()
    STATE_IN = enum.auto()
    STATE_OUT = enum.auto()


class Runtime:
    """The lanes of one device. See [Note: Lanes].

    has_streams: whether the device works asynchronously to the host. If so, one lane waits for an
        event of another; if not, the host waits for a collective when its result is needed.
    is_capturing: whether the pass that runs is captured by a CUDA graph: see `look`.
    rotation: the memory that gathers use in turn; None without streams, or where torch cannot swap it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.has_streams = device.type != "cpu"
        self.is_capturing = False
        self._streams: dict[Lane, torch.Stream] = {}
        self.rotation: Rotation | None = None
        if self.has_streams and swap_memory is not None:
            self.rotation = Rotation(self)
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

    def following(self, lane: Lane) -> "_Following":
        """Make a lane the current stream, and let it wait for what was current: rule 2."""
        return _Following(self, lane)

    def record(self) -> torch.Event | None:
        """Return an event at the current stream's position; None without streams."""
        if not self.has_streams:
            return None
        event = torch.Event(self.device.type)
        # By index, as everywhere here: by device, torch looks for the accelerator first.
        event.record(torch.accelerator.current_stream(self.device.index))
        return event

    def wait(self, event: torch.Event | None) -> None:
        """Let the current stream wait for an event; the host goes on. None: nothing to wait for."""
        if event is not None:
            torch.accelerator.current_stream(self.device.index).wait_event(event)

    def finish(self, event: torch.Event | None) -> None:
        """Let the host wait for an event. None: nothing to wait for."""
        if event is not None:
            event.synchronize()

    # CUDA graphs

    def look(self) -> bool:
        """Ask whether the current stream is being captured: at the beginning of each pass, and for `unshard`.

        [Note: Captures] What a capture records is done by its replays alone, each time anew. So no event and no
        memory of the engine's passes its borders: units that are whole are gathered anew (`Iteration`),
        nothing waits for what was recorded outside, gradient memory of one side is not used on the other, and checks for
        which the host would wait are left to passes that are not captured. A replay writes to shards unseen: once
        a model was captured, nothing that was gathered outlasts a pass.
        """
        if self.has_streams:
            before, self.is_capturing = self.is_capturing, self._is_stream_captured()
            if self.rotation is not None and (before or self.is_capturing):
                self.rotation.clear()  # with its events
        return self.is_capturing

    def refuse_capture(self, why: str) -> None:
        """Raise UnsupportedError if the current stream is being captured. why: what cannot be captured."""
        if self._is_stream_captured():
            raise UnsupportedError(
                f"Inside a CUDA graph capture: {why}, which no graph can hold. {_WITHOUT_CAPTURE}"
            )

    def _is_stream_captured(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def make_graph(self) -> "Graph":
        """Return a graph to capture work of this device with. Raises UnsupportedError unless it is CUDA's."""
        if self.device.type != "cuda":
            raise UnsupportedError(
                f"capture_step needs parameters on a CUDA device, and they are on {self.device}: only there can a "
                "step be captured. Call the step itself elsewhere; its results are the same."
            )
        return Graph(self.device)

    def _stream(self, lane: Lane) -> torch.Stream:
        if lane not in self._streams:
            # High priority: a collective that is ready goes before compute's queued kernels.
            self._streams[lane] = torch.Stream(self.device, priority=-1)
        return self._streams[lane]


_WITHOUT_CAPTURE = "Capture a step without it, or run the step without a graph."


class Graph:
    """Captured work of a CUDA device, and the stream on which it is prepared and captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Make the graph's stream the current one, without capturing: it goes on where the current one is.

        Nodes of autograd keep the stream that they were made on, so what is to be captured first runs there.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture what is done within the body, in place of what was captured before."""
        graph, failure = torch.cuda.CUDAGraph(), None
        # Of this thread alone: others, which load data or watch NCCL, go on.
        capture = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        # Where ending a capture raises, torch does not return to the stream that was current.
        with torch.cuda.stream(torch.cuda.current_stream(self._device)):
            try:
                with capture:
                    try:
                        yield
                    except BaseException as error:
                        failure = error
            except RuntimeError:
                if failure is None:
                    raise
        if failure is not None:
            raise failure  # what ends a broken capture says nothing of the cause
        self._graph = graph

    def replay(self) -> None:
        """Do on the current stream what was captured."""
        assert self._graph is not None
        self._graph.replay()


class _Following:
    """The context of `Runtime.following`: a class, since a generator's costs more than all that it does."""

    __slots__ = ("_entered", "_lane", "_runtime")

    def __init__(self, runtime: Runtime, lane: Lane) -> None:
        self._runtime, self._lane = runtime, lane

    def __enter__(self) -> None:
        before = self._runtime.record()
        self._entered = self._runtime.on(self._lane)
        self._entered.__enter__()
        self._runtime.wait(before)

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)


class _Turn(NamedTuple):
    """The unsharded memory of a unit that was resharded. read: recorded after its last reader."""

    memory: list[torch.UntypedStorage]
    read: torch.Event | None


class Rotation:
    """Unsharded memory that the units of a device hand on to each other during a pass.

    Memory from COMPUTE's allocator may still be read by anything that COMPUTE was given before. Here each
    piece has an event of its own, recorded when its unit was resharded: a gather waits for that, and
    runs beside all that came later. The memory belongs to ALL_GATHER (rule 1 of [Note: Lanes]), which
    waits for its last reader before it is used again.

    Units that are whole, being gathered or resting are three at a time, as many as in PyTorch's engine,
    whose all-gathers arrive in buffers of their own. Equal units find the same addresses again and again.
    What fits nobody goes back to the allocator, and so does all at the end of a pass: activations and
    the loss need the room.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._turns: collections.deque[_Turn] = collections.deque()  # oldest first
        self._borrowers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_lent = 0
        # COMPUTE was told to read memory of ALL_GATHER that went back to the allocator without an event.
        self._is_read_unnoticed = False

    @property
    def resting(self) -> list[torch.Tensor]:
        """The memory that no unit has, as 1-D tensors of bytes, for reports."""
        device = self._runtime.device
        storages = [each for turn in self._turns for each in turn.memory]
        return [torch.empty(0, dtype=torch.uint8, device=device).set_(each) for each in storages]

    @contextlib.contextmanager
    def lending(
        self,
        borrower: Any,
        storages: Sequence[tuple[torch.UntypedStorage, int]],
        after: torch.Event | None,
    ) -> Iterator[None]:
        """Make ALL_GATHER the current stream, with memory in empty storages of these sizes in bytes.

        borrower: who calls `take_back`. after: what the gather reads is written when this is over.
        """
        runtime = self._runtime
        # If a model is gone whose units were whole, nobody has recorded what reads their memory.
        if self._is_read_unnoticed or len(self._borrowers) != self._num_lent:
            self._is_read_unnoticed, self._num_lent = False, len(self._borrowers)
            after = runtime.record()
        with runtime.on(Lane.ALL_GATHER):
            runtime.wait(after)
            wanted = list(storages)
            while len(self._turns) > max(0, NUM_TURNS - 1 - self._num_lent):
                turn = self._turns.popleft()
                runtime.wait(turn.read)
                for memory in turn.memory:
                    size = memory.nbytes()
                    fitting = next((each for each in wanted if each[1] == size), None)
                    if fitting is not None:
                        swap_memory(fitting[0], memory)
                        wanted.remove(fitting)
            for storage, size in wanted:
                storage.resize_(size)
            self._borrowers.add(borrower)
            self._num_lent += 1
            yield

    def take_back(self, borrower: Any, storages: Sequence[torch.UntypedStorage]) -> None:
        """Take the memory of storages, which are empty then. What reads it was given to COMPUTE."""
        taken = []
        for storage in storages:
            memory = torch.UntypedStorage(0, device=storage.device)
            swap_memory(memory, storage)
            taken.append(memory)
        self._turns.append(_Turn(taken, self._runtime.record()))
        self._borrowers.discard(borrower)
        self._num_lent -= 1

    def note_reading(self) -> None:
        """Take note that COMPUTE was told to read memory of ALL_GATHER that is not lent, and is freed."""
        self._is_read_unnoticed = True

    def clear(self) -> None:
        """Give memory that no unit has back to the allocator. The next gather waits for all of COMPUTE."""
        self._is_read_unnoticed |= bool(self._turns)
        self._turns.clear()


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
        if is_dynamo_compiling() or compile_callback() is not None:
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
