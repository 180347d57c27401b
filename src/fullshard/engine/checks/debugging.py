"""`fullshard.debug`: checks that cost too much for every run.

Set the environment variable ``FULLSHARD_DEBUG`` to ``steps`` (or 1), ``nan``, or ``steps,nan`` to have them
without a change of the program.
"""

import os
import types
from collections.abc import Sequence

import torch

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.checks.finite import FiniteHunt, check_gradients
from fullshard.engine.unit import Unit
from fullshard.errors import DivergenceError, ShardingError
from fullshard.plan.paths import Moment, by_text


class debug:  # noqa: N801  (called like a function, and used as a context manager)
    """Switch checks on, until the program ends or the ``with`` block that this call opens.

        fullshard.debug()
        fullshard.debug(nan=True)

    steps: before each unit's forward and after its backward, all ranks tell each other which unit it
        is. If ranks are at different ones, DivergenceError on every rank names them, at the line of
        the program where it happens: before any data is exchanged, and on every backend. Costs one
        small collective per unit and pass. Every rank has to switch it on at the same moment. The
        default, unless another check is asked for.
    nan: the first NaN or infinity is a StateError on its rank, which names the module, the tensor, and
        whether it was made in forward or backward; see `checks.finite`. Looks at everything that modules
        return and at its gradients, so a step takes several times as long. Not with a gradient scaler,
        which makes infinite gradients on purpose, nor inside compiled modules.
    """

    checks_steps = False  # of this process
    _hunt = FiniteHunt()

    def __init__(self, *, steps: bool | None = None, nan: bool = False) -> None:
        self._before = (debug.checks_steps, debug._hunt.is_on)
        self._use(not nan if steps is None else steps, nan)

    @staticmethod
    def _use(steps: bool, nan: bool) -> None:
        debug.checks_steps = steps
        if nan:
            debug._hunt.begin()
        else:
            debug._hunt.end()

    @staticmethod
    def looks_at(unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        """Look at a unit's full gradients, if that was asked for."""
        if debug._hunt.is_on:
            check_gradients(unit, grads)

    def __enter__(self) -> "debug":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._use(*self._before)


def _from_environment(value: str) -> None:
    """Switch on what ``FULLSHARD_DEBUG`` says: 1 or steps, nan, or both with a comma between."""
    asked = {word.strip() for word in value.split(",")} - {"", "0"}
    if unknown := asked - {"1", "steps", "nan"}:
        raise ShardingError(
            f"FULLSHARD_DEBUG={value}: {', '.join(sorted(unknown))} is none of 1, steps, nan."
        )
    if asked:
        debug(steps=bool(asked & {"1", "steps"}), nan="nan" in asked)


_from_environment(os.environ.get("FULLSHARD_DEBUG", "0"))


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
