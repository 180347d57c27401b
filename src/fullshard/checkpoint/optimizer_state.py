"""Optimizer state for checkpoints: what each rank holds of it, by the names of the parameters.

A tensor of the parameter's size is divided as the parameter is. Whatever else an optimizer keeps, such
as step counters, is a value. Both are read from the optimizer's own memory, and loaded into it: state
that it has not made yet is made first, in the dtypes of the checkpoint, so moments are never dropped.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.plan.units import without_compile
from fullshard.state.agreement import Digests, Report, agree, digests_of, merged_alone
from fullshard.state.first_state import first_state
from fullshard.state.holdings import (
    Holding,
    UnitParts,
    parts_of,
    tensor_holding,
    whole_shape,
)
from fullshard.state.optim_keys import Trained, names_of_trained, trained_parameters, units_of
from fullshard.state.optim_units import UnitState, put_together, report, take_apart

Scalars = dict[str, dict[str, Any]]  # by name of the parameter, by name of the state


# Shape and dtype of each tensor state in a checkpoint, by name of the parameter and of the state.
SavedTensors = Mapping[tuple[str, str], tuple[tuple[int, ...], torch.dtype]]


@dataclasses.dataclass(slots=True)
class OptimizerState:
    """This rank's state of one optimizer.

    tensors: by name of the parameter and of the state. scalars: everything else, alike on all ranks.
    groups: the options of each parameter group, with the names of its parameters.
    kind: the optimizer's class, see `kind_of`.
    """

    tensors: dict[tuple[str, str], Holding]
    scalars: Scalars
    groups: list[dict[str, Any]]
    kind: str


@dataclasses.dataclass(slots=True)
class LocalState:
    """What this rank alone knows of an optimizer's state.

    units: by unit, its state and the names of its parameters. tensors, scalars: of what is not sharded.
    """

    units: Sequence[tuple[Unit, UnitState, Mapping[int, str]]]
    tensors: dict[tuple[str, str], Holding]
    scalars: Scalars
    groups: list[dict[str, Any]]
    kind: str

    def reports(self) -> list[Report]:
        """Return the state of each unit, as ranks compare it."""
        return [report(unit, state) for unit, state, _ in self.units]

    def digest(self) -> Digests:
        """Return what ranks have alike that have the same kinds of state of the same parameters."""
        return digests_of(self.reports(), [own for _, _, own in self.units])


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, which decides what its state means.

    A class that something has put over another one under the same name, as `step_on_shards` and
    schedulers of libraries do, counts as that one.
    """
    return type(optimizer).__name__


