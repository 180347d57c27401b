"""Optimizer state for checkpoints: what each rank holds of it, by the names of the parameters.

A tensor of the parameter's size is divided as the parameter is. Whatever else an optimizer keeps, such
as step counters, is a value. Both are read from the optimizer's own memory.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.checkpoint.values import encoded
from fullshard.engine.unit import Unit
from fullshard.errors import CheckpointError, StateError
from fullshard.plan.units import without_compile
from fullshard.state.agreement import Digests, Report, agree, digests_of, merged_alone
from fullshard.state.copies import Differing, own_share
from fullshard.state.first_state import first_state
from fullshard.state.holdings import Holding, tensor_holding, unit_holding
from fullshard.state.optim_keys import Trained, names_of_trained, refuse_strays, trained_in
from fullshard.state.optim_units import UnitState, copied, report, take_apart
from fullshard.state.structure import Structure
from fullshard.state.unit_parts import parts_of

Scalars = dict[str, dict[str, Any]]  # by name of the parameter, by name of the state


class AgreedState(NamedTuple):
    """What ranks have agreed on of one optimizer's state.

    holdings: this rank's tensors. scalars: everything else, alike on all ranks. differing: two ranks, by name, that
    have different scalars; the first one's are in ``scalars``.
    """

    holdings: list[Holding]
    scalars: Scalars
    differing: dict[str, tuple[int, int]]


@dataclasses.dataclass(slots=True)
class LocalState:
    """What this rank alone knows of an optimizer's state.

    units: each unit, and the names of its parameters. reports: the state of each unit, as ranks compare it.
    of_units, of_others: tensors of units' parameters and of others, in the optimizer's memory, without what other
    ranks are known to write. scalars: of others. groups: the options of each, with the names of its parameters.
    kind: the optimizer's class, see `kind_of`. Scalars and options are copies.
    """

    units: Sequence[tuple[Unit, Mapping[int, str]]]
    reports: Sequence[Report]
    of_units: dict[tuple[str, str], Holding]
    of_others: dict[tuple[str, str], Holding]
    scalars: Scalars
    groups: list[dict[str, Any]]
    kind: str

    def digest(self) -> Digests:
        """Return what ranks have alike that have the same kinds of state of the same parameters."""
        return digests_of(self.reports, [names for _, names in self.units])

    def holdings(self) -> Iterator[Holding]:
        """Yield what it has of all tensors."""
        yield from self.of_units.values()
        yield from self.of_others.values()

    def over(self, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> "LocalState":
        """Return the same over copies of its memory."""
        return dataclasses.replace(
            self,
            of_units={key: each.over(copy_of) for key, each in self.of_units.items()},
            of_others={key: each.over(copy_of) for key, each in self.of_others.items()},
        )


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
    structures: Sequence[Structure],
    prefix: str,
) -> LocalState:
    """Return what this rank has of an optimizer's state, without communication.

    prefix: of the tensors' names. Raises StateError for state that is neither of its parameter's size
    nor a value.
    """
    check_trained(optimizer, trained)
    _warn_of_more(optimizer)
    names = names_of_trained(trained)
    units = [unit for structure in structures for unit, _ in structure.units]
    states = {id(unit): UnitState() for unit in units}
    of_others: dict[tuple[str, str], Holding] = {}
    scalars: Scalars = {}
    for parameter in parameters_of(optimizer):
        own = optimizer.state.get(parameter)
        if not own:
            continue
        entry = trained[parameter]
        name = entry.names[0]
        of_unit: dict[str, Any] = {}
        values = of_unit if entry.unit is not None else scalars.setdefault(name, {})
        for key, value in own.items():
            full_name = f"{prefix}{name}/{key}"
            if type(key) is not str or not key or "/" in key:
                raise StateError(
                    f"{prefix}{name}: {kind_of(optimizer)} keeps state under {key!r}. A checkpoint "
                    "has names that are strings without slashes: keep it under one."
                )
            if not isinstance(value, torch.Tensor) or value.dim() == 0:
                values[key] = _copy_of(value)
            elif entry.unit is None or is_apart(value, parameter):
                of_others[name, key] = own_share(tensor_holding(full_name, value))
            else:
                of_unit[key] = value
        if entry.unit is not None:
            take_apart(entry, of_unit, states[id(entry.unit)])
    named_units = [(unit, names.get(id(unit), {})) for unit in units]
    reports = [report(unit, states[id(unit)]) for unit in units]
    of_units: dict[tuple[str, str], Holding] = {}
    for unit, own_names in named_units:
        parts = parts_of(unit)
        for index, locals_ in states[id(unit)].locals.items():
            for key, local in locals_.items():
                full_name = f"{prefix}{own_names[index]}/{key}"
                _check_plain(full_name, local)
                holding = unit_holding(parts, index, (full_name,), local)
                of_units[own_names[index], key] = own_share(holding)
    groups = [
        {
            "params": [name for p in group["params"] for name in trained[p].names],
            "options": {k: _copy_of(v) for k, v in group.items() if k not in _NOT_OPTIONS},
        }
        for group in optimizer.param_groups
    ]
    kind = kind_of(optimizer)
    return LocalState(named_units, reports, of_units, of_others, scalars, groups, kind)


def agreed_state(
    local: LocalState, section: str, group: dist.ProcessGroup | None, digests: Sequence[Digests]
) -> AgreedState:
    """Return a rank's state with what others have of the same parameters. Collective.

    digests: of all ranks' `LocalState`; if they are equal, nothing is sent.

    Raises StateError where ranks that have parts of a parameter differ in what state they have.
    """
    holdings, scalars = [*local.of_others.values()], dict(local.scalars)
    differing: dict[str, tuple[int, int]] = {}
    if group is None:
        found = merged_alone(local.reports)
    else:
        found = agree(local.reports, [names for _, names in local.units], group, digests)
    for (unit, names), agreed in zip(local.units, found, strict=True):
        for (index, key), ranks in agreed.differing.items():
            differing[f"{section}/{names[index]}/{key}"] = ranks
        for index, kinds in agreed.kinds.items():
            name = names[index]
            scalars[name] = dict(agreed.others.get(index, {}))
            for key, dtype in kinds.items():
                if dtype is None:
                    continue
                own = local.of_units.get((name, key))
                if own is None:  # this rank owns nothing of it
                    parts = parts_of(unit)
                    nothing = parts.new_local(index, dtype, torch.device("cpu"))
                    own = unit_holding(parts, index, (f"{section}/{name}/{key}",), nothing)
                holdings.append(own)
    return AgreedState(holdings, scalars, differing)


def manifest_values(local: LocalState, scalars: Scalars, section: str) -> dict[str, Any]:
    """Return what a manifest has of an optimizer that is no tensor. Raises CheckpointError if it cannot."""
    return {
        "class": local.kind,
        "groups": encoded(local.groups, f"{section}/groups"),
        # Name by name: a parameter's may begin with "$".
        "scalars": {name: encoded(own, f"{section}/{name}") for name, own in scalars.items()},
    }


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    """Yield what an optimizer trains, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def check_trained(
    optimizer: torch.optim.Optimizer, trained: Mapping[nn.Parameter, Trained]
) -> None:
    """Raise StateError if an optimizer trains, or keeps state of, what is no parameter of the models."""
    keys: Iterable[Any] = optimizer.state
    of_none = [key for key in keys if not isinstance(key, torch.Tensor)]
    if of_none:
        raise StateError(
            f"{type(optimizer).__name__}.state has {of_none[0]!r}, which is no parameter: a checkpoint has the "
            "state of parameters and the options of groups. Keep it in a group's options, or save it with "
            "extra=."
        )
    refuse_strays(optimizer, trained)


