"""`fullshard.debug`: checks that cost too much for every run.

Set the environment variable ``FULLSHARD_DEBUG=1`` to have them without a change of the program.
"""

import os
import types

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.unit import Unit
from fullshard.errors import DivergenceError
from fullshard.plan.paths import Moment, by_text


class debug:  # noqa: N801  (called like a function, and used as a context manager)
    """Switch checks on, until the program ends or the ``with`` block that this call opens.

        fullshard.debug()

    steps: before each unit's forward and after its backward, all ranks tell each other which unit it
        is. If ranks are at different ones, DivergenceError on every rank names them, at the line of
        the program where it happens: before any data is exchanged, and on every backend. Costs one
        small collective per unit and pass. Every rank has to switch it on at the same moment.
    """

    checks_steps = False  # of this process

    def __init__(self, *, steps: bool = True) -> None:
        self._before = debug.checks_steps
        debug.checks_steps = steps

    def __enter__(self) -> "debug":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        debug.checks_steps = self._before


debug.checks_steps = os.environ.get("FULLSHARD_DEBUG", "0") not in ("", "0")


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
