"""Checks of optimizers, and how often each has stepped since a module was first sharded."""

import math
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.checks.model import tie_outside
from fullshard.engine.params.flat import FlatParameter
from fullshard.engine.params.managed import (
    Count,
    ManagedParameter,
    ShardHolder,
    manager_of,
    owner_of,
)
from fullshard.plan.units import first_names
from fullshard.torch_private import local_part


class Known:
    """An optimizer. steps: the same on ranks at one place of a program. seen: `marks` and its groups, when looked through."""

    def __init__(self) -> None:
        self.steps = Count()
        self.seen: tuple[int, int] | None = None


_known: weakref.WeakKeyDictionary[Optimizer, Known] = weakref.WeakKeyDictionary()


def known(optimizer: Optimizer) -> Known:
    found = _known.get(optimizer)
    if found is None:
        found = _known[optimizer] = Known()
    return found


def stepped_optimizers() -> list[Optimizer]:
    """Return the optimizers that have begun a step since a module was first sharded."""
    return [optimizer for optimizer, known in _known.items() if known.seen is not None]


def num_updates(holder: ShardHolder) -> int | None:
    """Return how often optimizers have updated a parameter; None if this rank has nothing of it to update.

    Ranks that own something of it count alike, also where an optimizer was given only what has elements.
    """
    if not holder.sharded.requires_grad or holder.local.numel() == 0:
        return None
    return sum(steps.value for steps in holder.steps)


def find_former(optimizer: Optimizer) -> str | None:
    """Say which parameters modules no longer use, so that a step changes nothing. Tells the others what counts steps."""
    steps = known(optimizer).steps
    # By name. Stand-ins are unsharded parameters, freed at the next reshard.
    built_before: list[tuple[str, torch.Tensor]] = []
    stand_ins: list[tuple[str, torch.Tensor]] = []
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        manager = manager_of(parameter)
        if manager is not None and manager.replaces(parameter):
            # Original and sharded parameters have an owner; unsharded ones only a manager.
            is_former = owner_of(parameter) is not None
            (built_before if is_former else stand_ins).append((manager.name, parameter))
        elif manager is not None and not any(each is steps for each in manager.holder.steps):
            manager.holder.steps.append(steps)
    if not (built_before or stand_ins):
        return None  # also in a process that has no group any more
    name = f"{type(optimizer).__name__} (rank {dist.get_rank()})"
    names = first_names([name for name, _ in built_before or stand_ins])
    if built_before:
        return tie_outside(built_before) or (
            f"{name} has {names} as before sharding, or "
            "before a load replaced them: a step would change nothing that the model uses. Build "
            "the optimizer from model.parameters() after sharding and loading."
        )
    return (
        f"{name} has {names} as they are while unsharded, "
        "so its step would not reach the shards. It was built after a forward that keeps them "
        "unsharded, or after unshard(). Build it before, or call model.reshard() first."
    )


# Optimizers that need whole parameters, by class name, from whichever library, with the reason.
NOT_ELEMENTWISE = {
    "Adafactor": "scales by norms over rows, columns and whole parameters",
    "LAMB": "scales by norms of whole parameters",
    "LARS": "scales by norms of whole parameters",
    "LBFGS": "takes dot products over all parameters",
    "Muon": "orthogonalises whole matrices",
    "SparseAdam": "reads sparse gradients, which sharded parameters never have",
}


def why_not_elementwise(kind: type) -> str | None:
    """Say what a class of optimizers computes of other elements than the one it updates; None if not known."""
    names = (each.__name__ for each in kind.__mro__)
    return next((NOT_ELEMENTWISE[name] for name in names if name in NOT_ELEMENTWISE), None)


def find_plain_parts(optimizer: Optimizer) -> str | None:
    """Say that an optimizer needs whole parameters, and has parts as plain tensors.

    DTensors (`fully_shard`) know that they are parts, and their norms and products are of the whole. The
    wrapper's parameters are plain tensors, as PyTorch's are, so an optimizer cannot tell.
    """
    if (why := why_not_elementwise(type(optimizer))) is None:
        return None
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    name = next((name for p in parameters if (name := _name_of_part(p))), None)
    if name is None:
        return None
    return (
        f"{type(optimizer).__name__} {why}, and {name} is this rank's part alone, as a plain tensor: its updates are "
        "wrong, and depend on the number of ranks. Use fully_shard, whose DTensors give norms and products of whole "
        "parameters, or an elementwise optimizer, such as AdamW."
    )


def _name_of_part(parameter: torch.Tensor) -> str | None:
    """Return the name of a parameter of which this is a plain part; None for any other."""
    if isinstance(parameter, FlatParameter):
        return "a flat parameter" if parameter.is_part else None
    if isinstance(parameter, DTensor) or not isinstance(parameter, nn.Parameter):
        return None
    owner = manager_of(parameter)
    is_part = owner is not None and owner.local.numel() < math.prod(owner.shape)
    return owner.name if owner is not None and is_part else None


_FEWEST = 4096  # elements, below which torchao keeps state as it is


def find_wide_state(optimizer: Optimizer) -> str | None:
    """Say that state is wide here which would be low-bit if the parameter were whole.

    Optimizers such as torchao's AdamW8bit keep state in few bits where a tensor has enough elements, in whole
    blocks, and in float32 elsewhere. They ask that of a rank's part: the same parameter has other state on
    another number of ranks, and other updates.
    """
    block = getattr(optimizer, "block_size", None)
    if not isinstance(block, int) or block < 1:
        return None
    for parameter, state in optimizer.state.items():
        owner = owner_of(parameter)  # type: ignore[arg-type]
        if owner is None or not _is_low_bit_when_whole(owner, block):
            continue
        moments = [
            value
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim > 0
        ]
        if moments and not any(map(_is_low_bit, moments)):
            return (
                f"{type(optimizer).__name__} keeps the state of {owner.name} in {moments[0].dtype}, as this "
                f"rank's part has {owner.local.numel()} of {math.prod(owner.shape)} elements; of the whole parameter it would "
                "be low-bit. So the state's precision, and the training, depend on the number of ranks. Choose a "
                "mesh that leaves parts of the optimizer's block size, or exclude such parameters on any mesh."
            )
    return None


def find_left_state(optimizer: Optimizer) -> str | None:
    """Say that state stays beside its parameters, although a policy asks for another place.

    State that is streamed is not looked at: that would bring all of it back.
    """
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        owner = owner_of(parameter)
        unit: Any = None if owner is None else owner.unit()
        if unit is None or unit.state_place is not None or not (asked := unit.config.state_asked):
            continue
        state = optimizer.state.get(parameter, {}).values()
        moments = [each for each in state if isinstance(each, torch.Tensor) and each.ndim]
        if owner is not None and moments and asked != _place_of(moments[0]):
            return (
                f'PlacementPolicy(optimizer="{asked}"): {type(optimizer).__name__} keeps the state of {owner.name} on '
                f"{moments[0].device} all the same. Call fullshard.stream_state(optimizer) once it is built."
            )
    return None


def _place_of(tensor: torch.Tensor) -> str:
    return "host" if tensor.device.type == "cpu" else "device"


def _is_low_bit_when_whole(owner: ManagedParameter, block: int) -> bool:
    numel = math.prod(owner.shape)
    return numel >= _FEWEST and numel % block == 0 and owner.local.numel() < numel


def _is_low_bit(value: torch.Tensor) -> bool:
    local = local_part(value)
    return type(local) not in (torch.Tensor, nn.Parameter) or local.dtype.itemsize == 1
