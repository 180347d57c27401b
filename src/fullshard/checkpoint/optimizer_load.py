"""Load one optimizer's state into its own memory: what of it fits, where it goes, and its assignment.

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
from fullshard.state.first_state import device_of_state, first_state
from fullshard.state.holdings import Holding, tensor_holding, unit_holding
from fullshard.state.optim_keys import Trained
from fullshard.state.optim_units import UnitState, copied, put_together, take_apart
from fullshard.state.unit_parts import UnitParts, parts_of


class OptimizerLoad:
    """One optimizer whose state is loaded.

    state: of the files; its tensors have names SECTION/PARAMETER/STATE. trained: what the optimizer's parameters
    stand for. converted: names of parameters that have another dtype here than in the files, as their state has then.

    holdings: memory to read into, by names of the parameter and of the state. problems: what does not fit.
    notes: what a reader of a log should know.
    """

    def __init__(
        self,
        state: SavedState,
        section: str,
        optimizer: torch.optim.Optimizer,
        trained: Mapping[nn.Parameter, Trained],
        converted: Collection[str],
    ) -> None:
        self._optimizer, self._trained, self._converted = optimizer, trained, converted
        self._section, self._prefix = section, f"{section}/"
        self._places = {
            parameter: (number, position)
            for number, group in enumerate(optimizer.param_groups)
            for position, parameter in enumerate(group["params"])
        }
        # What units' parameters get, by id of the unit.
        self._units: dict[int, tuple[UnitState, UnitParts]] = {}
        self._plain: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        # State that says itself how it is divided, of parameters of units.
        self._apart: dict[nn.Parameter, dict[str, torch.Tensor]] = {}
        self._kept: set[nn.Parameter] = set()  # whose state is read into as it is
        self._first: dict[nn.Parameter, dict[str, Any]] = {}
        # By parameter, what the files lack of its state, as the optimizer begins with it.
        self._lacking: dict[str, dict[str, Any]] = {}
        self._saved = {
            name[len(self._prefix) :]: tensor
            for name, tensor in state.tensors.items()
            if name.startswith(self._prefix)
        }
        self.holdings: dict[tuple[str, str], Holding] = {}
        self.problems: list[str] = []
        self.notes: list[str] = []
        keys: dict[str, list[str]] = {}
        for full_name in self._saved:
            name, _, key = full_name.rpartition("/")
            keys.setdefault(name, []).append(key)
        values = state.values.get("optimizers", {}).get(section)
        if values is not None and not self._compare(values, keys):
            return
        for parameter in parameters_of(optimizer):
            entry = trained[parameter]
            if entry.unit is None:
                self._prepare_plain(parameter, entry.names[0], keys.get(entry.names[0], ()))
            else:
                wanted = {name: keys.get(name, ()) for name in entry.names}
                self._prepare(parameter, entry, wanted)

    def _compare(self, values: Mapping[str, Any], tensor_keys: Mapping[str, Sequence[str]]) -> bool:
        """Compare groups and kinds of state; return whether it is state of this class of optimizers at all."""
        scalars, groups = values["scalars"], values["groups"]
        keys = {
            name: {*scalars.get(name, ()), *tensor_keys.get(name, ())}
            for name in (*scalars, *tensor_keys)
        }
        if kinds := self._other_class(values.get("class"), set().union(*keys.values())):
            self.problems.append(f"class {self._section}: {kinds}")
            return False
        self.problems += self._of_groups(groups)
        self._find_lacking(keys, groups)
        self.problems += (
            f"missing {self._prefix}{name}/{key}"
            for name, own in self._lacking.items()
            for key in own
        )
        if values.get("class") is None:
            self._note_without_state(keys)
        return True

    def _other_class(self, saved: str | None, keys: set[str]) -> str:
        """Return how the saved optimizer differs from this one in its class; "" if it does not.

        saved: its class; None in files of others, where the keys of its state have to be the same.
        """
        if saved is not None:
            own = kind_of(self._optimizer)
            return f"{saved} in the checkpoint, {own} here" if saved != own else ""
        own_keys = state_keys(self._optimizer)
        if keys and own_keys and keys != own_keys:
            return f"{sorted(keys)} in the checkpoint, {sorted(own_keys)} here"
        return ""

    def _of_groups(self, saved: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """Yield problems of parameter groups: each has to get one set of options, and its own.

        Parameters of a saved group that are in several groups here would all get the options that were saved,
        whatever they were divided for.
        """
        options = {
            name: sorted(group["options"].items()) for group in saved for name in group["params"]
        }
        numbers: dict[str, int] = {}
        for number, own in enumerate(self._optimizer.param_groups):
            names = [name for p in own["params"] for name in self._trained[p].names]
            numbers.update(dict.fromkeys(names, number))
            yield from (f"missing {self._prefix}{name}" for name in names if name not in options)
            if len({repr(options[name]) for name in names if name in options}) > 1:
                yield f"groups {self._section}: {names[0]} and others of its group"
        for group in saved:
            if names := parted(group["params"], numbers):
                yield f"groups {self._section}: {' and '.join(names)}"

    def _find_lacking(
        self, keys: Mapping[str, Collection[str]], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Find what the files lack of a parameter's state. keys: what they have, by parameter.

        Only where they have a part of it, and more of another parameter: some optimizers keep different state for
        different parameters, so each such case is asked about.
        """
        complete: set[tuple[int, int, frozenset[str]]] = set()  # cases, as a step may take time
        most = set().union(*keys.values())
        # Options that are encoded (tuples, tensors) do not decide on what is kept.
        options = {
            name: {k: v for k, v in group["options"].items() if not isinstance(v, dict | list)}
            for group in groups
            for name in group["params"]
        }
        for parameter, (number, position) in self._places.items():
            for name in self._trained[parameter].names:
                own = frozenset(keys.get(name, ()))
                case = number, parameter.dim(), own
                if not own or most <= own or case in complete or name not in options:
                    continue
                try:
                    first = first_state(self._optimizer, number, position, options[name])
                except StateError:
                    continue
                left = {key: value for key, value in first.items() if key not in own}
                if left:
                    self._lacking[name] = left
                else:
                    complete.add(case)

    def _note_without_state(self, keys: Mapping[str, Collection[str]]) -> None:
        """Note it if files of others have no state of some trained parameters.

        That may be as it should: parameters that got no gradient have none.
        """
        names = [
            name
            for parameter in self._places
            if parameter.requires_grad
            for name in self._trained[parameter].names
            if not keys.get(name)
        ]
        if names and (any(keys.values()) or state_keys(self._optimizer)):
            self.notes.append(
                f"the files have no {self._section} state of {len(names)} trained parameters, the first "
                f"{names[0]}; it begins anew"
            )

    def _prepare(
        self, parameter: nn.Parameter, entry: Trained, wanted: Mapping[str, Sequence[str]]
    ) -> None:
        """Find memory for the state of a parameter of a unit. wanted: keys of tensors, by name."""
        unit = entry.unit
        assert unit is not None
        there = UnitState()
        own = self._optimizer.state.get(parameter)
        if own:
            take_apart(entry, {k: v for k, v in own.items() if not is_apart(v, parameter)}, there)
        if id(unit) not in self._units:
            self._units[id(unit)] = UnitState(), parts_of(unit)
        state, parts = self._units[id(unit)]
        kinds = {frozenset(keys) for keys in wanted.values()}
        if unit.flat_parameter is not None and len(kinds) > 1:
            lacking = [name for name, keys in wanted.items() if not keys] or list(wanted)
            self.problems += [f"flat {self._prefix}{name}" for name in lacking]
            return
        is_kept = bool(own)
        for index, name in zip(entry.indices, entry.names, strict=True):
            state.locals[index], state.others[index] = {}, {}
            for key in wanted[name]:
                dtype = self._dtype_of(parameter, name, key)
                shape = self._saved[f"{name}/{key}"].shape
                full_name = f"{self._prefix}{name}/{key}"
                if shape != parts.placed(index).shape:
                    value = self._made_by_optimizer(parameter, key)
                    if isinstance(value, DTensor) and (value.shape, value.dtype) == (shape, dtype):
                        self.holdings[name, key] = tensor_holding(full_name, value)
                        self._apart.setdefault(parameter, {})[key] = value
                    else:
                        self._refuse(full_name, shape, value)
                    continue
                local = there.locals.get(index, {}).get(key)
                if local is None or local.dtype != dtype:
                    is_kept = False
                    local = parts.new_local(
                        index, dtype, device_of_state(self._optimizer, parameter)
                    )
                local = parts.as_local(index, local)
                state.locals[index][key] = local
                self.holdings[name, key] = unit_holding(parts, index, (full_name,), local)
            if set(there.locals.get(index, {})) != set(state.locals[index]):
                is_kept = False
        if is_kept:
            self._kept.add(parameter)

    def _prepare_plain(self, parameter: nn.Parameter, name: str, wanted: Sequence[str]) -> None:
        """Make memory for the state of a parameter that is not sharded."""
        state = self._plain[parameter] = {}
        for key in wanted:
            shape, dtype = self._saved[f"{name}/{key}"].shape, self._dtype_of(parameter, name, key)
            full_name = f"{self._prefix}{name}/{key}"
            if shape == tuple(parameter.shape):
                state[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
            else:
                value = self._made_by_optimizer(parameter, key)
                if value is not None and tuple(value.shape) != shape:
                    self._refuse(full_name, shape, value)
                    continue
                state[key] = torch.empty(shape, dtype=dtype, device=parameter.device)
            self.holdings[name, key] = tensor_holding(full_name, state[key])

    def _refuse(self, name: str, shape: tuple[int, ...], value: torch.Tensor | None) -> None:
        own = "" if value is None else f", {tuple(value.shape)} here"
        self.problems.append(f"mismatched {name}: {shape} in the checkpoint{own}")

    def _dtype_of(self, parameter: nn.Parameter, name: str, key: str) -> torch.dtype:
        """Return the dtype in which a state is loaded: as it was saved, unless the parameter's differs."""
        saved = self._saved[f"{name}/{key}"].dtype
        if name not in self._converted or not saved.is_floating_point:
            return saved
        made = self._made_by_optimizer(parameter, key)
        return parameter.dtype if made is None else made.dtype

    def _made_by_optimizer(self, parameter: nn.Parameter, key: str) -> torch.Tensor | None:
        """Return a state as the optimizer has made it, or would in its first step; None if nobody can tell."""
        own: Any = self._optimizer.state.get(parameter)
        if not own:
            if parameter not in self._first:
                try:
                    self._first[parameter] = first_state(self._optimizer, *self._places[parameter])
                except StateError:
                    self._first[parameter] = {}
            own = self._first[parameter]
        value = own.get(key)
        return value if isinstance(value, torch.Tensor) else None

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
            values = {key: copied(value) for key, value in scalars.get(name, {}).items()}
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
            unit_state, _ = self._units[id(entry.unit)]
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


def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, torch.Tensor) and isinstance(value, torch.Tensor):
        current.copy_(value)  # a compiled step reads this tensor
    else:
        group[key] = value
