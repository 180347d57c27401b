"""Checks of a model: its root's share, by what its units divide, what was registered after it was sharded."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.params.managed import Count, manager_of
from fullshard.engine.unit import Unit
from fullshard.plan.units import first_names
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
