"""A check that all ranks run their units in one order.

Where orders differ, collectives of different units are matched, which gives wrong numbers or a
hang. The check costs one exchange per unit. So it is made only with
``TORCH_DISTRIBUTED_DEBUG=DETAIL``, and between ranks in the first iteration alone; later, each rank
compares its order with that of its first iteration.
"""

import warnings
from collections.abc import Sequence

import torch.distributed as dist

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.unit import Unit
from fullshard.errors import StateError


class ForwardOrder:
    """The order of one model's units in forward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._first: list[int] | None = None  # unit numbers, once the first iteration is over
        self._current: list[int] = []  # those of this iteration so far
        self._has_warned = False

    @property
    def is_checked(self) -> bool:
        """Whether the user asked for it (``TORCH_DISTRIBUTED_DEBUG=DETAIL``)."""
        return dist.get_debug_level() == dist.DebugLevel.DETAIL

    def check(self, number: int) -> None:
        """Check the unit that runs now. Every rank has to call it before the unit's all-gather.

        number: the unit's index. In the first iteration, raises StateError on all ranks if they run
        different units. Later, warns once if this rank's order has changed.
        """
        position = len(self._current)
        self._current.append(number)
        if self._first is None:
            self._compare_ranks(number)
        elif self._first[position : position + 1] != [number] and not self._has_warned:
            self._has_warned = True
            expected = self._first[position] if position < len(self._first) else None
            warnings.warn(
                "Forward order differs from that of the first iteration on rank "
                f"{dist.get_rank()}. Collectives are unchecked and may give incorrect results or "
                f"hang. This iteration runs {self._name(number)} at place {position}, the first "
                f"ran {'nothing' if expected is None else self._name(expected)}.",
                stacklevel=2,
            )

    def end_iteration(self) -> None:
        """Note that the last backward of an iteration is over."""
        if self._current and self._first is None:
            self._first = self._current
        self._current = []

    def forget(self) -> None:
        """Forget the order of an iteration that an exception ended."""
        self._current = []

    def _compare_ranks(self, number: int) -> None:
        """Raise StateError, on every rank of the unit's group, unless all run the same unit."""
        mesh = self._units[number].mesh
        group = mesh.shard_group or mesh.replicate_group
        numbers = gather_objects(number, group, "comparing the order of units")
        if len(set(numbers)) > 1:
            seen = ", ".join(f"rank {r}: {self._name(n)}" for r, n in enumerate(numbers))
            raise StateError(
                "Forward order differs across ranks: at the same place, they run different units "
                f"({seen}). Let every rank run the same modules in the same order."
            )

    def _name(self, number: int) -> str:
        return repr(self._units[number].name or "root")
