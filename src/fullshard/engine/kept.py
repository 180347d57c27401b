"""Unsharded parameters that somebody keeps after their reshard.

Their memory is freed, or holds values of before the next optimizer step, or is the shards' own:
using them crashed, or gave other results from path to path. So such a parameter is told by its
Python references, changes its class until the unit is unsharded again, and says so when it is used.
Views of it that were made before are not noticed.

[Note: Counting references] A check has to cost less than a microsecond, so it compares one sum of
reference counts with what it is when nobody else refers to the parameters. Autograd's saved tensors
must not count: one C++ reference or more keeps one Python reference. A node that never runs holds
one of each parameter for good, so that there is always exactly that one.
"""

import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.engine.params import ManagedParameter, manager_of
from fullshard.errors import StateError

_references = sys.getrefcount
_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
# What reads no memory.
_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim")
_LAYOUT = ("layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "nbytes", "itemsize")
_METHODS = ("size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous")
_PLACES = ("untyped_storage", "storage_offset", "data_ptr", "_version", "_backward_hooks")
_OTHERS = ("is_floating_point", "is_complex", "requires_grad_", "__hash__", "__len__")
_HARMLESS = {*_PROPERTIES, *_LAYOUT, *_METHODS, *_PLACES, *_OTHERS}


class ReshardedParameter(nn.Parameter):
    """A parameter whose unit is sharded again: using it is an error that names it."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        each = next((a for a in args if isinstance(a, cls)), None)
        manager = None if each is None else manager_of(each)
        raise StateError(
            f"{'A parameter' if manager is None else manager.name} was kept while its module was "
            f"resharded, and used after ({name}): its memory is freed or stale. Use it inside the "
            "module's forward, or between unshard() and reshard(), or keep "
            "weight.detach().clone()."
        )


class _Hold(torch.autograd.Function):
    """See [Note: Counting references]."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, held: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*held)
        return one.view_as(one)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


class KeptParameters:
    """Tells which unsharded parameters of a unit somebody keeps, plain tensors only."""

    def __init__(self, params: Sequence[ManagedParameter]) -> None:
        """Takes note of today's references: nothing but ``params`` may have any."""
        self.params = [p for p in params if type(p.unsharded) is nn.Parameter]
        self._tensors: list[nn.Parameter] = []
        self._retired: list[nn.Parameter] = []
        if _hooks is None or _hooks(False) is not None:
            self.params = []  # they would be called with memory that is not there
        for param in self.params:
            assert param.unsharded is not None
            self._tensors.append(param.unsharded)
        with torch.inference_mode(False), torch.enable_grad():
            one = torch.zeros((), requires_grad=True)
            self._holder: Any = _Hold.apply(one, self._tensors).grad_fn  # type: ignore[no-untyped-call]
        self._own = list(map(_references, self._tensors))
        self._total = sum(self._own)

    def looks_after(self, params: Sequence[ManagedParameter]) -> bool:
        """Whether these are its parameters, with the same unsharded forms."""
        plain = [p.unsharded for p in params if type(p.unsharded) is nn.Parameter]
        return len(plain) == len(self._tensors) and all(map(operator.is_, plain, self._tensors))

    def retire(self, num_switched: int) -> None:
        """After a reshard: turn those that somebody keeps into `ReshardedParameter`.

        num_switched: how many references a `Switch` has, one for each place.
        """
        if sum(map(_references, self._tensors)) != self._total + num_switched:
            self._retire(is_switched=num_switched > 0)

    def _retire(self, *, is_switched: bool) -> None:
        counts = list(map(_references, self._tensors))
        for param, count, own in zip(self.params, counts, self._own, strict=True):
            tensor = param.unsharded
            assert tensor is not None
            if count > own + is_switched * len(param.slots):
                tensor.__class__ = ReshardedParameter
                self._retired.append(tensor)

    def restore(self) -> None:
        """Before parameters are unsharded: let all be used again."""
        if self._retired:
            for tensor in self._retired:
                tensor.__class__ = nn.Parameter
            self._retired.clear()
