"""What a sharded model holds, whole: its parameters, gradients, buffers, ties and units."""

import contextlib
from collections.abc import Container, Iterable, Mapping

import torch
from torch import nn

import fullshard
from fullshard import FSDPModule
from fullshard.errors import StateError
from fullshard.plan.units import clean_name, without_compile
from fullshard.tools.verify.facts import Unit


def plain_name(name: str) -> str:
    """Return a name without what wrappers and ``torch.compile`` add to it."""
    return without_compile(clean_name(name))


def whole_parameters(
    model: nn.Module, names: Container[str] | None = None
) -> dict[str, torch.Tensor]:
    """Return whole parameters by name, those of ``names`` alone; on rank 0 alone. Collective."""
    state = fullshard.iter_full_state(model, to_rank=0, offload=True)
    if names is not None:
        return {name: tensor for name, tensor in state if name in names}
    buffers = buffers_of(model)
    return {name: tensor for name, tensor in state if name not in buffers}


@torch.no_grad()
def whole_gradients(
    model: nn.Module,
    names: Container[str] | None = None,
    others: Iterable[nn.Parameter] = (),
) -> dict[str, torch.Tensor]:
    """Return whole gradients by name; on rank 0 alone. Collective.

    others: sharded parameters that an optimizer has, while the model shows their unsharded forms.

    Parameters take the values of their gradients, are gathered, and get their own back, bit by bit. So
    gradients of every API and layout are gathered in one way, which does not depend on what is verified.
    Rejected: what the optimizer's step has changed, over its learning rate: most of its digits are lost.
    """
    for module in model.modules():
        if isinstance(
            module, FSDPModule
        ):  # one of several models may wait, whole, for its backward
            module.reshard()
    parameters = list(dict.fromkeys((*model.parameters(), *others)))
    kept = [parameter.detach().clone() for parameter in parameters]
    for parameter in parameters:
        grad = parameter.grad
        if (
            grad is None or grad.shape != parameter.shape
        ):  # in `no_sync`: whole, and not reduced yet
            parameter.zero_()
        else:
            parameter.copy_(grad)
    gradients = whole_parameters(model, names)
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    return gradients


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers by name."""
    return {plain_name(name): each for name, each in model.named_buffers()}


def ties_of(tensors: Mapping[str, object]) -> tuple[tuple[str, ...], ...]:
    """Return which names share a value."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return tuple(tuple(tied) for tied in names.values() if len(tied) > 1)


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    """Return the units of a model; none if nothing is sharded."""
    with contextlib.suppress(StateError):
        return tuple(
            Unit(u.name, (*u.direct, *u.packed, *u.flat, *u.extended), u.divide_factor)
            for u in fullshard.describe(model).units
        )
    return ()
