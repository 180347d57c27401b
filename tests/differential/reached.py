"""See that gradients arrive: what autograd has reached in a backward is what has a new gradient.

A hook of its own on every unsharded parameter notes what autograd accumulates, whatever the engine
makes of it. After a backward, each of those has another ``.grad`` than before, or the program has said
that its sums wait.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fullshard.engine.params.managed import ManagedParameter


class LostGradientError(AssertionError):
    """Autograd has computed a gradient of which the sharded parameter shows nothing."""


@contextlib.contextmanager
def gradients_arrive() -> Iterator[None]:
    """Check every backward meanwhile. Raises LostGradientError, with the names, where one is lost."""
    made = ManagedParameter.create_unsharded
    backward = torch.autograd.backward
    known: weakref.WeakSet[ManagedParameter] = weakref.WeakSet()
    reached: set[ManagedParameter] = set()
    depth = 0

    def make(self: ManagedParameter, tensor: Tensor) -> None:
        before = self.unsharded
        made(self, tensor)
        form = self.unsharded
        if (
            form is not before
            and form is not None
            and (form.is_floating_point() or form.is_complex())
        ):
            known.add(self)
            me = weakref.ref(self)
            required_grad = form.requires_grad
            form.requires_grad_()  # torch puts hooks on nothing else
            form.register_post_accumulate_grad_hook(lambda _: note(me()))
            form.requires_grad_(required_grad)

    def note(manager: ManagedParameter | None) -> None:
        if manager is not None and depth:
            reached.add(manager)

    def run(*args: Any, **kwargs: Any) -> None:
        nonlocal depth
        if not depth:
            reached.clear()
            before = {id(manager): _Gradient(manager) for manager in known}
        depth += 1
        try:
            backward(*args, **kwargs)
        finally:
            depth -= 1
        if not depth:
            lost = [m.name for m in reached if _may_not_wait(m) and before[id(m)].is_unchanged(m)]
            if lost:
                raise LostGradientError(
                    f"autograd reached {sorted(lost)}, whose .grad is as before"
                )

    ManagedParameter.create_unsharded = make
    torch.autograd.backward = run
    try:
        yield
    finally:
        ManagedParameter.create_unsharded = made
        torch.autograd.backward = backward


class _Gradient:
    """What a sharded parameter's ``.grad`` was before a backward."""

    def __init__(self, manager: ManagedParameter) -> None:
        grad = manager.holder.sharded.grad
        # Without a reference to it, since the engine asks who else has one.
        self._is = None if grad is None else weakref.ref(grad)
        self._values = None if grad is None else _local(grad).clone()
        self._version = None if grad is None else _local(grad)._version

    def is_unchanged(self, manager: ManagedParameter) -> bool:
        """Whether nothing was put there, or added to it, since."""
        grad = manager.holder.sharded.grad
        if grad is None or self._is is None:
            return grad is None and self._is is None
        return (
            self._is() is grad
            and self._version == _local(grad)._version
            and torch.equal(_local(grad), self._values)
        )


def _may_not_wait(manager: ManagedParameter) -> bool:
    """Whether this rank has a part of the parameter, and backward has to reduce its gradient."""
    unit = manager.unit()
    if unit is None or not manager.holder.local.numel():
        return False
    steps_in_backward = bool(manager.holder.post_accumulate_hooks)
    waits = not unit.config.reduce_grads or unit.gradients.has_partial
    is_frozen = not manager.holder.sharded.requires_grad  # by now: a leaf would have got none
    return not (steps_in_backward or waits or is_frozen)


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad
