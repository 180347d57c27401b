"""Gradients that come past the modules, and, on request, those that do not come at all.

Past the modules: to sharded parameters, or to those of before sharding. Nothing trains what a parameter was before it was sharded, so a gradient of it is an error. One of a
sharded parameter is warned of:

``weight.full_tensor()``, and operations on the DTensor itself, are differentiable. But a DTensor takes the
gradient for one that all ranks have alike, and every rank keeps its own rows of its own gradient: nothing is
summed. That is right for a penalty on weights, which is the same on all ranks, and wrong for a loss that uses
the weight with a rank's own data.

Where `set_unused(module, "error")` asks for it, each backward has to give every trained parameter a gradient. Ranks
tell each other what they found, so that all raise the same error: one collective per group and backward, once
gradients are complete.
"""

import functools
import operator
import warnings
from collections.abc import Sequence

import torch

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.checks.model import tie_outside
from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.managed import Watch
from fullshard.engine.runtime import outside_transforms
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError, StateError
from fullshard.peers.groups import place_in_job
from fullshard.plan.units import first_names
from fullshard.policies import Unused


@outside_transforms
def watch_direct_gradients(units: Sequence[Unit]) -> None:
    """Warn, once, of a gradient that autograd leaves on a sharded parameter; refuse one on an original.

    Call it once sharding cannot fail any more: then modules would have the originals again.
    """
    has_warned: list[bool] = []
    for unit in units:
        for param in unit.params:
            original = param.original()
            if original is not None and original is not param.sharded and original.requires_grad:
                # A dictionary of its own: the one that it has may be the sharded parameter's as well.
                original._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                original.register_post_accumulate_grad_hook(functools.partial(_refuse, param.name))
            is_alone = unit.mesh.plan.data_parallel_size == 1
            if isinstance(param, DTensorParameter) and param.sharded.requires_grad and not is_alone:
                # Of the tensor, not of the node that accumulates: while somebody holds that one, torch
                # cannot swap the tensor once it is frozen, as `model.to()` does.
                param.sharded.register_hook(Watch(_warn, param.name, has_warned))


def _refuse(name: str, original: torch.Tensor) -> None:
    raise MisuseError(
        tie_outside([(name, original)])
        or f"{name}: autograd has computed a gradient for the parameter as it was before it was sharded, which "
        "nothing trains. Something has kept it (a list, a closure, an attribute that is no parameter), or a "
        "forward from before sharding is differentiated. Read the parameter from its module each time it "
        "is used."
    )


def _warn(name: str, has_warned: list[bool], _: torch.Tensor) -> None:
    if has_warned:
        return
    has_warned.append(True)
    warnings.warn(
        f"{name}: a gradient comes through full_tensor() or another operation on the sharded parameter, not "
        "through its module. Nothing averages it over the ranks. That is right if it is the same on all of "
        "them, as for a penalty on weights. Where a loss uses the weight with a rank's own data, call "
        "fullshard.gathered(weight).",
        stacklevel=2,
    )


_unused = operator.attrgetter("config.unused")


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
        if Unused.ERROR not in map(_unused, units):  # nearly always
            return
        asked = [u for u in units if u.config.unused is Unused.ERROR and u.config.reduce_grads]
        if not asked:
            return
        rank = place_in_job().rank
        found: dict[str, set[int]] = {}
        for unit in asked:
            had = self._had.pop(unit, set())
            for index, param in enumerate(unit.params):
                if index not in had and param.sharded.requires_grad:
                    found[param.name] = {rank}
        # Once each, in one order on all ranks.
        for group in dict.fromkeys(group for unit in asked for group in unit.mesh.groups):
            everyones = gather_objects(found, group, "comparing unused parameters")
            found = {}
            for name, ranks in (item for own in everyones for item in own.items()):
                found.setdefault(name, set()).update(ranks)
        if found:
            shown = first_names([f"{n} (ranks {sorted(ranks)})" for n, ranks in found.items()])
            raise StateError(
                f"Trained parameters got no gradient in this backward: {shown}. Freeze "
                "them, use them in the loss, or call set_unused(module, 'zero'), which gives them zeros."
            )
