"""Comparing ranks at every unit, for `fullshard.debug(steps=True)`."""

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.unit import Unit
from fullshard.errors import DivergenceError
from fullshard.peers.paths import Moment, by_text


class StepChecks:
    """Whether this process compares at every unit: a switch."""

    are_on = False


def check_step(unit: Unit, moment: Moment) -> None:
    """Raise DivergenceError on every rank of the unit's groups unless all are at this unit."""
    mine = f"{unit.path} ({moment})"
    for group in (unit.mesh.shard_group, unit.mesh.replicate_group):
        if group is None or group.size() == 1:
            continue
        everyones = gather_objects(mine, group, f"{unit.path}: debug() compares ranks")
        if len(set(everyones)) > 1:
            seen = "; ".join(f"{who}: {what}" for who, what in by_text(dict(enumerate(everyones))))
            raise DivergenceError(
                f"Ranks are at different units, by their numbers in the group: {seen}. Let every rank "
                "run the same units in the same order."
            )
