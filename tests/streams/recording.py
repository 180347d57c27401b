"""What every operation reads and writes, by the modes of torch: a device made of host memory.

Programs see a device of type cuda: tensors say that they are there, factories and ``to`` put them
there, and the host works on its own memory. All memory is the host's in truth. `Recorder` is

- a mode on functions, which answers where tensors are, and says where new ones belong;
- a mode on the dispatcher, below autograd, which says what each operation reads and writes.

An operation on device memory runs on the current lane, one on host memory on the host. One between
the two runs on the lane, and the host waits for it unless it was told not to and the memory is
pinned. Whoever asks for values on the device waits as well; `NAMED_STALLS` are the functions that may.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import fullshard
from fullshard.engine import runtime
from fullshard.torch_private import swap_memory
from tests.streams.lanes import HOST, Lanes, Moment
from tests.streams.memory import Memory, Place

DEVICE = torch.device("cuda", 0)
HOST_DEVICE = torch.device("cpu")
_SOURCE = str(Path(fullshard.__file__).parent)
# Between the engine and an operation: torch, this folder's own files, and the standard library.
_TRANSPARENT = (
    str(Path(torch.__file__).parent),
    *(
        str(Path(__file__).parent / name)
        for name in ("capturing.py", "collectives.py", "lab.py", "lanes.py", "recording.py")
    ),
    contextlib.__file__,
    "<",
)

_aten = torch.ops.aten
# Of these the host needs the result, or its size, at once.
_STALLING = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.is_nonzero.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten.unique_consecutive.default,
    _aten._unique2.default,
}
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default}
# Functions of the engine in which the host may wait for the device, and why: docs/gpu.md.
NAMED_STALLS = {
    "_conclude": "the pass after a watched one asks what it has compared",
    "_read": "what is gathered early on request is compared before it is used, in watched passes",
    "agree": "ranks agree after a watched pass, and on what stays unsharded",
    "holds_shards": "what stays unsharded from one pass to the next is compared with the shards",
}
# They return memory, or change what a tensor is, and touch no element.
_UNTOUCHING = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "set_",
    "resize_",
}


class Recorder:
    """Records operations on lanes and memory while its context is entered.

    problems: what is wrong, each once, in the order in which it was found.
    num_operations: how many operations each lane was given.
    """

    def __init__(self) -> None:
        self.problems: dict[str, None] = {}
        self.num_operations: dict[Any, int] = {}
        self.lanes = Lanes(self.report)
        self.memory = Memory(self.lanes, self.report)
        self.is_paused = False
        self.is_in_step = False
        self.refuses_stalls = False
        self.new_place: Place | None = None  # where the next new tensor belongs, if it was said

    def report(self, problem: str) -> None:
        """Take note of something that is wrong."""
        where = engine_site()
        self.problems.setdefault(f"{problem} [{where}]" if where else problem)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record what this thread does, and let it see the device."""
        functions = _Functions(self)
        resize = torch.UntypedStorage.resize_
        run_backward = torch.autograd._engine_run_backward

        def resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            self.memory.resize(storage, lambda: resize(storage, nbytes))
            return storage

        def swapped(storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
            self.memory.swap(storage, other)
            swap_memory(storage, other)

        def backward(*args: Any, **options: Any) -> Any:
            # `Tensor.backward` is a function that the mode is told of, and so switched off in.
            with functions:
                return run_backward(*args, **options)

        with (
            mock.patch.object(torch.UntypedStorage, "resize_", resized),
            mock.patch.object(runtime, "swap_memory", swap_memory and swapped),
            mock.patch.object(torch.autograd, "_engine_run_backward", backward),
            functions,
            _Operations(self),
        ):
            yield

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing: what moves bytes for a collective, say."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    @contextlib.contextmanager
    def placing(self, place: Place) -> Iterator[None]:
        """Put new tensors there."""
        before, self.new_place = self.new_place, place
        try:
            yield
        finally:
            self.new_place = before

    def place_of(self, tensor: Tensor) -> Place:
        """Return where a tensor is; of a subclass, where that is which it wraps."""
        if type(tensor) not in (Tensor, nn.Parameter):
            for name in ("_local_tensor", "held"):
                if (inner := getattr(tensor, name, None)) is not None:
                    return self.place_of(inner)
        with torch._C.DisableTorchFunction():
            if tensor.is_meta or isinstance(tensor, FakeTensor):
                return Place.HOST
            return self.memory.place_of(tensor.untyped_storage())

    def stall(self, what: str) -> None:
        """Take note that the host waits for the device. Only the engine's waits are reported."""
        if self.lanes.capture is not None:
            self.lanes.capture.refuse_wait(what)
        self.lanes.stall()
        frame = engine_frame() if self.refuses_stalls else None
        if frame is not None and frame.f_code.co_name not in NAMED_STALLS:
            self.report(f"host: waits for {what}")

    def note(self, reads: Sequence[Tensor], writes: Sequence[Tensor], what: str) -> Moment:
        """Record an operation, on the current lane if it touches the device, else on the host."""
        is_on_device = any(self.place_of(each) is Place.DEVICE for each in (*reads, *writes))
        if is_on_device:
            # Numbers in host memory travel with the launch: the host reads them.
            numbers = [e for e in reads if not e.dim() and self.place_of(e) is not Place.DEVICE]
            if numbers and what != "copy_":
                self.note(numbers, [], what)
                reads = [each for each in reads if not any(each is number for number in numbers)]
        if is_on_device and self.lanes.capture is not None:
            self.lanes.capture.check_lane(self.lanes.current, what)
        moment = self.lanes.run(None if is_on_device else HOST)
        self.num_operations[moment.lane] = self.num_operations.get(moment.lane, 0) + 1
        site = engine_site()
        what = f"{what} at {site}" if site else what
        for tensor in reads:
            self.memory.use(tensor, moment, writes=False, what=what)
        for tensor in writes:
            self.memory.use(tensor, moment, writes=True, what=what)
        return moment


class _Functions(TorchFunctionMode):
    """Lets a program see the device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        tensor = torch.Tensor
        # By value: each access to `__get__` makes a new object.
        self._answers: dict[Any, Callable[[Place], Any]] = {
            tensor.device.__get__: lambda p: DEVICE if p is Place.DEVICE else HOST_DEVICE,
            tensor.is_cpu.__get__: lambda p: p is not Place.DEVICE,
            tensor.is_cuda.__get__: lambda p: p is Place.DEVICE,
            tensor.is_pinned: lambda p: p is Place.PINNED,
        }
        self._moves = {tensor.to, tensor.cuda, tensor.cpu}
        self._readers = {tensor.tolist, tensor.numpy}

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer, move, or say where new memory belongs."""
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder.is_paused:
            return function(*args, **kwargs)
        if function in self._answers:
            return self._answers[function](recorder.place_of(args[0]))
        if function in self._moves:
            return self._move(function, args, kwargs)
        if function in self._readers and recorder.place_of(args[0]) is Place.DEVICE:
            recorder.stall(function.__name__)
        device, pinned = kwargs.get("device"), kwargs.get("pin_memory")
        if device is None and not pinned:
            return function(*args, **kwargs)
        is_device = device is not None and torch.device(device).type == DEVICE.type
        kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        if is_device:
            kwargs["device"] = HOST_DEVICE
        with recorder.placing(
            Place.DEVICE if is_device else Place.PINNED if pinned else Place.HOST
        ):
            return function(*args, **kwargs)

    def _move(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Copy a tensor to where a call of ``to`` wants it, or return what ``to`` returns."""
        tensor, *rest = args
        kwargs = dict(kwargs)
        target = kwargs.pop("device", None)
        if function == torch.Tensor.cuda:
            target, rest = DEVICE, []
        elif function == torch.Tensor.cpu:
            target, rest = HOST_DEVICE, []
        others = []
        for value in rest:
            if isinstance(value, (torch.device, str)):
                target = value
            elif isinstance(value, Tensor):
                is_there = self._recorder.place_of(value) is Place.DEVICE
                target, kwargs["dtype"] = DEVICE if is_there else HOST_DEVICE, value.dtype
            else:
                others.append(value)
        if (held := getattr(tensor, "held", None)) is not None:
            return type(tensor)(self._move(function, (held, *others), {**kwargs, "device": target}))
        goes_to_device = target is not None and torch.device(target).type == DEVICE.type
        is_on_device = self._recorder.place_of(tensor) is Place.DEVICE
        if target is None or goes_to_device == is_on_device:
            kwargs.pop("non_blocking", None)
            return torch.Tensor.to(tensor, *others, **kwargs) if others or kwargs else tensor
        dtype = next(
            (each for each in others if isinstance(each, torch.dtype)), kwargs.get("dtype")
        )
        with self._recorder.placing(Place.DEVICE if goes_to_device else Place.HOST):
            out = torch.empty_like(tensor, dtype=dtype)
        return out.copy_(tensor, non_blocking=kwargs.get("non_blocking", False))


class _Operations(TorchDispatchMode):
    """Records what operations read and write, allocate, and wait for."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; guarding against it would cost each operation

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and record it."""
        kwargs = kwargs or {}
        # DTensor tries operations out on shapes alone.
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return function(*args, **kwargs)
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in kinds):
            return NotImplemented  # a subclass comes back with what it is made of
        with torch._C.DisableTorchFunction():
            if self._recorder.is_paused:
                return function(*args, **kwargs)
            operands = _operands(function, args, kwargs)
            capture = self._recorder.lanes.capture
            if capture is not None:
                capture.note_use(*operands)
            result = function(*args, **kwargs)
            self._record(function, args, kwargs, operands, result)
            return result

    def _record(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        operands: tuple[list[Tensor], list[Tensor]],
        result: Any,
    ) -> None:
        recorder = self._recorder
        what = function._schema.name.removeprefix("aten::")
        reads, writes = operands
        inputs = [*reads, *writes]
        old = {tensor.untyped_storage()._cdata for tensor in inputs}
        results = [each for each in pytree.tree_leaves(result) if isinstance(each, Tensor)]
        fresh = [each for each in results if each.untyped_storage()._cdata not in old]
        if fresh:
            self._allocate(fresh, inputs, what)
        if what in _UNTOUCHING or (results and not fresh and not writes):
            return  # a view
        if not inputs and not fresh:
            return
        moment = recorder.note(reads, [*writes, *fresh], what)
        if recorder.lanes.capture is not None and moment.lane != HOST:
            recorder.lanes.capture.add(function, args, kwargs, results, fresh)
        if function is _aten.copy_.default:
            self._wait_for_copy(reads[0], writes[0], args, kwargs)
        if _needs_result(function, reads) and recorder.place_of(reads[0]) is Place.DEVICE:
            recorder.stall(what)

    def _allocate(self, fresh: Sequence[Tensor], inputs: Sequence[Tensor], what: str) -> None:
        recorder = self._recorder
        place = recorder.new_place
        if place is None:
            is_on_device = any(recorder.place_of(tensor) is Place.DEVICE for tensor in inputs)
            place = Place.DEVICE if is_on_device else Place.HOST
        for tensor in fresh:
            storage = tensor.untyped_storage()
            if not recorder.memory.is_known(storage) or tensor.numel() == 0:
                recorder.memory.allocate(storage, place, what)

    def _wait_for_copy(self, source: Tensor, target: Tensor, args: Any, kwargs: Any) -> None:
        """Let the host wait for a copy between it and the device, unless that goes by itself."""
        places = {self._recorder.place_of(source), self._recorder.place_of(target)}
        non_blocking = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        if Place.DEVICE not in places or len(places) == 1:
            return
        if not (non_blocking and Place.PINNED in places):
            self._recorder.stall("a copy" if not non_blocking else "a copy of unpinned memory")


def _needs_result(function: Any, reads: Sequence[Tensor]) -> bool:
    """Whether the host needs the values of a result, or its size, which a mask decides."""
    if function in _STALLING:
        return True
    is_masked = any(each.dtype in (torch.bool, torch.uint8) for each in reads[1:])
    return function in _INDEXING and is_masked


def _operands(function: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the tensors that an operation reads, and those that it writes, by its schema."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    for position, argument in enumerate(function._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        if value is None:
            continue
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        values = value if isinstance(value, (list, tuple)) else (value,)
        found = (each for each in values if isinstance(each, Tensor))
        (writes if is_written else reads).extend(found)
    return reads, writes


def engine_frame() -> types.FrameType | None:
    """Return the frame of the engine that is running; None where torch or a program runs."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        # A comprehension is part of the function around it.
        if name.startswith(_SOURCE) and not frame.f_code.co_name.startswith("<"):
            return frame
        if not name.startswith((_SOURCE, *_TRANSPARENT)):
            return None
        frame = frame.f_back
    return None


def engine_site() -> str:
    """Return the line of the engine that is running; empty where torch or a program runs."""
    frame = engine_frame()
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename[len(_SOURCE) + 1 :]}:{frame.f_lineno}"
