"""The modules, units and names of a model, looked up in one walk over it: `structure_of`."""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from fullshard.engine.module_state import flat_states, states_in
from fullshard.engine.unit import Unit
from fullshard.errors import UnsupportedError
from fullshard.plan.units import clean_name
from fullshard.state.unit_parts import slots_of


class Structure(NamedTuple):
    """What a model is made of, as it is when this is made.

    modules: each with what its names begin with before sharding, "" or "layers.0."; in their order, and
        one that is in several places once for each.
    units: those that have parameters, in the order of modules. Per parameter, its names before sharding;
        a tied one has several, in the order of modules. Names that it has in another model, with which this
        one shares it, are left out; it has none if its module was taken out of the model.
    """

    modules: list[tuple[str, nn.Module]]
    units: list[tuple[Unit, list[list[str]]]]


def structure_of(model: nn.Module) -> Structure:
    """Return what a model is made of.

    What a wrapper with a flat parameter wraps (``wrapped.module``) is the wrapper's. Raises
    UnsupportedError for any other part of what such a wrapper contains: ranks have arbitrary pieces of it.
    """
    modules = modules_in(whole_of(model))
    prefixes = prefixes_of(modules)
    order = {prefix: position for position, (prefix, _) in enumerate(modules)}

    def names(places: list[tuple[nn.Module | None, str]]) -> list[str]:
        found = [(pre, name) for m, name in places for pre in prefixes.get(id(m), ())]
        return [pre + name for pre, name in sorted(found, key=lambda each: order[each[0]])]

    states = states_in(module for _, module in modules)
    units = [(unit, [*map(names, slots_of(unit))]) for state in states for unit in state.units]
    return Structure(modules, units)


def modules_in(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules of a model as a `Structure` has them."""
    return [
        (f"{clean}." if (clean := clean_name(path)) else "", module)
        for path, module in model.named_modules(remove_duplicate=False)
    ]


def prefixes_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, list[str]]:
    """Return, by id of each module, what its names begin with: several in several places."""
    prefixes: dict[int, list[str]] = {}
    for prefix, module in modules:
        prefixes.setdefault(id(module), []).append(prefix)
    return prefixes


def units_of(model: nn.Module) -> list[Unit]:
    """Return the units of a model that have parameters, in the order of its modules."""
    return [unit for state in states_in(whole_of(model).modules()) for unit in state.units]


def whole_of(model: nn.Module) -> nn.Module:
    """Return the wrapper with a flat parameter that wraps a model; if none does, the model.

    Raises UnsupportedError for a part of what such a wrapper contains.
    """
    modules = {id(module) for module in model.modules()}
    around = {
        state: name
        for state in flat_states()
        if not any(id(module) in modules for module in state.modules)
        for unit in state.units
        for places in slots_of(unit)
        for module, name in places
        if id(module) in modules
    }
    for state, name in around.items():
        wrapper = next((m for m in state.modules if any(c is model for c in m.children())), None)
        if wrapper is None:
            raise UnsupportedError(
                f"This {type(model).__name__} is a part of {state.all_units[0].label}, whose parameters are one "
                f"flat parameter ({name} too): ranks hold arbitrary pieces of it. Pass that wrapper, or the "
                "whole model."
            )
        return wrapper
    return model
