"""State dicts of optimizers of sharded models.

An optimizer keeps its state by the parameter it trains: a DTensor, this rank's piece of a flat
buffer, or a flat parameter that stands for many. Its state dicts here are by name instead, and hold
what the parameter's state would be if nothing were flattened. Both sides meet in one form,
`_UnitState`: for every parameter of a unit, this rank's local of each state tensor (see `parts`),
and what is no tensor of the parameter's size.

    saving    optimizer -> locals -> whole tensors (FULL) or sharded ones (SHARDED)
    loading   values of any kind -> locals -> optimizer

What ranks have to agree on beforehand (which parameters have which state, of which dtype) travels
as one object; tensors are exchanged one unit at a time, all of them in one collective.
"""

import copy
import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fullshard.comm.backends import any_device
from fullshard.engine.unit import Unit
from fullshard.errors import ShardingError, StateError
from fullshard.state.agreement import Kinds, Report, agree
from fullshard.state.optim_keys import (
    OptimInput,
    StateDict,
    Trained,
    keys_of_parameters,
    names_of_trained,
    parameters_by_key,
    trained_parameters,
    units_of,
)
from fullshard.state.parts import locals_of, sharded_values, whole_values


@dataclasses.dataclass(slots=True)
class _UnitState:
    """This rank's optimizer state of a unit's parameters, by index and name of the state."""

    locals: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    others: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)


# Saving


@torch.no_grad()
def save(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: StateDict,
    *,
    shards: bool,
    rank0_only: bool,
    offload_to_cpu: bool,
    group: dist.ProcessGroup | None,
    optim_input: OptimInput = None,
    dtensors: bool = False,
) -> StateDict:
    """Return an optimizer's state dict by name, as of the model before wrapping.

    state_dict: as the optimizer returns it. shards: hold rows instead of whole tensors. dtensors:
    as DTensors, also where wrappers were given no mesh. Every rank
    has to call it; with ``rank0_only`` the others get an empty dict.
    """
    trained = trained_parameters(model)
    by_key = parameters_by_key(model, optim, state_dict, trained, optim_input)
    states = {id(unit): _UnitState() for unit in units_of(model)}
    saved: dict[Any, Any] = {}
    for key, parameter in by_key.items():
        own = state_dict["state"].get(key)
        if own is None:
            continue
        what = trained[parameter]
        if what.unit is None:
            saved[what.names[0]] = _to_cpu(own) if offload_to_cpu else dict(own)
        else:
            _take_apart(what, own, states[id(what.unit)])
    keeps = shards or not rank0_only or dist.get_rank(group) == 0
    names = names_of_trained(trained)
    units = units_of(model)
    reports = [_report(unit, states[id(unit)]) for unit in units]
    known = agree(reports, [names[id(unit)] for unit in units], group)
    for unit, (kinds, others) in zip(units, known, strict=True):
        locals_ = _complete(unit, states[id(unit)], kinds)
        indices = [index for index, _ in locals_]
        gathered: Sequence[Any] = (
            sharded_values(unit, indices, [*locals_.values()], dtensors=dtensors)
            if shards
            else whole_values(unit, indices, [*locals_.values()], rank0_only=rank0_only)
        )
        values = dict(zip(locals_, gathered, strict=True))
        for index, own in kinds.items() if keeps else ():
            saved[names[id(unit)][index]] = {
                name: _own(others[index][name]) if dtype is None else values[index, name]
                for name, dtype in own.items()
            }
            if offload_to_cpu:
                entry = saved[names[id(unit)][index]]
                saved[names[id(unit)][index]] = _to_cpu(entry)
    if not keeps:
        return {}
    # In the order of the model: optimizers may differ, but who reads it goes through it on all ranks.
    order = [name for what in trained.values() for name in what.names if name in saved]
    result = {"state": {name: saved[name] for name in order}}
    for key, value in state_dict["state"].items():
        if key not in by_key:
            warnings.warn(
                f"The optimizer has a state {key!r} that belongs to no parameter of its groups. It "
                "is copied as it is.",
                stacklevel=4,
            )
            result["state"][key] = value
    if "param_groups" in state_dict:
        result["param_groups"] = [  # type: ignore[assignment]
            {
                **copy.deepcopy({k: v for k, v in param_group.items() if k != "params"}),
                "params": [n for key in param_group["params"] for n in trained[by_key[key]].names],
            }
            for param_group in state_dict["param_groups"]
        ]
    return result


