"""A warning for optimizers that need whole parameters, and get a rank's part as if it were whole.

DTensors (`fully_shard`) know that they are parts, and their norms and products are of the whole. The wrapper's
parameters are plain tensors, as PyTorch's are, so an optimizer cannot tell.
"""

import math
import warnings
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.params.flat import FlatParameter
from fullshard.engine.params.managed import manager_of

# By class name, from whichever library, with the reason.
NOT_ELEMENTWISE = {
    "Adafactor": "scales by norms over rows, columns and whole parameters",
    "LAMB": "scales by norms of whole parameters",
    "LARS": "scales by norms of whole parameters",
    "LBFGS": "takes dot products over all parameters",
    "Muon": "orthogonalises whole matrices",
    "SparseAdam": "reads sparse gradients, which sharded parameters never have",
}

_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def why_not_elementwise(kind: type) -> str | None:
    """Say what a class of optimizers computes of other elements than the one it updates; None if not known."""
    names = (each.__name__ for each in kind.__mro__)
    return next((NOT_ELEMENTWISE[name] for name in names if name in NOT_ELEMENTWISE), None)


def check_elementwise(optimizer: Optimizer, _: Any, __: Any) -> None:
    """Warn, before an optimizer's first step, if it needs whole parameters and has parts as plain tensors."""
    if optimizer in _seen:
        return
    _seen.add(optimizer)
    if (why := why_not_elementwise(type(optimizer))) is None:
        return
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    name = next((name for p in parameters if (name := _name_of_part(p))), None)
    if name is not None:
        warnings.warn(
            f"{type(optimizer).__name__} {why}, and {name} is this rank's part alone, as a plain tensor: its updates are "
            "wrong, and depend on the number of ranks. Use fully_shard, whose DTensors give norms and products of whole "
            "parameters, or an elementwise optimizer, such as AdamW.",
            stacklevel=2,
        )


def _name_of_part(parameter: torch.Tensor) -> str | None:
    """Return the name of a parameter of which this is a plain part; None for any other."""
    if isinstance(parameter, FlatParameter):
        return "a flat parameter" if parameter.is_part else None
    if isinstance(parameter, DTensor) or not isinstance(parameter, torch.nn.Parameter):
        return None
    owner = manager_of(parameter)
    is_part = owner is not None and owner.local.numel() < math.prod(owner.shape)
    return owner.name if owner is not None and is_part else None
