"""Optimizer state dicts by parameter names: what they contain, how they are saved and loaded.

An optimizer keeps its state by the parameter it trains: a DTensor, this rank's piece of a flat
buffer, or a flat parameter that stands for many. The state dicts made here are by name instead, and
hold the state that each parameter would have if nothing were flattened. In between is one form,
`UnitState` (see `optim_units`): for every parameter of a unit, this rank's part (its *local*, see
`unit_values`) of each state tensor, and state of other kinds, such as step counters.

    saving    optimizer -> locals -> whole tensors (FULL) or sharded ones (SHARDED)
    loading   values of any kind -> locals -> optimizer

First the ranks agree on which parameters have which state, of which dtype (`agreement`). Then
tensors are exchanged one unit at a time, all tensors of a unit in one collective.
"""

import copy
import dataclasses
import enum
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fullshard.comm.outside_steps import broadcast_object, run_collective
from fullshard.engine.unit import Unit
from fullshard.errors import ShardingError
from fullshard.peers.groups import any_device
from fullshard.state.agreement import agree
from fullshard.state.optim_keys import (
    OptimInput,
    ParamKey,
    StateDict,
    Trained,
    group_with,
    keys_of_parameters,
    names_of_trained,
    refuse_strays,
    trained_in,
)
from fullshard.state.optim_units import (
    UnitState,
    complete,
    copied,
    cut,
    put_together,
    report,
    take_apart,
    wanted,
)
from fullshard.state.structure import Structure, structure_of
from fullshard.state.unit_values import sharded_values, whole_values
from fullshard.torch_private import ShardedTensor

StateByName = dict[str, dict[str, Any]]


class Values(enum.Enum):
    """Forms of a sharded parameter's state tensors in a saved state dict."""

    WHOLE = enum.auto()  # the whole tensor
    # What no rank shards is whole in these too.
    SHARDED = enum.auto()  # this rank's rows: a DTensor over the unit's mesh, else a ShardedTensor
    DTENSORS = enum.auto()  # this rank's rows as a DTensor, also where the unit was given no mesh


