"""Autograd nodes that stand for moments in the backward of a sharded module.

Every level of a transform (``torch.func``, forward mode) sees them, where a tensor hook would be of
one level alone.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class State(Protocol):
    """Whose moments these are."""

    def before_backward(self, grad: torch.Tensor) -> torch.Tensor: ...

    def after_backward(self) -> None: ...


class AfterBackward(torch.autograd.Function):
    """On inputs: its backward runs once the gradients of all of them are complete."""

    @staticmethod
    def forward(ctx: Any, state: State, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.state = state
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.state.after_backward()
        if torch.is_grad_enabled():  # create_graph=True: this backward has a backward of its own
            grads = tuple(g if g is None else mark_before_backward(ctx.state, g) for g in grads)
        return (None, *grads)

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tangent.view_as(tangent) for tangent in tangents)


class AfterBackwardInTransforms(AfterBackward):
    """The same in the form that transforms ask for. Outside of them it costs 25 us more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(state: State, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, ctx.state.before_backward(grad)

    @staticmethod
    def jvp(ctx: Any, _: None, tangent: torch.Tensor | None) -> torch.Tensor | None:
        return None if tangent is None else mark_before_backward(ctx.state, tangent)


def mark_after_backward(state: State, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the tensors with one `AfterBackward` on all of them."""
    inside = torch._C._are_functorch_transforms_active()
    node = AfterBackwardInTransforms if inside else AfterBackward
    marked: tuple[torch.Tensor, ...] = node.apply(state, *tensors)  # type: ignore[no-untyped-call]
    return marked


def mark_before_backward(state: State, tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with a `BeforeBackward` on it, if it can have a gradient."""
    if not tensor.dtype.is_floating_point:
        return tensor
    marked: torch.Tensor = BeforeBackward.apply(state, tensor)  # type: ignore[no-untyped-call]
    return marked
