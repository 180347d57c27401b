"""Parameters that no unit manages, and optimizers of parameters that no module uses any more.

Two kinds of hooks of the whole process, installed when a model is first sharded:

    registration    of a parameter or a module anywhere counts up, so that the next forward of a
                    root looks through its modules for parameters added after sharding
    optimizer step  looks through an optimizer's parameters for those that sharding has replaced

Both look again only when something has changed, so a step pays for two comparisons.
"""

import warnings
import weakref
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fullshard.engine.checks.elementwise import check_elementwise
from fullshard.engine.checks.low_bit import check_state_precision
from fullshard.engine.params.managed import Count, ShardHolder, manager_of, marks, owner_of
from fullshard.engine.runtime import eager
from fullshard.errors import StateError
from fullshard.process_hooks import AFTER_STEP, BEFORE_STEP, MODULES, PARAMETERS, at_first_use

_MAX_NAMES = 8  # so many names in a message

# Registrations since `watch`, except of managed parameters: units may register those at any time.
registrations = Count()
# How often each has stepped since a model was first sharded: the same on ranks at one place of a program.
_steps: weakref.WeakKeyDictionary[Optimizer, Count] = weakref.WeakKeyDictionary()
# For each optimizer that was looked through: `marks` and its number of parameter groups then.
_seen: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


@at_first_use
def watch() -> None:
    """Install the hooks of the process."""
    why = "finds parameters that were added after sharding"
    PARAMETERS.add(_count_parameter, why)
    MODULES.add(_count_module, why)
    BEFORE_STEP.add(_check_optimizer, "refuses parameters that modules no longer use")
    BEFORE_STEP.add(check_elementwise, "warns of optimizers that need whole parameters")
    AFTER_STEP.add(check_state_precision, "warns of state whose precision depends on the mesh")
    AFTER_STEP.add(_count_step, "counts steps, for checkpoints")


def is_stray(parameter: nn.Parameter | None) -> bool:
    """Whether a registered parameter is trained, but no unit manages it."""
    return parameter is not None and parameter.requires_grad and manager_of(parameter) is None


def warn_of_strays(names: list[str]) -> None:
    """Warn of parameters that no unit of the model manages, if there are any.

    A warning, not an error: a program may reduce their gradients itself.
    """
    if names:
        warnings.warn(
            f"{first_names(names)} (rank {dist.get_rank()}): registered after the module was sharded, "
            "so neither sharded nor reduced. Each rank trains on its own data, and values drift "
            "apart. Add parameters before sharding; or, if you reduce their gradients yourself, "
            "name them in ignored_params (ignored_states).",
            UserWarning,
            stacklevel=2,
        )


def _count_parameter(_: nn.Module, __: str, parameter: nn.Parameter) -> None:
    if manager_of(parameter) is None:
        registrations.value += 1


def _count_module(_: nn.Module, __: str, ___: nn.Module | None) -> None:
    registrations.value += 1


@eager
def _count_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    steps_of(optimizer).value += 1


def steps_of(optimizer: Optimizer) -> Count:
    """Return what counts an optimizer's steps since a model was first sharded."""
    return _steps.setdefault(optimizer, Count())


def _check_optimizer(optimizer: Optimizer, _: Any, __: Any) -> None:
    """Refuse a step on parameters that sharding has replaced: it would change nothing.

    Raises StateError.
    """
    now = (marks.value, len(optimizer.param_groups))
    if _seen.get(optimizer) != now:
        _look_through(optimizer)
        _seen[optimizer] = now  # after it, so that an optimizer that was refused is looked at again


def num_updates(holder: ShardHolder) -> int | None:
    """Return how often optimizers have updated a parameter; None if this rank has nothing of it to update.

    Ranks that own something of it count alike, also where an optimizer was given only what has elements.
    """
    if not holder.sharded.requires_grad or holder.local.numel() == 0:
        return None
    return sum(steps.value for steps in holder.steps)


def stepped_optimizers() -> list[Optimizer]:
    """Return the optimizers that have begun a step since a model was first sharded."""
    return list(_seen)


@eager
def _look_through(optimizer: Optimizer) -> None:
    """Tell an optimizer's parameters what counts its steps. Raises StateError if modules no longer use one."""
    steps = steps_of(optimizer)
    built_before: list[str] = []
    stand_ins: list[str] = []  # unsharded parameters, freed at the next reshard
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        manager = manager_of(parameter)
        if manager is not None and manager.replaces(parameter):
            # Original and sharded parameters have an owner; unsharded ones only a manager.
            is_former = owner_of(parameter) is not None
            (built_before if is_former else stand_ins).append(manager.name)
        elif manager is not None and not any(each is steps for each in manager.holder.steps):
            manager.holder.steps.append(steps)
    name = type(optimizer).__name__
    if built_before:
        raise StateError(
            f"{name} (rank {dist.get_rank()}) has {first_names(built_before)} as before sharding, or "
            "before a load replaced them: a step would change nothing that the model uses. Build "
            "the optimizer from model.parameters() after sharding and loading."
        )
    if stand_ins:
        raise StateError(
            f"{name} (rank {dist.get_rank()}) has {first_names(stand_ins)} as they are while unsharded, "
            "so its step would not reach the shards. It was built after a forward that keeps them "
            "unsharded, or after unshard(). Build it before, or call model.reshard() first."
        )


def first_names(names: list[str]) -> str:
    """Join the first names, for a message, and say how many more there are."""
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