def _warn_of_more(optimizer: torch.optim.Optimizer) -> None:
    """Warn of what an optimizer with a ``state_dict`` of its own puts beside state and groups."""
    if type(optimizer).state_dict is torch.optim.Optimizer.state_dict:
        return
    try:
        more = sorted({*optimizer.state_dict()} - {"state", "param_groups"}, key=str)
    except Exception:  # whatever it needs for that is of no interest here
        return
    if more:
        warnings.warn(
            f"{kind_of(optimizer)}.state_dict() has {', '.join(map(repr, more))} beside the state of parameters "
            "and the groups. A checkpoint does not: save it with extra=.",
            UserWarning,
            stacklevel=2,
        )


_NOT_OPTIONS = ("params", "param_names")


def is_apart(value: Any, parameter: nn.Parameter) -> bool:
    """Return whether a state says itself how it is divided: a DTensor not of its parameter's shape."""
    return isinstance(value, DTensor) and value.dim() > 0 and value.shape != parameter.shape


def _copy_of(value: Any) -> Any:
    """Return a copy; the value itself if it has none, and is refused by its name when it is encoded."""
    try:
        return copied(value)
    except Exception:  # whatever the value's own methods raise
        return value


def _check_plain(name: str, local: torch.Tensor) -> None:
    if type(local) is not torch.Tensor:
        raise StateError(
            f"{name}: the optimizer's state is a {type(local).__name__}, which keeps its values in "
            "several tensors. Save it through torch.distributed.checkpoint."
        )