@dataclasses.dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of `save`.

    rank0_only: the other ranks get an empty dict, except for those that have the rest of the first's
        values with tensor parallel, who put them together with it. Only for whole values.
    group: the ranks that take part; None for all.
    """

    values: Values
    rank0_only: bool = False
    offload_to_cpu: bool = False
    group: dist.ProcessGroup | None = None

    def is_kept_here(self, units: Sequence[Unit]) -> bool:
        """Whether this rank gets a result. units: of the model."""
        is_for_all = self.values is not Values.WHOLE or not self.rank0_only
        if is_for_all or dist.get_rank(self.group) == 0:
            return True
        first = dist.get_process_group_ranks(self.group)[0]
        specs = [param.form.unsharded for unit in units for param in unit.managed]
        return any(spec is not None and first in spec.mesh.mesh for spec in specs)


# Saving


@torch.no_grad()
def save(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: StateDict,
    options: SaveOptions,
    *,
    optim_input: OptimInput = None,
) -> StateDict:
    """Return an optimizer's state dict by name, as of the model before wrapping. Collective.

    state_dict: as the optimizer returns it. The result is

        {"state": {name: {"exp_avg": value, "step": 3, ...}, ...}, "param_groups": [...]}

    with names in the order of the model, "params" of the groups as names, and without
    "param_groups" if ``state_dict`` has none. State under keys that are no parameter's is copied,
    with a warning. Ranks that ``options`` gives no result return an empty dict.

    Raises StateError if one rank lacks state that the others have, if state is neither a scalar nor of
    its parameter's shape, or if the optimizer trains what the model does not have.
    """
    structure = structure_of(model)
    trained = trained_in(structure)
    if optim is not None:
        refuse_strays(optim, trained)
    is_named = any(isinstance(key, str) for key in list(state_dict["state"])[:1])
    keys = keys_of_parameters(model, optim, trained, optim_input, is_named=is_named)
    by_key = {key: parameter for parameter, key in keys.items()}
    saved: StateByName = {}
    units = [unit for unit, _ in structure.units]
    states = {id(unit): UnitState() for unit in units}
    for key, parameter in by_key.items():
        kept = state_dict["state"].get(key)
        if kept is None:
            continue
        entry = trained[parameter]
        if entry.unit is None:
            saved[entry.names[0]] = _to_cpu(kept) if options.offload_to_cpu else dict(kept)
        else:
            take_apart(entry, kept, states[id(entry.unit)])
    saved |= _values_of_units(units, states, names_of_trained(trained), options)
    if not options.is_kept_here(units):
        return {}
    # In the order of the model: whoever reads the dict collectively, such as a checkpoint, goes
    # through it in one order on all ranks, while optimizers' groups may differ between ranks.
    order = [name for entry in trained.values() for name in entry.names if name in saved]
    result: StateDict = {"state": {name: saved[name] for name in order}}
    result["state"] |= _state_of_others(state_dict, by_key)
    if "param_groups" in state_dict:
        result["param_groups"] = [
            group_with(group, [n for key in group["params"] for n in trained[by_key[key]].names])
            for group in state_dict["param_groups"]
        ]
    return result


def _values_of_units(
    units: Sequence[Unit],
    states: Mapping[int, UnitState],
    names: Mapping[int, Mapping[int, str]],
    options: SaveOptions,
) -> StateByName:
    """Agree with all ranks on which state there is, and make its values unit by unit. Collective.

    states, names: by id of the unit.
    """
    reports = [report(unit, states[id(unit)]) for unit in units]
    everyones = agree(reports, [names[id(unit)] for unit in units], options.group)
    saved: StateByName = {}
    for unit, agreed in zip(units, everyones, strict=True):
        locals_ = complete(unit, states[id(unit)], agreed.kinds)
        indices, tensors = [index for index, _ in locals_], [*locals_.values()]
        gathered: Sequence[Any]
        if options.values is Values.WHOLE or (unit.is_flat and unit.mesh.shard_group is None):
            gathered = whole_values(unit, indices, tensors, rank0_only=options.rank0_only)
        else:
            is_dtensors = options.values is Values.DTENSORS
            gathered = sharded_values(unit, indices, tensors, dtensors=is_dtensors)
        if not options.is_kept_here([unit]):
            continue
        values = dict(zip(locals_, gathered, strict=True))
        for index, kinds in agreed.kinds.items():
            own = {
                name: copied(agreed.others[index][name]) if dtype is None else values[index, name]
                for name, dtype in kinds.items()
            }
            saved[names[id(unit)][index]] = _to_cpu(own) if options.offload_to_cpu else own
    return saved


def _state_of_others(state_dict: StateDict, by_key: Mapping[ParamKey, nn.Parameter]) -> StateDict:
    """Return the state under keys that are no parameter's (a library's own), and warn of each."""
    others = {key: value for key, value in state_dict["state"].items() if key not in by_key}
    for key in others:
        warnings.warn(
            f"The optimizer has a state {key!r} that belongs to no parameter of its groups. It "
            "is copied as it is.",
            stacklevel=5,  # this, save, its no_grad, the method of a face, the user
        )
    return others


def _to_cpu(kept: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, (torch.Tensor, ShardedTensor)) else value
        for name, value in kept.items()
    }


# Loading


@torch.no_grad()
def load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: StateDict,
    *,
    rank0_only: bool = False,
    is_named: bool = False,
    group: dist.ProcessGroup | None = None,
    optim_input: OptimInput = None,
) -> StateDict:
    """Return a state dict that the optimizer can load, from one by name. Collective.

    state_dict: as `save` returns it, with values of any kind. rank0_only: the first rank alone has
    it. is_named: the optimizer's own state dicts are by name too, and must hold state of every
    parameter, so those of which this rank owns nothing keep the state that they have.

    Raises ShardingError for a dict without "state", or with values of other shapes, and StateError if ranks have
    sharded values of different state.
    """
    if rank0_only:
        state_dict = _spread(state_dict, group)
    if "state" not in state_dict:
        raise ShardingError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict, but '
            f"it has {sorted(state_dict)}."
        )
    structure = structure_of(model)
    trained = trained_in(structure)
    keys = keys_of_parameters(model, optim, trained, optim_input, is_named=is_named)
    kept: Mapping[Any, Any] = optim.state if is_named and optim is not None else {}
    names = names_of_trained(trained)
    reports = [wanted(names[id(unit)], state_dict["state"]) for unit, _ in structure.units]
    if any(report.dtypes for report in reports):
        agree(reports, [names[id(unit)] for unit, _ in structure.units], group)
    loaded = _state_to_load(structure, trained, keys, state_dict["state"], kept)
    result: StateDict = {"state": loaded}
    known = {name for entry in trained.values() for name in entry.names}
    for name, value in state_dict["state"].items():
        if name not in known:
            result["state"][name] = copy.copy(value)  # the user's own, or a library's
    if "param_groups" in state_dict:
        key_of = {n: keys[p] for p, entry in trained.items() for n in entry.names if p in keys}
        result["param_groups"] = [
            group_with(each, sorted({key_of[name] for name in each["params"]}))
            for each in state_dict["param_groups"]
        ]
    return result


def _state_to_load(
    structure: Structure,
    trained: Mapping[nn.Parameter, Trained],
    keys: Mapping[nn.Parameter, ParamKey],
    source: Mapping[str, Any],
    kept: Mapping[nn.Parameter, Any],
) -> dict[Any, Any]:
    """Return the state of trained parameters by the optimizer's keys. Collective.

    kept: by parameter, the state to use where this rank owns nothing of it.
    """
    names = names_of_trained(trained)
    by_unit = {id(unit): cut(unit, names[id(unit)], source) for unit, _ in structure.units}
    loaded: dict[Any, Any] = {}
    for parameter, entry in trained.items():
        if not any(name in source for name in entry.names):
            continue
        # A parameter that this optimizer does not train has its name as key, a flat one the tuple.
        key = keys.get(parameter, entry.names if len(entry.names) > 1 else entry.names[0])
        if entry.unit is None:
            loaded[key] = copy.copy(source[entry.names[0]])
        elif state := put_together(entry, by_unit[id(entry.unit)]):
            loaded[key] = state
        elif parameter in kept:
            loaded[key] = copy.deepcopy(kept[parameter])
    return loaded


class _Described(NamedTuple):
    """A place for a tensor that is broadcast after the description of the dict."""

    shape: torch.Size
    dtype: torch.dtype


def _spread(state_dict: StateDict, group: dist.ProcessGroup | None) -> StateDict:
    """Return the first rank's state dict on every rank, with tensors on the CPU. Collective.

    An empty dict if it has no "state", so that all ranks can refuse it alike. Tensors travel one at
    a time, which keeps the device's memory small.
    """
    label = "spreading an optimizer's state"
    is_source = dist.get_rank(group) == 0
    tensors: list[torch.Tensor] = []

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            tensors.append(value)
            return _Described(value.shape, value.dtype)
        return value

    own = {}
    if is_source and "state" in state_dict:
        own = {**state_dict, "state": _mapped(state_dict["state"], describe)}
    described: StateDict = broadcast_object(own, 0, group, label)
    if "state" not in described:
        return {}
    remaining, device = iter(tensors), any_device(group)

    def receive(value: Any) -> Any:
        if not isinstance(value, _Described):
            return value
        tensor = (
            next(remaining).to(device).contiguous()
            if is_source
            else torch.empty(value.shape, dtype=value.dtype, device=device)
        )
        run_collective(dist.broadcast, tensor, group=group, group_src=0, label=label)
        return tensor.cpu()

    return {**described, "state": _mapped(described["state"], receive)}


def _mapped(state: Mapping[str, Any], function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return state by name with a function applied to every value of it."""
    return {
        name: {key: function(value) for key, value in own.items()}
        if isinstance(own, dict)
        else function(own)
        for name, own in state.items()
    }
