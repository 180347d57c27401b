"""Unsharded parameters that somebody keeps after their reshard.

Their memory is freed, or holds values of before the next optimizer step, or is the shards' own:
using them crashed, or gave other results from path to path. So such a parameter is told by its
Python references, and may not be used until the unit is unsharded again (see `resharded`). For views
of parameters see `kept_views`.

[Note: Counting references] A check has to cost less than a microsecond, so it compares one sum of
reference counts with what it is when nobody else refers to the parameters. Autograd's saved tensors
must not count: one C++ reference or more keeps one Python reference. A node that never runs holds
one of each parameter for good, so that there is always exactly that one.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.params.resharded import allow_use, forbid_use
from fullshard.engine.references import python_uses

_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_LOOKED_AFTER = (nn.Parameter, DTensor)


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
    """Tells which unsharded parameters of a unit somebody keeps: plain tensors and DTensors."""

    def __init__(self, params: Sequence[ManagedParameter]) -> None:
        """Takes note of today's references: nothing but ``params`` may have any."""
        self.params = [p for p in params if type(p.unsharded) in _LOOKED_AFTER]
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
        self._own = list(map(python_uses, self._tensors))
        self._total = sum(self._own)

    def looks_after(self, params: Sequence[ManagedParameter]) -> bool:
        """Whether these are its parameters, with the same unsharded forms."""
        plain = [p.unsharded for p in params if type(p.unsharded) in _LOOKED_AFTER]
        return len(plain) == len(self._tensors) and all(map(operator.is_, plain, self._tensors))

    def retire(self, num_switched: int) -> None:
        """After a reshard: forbid the use of those that somebody keeps.

        num_switched: how many references a `Switch` has, one for each place.
        """
        if sum(map(python_uses, self._tensors)) != self._total + num_switched:
            self._retire(is_switched=num_switched > 0)

    def _retire(self, *, is_switched: bool) -> None:
        counts = list(map(python_uses, self._tensors))
        for param, count, own in zip(self.params, counts, self._own, strict=True):
            tensor = param.unsharded
            assert tensor is not None
            if count > own + is_switched * len(param.slots):
                forbid_use(tensor, param.name)
                self._retired.append(tensor)

    def restore(self) -> None:
        """Before parameters are unsharded: let all be used again."""
        if self._retired:
            for tensor in self._retired:
                allow_use(tensor)
            self._retired.clear()
