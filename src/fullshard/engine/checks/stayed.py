"""Units that stay unsharded from one pass to the next, and when their parameters are outdated.

Their whole parameters are in memory of this rank alone, so a forward need not gather them. But
somebody may have written to their shards since: an optimizer, a load, a program. All ranks have to
agree which units to gather anew, or one would wait for the others in vain.
"""

import collections
from collections.abc import Container, Iterable, Sequence

from fullshard.engine.unit import Unit


class StayedUnits:
    """The units of one model that stayed unsharded after its last pass."""

    def __init__(self) -> None:
        self._stayed: list[Unit] = []

    def note(self, unsharded: Iterable[Unit]) -> None:
        """Note which of these are unsharded in private memory, at the end of a pass of all ranks."""
        self._stayed = [unit for unit in unsharded if not unit.params.is_in_place]

    def drop_outdated(self, unsharded: Iterable[Unit], *, is_for_all: bool) -> None:
        """Reshard units, of these, whose shards were written to since they were gathered.

        A rank notices writes to its own rows, and may have no rows of a unit. So ranks agree if all
        run this forward (``is_for_all``). Otherwise, where this rank may evaluate alone, one
        outdated unit stands for all, so that ranks are likely to do the same.
        """
        outdated = {unit for unit in unsharded if unit.is_outdated}
        if is_for_all and self._stayed:
            # Resharded on this rank alone: by a load, say, or an exception in its own evaluation.
            gone = {unit for unit in self._stayed if not unit.is_unsharded}
            outdated |= chosen_by_any(outdated | gone, self._stayed)
            # Cleared here only: the others have to hear of it in the next forward of all.
            self._stayed = []
        elif outdated:
            outdated |= {unit for unit in self._stayed if not unit.is_held}
        for unit in outdated:
            unit.reshard()


def is_whole(unit: Unit) -> bool:
    """Return whether this rank has the unit's whole parameters, and memory that no peer writes to."""
    if unit.is_unsharded and not unit.is_in_place:
        return True
    return unit.mesh.plan.shard_size == 1 or not unit.params


def chosen_by_any(chosen: Container[Unit], among: Sequence[Unit]) -> set[Unit]:
    """Return those of the units that any rank has chosen.

    Every rank has to call it, with the same units in ``among``, in the same order.
    """
    by_group = collections.defaultdict[object, list[Unit]](list)
    for unit in among:
        by_group[unit.mesh.shard_group].append(unit)
    found: set[Unit] = set()
    for units in by_group.values():
        bits = sum((unit in chosen) << number for number, unit in enumerate(units))
        bits = units[0].comm.agree(bits, len(units))
        found.update(unit for number, unit in enumerate(units) if bits >> number & 1)
    return found
