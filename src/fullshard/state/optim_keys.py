"""Names of parameters in optimizer state dicts.

An optimizer's own state dict identifies a parameter by its position in the groups, or, for a named
optimizer, by its name in the sharded model. Our state dicts use the name that the parameter had
before sharding. A flat parameter stands for many such names.
"""

import copy
import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fullshard.engine.params.managed import manager_of
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, ShardingError, StateError
from fullshard.plan.units import first_names
from fullshard.state.options import OptimStateKeyType
from fullshard.state.structure import Structure, structure_of
from fullshard.state.unit_parts import trained_of

StateDict = dict[str, Any]
ParamKey = int | str
OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """The parameters before sharding that one parameter of an optimizer stands for.

    names: one name, or many for a flat parameter.
    unit, indices: the unit that manages them and their numbers in it; None and () for a parameter that
        is not sharded.
    """

    names: tuple[str, ...]
    unit: Unit | None = None
    indices: tuple[int, ...] = ()


def trained_in(structure: Structure) -> dict[nn.Parameter, Trained]:
    """Return an entry for every parameter that an optimizer of this model may train."""
    found: dict[nn.Parameter, Trained] = {}
    for unit, every_name in structure.units:
        names = {index: own[0] for index, own in enumerate(every_name) if own}
        for sharded, stands_for in trained_of(unit):
            indices = tuple(index for index in stands_for if index in names)
            if indices or unit.flat_parameter is not None:
                found[sharded] = Trained(tuple(names[i] for i in indices), unit, indices)
    for prefix, module in structure.modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter not in found:
                found[parameter] = Trained((prefix + name,))
    return found


def refuse_strays(
    optimizer: torch.optim.Optimizer, trained: Mapping[nn.Parameter, Trained]
) -> None:
    """Raise StateError if an optimizer trains what is no parameter of the model."""
    strays = [p for group in optimizer.param_groups for p in group["params"] if p not in trained]
    if strays:
        managers = ((manager_of(parameter), parameter) for parameter in strays)
        former = [m.name for m, parameter in managers if m is not None and m.replaces(parameter)]
        which = f". As before sharding, it has {first_names(former)}" if former else ""
        raise StateError(
            f"{type(optimizer).__name__} trains {len(strays)} parameters that the model does not have, "
            f"the first of shape {tuple(strays[0].shape)}{which}. Make the optimizer after sharding, "
            "from model.parameters(), or pass the models of all its parameters."
        )


def rekey(
    state_dict: StateDict,
    kind: OptimStateKeyType,
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_input: OptimInput,
) -> StateDict:
    """Return a state dict by name, or by position in the optimizer, from one of either kind.

    Raises ShardingError if ``state_dict`` has keys of both kinds.
    """
    types = {type(key) for key in state_dict["state"]}
    if len(types & {str, int}) > 1:
        raise ShardingError(f"Invalid parameter keys: {state_dict['state'].keys()}")
    wanted = str if kind is OptimStateKeyType.PARAM_NAME else int
    if types == {wanted}:
        return state_dict
    trained = trained_in(structure_of(model))
    names = {
        key: trained[parameter].names[0]
        for key, parameter in _numbered(model, optim, optim_input).items()
    }
    new: dict[Any, Any] = {**names} if wanted is str else {name: key for key, name in names.items()}
    return {
        "state": {new[key]: own for key, own in state_dict["state"].items()},
        "param_groups": [
            group_with(param_group, sorted(new[key] for key in param_group["params"]))
            for param_group in state_dict["param_groups"]
        ],
    }


def group_with(param_group: Mapping[str, Any], params: list[Any]) -> dict[str, Any]:
    """Return a copy of a parameter group whose "params" are these."""
    options = {name: value for name, value in param_group.items() if name != "params"}
    return {**copy.deepcopy(options), "params": params}


def names_of_trained(trained: Mapping[nn.Parameter, Trained]) -> dict[int, dict[int, str]]:
    """Return the names of sharded parameters, by id of the unit and number in it."""
    names: dict[int, dict[int, str]] = {}
    for entry in trained.values():
        if entry.unit is not None:
            names.setdefault(id(entry.unit), {}).update(
                zip(entry.indices, entry.names, strict=True)
            )
    return names


def keys_of_parameters(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    trained: Mapping[nn.Parameter, Trained],
    optim_input: OptimInput,
    *,
    is_named: bool,
) -> dict[nn.Parameter, ParamKey]:
    """Return the key of each parameter in the optimizer's own state dict.

    is_named: keys are names in the sharded model instead of positions.
    """
    numbered = _numbered(model, optim, optim_input)
    if not is_named:
        return {parameter: key for key, parameter in numbered.items() if parameter in trained}
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {p: names[p] for p in numbered.values() if p in trained}


def _numbered(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput
) -> dict[ParamKey, nn.Parameter]:
    """Return an optimizer's parameters by their position, counted through all groups."""
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: pass the optimizer instead.",
            FutureWarning,
            stacklevel=6,
        )
        return dict(enumerate(_listed(optim_input)))
    if optim is None:
        return dict(enumerate(model.parameters()))
    return dict(enumerate(p for group in optim.param_groups for p in group["params"]))


def _listed(optim_input: Any) -> list[nn.Parameter]:
    try:
        given = list(optim_input)
    except TypeError as error:
        raise TypeError(
            f"Optimizer input should be an iterable of Tensors or dicts, but got {optim_input}"
        ) from error
    if not given:
        raise ShardingError("Optimizer input should not be empty")
    if all(isinstance(each, torch.Tensor) for each in given):
        return given
    if not all(isinstance(each, dict) for each in given):
        raise TypeError("Optimizer input should be an iterable of Tensors or dicts")
    if not all("params" in each for each in given):
        raise MisuseError('A parameter group should map "params" to a list of parameters.')
    return [parameter for group in given for parameter in group["params"]]
