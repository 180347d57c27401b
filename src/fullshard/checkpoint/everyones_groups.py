"""Optimizers' values of all ranks as one: groups, options and scalars, where ranks have different ones.

Mostly all ranks have the same. With pipeline parallel each trains other parameters:

    rank 0   groups [{params: [0.weight], lr: 0.1}]  ->  [{params: [0.weight, 1.weight], lr: 0.1}]
    rank 1   groups [{params: [1.weight], lr: 0.1}]

A group without parameters is known by the rank that has it, and its number there: `EMPTY_ON`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.errors import CheckpointError
from fullshard.state.copies import Differing

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
