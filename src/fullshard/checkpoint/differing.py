"""Values that several ranks have under one name, though nothing keeps them equal, and that differ.

Of plain modules, and of a model that is sharded several times in a job without replicating, the first
rank's values are saved. Mostly all have the same. Where they have not, two stages of a pipeline may have
parameters of one name, and all but the first would be lost without a word.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fullshard.checkpoint.checksums import checksum
from fullshard.checkpoint.everyones_groups import OptimizerValues
from fullshard.checkpoint.peers import Peers
from fullshard.checkpoint.writing import host_bytes
from fullshard.state.holdings import Holding

_NAMES_SHOWN = 3


def digest_of_values(holdings: Sequence[Holding]) -> str:
    """Return what ranks have alike that have the same values where nothing keeps them equal."""
    return checksum(repr(_values(holdings)).encode())


Differing = Mapping[str, tuple[int, int]]  # by name, two ranks, the first of which is saved


def differing_tensors(holdings: Sequence[Holding], peers: Peers) -> Differing:
    """Return where ranks have different values of the same boxes. Collective."""
    first: dict[object, tuple[int, str]] = {}
    names: dict[str, tuple[int, int]] = {}
    for rank, values in enumerate(peers.gathered(_values(holdings))):
        for name, (boxes, value) in values.items():
            number, known = first.setdefault((name, boxes), (rank, value))
            if known != value:
                names.setdefault(name, (number, rank))
    return names


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


def said_of_differing(names: Differing) -> str:
    """Return what to say where ranks have different values; "" for none."""
    if not names:
        return ""
    shown = ", ".join([*names][:_NAMES_SHOWN])
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    number, other = next(iter(names.values()))
    return (
        f"{shown}{more}: rank {other} has other values than rank {number}, whose are saved; nothing keeps "
        "them equal. Stages of a pipeline need different names of parameters. Copies of one model are kept "
        "equal by replicate, DistributedDataParallel, or a mesh with an axis that replicates."
    )


def _values(holdings: Sequence[Holding]) -> dict[str, tuple[str, str]]:
    """Return, by name, the boxes and a checksum of the values of what nothing keeps equal.

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
