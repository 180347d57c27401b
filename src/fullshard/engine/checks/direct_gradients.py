"""A warning for gradients that reach sharded parameters past their modules.

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
from fullshard.engine.runtime import outside_transforms
from fullshard.engine.unit import Unit


@outside_transforms
@torch.inference_mode(False)  # a model may be evaluated before it is trained
@torch.enable_grad()
def watch_direct_gradients(units: Sequence[Unit]) -> list[Any]:
    """Warn, once, of a gradient that autograd leaves on a sharded parameter of these units.

    Returns autograd's nodes that watch: as long as somebody holds them.
    """
    nodes: list[Any] = []
    warn = functools.partial(_warn, has_warned=[])
    for unit in units:
        if unit.mesh.plan.data_parallel_size == 1:
            continue
        for param in unit.params:
            # Tensor subclasses need not know the operator below.
            is_plain = isinstance(param, DTensorParameter) and not param.is_extended
            if is_plain and param.sharded.requires_grad:
                # Through an alias: `get_gradient_edge` takes a view, which DTensors without elements lack.
                alias: Any = torch.ops.aten.alias.default(param.sharded)
                node = alias.grad_fn.next_functions[0][0]
                node.register_prehook(functools.partial(warn, param.name))
                nodes.append(node)
    return nodes


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
