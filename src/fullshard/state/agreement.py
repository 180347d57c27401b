"""Agree with all ranks on which optimizer state there is, before any of it is exchanged.

A rank that owns nothing of a parameter may have no state of it, or outdated state. So each rank
makes a report. Mostly all reports are equal; comparing digests shows that, and nothing else is
sent: 1,000 ranks send 40 bytes each. Where reports differ, each distinct one is sent once. With
pieces of flat parameters there are many distinct reports, each of few parameters; with ownership of
rows, few.
"""

import hashlib
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.outside_steps import broadcast_object, gather_objects
from fullshard.errors import StateError

_LABEL = "agreeing on optimizer state"

Kinds = dict[int, dict[str, torch.dtype | None]]
Others = dict[int, dict[str, Any]]


class Report(NamedTuple):
    """The state of one unit that one rank has.

    dtypes: of state tensors, by parameter and name. others: values that are no tensor of the
    parameter's size. owned: the parameters of which the rank owns at least one element.
    """

    dtypes: dict[int, dict[str, torch.dtype]]
    others: Others
    owned: set[int]


class _Scalar(NamedTuple):
    """A 0-dim tensor as plain values. Its own pickle is larger, and differs between processes."""

    number: float
    dtype: torch.dtype
    device: str


class Agreed(NamedTuple):
    """The state of one unit that any rank has.

    kinds: the dtype of each state of each parameter; None for a value that is no tensor of the
    parameter's size, which is then in ``others``. differing: two ranks, by parameter and name, that own
    parts of it and have different such values; the first one's is there.
    """

    kinds: Kinds
    others: Others
    differing: dict[tuple[int, str], tuple[int, int]]


class Digests(NamedTuple):
    """What ranks have alike that have the same units, the same state of them, and own the same of it."""

    units: bytes
    state: bytes
    owned: bytes


def digests_of(mine: Sequence[Report], names: Sequence[Mapping[int, str]]) -> Digests:
    """Return the digests of a rank's reports. names: of each unit's parameters."""
    units = _digest([sorted(own.items()) for own in names])
    state = _digest([(r.dtypes, _map(r.others, lambda v: _text(_to_scalar(v)))) for r in mine])
    return Digests(units, state, _digest([sorted(r.owned) for r in mine]))


def agree(
    mine: Sequence[Report],
    names: Sequence[Mapping[int, str]],
    group: dist.ProcessGroup | None,
    everyones: Sequence[Digests] | None = None,
) -> list[Agreed]:
    """Merge the reports of all ranks that have the same units, unit by unit. Every rank has to call it.

    names: of each unit's parameters; ranks with others are stages of a pipeline, and agree among
    themselves. everyones: the ranks' `digests_of`, if they are known. Raises StateError if a rank owns a
    part of a parameter but lacks state of it that others have; on all ranks that have its units.
    """
    if everyones is None:
        everyones = gather_objects(digests_of(mine, names), group, _LABEL)
    if len({(each.units, each.state) for each in everyones}) == len({e.units for e in everyones}):
        return merged_alone(mine)
    sent = [report._replace(others=_map(report.others, _to_scalar)) for report in mine]
    own = everyones[dist.get_rank(group)].units
    found = _distinct(sent, everyones, group)
    reports = {digest: each for digest, each in found.items() if digest.units == own}
    ranks = [everyones.index(digest) for digest in reports]
    result = [_merge([each[unit] for each in reports.values()], ranks) for unit in range(len(mine))]
    problems = [
        f"rank {rank} has none of {', '.join(names[unit][index] for index in lacking)}"
        for unit, agreed in enumerate(result)
        for rank, digest in enumerate(everyones)
        if digest.units == own
        if (lacking := _lacking(reports[digest][unit], agreed))
    ]
    if problems:
        raise StateError(
            "FSDP currently requires each rank to have at least the optimizer states needed by rank "
            "0's optimizer but some ranks are missing some of those states: "
            f"{'; '.join(problems)}. Give the optimizers of all ranks the same parameters."
        )
    return [each._replace(others=_map(each.others, _from_scalar)) for each in result]


def merged_alone(mine: Sequence[Report]) -> list[Agreed]:
    """Return what one rank alone agrees on with itself, without a process group."""
    return [_merge([report], [0]) for report in mine]


def _distinct(
    mine: list[Report], everyones: Sequence[Digests], group: dist.ProcessGroup | None
) -> dict[Digests, list[Report]]:
    """Return each distinct report by its digest, in the order of the first ranks that have them."""
    first = {digest: everyones.index(digest) for digest in dict.fromkeys(everyones)}
    rank = dist.get_rank(group)
    speaks = rank in first.values()
    if 2 * len(first) >= len(everyones):
        received = gather_objects(mine if speaks else None, group, _LABEL)
        return {digest: received[speaker] for digest, speaker in first.items()}
    found = {}
    for digest, speaker in first.items():  # one after the other: gathering pads all to the longest
        found[digest] = broadcast_object(mine, speaker, group, _LABEL)
    return found


def _merge(reports: Sequence[Report], ranks: Sequence[int]) -> Agreed:
    """Return what owners have; of state that no owner has, what the other ranks have.

    ranks: the first that has made each report.
    """
    kinds: Kinds = {}
    others: Others = {}
    differing: dict[tuple[int, str], tuple[int, int]] = {}
    first: dict[tuple[int, str], tuple[int, Any]] = {}
    for of_owners in (True, False):
        for rank, report in zip(ranks, reports, strict=True):
            for index, own in report.others.items():
                if (index in report.owned) is of_owners:
                    for name, value in own.items():
                        kinds.setdefault(index, {}).setdefault(name, None)
                        others.setdefault(index, {}).setdefault(name, value)
                        if of_owners and len(reports) > 1:
                            number, known = first.setdefault((index, name), (rank, value))
                            if _text(known) != _text(value):
                                differing.setdefault((index, name), (number, rank))
            for index, dtypes in report.dtypes.items():
                if (index in report.owned) is of_owners:
                    for name, dtype in dtypes.items():
                        kinds.setdefault(index, {}).setdefault(name, dtype)
    return Agreed({index: kinds[index] for index in sorted(kinds)}, others, differing)


def _lacking(report: Report, agreed: Agreed) -> list[int]:
    def lacks(index: int) -> bool:
        own = {**report.others.get(index, {}), **report.dtypes.get(index, {})}
        is_there = index in report.dtypes or index in report.others
        names = [name for name, dtype in agreed.kinds[index].items() if dtype is not None]
        return not is_there or any(name not in own for name in names)

    return sorted(filter(lacks, report.owned & agreed.kinds.keys()))


def _map(others: Others, function: Any) -> Others:
    return {
        index: {name: function(value) for name, value in own.items()}
        for index, own in others.items()
    }


def _to_scalar(value: Any) -> Any:
    if type(value) is torch.Tensor and value.dim() == 0:
        return _Scalar(value.item(), value.dtype, value.device.type)
    return value


def _from_scalar(value: Any) -> Any:
    if isinstance(value, _Scalar):
        return torch.tensor(value.number, dtype=value.dtype, device=value.device)
    return value


def _text(value: Any) -> str | bytes:
    """Return a text that is equal in all processes for equal values.

    A pickle for unknown types; of what has none, all of a type are equal.
    """
    plain = (bool, int, float, str, type(None), _Scalar)
    if type(value) in plain:
        return repr(value)
    try:
        return pickle.dumps(value)
    except Exception:  # whatever the value's own methods raise
        return type(value).__qualname__


def _digest(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()[:16]
