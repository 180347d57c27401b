"""Giving every rank an optimizer state dict that the first rank alone has."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.outside_steps import broadcast_object, run_collective
from fullshard.peers.groups import any_device
from fullshard.state.optim_keys import StateDict


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """A place for a tensor that is broadcast after the description of the dict."""

    shape: torch.Size
    dtype: torch.dtype


def spread(state_dict: StateDict, group: dist.ProcessGroup | None) -> StateDict:
    """Return the first rank's state dict on every rank, with tensors on the CPU. Collective.

    An empty dict if it has no "state", so that all ranks can refuse it alike. Tensors travel one at
    a time, which keeps the device's memory small.
    """
    source = 0 if group is None else dist.get_global_rank(group, 0)
    is_source = dist.get_rank() == source
    tensors: list[torch.Tensor] = []

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            tensors.append(value)
            return _Described(value.shape, value.dtype)
        return value

    label = "spreading an optimizer's state"
    number = dist.get_group_rank(group, source) if group is not None else source
    own: Any = None
    if is_source:
        own = _map_state(state_dict, describe) if "state" in state_dict else {}
    described = broadcast_object(own, number, group, label)
    if "state" not in described:
        return {}
    remaining = iter(tensors)
    device = any_device(group)

    def receive(value: Any) -> Any:
        if not isinstance(value, _Described):
            return value
        tensor = (
            next(remaining).to(device).contiguous()
            if is_source
            else torch.empty(value.shape, dtype=value.dtype, device=device)
        )
        run_collective(dist.broadcast, tensor, group=group, group_src=number, label=label)
        return tensor.cpu()

    result: StateDict = _map_state(described, receive)
    return result


def _map_state(state_dict: Any, function: Callable[[Any], Any]) -> Any:
    """Return a state dict with a function applied to every value of its state."""
    state = {
        name: {key: function(value) for key, value in own.items()}
        if isinstance(own, dict)
        else function(own)
        for name, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