def _take_apart(what: Trained, own: Mapping[str, Any], into: _UnitState) -> None:
    """Divide the state of a parameter among the parameters that it stands for."""
    unit = what.unit
    assert unit is not None
    places = (
        {p.index: (b, p) for b in unit.plan_layout().buckets for p in b.params}
        if unit.params.flat
        else {}
    )
    for index in what.indices:
        param = unit.params[index]
        locals_ = into.locals.setdefault(index, {})
        others = into.others.setdefault(index, {})
        for name, value in own.items():
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                others[name] = value
                continue
            local = value._local_tensor if isinstance(value, DTensor) else value
            if index in places:
                bucket, place = places[index]
                start, shape = bucket.shard_range(place, unit.mesh.plan.shard_rank)
                if local.numel() == bucket.shard_numel:
                    local = local.reshape(-1)[start : start + math.prod(shape)]
            if local.numel() != math.prod(param.shard_shape):
                raise StateError(
                    f"{param.name}: the optimizer's state {name!r} has shape {tuple(value.shape)}, "
                    f"which is not that of what it trains, {tuple(param.holder.sharded.shape)}, so "
                    "it cannot be put together from all ranks."
                )
            locals_[name] = local.reshape(-1)


def _report(unit: Unit, state: _UnitState) -> Report:
    dtypes = {i: {name: t.dtype for name, t in own.items()} for i, own in state.locals.items()}
    owned = {index for index, param in enumerate(unit.params) if param.sharded.numel()}
    if unit.params.flat is not None:
        owned = set(range(len(unit.params)))
    return Report(dtypes, state.others, owned)


def _complete(unit: Unit, state: _UnitState, kinds: Kinds) -> dict[tuple[int, str], torch.Tensor]:
    """Return this rank's locals of everything that any rank has."""
    locals_ = {}
    for index, own in kinds.items():
        for name, dtype in own.items():
            if dtype is None:
                continue
            local = state.locals.get(index, {}).get(name)
            if local is None:  # this rank owns nothing of it
                local = torch.zeros(unit.params[index].shard_shape, dtype=dtype)
            locals_[index, name] = local.to(unit.device)
    return locals_


# Loading


@torch.no_grad()
def load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: StateDict,
    *,
    rank0_only: bool,
    is_named: bool,
    group: dist.ProcessGroup | None,
    optim_input: OptimInput = None,
) -> StateDict:
    """Return a state dict that the optimizer can load, from one by name with values of any kind.

    rank0_only: the first rank alone has it. is_named: the optimizer's own state dicts are by name
    too, and must hold state of every parameter. Every rank has to call it.
    """
    if rank0_only:
        state_dict = _spread(state_dict, group)
    if "state" not in state_dict:
        raise ShardingError(
            '`optim_state_dict` must have the keys "state" to be a valid optimizer state dict, but '
            f"it has {sorted(state_dict)}."
        )
    trained = trained_parameters(model)
    keys = keys_of_parameters(model, optim, trained, optim_input, is_named=is_named)
    source: dict[Any, Any] = state_dict["state"]
    used: set[Any] = set()
    loaded: dict[Any, Any] = {}
    names_by_unit = names_of_trained(trained)
    by_unit: dict[int, _UnitState] = {}
    for unit in units_of(model):
        by_unit[id(unit)] = _cut(unit, names_by_unit[id(unit)], source)
    for parameter, what in trained.items():
        names = [name for name in what.names if name in source]
        used.update(names)
        if not names:
            continue
        key = keys.get(parameter, what.names if len(what.names) > 1 else what.names[0])
        if what.unit is None:
            loaded[key] = copy.copy(source[names[0]])
            continue
        state = _put_together(what, by_unit[id(what.unit)])
        if state:
            loaded[key] = state
        elif is_named and optim is not None and parameter in optim.state:
            loaded[key] = copy.deepcopy(optim.state[parameter])
    for name, value in source.items():
        if name not in used:
            loaded[name] = copy.copy(value)  # of the user's own
    result: StateDict = {"state": loaded}
    if "param_groups" in state_dict:
        key_of = {n: keys[p] for p, what in trained.items() for n in what.names if p in keys}
        result["param_groups"] = [
            {
                **copy.deepcopy({k: v for k, v in param_group.items() if k != "params"}),
                "params": sorted({key_of[name] for name in param_group["params"]}),
            }
            for param_group in state_dict["param_groups"]
        ]
    return result


