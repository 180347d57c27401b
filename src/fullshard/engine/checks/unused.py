"""A check, on request, that each backward gives every parameter that is trained a gradient.

Ranks tell each other what they found, so that all raise the same error: one collective per group and
backward, once gradients are complete.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.policies import Unused

_LABEL = "comparing unused parameters"
_NAMES_SHOWN = 5


class UnusedWatch:
    """The parameters of one model that have had a gradient since the last check."""

    def __init__(self) -> None:
        self._had: dict[Unit, set[int]] = {}

    def note(self, unit: Unit, grads: Sequence[torch.Tensor | None]) -> None:
        """Take note of the gradients that a backward has left, one per parameter or None."""
        if unit.config.unused is Unused.ERROR:
            found = {index for index, grad in enumerate(grads) if grad is not None}
            self._had.setdefault(unit, set()).update(found)

    def forget(self) -> None:
        self._had.clear()

    def check(self, units: Sequence[Unit]) -> None:
        """Raise StateError on every rank if one has left parameters of these units unused. Collective."""
        asked = [u for u in units if u.config.unused is Unused.ERROR and u.config.reduce_grads]
        if not asked:
            return
        rank = dist.get_rank() if dist.is_initialized() else 0
        found: dict[str, list[int]] = {}
        for unit in asked:
            had = self._had.pop(unit, set())
            for index, param in enumerate(unit.params):
                if index not in had and param.sharded.requires_grad:
                    found[param.name] = [rank]
        for group in _groups(asked):
            found = _merged(gather_objects(found, group, _LABEL))
        if found:
            shown = [f"{name} (ranks {ranks})" for name, ranks in [*found.items()][:_NAMES_SHOWN]]
            more = f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
            raise StateError(
                f"Trained parameters got no gradient in this backward: {', '.join(shown)}{more}. Freeze "
                "them, use them in the loss, or call set_unused(module, 'zero'), which gives them zeros."
            )


def _groups(units: Sequence[Unit]) -> list[Any]:
    """Return the groups of all axes of the units' meshes, once each, in one order on all ranks."""
    meshes = [unit.mesh for unit in units]
    groups = [group for mesh in meshes for group in (mesh.shard_group, mesh.replicate_group)]
    return list(dict.fromkeys(group for group in groups if group is not None))


def _merged(everyones: Sequence[dict[str, list[int]]]) -> dict[str, list[int]]:
    """Return, by name in one order, the ranks of all."""
    merged: dict[str, set[int]] = {}
    for own in everyones:
        for name, ranks in own.items():
            merged.setdefault(name, set()).update(ranks)
    return {name: sorted(ranks) for name, ranks in merged.items()}
