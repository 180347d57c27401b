"""Unsharded parameters that somebody keeps after their reshard (``self.w = layer.weight``).

Their memory is freed, or has the values of before the next optimizer step, or is the shards' own:
using them would crash, or give results that depend on how ranks communicate. So each reshard counts
the Python references to the unsharded parameters. One that has more than expected may not be used
until the unit is unsharded again (see `resharded`). For views of parameters see `kept_views`.

[Note: Counting references] The check runs at every reshard and has to cost less than a microsecond.
So it compares the sum of all reference counts with a baseline, taken when nobody but the unit had
the parameters, and looks at single ones only if the sum differs. Tensors that autograd saves must
not count. torch keeps one Python reference to a tensor's object while C++ refers to the tensor, be
it once or often, so a graph would raise the count by one. An autograd node that never runs
(`_Hold`) therefore saves every parameter for good: this one reference is always there, in the
baseline as well as later.
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
from fullshard.engine.runtime import out_of_context

# The exact types of unsharded forms: a plain parameter, a parameter that is a DTensor.
_LOOKED_AFTER = (nn.Parameter, DTensor)


class _Hold(torch.autograd.Function):
    """A node that saves tensors and never runs. See [Note: Counting references]."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, held: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*held)
        return one.view_as(one)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


def _hold(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the output of a node that saves tensors: they are saved as long as it lives.

    Not the node itself: before torch 2.13 it drops what it saved as soon as its output is gone.

    Call it out of context: a user's hooks on saved tensors (`save_on_cpu`) would read their memory,
    which may be freed, and count them.
    """
    one = torch.zeros((), requires_grad=True, device="cpu")
    output: torch.Tensor = _Hold.apply(one, tensors)  # type: ignore[no-untyped-call]
    return output


class KeptParameters:
    """Finds the unsharded parameters of one unit that somebody keeps: plain tensors and DTensors.

    params: the parameters that it looks after.
    """

    def __init__(self, params: Sequence[ManagedParameter]) -> None:
        """Take today's references for the baseline: nobody but the unit may have any."""
        self.params = [p for p in params if type(p.unsharded) in _LOOKED_AFTER]
        self._tensors = [p.unsharded for p in self.params if p.unsharded is not None]
        self._retired: list[nn.Parameter] = []
        # The baseline comes after the node, and after `_tensors`, which has a reference to each too.
        self._holder = out_of_context(lambda: _hold(self._tensors))
        self._own = list(map(python_uses, self._tensors))
        self._total = sum(self._own)

    def looks_after(self, params: Sequence[ManagedParameter]) -> bool:
        """Whether these parameters have the unsharded forms whose references were counted."""
        plain = [p.unsharded for p in params if type(p.unsharded) in _LOOKED_AFTER]
        return len(plain) == len(self._tensors) and all(map(operator.is_, plain, self._tensors))

    def retire(self, num_switched: int) -> None:
        """Forbid the use of parameters that somebody keeps. Called after each reshard.

        num_switched: how many references the unit's `Switch` has to them: one per slot, or 0. It is
            made after the baseline was taken.
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
        """Allow the use of all parameters. Called before they are shown unsharded."""
        if self._retired:
            for tensor in self._retired:
                allow_use(tensor)
            self._retired.clear()