def _cut(unit: Unit, names: Mapping[int, str], source: Mapping[str, Any]) -> _UnitState:
    """Take this rank's locals of the values of a unit's parameters."""
    state = _UnitState()
    wanted: list[tuple[int, str]] = []
    values: list[Any] = []
    for index, name in names.items():
        if name not in source:
            continue
        param = unit.params[index]
        state.locals[index], state.others[index] = {}, {}
        for key, value in source[name].items():
            if not isinstance(value, (torch.Tensor, ShardedTensor)) or len(value.size()) == 0:
                state.others[index][key] = _own(value)
                continue
            expected = param.shape if param.form.unsharded is None else param.form.unsharded.shape
            if tuple(value.size()) != tuple(expected):
                raise ShardingError(
                    f"{name}: the state {key!r} has shape {tuple(value.size())}, but the parameter "
                    f"has {tuple(expected)}. Load a state dict of this model."
                )
            wanted.append((index, key))
            values.append(value)
    locals_ = locals_of(unit, [index for index, _ in wanted], values)
    for (index, key), local in zip(wanted, locals_, strict=True):
        state.locals[index][key] = local.clone()  # optimizers write to what they load
    return state


def _put_together(what: Trained, state: _UnitState) -> dict[str, Any]:
    """Make the state of what the optimizer trains from that of the parameters it stands for.

    Empty if this rank owns nothing of them, as optimizers keep no state of empty parameters.
    """
    unit = what.unit
    assert unit is not None
    if unit.params.flat is None:
        (index,) = what.indices
        param = unit.params[index]
        if unit.params.is_flat and param.local.numel() == 0:
            return {}
        own = {name: param.wrap_shard(t) for name, t in state.locals[index].items()}
        return {**state.others[index], **own}
    (bucket,) = unit.plan_layout().buckets
    result: dict[str, Any] = {}
    present = [index for index in what.indices if index in state.locals]
    for name in dict.fromkeys(n for index in present for n in state.others[index]):
        found = [state.others.get(index, {}).get(name) for index in what.indices]
        _check_same(found, what, name)
        result[name] = found[0]
    for name in dict.fromkeys(n for index in present for n in state.locals[index]):
        tensors = [state.locals.get(index, {}).get(name) for index in what.indices]
        if any(tensor is None for tensor in tensors):
            lacking = [n for n, t in zip(what.names, tensors, strict=True) if t is None]
            raise ShardingError(
                f"{', '.join(lacking)}: no state {name!r}, but other parameters of the same flat "
                "parameter have it. Load the state of all of them, or of none."
            )
        dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
        if len(dtypes) > 1:
            raise ShardingError(
                f"{', '.join(what.names)}: the states {name!r} are of different dtypes, {dtypes}, "
                "but belong to one flat parameter."
            )
        flat = torch.zeros(bucket.shard_numel, dtype=dtypes.pop(), device=unit.device)
        for place in bucket.params:
            start, shape = bucket.shard_range(place, unit.mesh.plan.shard_rank)
            piece = state.locals[place.index][name]
            flat[start : start + math.prod(shape)].copy_(piece.reshape(-1))
        result[name] = flat
    return result


def _check_same(values: Sequence[Any], what: Trained, name: str) -> None:
    first = values[0]
    for value in values[1:]:
        same = (
            torch.equal(torch.as_tensor(value), torch.as_tensor(first))
            if isinstance(first, torch.Tensor) and isinstance(value, torch.Tensor)
            else value == first
        )
        if not same:
            raise ShardingError(
                "All unflattened parameters comprising a single flat parameter must have scalar "
                f"state with the same value and dtype, but {name!r} of {', '.join(what.names)} are "
                f"{values}. Pass use_orig_params=True to keep them apart."
            )


def _spread(state_dict: StateDict, group: dist.ProcessGroup | None) -> StateDict:
    """Give every rank the state dict of the first one."""
    source = 0 if group is None else dist.get_global_rank(group, 0)
    is_source = dist.get_rank() == source
    tensors: list[torch.Tensor] = []

    def describe(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            tensors.append(value)
            return _Described(value.shape, value.dtype)
        return value

    described: list[Any] = [None]
    if is_source:
        described[0] = _map_state(state_dict, describe) if "state" in state_dict else {}
    dist.broadcast_object_list(described, source, group=group)
    if "state" not in described[0]:
        return {}  # refused by all ranks
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
        dist.broadcast(tensor, source, group=group)
        return tensor.cpu()

    result: StateDict = _map_state(described[0], receive)
    return result


@dataclasses.dataclass(frozen=True, slots=True)
class _Described:
    """A tensor that is to follow."""

    shape: torch.Size
    dtype: torch.dtype


def _map_state(state_dict: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every state value."""
    state = {
        name: {key: function(value) for key, value in own.items()}
        if isinstance(own, dict)
        else function(own)
        for name, own in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _own(value: Any) -> Any:
    """Return a value of one's own: parameters of one flat parameter share its step."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _to_cpu(own: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.cpu() if isinstance(value, (torch.Tensor, ShardedTensor)) else value
        for name, value in own.items()
    }
