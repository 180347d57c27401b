"""One unit's optimizer state: from what an optimizer keeps to the locals of parameters, and back.

`UnitState` is the form in which saving and loading meet:

    saving    `take_apart` what an optimizer keeps; `report` it; `complete` it by what others have
    loading   `cut` it from values of a state dict; `put_together` what an optimizer keeps
"""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.unit import Unit
from fullshard.errors import ShardingError
from fullshard.state.agreement import Kinds, Report
from fullshard.state.optim_keys import Trained
from fullshard.state.unit_parts import parts_of
from fullshard.state.unit_values import locals_of
from fullshard.torch_private import ShardedTensor


@dataclasses.dataclass(slots=True)
class UnitState:
    """This rank's optimizer state of one unit, by number of the parameter and name of the state.

    locals: state tensors of the parameter's size, cut as this rank's shard. others: the rest, such
    as step counters.
    """

    locals: dict[int, dict[str, torch.Tensor]] = dataclasses.field(default_factory=dict)
    others: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)


# Saving


def take_apart(entry: Trained, own: Mapping[str, Any], into: UnitState) -> None:
    """Divide the state of what an optimizer trains among the parameters that it stands for.

    own: the optimizer's state of it, by name. Raises StateError for a tensor of another size.
    """
    assert entry.unit is not None
    parts = parts_of(entry.unit)
    for index in entry.indices:
        locals_ = into.locals.setdefault(index, {})
        others = into.others.setdefault(index, {})
        for name, value in own.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                locals_[name] = parts.local_in(index, name, value)
            else:
                others[name] = value


def report(unit: Unit, state: UnitState) -> Report:
    """Return the state of a unit that this rank has, for `agree`."""
    dtypes = {i: {name: t.dtype for name, t in own.items()} for i, own in state.locals.items()}
    return Report(dtypes, state.others, parts_of(unit).owned())


def complete(unit: Unit, state: UnitState, kinds: Kinds) -> dict[tuple[int, str], torch.Tensor]:
    """Return this rank's local of each state tensor that any rank has, by index and name.

    Empty ones where this rank owns nothing, so that all ranks exchange the same list.
    """
    parts, locals_ = parts_of(unit), {}
    for index, own in kinds.items():
        for name, dtype in own.items():
            if dtype is None:
                continue
            local = state.locals.get(index, {}).get(name)
            if local is None:  # this rank owns nothing of it
                local = parts.new_local(index, dtype).zero_()
            locals_[index, name] = local.to(unit.device)
    return locals_


# Loading


def wanted(names: Mapping[int, str], source: Mapping[str, Any]) -> Report:
    """Return which state tensors of a unit are sharded values in a state dict, for `agree`: ranks exchange those.

    names: of the unit's parameters, by index.
    """
    dtypes = {
        index: {
            key: value.dtype
            for key, value in source[name].items()
            if isinstance(value, (DTensor, ShardedTensor))
        }
        for index, name in names.items()
        if name in source
    }
    return Report({index: own for index, own in dtypes.items() if own}, {}, set(names))


def cut(unit: Unit, names: Mapping[int, str], source: Mapping[str, Any]) -> UnitState:
    """Return this rank's part of a unit's state, from values of any kind by name. Collective.

    names: of the unit's parameters, by index. Raises ShardingError for a value of another shape.
    """
    state, parts = UnitState(), parts_of(unit)
    wanted: list[tuple[int, str]] = []
    values: list[Any] = []
    for index, name in names.items():
        if name not in source:
            continue
        state.locals[index], state.others[index] = {}, {}
        for key, value in source[name].items():
            if not isinstance(value, (torch.Tensor, ShardedTensor)) or len(value.size()) == 0:
                state.others[index][key] = copied(value)
                continue
            expected = parts.placed(index).shape
            if tuple(value.size()) != expected:
                raise ShardingError(
                    f"{name}: the state {key!r} has shape {tuple(value.size())}, but the parameter "
                    f"has {expected}. Load a state dict of this model."
                )
            wanted.append((index, key))
            values.append(value)
    locals_ = locals_of(unit, [index for index, _ in wanted], values)
    for (index, key), local in zip(wanted, locals_, strict=True):
        # Optimizers write to what they load, and steps over all tensors want it contiguous.
        state.locals[index][key] = local.clone(memory_format=torch.contiguous_format)
    return state


def put_together(entry: Trained, state: UnitState) -> dict[str, Any]:
    """Return the state that the optimizer takes for one parameter that it trains.

    Empty if this rank owns nothing of it, as optimizers keep no state of empty parameters. For a
    flat parameter, raises ShardingError if the parameters in it have different kinds of state.
    """
    assert entry.unit is not None
    parts = parts_of(entry.unit)
    if entry.unit.flat_parameter is None:
        (index,) = entry.indices
        if entry.unit.is_flat and parts.local(index).numel() == 0:
            return {}
        own = {name: parts.as_shown(index, t) for name, t in state.locals[index].items()}
        return {**state.others[index], **own}
    result: dict[str, Any] = {}
    present = [index for index in entry.indices if index in state.locals]
    for name in dict.fromkeys(n for index in present for n in state.others[index]):
        found = [state.others.get(index, {}).get(name) for index in entry.indices]
        _check_same(found, entry, name)
        result[name] = found[0]
    for name in dict.fromkeys(n for index in present for n in state.locals[index]):
        tensors = [state.locals.get(index, {}).get(name) for index in entry.indices]
        if any(tensor is None for tensor in tensors):
            lacking = [n for n, t in zip(entry.names, tensors, strict=True) if t is None]
            raise ShardingError(
                f"{', '.join(lacking)}: no state {name!r}, but other parameters of the same flat "
                "parameter have it. Load the state of all of them, or of none."
            )
        dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
        if len(dtypes) > 1:
            raise ShardingError(
                f"{', '.join(entry.names)}: the states {name!r} are of different dtypes, {dtypes}, "
                "but belong to one flat parameter."
            )
        locals_ = {index: state.locals[index][name] for index in entry.indices}
        result[name] = parts.joined(locals_, dtypes.pop())
    return result


def _check_same(values: Sequence[Any], entry: Trained, name: str) -> None:
    first = values[0]
    for value in values[1:]:
        same = (
            torch.equal(value.cpu(), first.cpu())
            if isinstance(first, torch.Tensor) and isinstance(value, torch.Tensor)
            else value == first
        )
        if not same:
            raise ShardingError(
                "All unflattened parameters comprising a single flat parameter must have scalar "
                f"state with the same value and dtype, but {name!r} of {', '.join(entry.names)} are "
                f"{values}. Pass use_orig_params=True to keep them apart."
            )


def copied(value: Any) -> Any:
    """Return a copy: the parameters inside one flat parameter must not share its step counter."""
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
