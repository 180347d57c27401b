"""`fullshard.debug`: checks that cost too much for every run.

Set the environment variable ``FULLSHARD_DEBUG`` to ``steps`` (or 1), ``nan``, or ``steps,nan`` to have them
without a change of the program.
"""

import os
import types

from fullshard.compare.recording import Recording
from fullshard.engine.checks.finite import FiniteHunt
from fullshard.engine.checks.path import StepChecks
from fullshard.errors import ShardingError
from fullshard.peers import stacks


class debug:  # noqa: N801  (called like a function, and used as a context manager)
    """Switch checks on, until the program ends or the ``with`` block that this call opens.

        fullshard.debug()
        fullshard.debug(nan=True)
        fullshard.debug(replay="replays/step-812")

    steps: before each unit's forward and after its backward, all ranks tell each other which unit it
        is. If ranks are at different ones, DivergenceError on every rank names them, at the line of
        the program where it happens: before any data is exchanged, and on every backend. Costs one
        small collective per unit and pass. Every rank has to switch it on at the same moment. The
        default, unless something else is asked for.
    nan: the first NaN or infinity is a StateError on its rank, which names the module, the tensor, and
        whether it was made in forward or backward; see `checks.finite`. Looks at everything that modules
        return and at its gradients, so a step takes several times as long. Not with a gradient scaler,
        which makes infinite gradients on purpose, nor inside compiled modules.
    replay: a folder that all ranks see. The next step is recorded there, for `fullshard.replay`: from the next
        forward with gradients of a sharded model to the first step of its optimizer, or to the end of
        the ``with`` block. Every rank has to switch it on at the same moment. A recording that is there
        is replaced. See `compare.recording` for what it holds.
    """

    _hunt = FiniteHunt()

    def __init__(
        self,
        *,
        steps: bool | None = None,
        nan: bool = False,
        replay: str | os.PathLike[str] | None = None,
    ) -> None:
        self._before = (StepChecks.are_on, debug._hunt.is_on)
        self._recording = None if replay is None else Recording(replay)
        self._use(not nan and replay is None if steps is None else steps, nan)

    @staticmethod
    def _use(steps: bool, nan: bool) -> None:
        StepChecks.are_on = steps
        if nan:
            debug._hunt.begin()
        else:
            debug._hunt.end()

    def __enter__(self) -> "debug":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._use(*self._before)
        if self._recording is not None:
            self._recording.close(error)


def _from_environment(value: str) -> None:
    """Switch on what ``FULLSHARD_DEBUG`` says: 1 or steps, nan, or both with a comma between."""
    asked = {word.strip() for word in value.split(",")} - {"", "0"}
    if unknown := asked - {"1", "steps", "nan"}:
        raise ShardingError(
            f"FULLSHARD_DEBUG={value}: {', '.join(sorted(unknown))} is none of 1, steps, nan."
        )
    if asked:
        stacks.shows_all_frames = True
        debug(steps=bool(asked & {"1", "steps"}), nan="nan" in asked)


_from_environment(os.environ.get("FULLSHARD_DEBUG", "0"))
