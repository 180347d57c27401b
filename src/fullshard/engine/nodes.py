"""Autograd nodes that stand for moments in the backward of a sharded module.

A node on a module's inputs marks the end of its backward. Every level of a transform
(``torch.func``, forward mode) sees it, where a tensor hook would be of one level alone.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch.autograd.function import _SingleLevelFunction

from fullshard.engine.runtime import passing_through


class State(Protocol):
    """Whose moments these are."""

    def before_backward(self, grad: torch.Tensor) -> torch.Tensor: ...

    def after_backward(self) -> None: ...


class AfterBackward(_SingleLevelFunction):
    """On inputs: its backward runs once the gradients of all of them are complete."""

    @staticmethod
    def forward(ctx: Any, state: State, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        return tensors

    @staticmethod
    @passing_through
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return (None, *_end(ctx.state, grads, ()))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)


class AfterBackwardInTransforms(torch.autograd.Function):
    """The same in the form that transforms ask for. Outside of them it costs 25 us more."""

    generate_vmap_rule = True
    backward = AfterBackward.backward
    jvp = AfterBackward.jvp

    @staticmethod
    def forward(state: State, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensors

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.state = inputs[0]


class BeforeBackward(torch.autograd.Function):
    """On outputs inside transforms, where a tensor hook would serve the innermost one alone."""

    generate_vmap_rule = True

    @staticmethod
    def forward(state: State, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.state = inputs[0]

    @staticmethod
    @passing_through
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.state.before_backward(grad)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else mark_before_backward(ctx.state, tangent)


def mark_after_backward(state: State, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors with one node on all of them, whose backward is `State.after_backward`."""
    marked: tuple[torch.Tensor, ...]
    if torch._C._are_functorch_transforms_active():
        marked = AfterBackwardInTransforms.apply(state, *tensors)  # type: ignore[no-untyped-call]
        return marked
    # For one tensor the same at half of the cost. If the module changes its input in place, autograd
    # replaces this node, and the unit is reduced at the end of backward; `AfterBackward` would make
    # that an error. It would also turn a gradient that is missing into zeros.
    if len(tensors) == 1 and type(tensors[0]) is torch.Tensor:
        view = tensors[0].view_as(tensors[0])
        if view.grad_fn is not None:  # not so for what was made in inference mode
            view.grad_fn.register_hook(functools.partial(_end, state))
            return (view,)
    marked = AfterBackward.apply(state, *tensors)  # type: ignore[attr-defined]
    return marked


@passing_through
def _end(
    state: State, grads: tuple[torch.Tensor | None, ...], _: tuple[torch.Tensor | None, ...]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a module's inputs once its backward is over."""
    state.after_backward()
    if not torch.is_grad_enabled():
        return grads
    # create_graph=True: this backward has a backward of its own.
    return tuple(g if g is None else mark_before_backward(state, g) for g in grads)


def mark_before_backward(state: State, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a `BeforeBackward` on it, if it can have a gradient."""
    if not tensor.dtype.is_floating_point:
        return tensor
    marked: torch.Tensor = BeforeBackward.apply(state, tensor)  # type: ignore[no-untyped-call]
    return marked


class _View:
    """An output that is a view: when its gradient is ready, whatever was done to it since.

    A view that is changed in place gets another node, which knows nothing of its hooks. What it is
    a view of keeps its own node behind that of the change, so there is a hook on both. The first
    one to fire in a backward pass counts: the second comes late if nothing was changed and the
    module returned a view of its input.
    """

    __slots__ = ("_seen", "_state")

    def __init__(self, state: State) -> None:
        self._state = state
        self._seen = -1  # in this backward pass

    @passing_through
    def of_view(self, grad: torch.Tensor) -> torch.Tensor:
        self._seen = torch._C._current_graph_task_id()
        return self._state.before_backward(grad)

    @passing_through
    def of_base(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        task = torch._C._current_graph_task_id()
        grad = next((grad for grad in grads if grad is not None), None)
        if grad is not None and task != self._seen:
            self._seen = task
            self._state.before_backward(grad)


def watch_view(state: State, tensor: torch.Tensor) -> None:
    """Call `State.before_backward` when the gradient of a view is ready, or of what it became."""
    view = _View(state)
    tensor.register_hook(view.of_view)
    # Autograd itself refuses a change in place where the base has no node, and where one function
    # made several views.
    node = tensor._base.grad_fn if tensor._base is not None else None
    if node is not None:
        node.register_prehook(view.of_base)


def is_captured(leaf: torch.Tensor) -> bool:
    """Whether this is the backward of `torch.autograd.grad`, for this leaf among others."""
    if torch._C._current_graph_task_id() == -1:
        return False  # a schedule that calls for reduction itself
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        torch._C._will_engine_execute_node(node)
    except RuntimeError:  # which is how it says so
        return True
    return False
