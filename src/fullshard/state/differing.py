"""Values that several ranks have under one name, though nothing keeps them equal, and that differ.

Of plain modules, and of a model that is sharded several times in a job without replicating, the first
rank's values are taken. Mostly all have the same. Where they have not, two stages of a pipeline may have
parameters of one name, and all but the first would be lost without a word.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fullshard.state.holdings import Holding
from fullshard.state.host_memory import host_bytes

Differing = Mapping[str, tuple[int, int]]  # by name, two ranks, the first of which is taken

# By name, what tells boxes apart, and what tells their values apart.
_Values = Mapping[str, tuple[str, str]]

_NAMES_SHOWN = 3


def crc(data: Any) -> str:
    """Return a checksum of bytes that needs no package: enough to notice values that differ."""
    return f"{zlib.crc32(data):08x}"


def digest_of_values(holdings: Sequence[Holding], checksum: Callable[[Any], str] = crc) -> str:
    """Return what ranks have alike that have the same values where nothing keeps them equal."""
    return checksum(repr(_values(holdings, checksum)).encode())


def differing_tensors(
    holdings: Sequence[Holding],
    gathered: Callable[[_Values], Sequence[_Values]],
    checksum: Callable[[Any], str] = crc,
) -> Differing:
    """Return where ranks have different values of the same boxes. Collective.

    gathered: returns every rank's argument, in rank order.
    """
    first: dict[object, tuple[int, str]] = {}
    names: dict[str, tuple[int, int]] = {}
    for rank, values in enumerate(gathered(_values(holdings, checksum))):
        for name, (boxes, value) in values.items():
            number, known = first.setdefault((name, boxes), (rank, value))
            if known != value:
                names.setdefault(name, (number, rank))
    return names


def said_of_differing(names: Differing, *, taken: str) -> str:
    """Return what to say where ranks have different values; "" for none.

    taken: what is done with the values of the first of two ranks, such as "saved".
    """
    if not names:
        return ""
    shown = ", ".join([*names][:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    number, other = next(iter(names.values()))
    return (
        f"{shown}{more}: rank {other} has other values than rank {number}, whose are {taken}; nothing keeps "
        "them equal. Stages of a pipeline need different names of parameters. Copies of one model are kept "
        "equal by replicate, DistributedDataParallel, or a mesh with an axis that replicates."
    )


def _values(holdings: Sequence[Holding], checksum: Callable[[Any], str]) -> _Values:
    """Return the boxes and a checksum of the values of what nothing keeps equal.

    Buffers are left out: running means differ, as they do in training. So is the extra state, of which
    each rank has its own.
    """
    return {
        each.name: (
            repr([held.box for held in each.boxes]),
            "".join([checksum(host_bytes(held.view)) for held in each.boxes]),
        )
        for each in holdings
        if not each.copies and not each.is_buffer and not each.name.startswith("extra/")
    }
