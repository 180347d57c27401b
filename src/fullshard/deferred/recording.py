"""Record a construction: every operator runs on the meta device, where it computes nothing.

[Note: As if with memory] A construction may ask where its tensors are, and leave out what would be lost on the
meta device. It is told what an ordinary construction would be told. Some of ``torch.nn.init`` ask as well, and
draw again what does not fit, which cannot be recorded operator by operator: such a call is recorded as a whole.
"""

import sys
import types
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fullshard.deferred.record import (
    ConstructionRecord,
    MemoryView,
    Operation,
    needed_for,
    replay,
    tensor_of,
    tensors_in,
)
from fullshard.errors import UnsupportedError
from fullshard.torch_private import TorchDispatchMode, pytree

# In-place operators that give every element a new value, whatever was there.
_FILLS = frozenset(
    f"aten::{name}_"
    for name in [
        "bernoulli",
        "cauchy",
        "copy",
        "exponential",
        "fill",
        "geometric",
        "log_normal",
        "normal",
        "random",
        "uniform",
        "zero",
    ]
)


class Recorder(TorchDispatchMode):
    """Runs operators on the meta device, and records them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = ConstructionRecord(torch.get_rng_state())
        # By address of a storage of the meta device, its number. They are kept, so that no address is given
        # out twice.
        self._numbers: dict[int, int] = {}
        self._kept: list[torch.UntypedStorage] = []

    def known_view(self, tensor: torch.Tensor) -> MemoryView | None:
        """Return what a tensor stands for; None if it was not made here."""
        # By its storage: of the tensor itself, `AsIfWithMemory` would be asked.
        is_known = tensor.untyped_storage()._cdata in self._numbers
        return self._view(tensor) if is_known else None

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        args, kwargs = pytree.tree_map_only(torch.Tensor, self._on_meta, (args, kwargs or {}))
        kinds = {str(returned.type) for returned in function._schema.returns}
        if kinds and not any("Tensor" in kind for kind in kinds):
            return self._computed(function, args, kwargs)
        known = len(self._numbers)
        inputs = [self._view(tensor) for tensor in tensors_in((args, kwargs))]
        result = function(*args, **_with_device(function, kwargs, "meta"))
        outputs = tuple(map(self._view, tensors_in(result)))
        creates = frozenset(view.memory for view in outputs if view.memory >= known)
        if function._schema.is_mutable or creates or not inputs:  # else views of what there is
            self._note(function, args, kwargs, inputs, outputs, creates)
        return result

    def _note(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        inputs: list[MemoryView],
        outputs: tuple[MemoryView, ...],
        creates: frozenset[int],
    ) -> None:
        read = frozenset(view.memory for view in inputs)
        overwrites: frozenset[int] = frozenset()
        if function._schema.name in _FILLS and inputs[0].covers(
            self.record.nbytes[inputs[0].memory]
        ):
            overwrites = frozenset({inputs[0].memory} - {view.memory for view in inputs[1:]})
        writes = creates | {
            self._view(tensor).memory for tensor in _written(function, args, kwargs)
        }
        own = pytree.tree_map_only(torch.Tensor, self._view, (args, kwargs))
        # Values are computed where the construction asked, or on the CPU.
        device = torch.device(own[1].get("device") or "cpu")
        self.record.operations.append(
            Operation(
                function,
                own[0],
                _with_device(function, own[1], "cpu" if device.type == "meta" else device),
                outputs,
                reads=read - overwrites,
                overwrites=overwrites,
                creates=creates,
                writes=writes,
                is_random=torch.Tag.nondeterministic_seeded in function.tags,
            )
        )

    def note_call(self, function: Any, kwargs: dict[str, Any], tensor: torch.Tensor) -> None:
        """Record a call of a function that gives every element of a tensor a new value."""
        view = self._view(tensor)
        own = frozenset({view.memory})
        is_all = view.covers(self.record.nbytes[view.memory])
        self.record.operations.append(
            Operation(
                function,
                (),
                pytree.tree_map_only(torch.Tensor, self._view, kwargs),
                (),
                reads=frozenset() if is_all else own,
                overwrites=own if is_all else frozenset(),
                creates=frozenset(),
                writes=own,
                is_random=True,
            )
        )

    def _view(self, tensor: torch.Tensor) -> MemoryView:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self._numbers)
            self._kept.append(storage)
            self.record.nbytes[number] = storage.nbytes()
        strides, offset = tuple(tensor.stride()), int(tensor.storage_offset())
        return MemoryView(number, tuple(tensor.shape), strides, offset, tensor.dtype)

    def _on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what stands for a tensor: itself on the meta device, else one that has its values now."""
        if tensor.untyped_storage().device.type == "meta":
            return tensor
        kept = tensor.detach().clone()
        twin = torch.empty_strided(kept.shape, kept.stride(), dtype=kept.dtype, device="meta")
        self.record.constants[self._view(twin).memory] = kept.untyped_storage()
        return twin

    def _computed(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Return a number that the construction reads. Raises UnsupportedError if it is a random one."""
        views = [self._view(tensor) for tensor in tensors_in((args, kwargs))]
        memories = frozenset(view.memory for view in views)
        needed = needed_for(self.record.operations, memories)
        if any(operation.is_random for operation in needed):
            raise UnsupportedError(
                f"deferred_init: the construction reads a random number ({function}), and random numbers are "
                "drawn later. Draw it before, or build this model without deferred_init."
            )
        storages = {m: self.record.constants[m] for m in memories & self.record.constants.keys()}
        replay(self.record, needed, storages.__setitem__)
        real = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor_of(self._view(tensor), storages), (args, kwargs)
        )
        return function(*real[0], **real[1])


class AsIfWithMemory(TorchFunctionMode):
    """Answers where a recorded tensor is: see [Note: As if with memory]."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in (_IS_META, _DEVICE):
            (tensor,) = args
            if self._recorder.known_view(tensor) is not None:
                if function == _DEVICE:
                    return torch.device("cpu")
                return self._leaves_out(sys._getframe(1), tensor)
        return function(*args, **(kwargs or {}))

    def _leaves_out(self, frame: types.FrameType, tensor: torch.Tensor) -> bool:
        """Record the initialiser of torch that asks, and tell it to return; False for others."""
        code = frame.f_code
        if code.co_filename != nn.init.__file__:
            return False
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        function = getattr(nn.init, code.co_name)
        self._recorder.note_call(function, {n: frame.f_locals[n] for n in names}, tensor)
        return True


_IS_META: Any = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_DEVICE: Any = torch.Tensor.device.__get__


def _written(function: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the tensors among an operator's arguments that it writes to."""
    given = dict(zip((a.name for a in function._schema.arguments), args, strict=False)) | kwargs
    return [
        tensor
        for argument in function._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(given.get(argument.name))
    ]


def _with_device(function: Any, kwargs: dict[str, Any], device: Any) -> dict[str, Any]:
    """Return arguments with this device, if the operator takes one."""
    takes = any(argument.name == "device" for argument in function._schema.arguments)
    return {**kwargs, "device": torch.device(device)} if takes else kwargs
