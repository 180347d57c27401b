"""Gradients that come past the modules: to sharded parameters, or to those of before sharding.

Nothing trains what a parameter was before it was sharded, so a gradient of it is an error. One of a
sharded parameter is warned of:

``weight.full_tensor()``, and operations on the DTensor itself, are differentiable. But a DTensor takes the
gradient for one that all ranks have alike, and every rank keeps its own rows of its own gradient: nothing is
summed. That is right for a penalty on weights, which is the same on all ranks, and wrong for a loss that uses
the weight with a rank's own data.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fullshard.engine.params.dtensor import DTensorParameter
from fullshard.engine.params.managed import accumulator_of
from fullshard.engine.runtime import outside_transforms
from fullshard.engine.unit import Unit
from fullshard.errors import MisuseError


@outside_transforms
def watch_direct_gradients(units: Sequence[Unit]) -> list[Any]:
    """Warn, once, of a gradient that autograd leaves on a sharded parameter; refuse one on an original.

    Call it once sharding cannot fail any more: then modules would have the originals again. Returns
    autograd's nodes that watch: as long as somebody holds them.
    """
    nodes: list[Any] = []
    warn = functools.partial(_warn, has_warned=[])
    for unit in units:
        for param in unit.params:
            original = param.original()
            if original is not None and original is not param.sharded and original.requires_grad:
                # A dictionary of its own: the one that it has may be the sharded parameter's as well.
                original._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                original.register_post_accumulate_grad_hook(functools.partial(_refuse, param.name))
        if unit.mesh.plan.data_parallel_size == 1:
            continue
        for param in unit.params:
            if isinstance(param, DTensorParameter) and param.sharded.requires_grad:
                node = accumulator_of(param.sharded)
                node.register_prehook(functools.partial(warn, param.name))
                nodes.append(node)
    return nodes


def _refuse(name: str, _: torch.Tensor) -> None:
    raise MisuseError(
        f"{name}: autograd has computed a gradient for the parameter as it was before it was sharded, which "
        "nothing trains. Something has kept it (a list, a closure, an attribute that is no parameter), or a "
        "forward from before sharding is differentiated. Read the parameter from its module each time it "
        "is used."
    )


def _warn(name: str, _: tuple[torch.Tensor, ...], *, has_warned: list[bool]) -> None:
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
