"""Translate an optimizer's parameters, gradients and state between DTensors and their local tensors.

                shown (to users)                       local (in a step)
    parameter   DTensor                                its local tensor, the shard
    gradient    DTensor, the parameter's ``grad``      its local tensor, the shard's ``grad``
    state       DTensors, by parameter                 their local tensors, by shard

Both forms of a tensor share memory, so switching forms exchanges references and copies nothing.
Parameters that are no DTensors, and their state, are the same in both forms.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.params.form import redistributed, with_dtype
from fullshard.engine.params.managed import owner_of
from fullshard.errors import StateError
from fullshard.torch_private import pytree

State = dict[Any, Any]

# State of these names stays a plain 0-dim tensor, even if the parameter is a 0-dim DTensor: so do
# PyTorch's optimizers keep it.
_SCALARS = {"step", "mu", "mu_product", "eta"}


def local_gradient(grad: torch.Tensor, parameter: DTensor) -> torch.Tensor:
    """Return this rank's part of a gradient, divided over ranks as the parameter is.

    Tensor parallel may leave partial sums; they are completed here, as DTensor arithmetic would, by
    a collective. Raises StateError for a gradient that is no DTensor.
    """
    if not isinstance(grad, DTensor):
        raise StateError(
            f"{_label(parameter)} is a DTensor, but its gradient is a {type(grad).__name__}. "
            "Assign a DTensor of the same mesh and placements."
        )
    return redistributed(grad, parameter.placements)


def localize(shown: Mapping[Any, Any], parameters: Sequence[DTensor]) -> State:
    """Return the local form of an optimizer's state, by local tensor instead of parameter.

    Raises StateError for state that is not divided as its parameter is.
    """
    shard_of = {parameter: parameter._local_tensor for parameter in parameters}
    state: State = defaultdict(dict)
    for key, own in shown.items():
        if key in shard_of and isinstance(own, dict):
            local = {name: _local_value(value, key, name) for name, value in own.items()}
            state[shard_of[key]] = local
        else:
            state[key] = own
    return state


def show(
    state: Mapping[Any, Any],
    parameters: Sequence[DTensor],
    shards: Sequence[torch.Tensor],
    shown: State | None = None,
) -> State:
    """Return the shown form of an optimizer's state, by parameter.

    shown: an earlier shown form, which users may hold. It is updated in place and returned, and
        DTensors in it that still have the right local tensor stay the same objects.
    """
    shown = defaultdict(dict) if shown is None else shown
    parameter_of = dict(zip(shards, parameters, strict=True))
    now: State = {}
    for key, own in state.items():
        parameter = parameter_of.get(key)
        if parameter is None or not isinstance(own, dict):
            now[key] = own
            continue
        before = shown.get(parameter, {})
        values = {
            name: _shown_value(value, parameter, name, before.get(name))
            for name, value in own.items()
        }
        before.clear()
        before.update(values)
        now[parameter] = before
    shown.clear()
    shown.update(now)
    return shown


def _local_value(value: Any, parameter: DTensor, name: str) -> Any:
    if isinstance(value, DTensor):
        if (
            value.device_mesh != parameter.device_mesh
            or value.placements != parameter.placements
            or value.shape != parameter.shape
        ):
            raise StateError(
                f"{_label(parameter)}: the optimizer's state {name!r} is {_division(value)}, but "
                f"the parameter is {_division(parameter)}. Load a state dict made for this sharding."
            )
        return value._local_tensor
    _refuse_parts(value, parameter, name)
    return value


def _shown_value(value: Any, parameter: DTensor, name: str, before: Any) -> Any:
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        if isinstance(before, DTensor) and before._local_tensor is value:
            return before
        like = parameter._local_tensor
        if value.shape == like.shape and (value.dim() > 0 or name not in _SCALARS):
            spec = with_dtype(parameter._spec, value.dtype)
            return DTensor(value, spec, requires_grad=False)
    _refuse_parts(value, parameter, name)
    return value


def _refuse_parts(value: Any, parameter: DTensor, name: str) -> None:
    """Raise StateError for state that is neither a scalar nor divided as the parameter.

    It would differ between ranks, and no state dict could describe it.
    """
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, DTensor) or (isinstance(tensor, torch.Tensor) and tensor.numel() > 1):
            raise StateError(
                f"{_label(parameter)}: the optimizer's state {name!r} holds a "
                f"{type(tensor).__name__} of shape {tuple(tensor.shape)}, which is not divided over "
                f"ranks as the parameter, {_division(parameter)}. Use the optimizer without "
                "step_on_shards, or load a state dict made for this sharding."
            )


def _division(tensor: DTensor) -> str:
    return f"of shape {tuple(tensor.shape)}, {tensor.placements} over {tensor.device_mesh}"


def _label(parameter: DTensor) -> str:
    owner = owner_of(parameter)  # type: ignore[arg-type]
    return f"A parameter of shape {tuple(parameter.shape)}" if owner is None else owner.name
