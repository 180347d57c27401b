"""A check that all ranks run their units in one order.

Ranks that differ match each other's collectives wrongly, which gives wrong numbers or a hang. The
check costs an exchange a unit, so it is made only where ``torch.distributed`` is told to debug in
detail, and across ranks in the first iteration alone; later ones are compared with the first.
"""

import warnings
from collections.abc import Sequence

import torch.distributed as dist

from fullshard.engine.unit import Unit
from fullshard.errors import StateError


class ForwardOrder:
    """The order of one model's units in forward."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._first: list[int] | None = None  # once the first iteration is over
        self._current: list[int] = []
        self._has_warned = False

    @property
    def is_checked(self) -> bool:
        """Whether the user asked for it (``TORCH_DISTRIBUTED_DEBUG=DETAIL``)."""
        return dist.get_debug_level() == dist.DebugLevel.DETAIL

    def check(self, number: int) -> None:
        """Compare the unit that runs now. Raises StateError, on all ranks, if others run another."""
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
        """Say that a backward is over."""
        if self._current and self._first is None:
            self._first = self._current
        self._current = []

    def forget(self) -> None:
        """Forget an iteration that an exception ended."""
        self._current = []

    def _compare_ranks(self, number: int) -> None:
        mesh = self._units[number].mesh
        group = mesh.shard_group or mesh.replicate_group
        numbers: list[int] = [-1] * dist.get_world_size(group)
        dist.all_gather_object(numbers, number, group=group)
        if len(set(numbers)) > 1:
            seen = ", ".join(f"rank {r}: {self._name(n)}" for r, n in enumerate(numbers))
            raise StateError(
                "Forward order differs across ranks: at the same place, they run different units "
                f"({seen}). Let every rank run the same modules in the same order."
            )

    def _name(self, number: int) -> str:
        return repr(self._units[number].name or "root")
