"""Plan which units' optimizer state stays on the device, and how much memory the others pass through."""

from collections.abc import Sequence
from typing import NamedTuple

NUM_SLOTS = (
    2  # one unit's state is stepped on while the next one's arrives, or the last one's leaves
)


class StatePlan(NamedTuple):
    """What is settled for the units of one policy.

    stays: for each unit, whether its state stays on the device.
    slot_nbytes: the size of each of `NUM_SLOTS` pieces of device memory that the others pass through; 0 if
        all stay.
    """

    stays: tuple[bool, ...]
    slot_nbytes: int


def least_budget(nbytes: Sequence[int]) -> int:
    """Return the fewest bytes of device memory with which the state of these units can be stepped on."""
    return min((_taken(nbytes, largest) for largest in {*nbytes, 0}), default=0)


def plan_state(nbytes: Sequence[int], budget: int | None) -> StatePlan:
    """Decide which units' state stays on the device, so that as many bytes as possible do.

    nbytes: of each unit's state. budget: bytes on the device, those that states pass through included;
    None lets all leave. It has to be `least_budget` or more.
    """
    if budget is None:
        return StatePlan((False,) * len(nbytes), max(nbytes, default=0))
    best: tuple[int, tuple[bool, ...], int] | None = None
    for largest in sorted({*nbytes, 0}):  # of those that leave
        left = budget - _taken(nbytes, largest)
        if left < 0:
            continue
        stays = []
        for size in nbytes:
            fits = size > largest or size <= left
            left -= size if fits and size <= largest else 0
            stays.append(fits)
        leaving = [size for size, stay in zip(nbytes, stays, strict=True) if not stay]
        found = (sum(nbytes) - sum(leaving), tuple(stays), max(leaving, default=0))
        best = found if best is None or found[0] > best[0] else best
    assert best is not None, "the caller has compared the budget with `least_budget`"
    return StatePlan(best[1], best[2])


def _taken(nbytes: Sequence[int], largest: int) -> int:
    """Return the bytes on the device if all larger than this stay, and others pass through slots of its size."""
    return NUM_SLOTS * largest + sum(size for size in nbytes if size > largest)
