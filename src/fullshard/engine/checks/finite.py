"""The hunt for the first value that is not finite: `fullshard.debug(nan=True)`.

Hooks of the whole process look at what modules return, innermost first, and at the gradients that reach
their outputs and inputs. The first NaN or infinity in the order of execution is an error that says where it
was made: from finite inputs in a module's forward, in its backward, by a parameter or buffer, or by what lies
between modules. Gradients of parameters are looked at before they are reduced.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.engine.observer import PassWatcher, watchers
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.peers.groups import place_in_job
from fullshard.plan.units import clean_name
from fullshard.process_hooks import AFTER_FORWARD, BEFORE_FORWARD
from fullshard.torch_private import local_part

# Paths of modules, below the outermost module that ran.
_paths: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()


class _Role(NamedTuple):
    """What a tensor is to a module: its output, or its input."""

    module: str
    is_input: bool


class FiniteHunt(PassWatcher):
    """Hooks that look for values which are not finite, from `begin` to `end`."""

    reads_values = "fullshard.debug(nan=True)"

    def __init__(self) -> None:
        self.is_on = False

    def begin(self) -> None:
        if not self.is_on:
            self.is_on = True
            why = "fullshard.debug(nan=True) looks for values that are not finite"
            BEFORE_FORWARD.add(_name, why)
            AFTER_FORWARD.add(_look, why)
            watchers.append(self)

    def end(self) -> None:
        if self.is_on:
            self.is_on = False
            BEFORE_FORWARD.remove(_name)
            AFTER_FORWARD.remove(_look)
            watchers.remove(self)

    def gradients_complete(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        """Raise StateError for a full gradient that is not finite."""
        for param, grad in zip(unit.params, grads, strict=True):
            if grad is not None and (found := _unlike(grad)):
                raise StateError(
                    f"Not finite first: in backward, {_rank()}, the gradient of {param.name} has {found}, while "
                    "gradients of outputs and inputs of modules were finite. It is made in the backward of the "
                    "module that has this parameter."
                )


@eager
def _name(module: nn.Module, _: Any) -> None:
    """Name a module that runs, and all inside it: the outermost runs first."""
    if module not in _paths:
        for path, each in module.named_modules():
            _paths[each] = clean_name(path)


@eager
def _look(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    path = f"{_paths.get(module) or 'the model'} ({type(module).__name__})"
    for tensor in _tensors(output):
        if found := _unlike(tensor):
            raise StateError(
                f"Not finite first: in forward, {_rank()}, the output of {path} has {found}. "
                + _cause(module, (args, kwargs))
            )
        _watch_gradient(tensor, _Role(path, is_input=False))
    for tensor in _tensors((args, kwargs)):
        _watch_gradient(tensor, _Role(path, is_input=True))


def _cause(module: nn.Module, inputs: Any) -> str:
    """Say what was not finite before a module computed."""
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and (found := _unlike(tensor)):
            return (
                f"Its {name} has {found}: the last optimizer step, a load or its initialisation has left "
                "that there."
            )
    sizes = []
    for number, tensor in enumerate(_tensors(inputs)):
        if found := _unlike(tensor):
            return (
                f"Its input {number} has {found}, which no module has returned: look at the data, and at "
                "what forward hooks and code between modules compute."
            )
        sizes.append(f"{tensor.detach().abs().max().item():.3g}" if tensor.numel() else "empty")
    return (
        f"Its inputs (largest values {', '.join(sizes) or 'none'}), parameters and buffers are finite, so it is "
        "computed there."
    )


def _watch_gradient(tensor: torch.Tensor, role: _Role) -> None:
    """Look at a tensor's gradient, once however many modules it passes."""
    if not tensor.requires_grad or not torch.is_grad_enabled():
        return
    roles: list[_Role] | None = getattr(tensor, "_fullshard_roles", None)
    if roles is not None:
        roles.append(role)
        return
    roles = tensor._fullshard_roles = [role]  # type: ignore[attr-defined]

    def look(grad: torch.Tensor) -> None:
        if found := _unlike(grad):
            raise StateError(
                f"Not finite first: in backward, {_rank()}, {_made(roles)} has {found}."
            )

    tensor.register_hook(look)


def _made(roles: Sequence[_Role]) -> str:
    """Say which gradient it is, by the innermost module that made it. roles: innermost first."""
    for role in roles:
        if role.is_input:
            return (
                f"the gradient of an input of {role.module}, made in that module's backward from finite gradients "
                "of its outputs: it"
            )
    return (
        f"the gradient of the output of {roles[0].module}, made by what uses it outside of modules, such as the "
        "loss: it"
    )


def _unlike(tensor: torch.Tensor) -> str:
    """Say what of a tensor is not finite; "" if all is."""
    local = local_part(tensor).detach()
    if local.is_meta or not (local.is_floating_point() or local.is_complex()):
        return ""
    if bool(local.isfinite().all()):
        return ""
    num_nan = int(local.isnan().sum())
    num_infinite = math.prod(local.shape) - int(local.isfinite().sum()) - num_nan
    return f"{num_nan} NaN and {num_infinite} infinite of {local.numel()} elements"


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in tuples, lists and dicts."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (dict, tuple, list)):
        for each in values.values() if isinstance(values, dict) else values:
            yield from _tensors(each)


def _rank() -> str:
    return f"rank {place_in_job().rank}"
