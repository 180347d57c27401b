"""Loading an optimizer's state: into its own memory (`Destination`), and what of it does not fit (`plan_optimizer`).

State that the optimizer has not made yet is made first, in the dtypes of the checkpoint, so moments are never
dropped. Problems are in the words of `fit`. Planning changes no value.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.optimizer import (
    is_apart,
    kind_of,
    options_of_empty,
    parameters_of,
    parted,
    state_keys,
)
from fullshard.checkpoint.read import SavedState
from fullshard.errors import StateError
from fullshard.state.first_state import first_state
from fullshard.state.holdings import Holding, tensor_holding, unit_holding
from fullshard.state.optim_keys import Trained
from fullshard.state.optim_units import UnitState, put_together, take_apart
from fullshard.state.unit_parts import UnitParts, parts_of

# Shape and dtype of each tensor state in a checkpoint, by name of the parameter and of the state.
SavedTensors = Mapping[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]


class Destination:
    """An optimizer whose state is loaded: memory for it, and its assignment once values are there.

    saved: what there is to load. lacking: by parameter, what there is not of its state, as the optimizer
    begins with it. converted: names of parameters that have another dtype here, as their state has then.
    problems: what of the state does not fit, in the words of `fit`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[nn.Parameter, Trained],
        saved: SavedTensors,
        prefix: str,
        *,
        lacking: Mapping[str, Mapping[str, Any]] | None = None,
        converted: Collection[str] = (),
    ) -> None:
        self._optimizer = optimizer
        self._trained = trained
        self._lacking, self._converted = lacking or {}, converted
        self._units: dict[int, UnitState] = {}
        self._parts: dict[int, UnitParts] = {}
        self._plain: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        # State that says itself how it is divided, of parameters of units.
        self._apart: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        self._kept: set[nn.Parameter] = set()
        self._first: dict[nn.Parameter, dict[str, Any]] = {}
        self.holdings: dict[tuple[str, str], Holding] = {}
        self.problems: list[str] = []
        keys: dict[str, list[str]] = {}
        for name, key in saved:
            keys.setdefault(name, []).append(key)
        for parameter in parameters_of(optimizer):
            entry = trained[parameter]
            wanted = {name: keys.get(name, ()) for name in entry.names}
            if entry.unit is None:
                self._prepare_plain(parameter, entry, wanted[entry.names[0]], saved, prefix)
            else:
                self._prepare(parameter, entry, wanted, saved, prefix)

    def _prepare(
        self,
        parameter: nn.Parameter,
        entry: Trained,
        wanted: Mapping[str, Sequence[str]],
        saved: SavedTensors,
        prefix: str,
    ) -> None:
        unit = entry.unit
        assert unit is not None
        there = UnitState()
        own = self._optimizer.state.get(parameter)
        if own:
            take_apart(entry, {k: v for k, v in own.items() if not is_apart(v, parameter)}, there)
        if id(unit) not in self._units:
            self._units[id(unit)], self._parts[id(unit)] = UnitState(), parts_of(unit)
        state, parts = self._units[id(unit)], self._parts[id(unit)]
        kinds = {frozenset(keys) for keys in wanted.values()}
        if unit.flat_parameter is not None and len(kinds) > 1:
            lacking = [name for name, keys in wanted.items() if not keys] or list(wanted)
            self.problems += [f"flat {prefix}{name}" for name in lacking]
            return
        is_kept = bool(own)
        for index, name in zip(entry.indices, entry.names, strict=True):
            state.locals[index], state.others[index] = {}, {}
            for key in wanted[name]:
                shape, dtype = saved[name, key]
                dtype = self._dtype_of(parameter, name, key, dtype)
                if shape != parts.placed(index).shape:
                    value = self._made_by_optimizer(parameter, key)
                    full_name = f"{prefix}{name}/{key}"
                    if isinstance(value, DTensor) and _is_like(value, shape, dtype):
                        self.holdings[name, key] = tensor_holding(full_name, value)
                        self._apart.setdefault(parameter, {})[key] = value
                    else:
                        self.problems.append(_mismatch(full_name, shape, value))
                    continue
                local = there.locals.get(index, {}).get(key)
                if local is None or local.dtype != dtype:
                    is_kept = False
                    local = parts.new_local(index, dtype, parts.local(index).device)
                local = parts.as_local(index, local)
                state.locals[index][key] = local
                names = (f"{prefix}{name}/{key}",)
                self.holdings[name, key] = unit_holding(parts, index, names, local)
            if set(there.locals.get(index, {})) != set(state.locals[index]):
                is_kept = False
        if is_kept:
            self._kept.add(parameter)

    def _prepare_plain(
        self,
        parameter: nn.Parameter,
        entry: Trained,
        wanted: Sequence[str],
        saved: SavedTensors,
        prefix: str,
    ) -> None:
        (name,) = entry.names
        state = self._plain[parameter] = {}
        for key in wanted:
            shape, dtype = saved[name, key]
            dtype = self._dtype_of(parameter, name, key, dtype)
            if shape == tuple(parameter.shape):
                state[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = self._made_by_optimizer(parameter, key)
                if value is not None and tuple(value.shape) != shape:
                    self.problems.append(_mismatch(f"{prefix}{name}/{key}", shape, value))
                    continue
                state[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
            self.holdings[name, key] = tensor_holding(f"{prefix}{name}/{key}", state[key])

    def _dtype_of(
        self, parameter: nn.Parameter, name: str, key: str, saved: torch.dtype
    ) -> torch.dtype:
        """Return the dtype in which a state is loaded: as it was saved, unless the parameter's differs."""
        if name not in self._converted or not saved.is_floating_point:
            return saved
        made = self._made_by_optimizer(parameter, key)
        return parameter.dtype if made is None else made.dtype

    def _made_by_optimizer(self, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
        """Return a state as the optimizer has made it, or would in its first step; None if nobody can tell."""
        own: Any = self._optimizer.state.get(parameter)
        if not own:
            if parameter not in self._first:
                self._first[parameter] = self._first_state(parameter)
            own = self._first[parameter]
        value = own.get(key)
        return value if isinstance(value, torch.Tensor) else None

    def _first_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        for number, group in enumerate(self._optimizer.param_groups):
            for position, each in enumerate(group["params"]):
                if each is parameter:
                    try:
                        return first_state(self._optimizer, number, position)
                    except StateError:
                        return {}
        return {}

    @torch.no_grad()
    def assign(
        self,
        scalars: Mapping[str, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        rank: int,
    ) -> None:
        """Give the optimizer the state whose tensors have been read, and the options of its groups."""
        options = {name: each["options"] for each in groups for name in each["params"]}
        for number, group in enumerate(self._optimizer.param_groups):
            names = [name for p in group["params"] for name in self._trained[p].names]
            if names:
                known = next((name for name in names if name in options), None)
                own = options.get(known, {})
            else:
                own = options_of_empty(groups, rank, number)
            for key, value in own.items():
                _set_option(group, key, value)
            for parameter in group["params"]:
                self._assign(parameter, scalars, group)

    def _assign(
        self, parameter: nn.Parameter, scalars: Mapping[str, Mapping[str, Any]], group: Any
    ) -> None:
        entry = self._trained[parameter]
        on_device = group.get("capturable") or group.get("fused")

        def own(name: str) -> dict[str, Any]:
            values = {key: _copied(value) for key, value in scalars.get(name, {}).items()}
            step = values.get("step")
            if on_device and isinstance(step, torch.Tensor):
                values["step"] = step.to(parameter.device, torch.float32)
            return values

        state: dict[str, Any]
        if entry.unit is None:
            state = {**own(entry.names[0]), **self._plain[parameter]}
        elif parameter in self._kept:
            self._optimizer.state[parameter].update(own(entry.names[0]))
            return
        else:
            unit_state = self._units[id(entry.unit)]
            for index, name in zip(entry.indices, entry.names, strict=True):
                unit_state.others[index] = own(name)
            state = {**put_together(entry, unit_state), **self._apart.get(parameter, {})}
        before = self._optimizer.state.get(parameter, {})
        for name in entry.names:
            for key, value in self._lacking.get(name, {}).items():
                state[key] = before.get(key, value)
        if state:
            self._optimizer.state[parameter] = state
        else:
            self._optimizer.state.pop(parameter, None)


def _is_like(value: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tuple(value.shape) == shape and value.dtype == dtype


def _mismatch(name: str, shape: tuple[int, ...], value: torch.Tensor | None) -> str:
    own = "" if value is None else f", {tuple(value.shape)} here"
    return f"mismatched {name}: {shape} in the checkpoint{own}"


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        current.copy_(value)  # a compiled step reads this tensor
    else:
        group[key] = value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


# What is taken, and what does not fit


def plan_optimizer(
    state: SavedState,
    section: str,
    optimizer: torch.optim.Optimizer,
    trained: Mapping[nn.Parameter, Trained],
    converted: Collection[str],
) -> tuple[Destination, list[str], list[str]]:
    """Return memory for one optimizer's state, what of it does not fit, and notes.

    trained: what its parameters stand for. converted: names of parameters whose dtype differs from that
    in the files.
    """
    prefix = f"{section}/"
    saved = {}
    for name, tensor in state.tensors.items():
        if name.startswith(prefix):
            parameter, _, key = name[len(prefix) :].rpartition("/")
            saved[parameter, key] = (tensor.shape, tensor.dtype)
    values = state.values.get("optimizers", {}).get(section)
    problems: list[str] = []
    lacking: Mapping[str, Mapping[str, Any]] = {}
    notes: list[str] = []
    if values is not None:
        keys: dict[str, set[str]] = {name: set(own) for name, own in values["scalars"].items()}
        for name, key in saved:
            keys.setdefault(name, set()).add(key)
        if kinds := _other_class(values.get("class"), set().union(*keys.values()), optimizer):
            return Destination(optimizer, trained, {}, prefix), [f"class {section}: {kinds}"], []
        problems += _of_groups(section, values["groups"], optimizer, trained)
        lacking = _lacking(keys, values["groups"], optimizer, trained)
        problems += (
            f"missing {prefix}{name}/{key}" for name, own in lacking.items() for key in own
        )
        if values.get("class") is None:
            notes = _without_state(section, keys, optimizer, trained)
    destination = Destination(
        optimizer, trained, saved, prefix, lacking=lacking, converted=converted
    )
    return destination, [*problems, *destination.problems], notes


def _lacking(
    keys: Mapping[str, Collection[str]],
    groups: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    trained: Mapping[nn.Parameter, Trained],
) -> dict[str, dict[str, Any]]:
    """Return what the files lack of a parameter's state, as the optimizer begins with it.

    keys: what they have, by parameter. Only where they have a part of it, and more of another parameter:
    some optimizers keep different state for different parameters, so each such case is asked about.
    """
    lacking: dict[str, dict[str, Any]] = {}
    complete: set[tuple[int, int, frozenset[str]]] = set()  # cases, as a step may take time
    most = set().union(*keys.values())
    # Options that are encoded (tuples, tensors) do not decide on what is kept.
    options = {
        name: {k: v for k, v in group["options"].items() if not isinstance(v, dict | list)}
        for group in groups
        for name in group["params"]
    }
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            for name in trained[parameter].names:
                own = frozenset(keys.get(name, ()))
                case = number, parameter.dim(), own
                if not own or most <= own or case in complete or name not in options:
                    continue
                try:
                    first = first_state(optimizer, number, position, options[name])
                except StateError:
                    continue
                left = {key: value for key, value in first.items() if key not in own}
                if left:
                    lacking[name] = left
                else:
                    complete.add(case)
    return lacking


def _without_state(
    section: str,
    keys: Mapping[str, Collection[str]],
    optimizer: torch.optim.Optimizer,
    trained: Mapping[nn.Parameter, Trained],
) -> list[str]:
    """Return a note if files of others have no state of some trained parameters.

    That may be as it should: parameters that got no gradient have none.
    """
    names = [
        name
        for parameter in parameters_of(optimizer)
        if parameter.requires_grad
        for name in trained[parameter].names
        if not keys.get(name)
    ]
    if not names or not (any(keys.values()) or state_keys(optimizer)):
        return []
    return [
        f"the files have no {section} state of {len(names)} trained parameters, the first {names[0]}; "
        "it begins anew"
    ]


def _other_class(saved: str | None, keys: set[str], optimizer: torch.optim.Optimizer) -> str:
    """Return how the saved optimizer differs from this one in its class; "" if it does not.

    saved: its class; None in files of others, where the keys of its state have to be the same.
    """
    if saved is not None:
        own = kind_of(optimizer)
        return f"{saved} in the checkpoint, {own} here" if saved != own else ""
    own_keys = state_keys(optimizer)
    if keys and own_keys and keys != own_keys:
        return f"{sorted(keys)} in the checkpoint, {sorted(own_keys)} here"
    return ""


def _of_groups(
    section: str,
    saved: Sequence[Mapping[str, Any]],
    optimizer: torch.optim.Optimizer,
    trained: Mapping[nn.Parameter, Trained],
) -> Iterator[str]:
    """Yield problems of parameter groups: each has to get one set of options, and its own.

    Parameters of a saved group that are in several groups here would all get the options that were saved,
    whatever they were divided for.
    """
    options = {
        name: sorted(group["options"].items()) for group in saved for name in group["params"]
    }
    numbers: dict[str, int] = {}
    for number, own in enumerate(optimizer.param_groups):
        names = [name for p in own["params"] for name in trained[p].names]
        numbers.update(dict.fromkeys(names, number))
        yield from (f"missing {section}/{name}" for name in names if name not in options)
        if len({repr(options[name]) for name in names if name in options}) > 1:
            yield f"groups {section}: {names[0]} and others of its group"
    for group in saved:
        if names := parted(group["params"], numbers):
            yield f"groups {section}: {' and '.join(names)}"
