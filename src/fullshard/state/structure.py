"""The modules, units and names of a model, looked up in one walk over it: `structure_of`."""

from typing import NamedTuple

from torch import nn

from fullshard.engine.module_state import state_of
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.unit import Unit
from fullshard.plan.units import clean_name

NamedUnit = tuple[Unit, list[list[str]]]  # and the names of each of its parameters


class Structure(NamedTuple):
    """What a model is made of, as it is when this is made.

    modules: each with what its names begin with before sharding, "" or "layers.0."; in their order, and
        one that is in several places once for each.
    units: those that have parameters, in the order of modules. Per parameter, its names before sharding;
        a tied one has several. Names that it has in another model, with which this one shares it, are
        left out; it has none if its module was taken out of the model.
    """

    modules: list[tuple[str, nn.Module]]
    units: list[NamedUnit]


def structure_of(model: nn.Module) -> Structure:
    """Return what a model is made of."""
    modules = [
        (f"{clean}." if (clean := clean_name(path)) else "", module)
        for path, module in model.named_modules(remove_duplicate=False)
    ]
    prefixes: dict[int, str] = {}
    for prefix, module in modules:
        prefixes.setdefault(id(module), prefix)

    def names(param: ManagedParameter) -> list[str]:
        found = [(prefixes.get(id(slot.module())), slot.name) for slot in param.slots]
        return [prefix + name for prefix, name in found if prefix is not None]

    states = dict.fromkeys(state for _, m in modules if (state := state_of(m)) is not None)
    units = [(unit, [*map(names, unit.params)]) for state in states for unit in state.units]
    return Structure(modules, units)


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model that have parameters, in the order of its modules."""
    states = dict.fromkeys(state for m in model.modules() if (state := state_of(m)) is not None)
    return [unit for state in states for unit in state.units]