def trained_by(
    structures: Mapping[str, Structure], optimizers: Mapping[str, torch.optim.Optimizer]
) -> dict[str, Mapping[nn.Parameter, Trained]]:
    """Return, by section of each optimizer, what the parameters of the models stand for.

    structures: of the models, by section. For an optimizer that trains several of them, names of parameters
    begin with the model's key if they would not be different otherwise: "actor.0.weight".
    """
    by_model = {section: _clean_trained(each) for section, each in structures.items()}
    joined: dict[nn.Parameter, Trained] = {}
    qualified: dict[nn.Parameter, Trained] = {}
    for section, own in by_model.items():
        joined = {**own, **joined}  # of what several models have, the first one's name
        key = section.partition(".")[2]
        for parameter, entry in own.items():
            names = tuple(f"{key}.{name}" for name in entry.names)
            qualified.setdefault(parameter, dataclasses.replace(entry, names=names))
    found: dict[str, Mapping[nn.Parameter, Trained]] = {}
    for section, optimizer in optimizers.items():
        parameters = {*parameters_of(optimizer)}
        num_models = sum(bool(parameters & own.keys()) for own in by_model.values())
        trained = [name for p in parameters if p in joined for name in joined[p].names]
        is_clear = num_models < 2 or len({*trained}) == len(trained)
        found[section] = joined if is_clear else qualified
    return found


def _clean_trained(structure: Structure) -> dict[nn.Parameter, Trained]:
    found = trained_in(structure)
    for parameter, entry in found.items():
        names = tuple(map(without_compile, entry.names))
        if names != entry.names:
            found[parameter] = dataclasses.replace(entry, names=names)
    return found


# Groups, options and scalars of all ranks as one
#
# Mostly all ranks have the same. With pipeline parallel each trains other parameters:
#
#     rank 0   groups [{params: [0.weight], lr: 0.1}]  ->  [{params: [0.weight, 1.weight], lr: 0.1}]
#     rank 1   groups [{params: [1.weight], lr: 0.1}]
#
# A group without parameters is known by the rank that has it, and its number there: `EMPTY_ON`.

# As a manifest has them: by section, "class", "groups" and "scalars".
OptimizerValues = Mapping[str, Mapping[str, Any]]

# Of a group: [rank, number] of each group without parameters that is part of it.
EMPTY_ON = "empty_on"


def merged_values(everyones: Sequence[OptimizerValues]) -> dict[str, dict[str, Any]]:
    """Return one set of values for those of all ranks.

    Scalars of what several ranks have are the first one's. Raises CheckpointError, with the ranks, where
    they have different options for one parameter, or different classes of optimizers.
    """
    return {
        section: _merged(section, [own[section] for own in everyones]) for section in everyones[0]
    }


def differing_scalars(everyones: Sequence[OptimizerValues]) -> Differing:
    """Return where ranks have different values of optimizers that are no tensors, such as steps."""
    first: dict[str, tuple[int, Any]] = {}
    names: dict[str, tuple[int, int]] = {}
    for rank, own in enumerate(everyones):
        for section, values in own.items():
            for parameter, scalars in values["scalars"].items():
                for key, value in scalars.items():
                    name = f"{section}/{parameter}/{key}"
                    number, known = first.setdefault(name, (rank, value))
                    if known != value:
                        names.setdefault(name, (number, rank))
    return names


