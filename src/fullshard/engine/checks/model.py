"""Checks of a model: its root's share, by what its units divide, what is in no unit: tied to it, or registered later."""

import gc
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.params.managed import Count, manager_of, owner_of
from fullshard.engine.unit import Unit
from fullshard.plan.units import clean_name, first_names
from fullshard.policies import ParamStyle
from fullshard.process_hooks import MODULES, PARAMETERS, at_first_use

_SMALL_NBYTES = 1 << 20  # below, nobody shards to save memory


class Model(NamedTuple):
    """A model that first runs.

    root: its outermost sharded module. modules: those that were sharded, and what is inside them and not
        sharded apart. own: the root's units. device: of the root.
    """

    root: nn.Module
    modules: Sequence[nn.Module]
    units: Sequence[Unit]
    own: Sequence[Unit]
    device: torch.device


def find_large_root(model: Model) -> str | None:
    """Say, on rank 0, that the root's own units have more than half of the bytes of all.

    A unit is gathered as a whole, and the root's stays whole from the first layer's forward to the last
    layer's backward. So a model of which only the root is sharded saves no memory while it computes.
    That is seldom intended, and nothing else shows it. Small models do not count, nor a root that is whole anyway.
    """
    total, of_root = _unsharded_nbytes(model.units), _unsharded_nbytes(model.own)
    if of_root < _SMALL_NBYTES or 2 * of_root <= total or model.own[0].mesh.plan.shard_size == 1:
        return None
    if dist.get_rank() != 0:
        return None
    remedy = "Apply fully_shard to its blocks and to a large embedding first, to the model last."
    if model.own[0].config.style is not ParamStyle.DTENSOR:
        remedy = "Pass auto_wrap_policy=ModuleWrapPolicy({Block}), with the class of its blocks."
    return (
        f"{type(model.root).__name__}: the root unit owns {100 * of_root / total:.0f} % of all parameters "
        f"({of_root / 2**20:.0f} of {total / 2**20:.0f} MiB), which are gathered together and stay whole from the "
        f"first layer's forward to the last layer's backward, with all their gradients. {remedy}"
    )


def _unsharded_nbytes(units: Iterable[Unit]) -> int:
    """Return the bytes of whole parameters in their compute dtypes, however they are gathered."""
    specs = (spec for unit in units for spec in unit.params.specs(unit.config.mp_policy))
    return sum(spec.numel * spec.compute_dtype.itemsize for spec in specs)


def find_small_divisors(model: Model) -> str | None:
    """Say which units have a smaller mesh than others, if nobody said by what to divide.

    With expert parallel, an expert's gradient is a sum over the tokens of all data-parallel ranks, but its
    unit knows of its own mesh only:

        4 ranks, 2 of them share an expert    dense layers: sum / 4    the expert: sum / 2, twice as large
    """
    num_ranks = max((unit.mesh.plan.data_parallel_size for unit in model.units), default=1)
    found = [
        unit
        for unit in model.units
        if unit.mesh.plan.data_parallel_size < num_ranks
        and unit.config.gradient_divide_factor is None
        and unit.config.comm_hook is None
        and any(param.requires_grad for param in unit.params)
    ]
    if not found:
        return None
    more = f" and {len(found) - 1} more units" if len(found) > 1 else ""
    own = found[0].mesh.plan.data_parallel_size
    return (
        f"{found[0].label}{more}: gradients are divided by {own}, the ranks that the unit is sharded over, "
        f"while other units of the model divide by {num_ranks}. If its tokens come from all of these ranks, as "
        f"with expert parallel, its gradients are {num_ranks / own:g} times too large: call "
        f"set_gradient_divide_factor({num_ranks}) on its module. If not, set_gradient_divide_factor({own}) "
        "says so."
    )


def find_ties_outside(model: Model) -> str | None:
    """Say which module around the root, in no unit, has a parameter that is sharded elsewhere.

    What is around is known from the forwards that run. Without gradients values are alike, and nothing is said.
    """
    outermost, frame = None, sys._getframe() if torch.is_grad_enabled() else None
    while frame is not None:
        if frame.f_code is nn.Module._call_impl.__code__:
            outermost = frame.f_locals["self"]
        frame = frame.f_back
    if outermost is None or outermost is model.root:
        return None
    paths = {id(module): [path] for path, module in outermost.named_modules()}
    for path, module in outermost.named_modules():
        for name, parameter in module._parameters.items():
            owner = None if parameter is None else owner_of(parameter)
            if owner is None or not parameter.requires_grad:
                continue
            is_outside = all(slot.registry is not module._parameters for slot in owner.slots)
            # A DTensor says by itself that it is a part; the wrapper's parameters do not.
            is_part = parameter is owner.sharded and not isinstance(parameter, DTensor)
            if is_outside and (is_part or owner.replaces(parameter)):
                names = owner.names_among(paths) or owner.names
                return _tied(names[0], clean_name(f"{path}.{name}"))
    return None


def tie_outside(formers: Sequence[tuple[str, torch.Tensor]]) -> str | None:
    """Say which module in no unit has a parameter as it was before it was sharded; None if none has.

    formers: such parameters, with the names of what took their place. Searches all objects of the process, for an
        error that is raised anyway.
    """
    names = {id(parameter): name for name, parameter in formers}
    for each in gc.get_objects() if names else ():
        if issubclass(type(each), nn.Module):
            for own, registered in each.__dict__.get("_parameters", {}).items():
                if id(registered) in names:
                    return _tied(names[id(registered)], f"{own} of a {type(each).__name__}")
    return None


def _tied(name: str, other: str) -> str:
    return (
        f"{name} is sharded and was one parameter with {other}, which is in no unit: they would train apart. Call "
        "fully_shard (or FullyShardedDataParallel) on a module that contains both, such as the model, or untie them."
    )


# Registrations in the process since a module was first sharded, except of managed parameters: units may register
# those at any time. A root looks through its modules again when this has changed.
registrations = Count()


def is_stray(parameter: nn.Parameter | None) -> bool:
    """Say whether a registered parameter is trained, but no unit manages it."""
    return parameter is not None and parameter.requires_grad and manager_of(parameter) is None


def find_strays(names: list[str]) -> str | None:
    """Say which parameters no unit of the model manages, as they were added after sharding.

    A warning, not an error: a program may reduce their gradients itself.
    """
    if not names:
        return None
    return (
        f"{first_names(names)} (rank {dist.get_rank()}): registered after the module was sharded, "
        "so neither sharded nor reduced. Each rank trains on its own data, and values drift "
        "apart. Add parameters before sharding; or, if you reduce their gradients yourself, "
        "name them in ignored_params (ignored_states)."
    )


@at_first_use
def _count_registrations() -> None:
    why = "finds parameters that were added after sharding"
    PARAMETERS.add(_count_parameter, why)
    MODULES.add(_count_module, why)


def _count_parameter(_: nn.Module, __: str, parameter: nn.Parameter) -> None:
    if manager_of(parameter) is None:
        registrations.value += 1


def _count_module(_: nn.Module, __: str, ___: nn.Module | None) -> None:
    registrations.value += 1