def state_keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return what an optimizer keeps of a parameter: {"step", "exp_avg", "exp_avg_sq"}.

    Empty if that is nothing, or cannot be known before its first step.
    """
    if optimizer.state:
        return {key for own in optimizer.state.values() for key in own}
    for number, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            if parameter.numel():
                try:
                    return set(first_state(optimizer, number, position))
                except StateError:
                    return set()
    return set()


def local_state(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[nn.Parameter, Trained],
    models: Sequence[nn.Module],
    prefix: str,
) -> LocalState:
    """Return what this rank has of an optimizer's state, without communication.

    prefix: of the tensors' names. Raises StateError for state that is neither of its parameter's size
    nor a value.
    """
    check_trained(optimizer, trained)
    names = names_of_trained(trained)
    units = [unit for model in models for unit in units_of(model)]
    states = {id(unit): UnitState() for unit in units}
    tensors: dict[tuple[str, str], Holding] = {}
    scalars: Scalars = {}
    for parameter in _parameters(optimizer):
        own = optimizer.state.get(parameter)
        if not own:
            continue
        entry = trained[parameter]
        for key in own:
            if not isinstance(key, str) or not key or "/" in key:
                raise StateError(
                    f"{prefix}{entry.names[0]}: {kind_of(optimizer)} keeps state under {key!r}. A checkpoint "
                    "has names that are strings without slashes: keep it under one."
                )
        if entry.unit is not None:
            # A DTensor of another shape than its parameter's says itself how it is divided.
            apart = {k: v for k, v in own.items() if _is_apart(v, parameter)}
            tensors.update(_of_plain(entry.names[0], apart, prefix))
            rest = {key: value for key, value in own.items() if key not in apart}
            take_apart(entry, rest, states[id(entry.unit)])
            continue
        name = entry.names[0]
        tensors.update(_of_plain(name, {k: v for k, v in own.items() if _is_tensor(v)}, prefix))
        scalars[name] = {key: value for key, value in own.items() if not _is_tensor(value)}
    of_units = [(unit, states[id(unit)], names.get(id(unit), {})) for unit in units]
    return LocalState(of_units, tensors, scalars, _groups(optimizer, trained), kind_of(optimizer))


def agreed_state(
    local: LocalState,
    prefix: str,
    group: dist.ProcessGroup | None,
    digests: Sequence[Digests],
) -> OptimizerState:
    """Return a rank's state with what others have of the same parameters. Collective.

    digests: of all ranks' `LocalState`; if they are equal, nothing is sent.

    Raises StateError where ranks that have parts of a parameter differ in what state they have.
    """
    tensors, scalars = dict(local.tensors), dict(local.scalars)
    reports = local.reports()
    names = [own for _, _, own in local.units]
    found = merged_alone(reports) if group is None else agree(reports, names, group, digests)
    for (unit, state, own_names), agreed in zip(local.units, found, strict=True):
        parts = parts_of(unit)
        for index, kinds in agreed.kinds.items():
            name = own_names[index]
            scalars[name] = dict(agreed.others.get(index, {}))
            for key, dtype in kinds.items():
                if dtype is not None:
                    own = state.locals.get(index, {}).get(key)
                    full_name = f"{prefix}{name}/{key}"
                    tensors[name, key] = _of_local(unit, parts, index, full_name, own, dtype)
    return OptimizerState(tensors, scalars, local.groups, local.kind)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_trained(
    optimizer: torch.optim.Optimizer, trained: Mapping[nn.Parameter, Trained]
) -> None:
    """Raise StateError if an optimizer trains what is no parameter of the models."""
    strays = [p for p in _parameters(optimizer) if p not in trained]
    if strays:
        raise StateError(
            f"{type(optimizer).__name__} trains {len(strays)} parameters that the model does not have, "
            f"the first of shape {tuple(strays[0].shape)}. Make the optimizer after sharding, from "
            "model.parameters(), or pass the models of all its parameters."
        )


def _groups(
    optimizer: torch.optim.Optimizer, trained: Mapping[nn.Parameter, Trained]
) -> list[dict[str, Any]]:
    return [
        {
            "params": [name for p in group["params"] for name in trained[p].names],
            "options": {key: value for key, value in group.items() if key not in _NOT_OPTIONS},
        }
        for group in optimizer.param_groups
    ]


_NOT_OPTIONS = ("params", "param_names")


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _is_apart(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, DTensor) and value.dim() > 0 and value.shape != parameter.shape


def _of_plain(
    name: str, tensors: Mapping[str, torch.Tensor], prefix: str
) -> Iterator[tuple[tuple[str, str], Holding]]:
    for key, value in tensors.items():
        yield (name, key), tensor_holding(f"{prefix}{name}/{key}", value)


def _of_local(
    unit: Unit,
    parts: UnitParts,
    index: int,
    name: str,
    local: torch.Tensor | None,
    dtype: torch.dtype,
) -> Holding:
    copy, copies = parts.copies(index)
    if local is None:  # this rank owns nothing of it
        local = torch.empty(unit.params[index].shard_shape, dtype=dtype)
    if type(local) is not torch.Tensor:
        raise StateError(
            f"{name}: the optimizer's state is a {type(local).__name__}, which keeps its values in "
            "several tensors. Save it through torch.distributed.checkpoint."
        )
    param = unit.params[index]
    return Holding(
        (name,),
        whole_shape(param),
        dtype,
        parts.boxes(index, local),
        "as its parameter",
        copy,
        copies,
    )


# Loading


class Destination:
    """An optimizer whose state is loaded: memory for it, and its assignment once values are there.

    problems: what of the state does not fit, in the words of `loading`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[nn.Parameter, Trained],
        saved: SavedTensors,
        prefix: str,
    ) -> None:
        self._optimizer = optimizer
        self._trained = trained
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
        for parameter in _parameters(optimizer):
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
            take_apart(entry, {k: v for k, v in own.items() if not _is_apart(v, parameter)}, there)
        if id(unit) not in self._units:
            self._units[id(unit)], self._parts[id(unit)] = UnitState(), parts_of(unit)
        state = self._units[id(unit)]
        if unit.params.flat is not None and len({frozenset(keys) for keys in wanted.values()}) > 1:
            lacking = [name for name, keys in wanted.items() if not keys] or list(wanted)
            self.problems += [f"flat {prefix}{name}" for name in lacking]
            return
        is_kept = bool(own)
        for index, name in zip(entry.indices, entry.names, strict=True):
            param = unit.params[index]
            state.locals[index], state.others[index] = {}, {}
            for key in wanted[name]:
                shape, dtype = saved[name, key]
                if shape != whole_shape(param):
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
                    local = torch.empty(param.shard_shape, dtype=dtype, device=param.local.device)
                elif local.numel() == 0:
                    local = local.view(param.shard_shape)
                state.locals[index][key] = local.view(param.shard_shape)
                self.holdings[name, key] = Holding(
                    (f"{prefix}{name}/{key}",),
                    whole_shape(param),
                    dtype,
                    self._parts[id(unit)].boxes(index, local),
                    "",
                )
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
            if shape == tuple(parameter.shape):
                state[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = self._made_by_optimizer(parameter, key)
                if value is not None and tuple(value.shape) != shape:
                    self.problems.append(_mismatch(f"{prefix}{name}/{key}", shape, value))
                    continue
                state[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
            self.holdings[name, key] = tensor_holding(f"{prefix}{name}/{key}", state[key])

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
        self, scalars: Mapping[str, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Give the optimizer the state whose tensors have been read, and the options of its groups."""
        options = {name: each["options"] for each in groups for name in each["params"]}
        for number, group in enumerate(self._optimizer.param_groups):
            names = [name for p in group["params"] for name in self._trained[p].names]
            known = next((name for name in names if name in options), None)
            own = options.get(known, {})
            if not names and number < len(groups) and not groups[number]["params"]:
                own = groups[number]["options"]  # of a group without parameters, by its place
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


class TrainedBy:
    """What each parameter stands for that optimizers of some models may train.

    models: by section. Of an optimizer that trains several of them, names of parameters begin with the
    model's key if they would not be different otherwise: "actor.0.weight".
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        self._by_section = {section: _clean_trained(model) for section, model in models.items()}

    def of(self, optimizer: torch.optim.Optimizer) -> Mapping[nn.Parameter, Trained]:
        """Return it for the parameters of an optimizer, and for those of the models beside them."""
        parameters = {*_parameters(optimizer)}
        sections = [own for own in self._by_section.values() if parameters & own.keys()]
        joined: dict[nn.Parameter, Trained] = {}
        for own in self._by_section.values():
            joined = {
                **own,
                **joined,
            }  # of a parameter that several models have, the first one's name
        trained = [name for p in parameters if p in joined for name in joined[p].names]
        if len(sections) < 2 or len({*trained}) == len(trained):
            return joined
        qualified: dict[nn.Parameter, Trained] = {}
        for section, own in self._by_section.items():
            key = section.partition(".")[2]
            for parameter, entry in own.items():
                names = tuple(f"{key}.{name}" for name in entry.names)
                qualified.setdefault(parameter, dataclasses.replace(entry, names=names))
        return qualified


def _clean_trained(model: nn.Module) -> dict[nn.Parameter, Trained]:
    return {
        parameter: dataclasses.replace(entry, names=tuple(map(without_compile, entry.names)))
        for parameter, entry in trained_parameters(model).items()
    }