def _merged(section: str, everyones: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    kinds = [own["class"] for own in everyones]
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise CheckpointError(
            f"{section}: is a {kinds[0]} on rank 0 and a {kinds[other]} on rank {other}. Save with the same "
            "optimizers on all ranks."
        )
    groups: list[dict[str, Any]] = []
    numbers: list[int] = []  # of each merged group among those of the rank that had it first
    found: dict[str, tuple[int, dict[str, Any]]] = {}  # rank and group, by parameter
    for rank, own in enumerate(everyones):
        for number, group in enumerate(own["groups"]):
            for name in group["params"]:
                first, known = found.get(name, (rank, group))
                _check_alike(
                    f"{section}: {name}", known["options"], group["options"], (first, rank)
                )
            same = (
                known
                for n, known in zip(numbers, groups, strict=True)
                if n == number and known["options"] == group["options"]
            )
            target = next(same, None)
            if target is None:
                groups.append(target := {"params": [], "options": group["options"]})
                numbers.append(number)
            if not group["params"]:
                target.setdefault(EMPTY_ON, []).append([rank, number])
            new = [name for name in group["params"] if name not in found]
            target["params"] += new
            found.update((name, (rank, group)) for name in new)
    for rank, own in enumerate(everyones):
        _check_undivided(section, groups, own["groups"], rank)
    scalars: dict[str, Any] = {}
    for own in everyones:
        for name, values in own["scalars"].items():
            scalars.setdefault(name, values)
    return {"class": kinds[0], "groups": groups, "scalars": scalars}


def options_of_empty(
    groups: Sequence[Mapping[str, Any]], rank: int, number: int
) -> Mapping[str, Any]:
    """Return the options that were saved of a rank's group ``number``, which has no parameters.

    groups: as they were saved, by any number of ranks. Empty if there is none, or ranks had different
    ones and none was this rank's.
    """
    placed = [(place, group["options"]) for group in groups for place in group.get(EMPTY_ON, ())]
    if not placed:  # all ranks had the same groups
        is_empty = number < len(groups) and not groups[number]["params"]
        return groups[number]["options"] if is_empty else {}
    own = [options for place, options in placed if place == [rank, number]]
    others = [options for place, options in placed if place[1] == number]
    if own or (others and all(options == others[0] for options in others)):
        return (own or others)[0]
    return {}


def _check_undivided(
    section: str,
    merged: Sequence[Mapping[str, Any]],
    own: Sequence[Mapping[str, Any]],
    rank: int,
) -> None:
    """Raise CheckpointError if parameters of one group are in several of a rank's: it could not load them."""
    numbers = {name: number for number, group in enumerate(own) for name in group["params"]}
    for group in merged:
        if names := parted(group["params"], numbers):
            raise CheckpointError(
                f"{section}: {' and '.join(names)} are in two parameter groups on rank {rank}, and in one on "
                "another rank. Divide parameters into the same groups on all ranks."
            )


def parted(names: Sequence[str], numbers: Mapping[str, int]) -> list[str]:
    """Return two parameters of one group that are in different groups elsewhere; [] if there are none.

    numbers: of the group elsewhere, by name; it may lack some.
    """
    first: dict[int, str] = {}
    for name in names:
        if name in numbers:
            first.setdefault(numbers[name], name)
    return [*first.values()][:2] if len(first) > 1 else []


def _check_alike(
    what: str, first: Mapping[str, Any], second: Mapping[str, Any], ranks: tuple[int, int]
) -> None:
    for key in dict.fromkeys((*first, *second)):
        if first.get(key) != second.get(key):
            raise CheckpointError(
                f"{what}: {key} is {first.get(key)!r} on rank {ranks[0]} and {second.get(key)!r} on rank "
                f"{ranks[1]}, and a checkpoint has one. Give all ranks the same: a scheduler has to see the "
                "same losses on all of them."
            )
