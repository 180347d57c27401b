"""Whole parameters that stay registered after a backward, and their gradients.

Units that stay unsharded have whole parameters registered, as in PyTorch, while gradients are on the
sharded ones. Code that goes through ``model.parameters()`` there would find no gradient: clipping
would clip nothing. So outside of forward and backward such a parameter gets another class, whose
``grad`` is that of the sharded parameter: it can be read, scaled in place and set to None. Autograd,
in C++, does not look at the class and goes on to accumulate into the parameter's own gradient.

Why whole parameters stay registered at all: see docs/design.md, "Flat units".
"""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.params.managed import ManagedParameter, manager_of
from fullshard.errors import StateError

_own: Any = torch.Tensor.grad  # the property of every tensor

# Return what autograd has accumulated into a parameter, also while its class shows another gradient.
own_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _own.__get__


class StandIns:
    """The unsharded parameters of one unit whose class shows the sharded ones' gradients."""

    def __init__(self) -> None:
        self._tensors: list[nn.Parameter] = []

    def show(self, params: Iterable[ManagedParameter]) -> None:
        """Let the unsharded parameters show the gradients of the sharded ones."""
        for param in params:
            tensor = param.unsharded
            # By exact type: users' subclasses have no stand-in.
            if tensor is not None and (other := _KINDS.get(type(tensor))) is not None:
                tensor.__class__ = other
                self._tensors.append(tensor)

    def hide(self) -> None:
        """Let the parameters have gradients of their own again, before a forward or a backward."""
        for tensor in self._tensors:
            tensor.__class__ = type(tensor)._kind  # type: ignore[attr-defined]
        self._tensors.clear()


def _get(self: Any) -> Any:
    """Return the parameter's own gradient if there is one, else that of the sharded parameter."""
    # Autograd may have left one meanwhile. Nothing has reduced it yet, and it must not be hidden.
    own, trained = _own.__get__(self), _trained(self)
    return own if own is not None or trained is None else trained.grad


def _set(self: Any, value: torch.Tensor | None) -> None:
    """Set the gradient of the sharded parameter; None clears both.

    Raises StateError for a value that is not sharded as the parameter is.
    """
    trained = _trained(self)
    if trained is None:
        _own.__set__(self, value)
    elif value is None:
        _own.__set__(self, None)
        trained.grad = None
    elif isinstance(value, DTensor) and value._spec.placements == trained._spec.placements:  # type: ignore[attr-defined]
        trained.grad = value
    else:
        manager = manager_of(self)
        raise StateError(
            f"{'A parameter' if manager is None else manager.name} stays unsharded, and its .grad was "
            "set to a tensor that is not sharded like the parameter that is trained: the optimizer "
            "would not see it. Call model.reshard() first, and set .grad of the sharded parameter to "
            "a DTensor."
        )


def _trained(self: Any) -> nn.Parameter | None:
    """Return the sharded parameter, or None for a copy of an unsharded one.

    A copy has the attributes of what it was copied from, so it is told by identity.
    """
    manager = manager_of(self)
    return manager.sharded if manager is not None and manager.unsharded is self else None


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Copy the parameter as what it is without the exchanged class."""
    kind = type(self)
    self.__class__ = kind._kind
    try:
        return copy.deepcopy(self, memo)
    finally:
        self.__class__ = kind


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle the parameter as what it is: the stand-in class has no name to be found by."""
    kind = type(self)
    self.__class__ = kind._kind
    try:
        return self.__reduce_ex__(protocol)
    finally:
        self.__class__ = kind


def _stand_in(kind: type) -> type:
    """Return a subclass with another ``grad``, of the same name.

    It adds no slots: see `guard.forbidden`.
    """
    namespace = {
        "__slots__": (),
        "__doc__": "A whole parameter whose gradient is that of the sharded one.",
        "__module__": __name__,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce,
        "_kind": kind,
        "grad": property(_get, _set, lambda self: _set(self, None)),
    }
    return type(kind)(kind.__name__, (kind,), namespace)


_KINDS: dict[type, Any] = {kind: _stand_in(kind) for kind in (nn.Parameter, DTensor)}
