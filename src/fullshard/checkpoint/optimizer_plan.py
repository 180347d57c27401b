"""What a load takes of one optimizer's state, and what does not fit: `plan_optimizer`.

Problems are in the words of `fitting`. No value is changed.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.everyones_groups import parted
from fullshard.checkpoint.optimizer_loading import Destination
from fullshard.checkpoint.optimizer_state import kind_of, parameters_of, state_keys
from fullshard.checkpoint.saved_state import SavedState
from fullshard.errors import StateError
from fullshard.state.first_state import first_state
from fullshard.state.optim_keys import Trained


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
