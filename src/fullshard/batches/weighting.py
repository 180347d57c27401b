"""`weighted_loss`: gradients of the mean over all tokens, however they are divided over ranks and backwards.

The mean over ranks of each rank's mean is another number as soon as ranks have different numbers of tokens.
With weights w of all losses of a step, one per rank and backward, the gradient that is wanted is

    sum(w * grad(loss)) / sum(w)

The engine adds up grad(loss) over ranks and backwards, and divides by the number of ranks. So a loss is
scaled by ``w * ranks / total``, where the total contains what came before; and what earlier backwards have
left is scaled by ``total before / total`` (`totals`). Gradients are right after each backward, not only after
the last.
"""

import math
import numbers
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.batches.totals import add_weight, widest
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.errors import ShardingError, StateError
from fullshard.state.structure import units_of


@eager
def weighted_loss(
    loss: torch.Tensor, weight: float | torch.Tensor, model: nn.Module
) -> torch.Tensor:
    """Return a loss that counts in proportion to its weight among all ranks and backwards of a step.

        loss = cross_entropy(model(inputs), labels)      # the mean over this rank's tokens
        weighted_loss(loss, num_tokens, model).backward()

    loss: of one element, the mean over what ``weight`` counts on this rank. weight: how much it counts, such as
        a number of tokens: 0 or more, a number or a tensor of one element. A rank with weight 0 adds nothing.
    model: the root of a model that is sharded with either API, or any model where there is one process.

    The value of the loss stays. Its gradients become those of the weighted mean over all data-parallel ranks,
    and over all backwards since gradients were dropped or zeroed: after each backward, ``.grad`` is right. So
    do not divide the loss by the number of micro-batches, and let every backward of a step go through this.

    All ranks call it, and run the backward, in which they exchange weights: one all-reduce of a few bytes per
    parameter over each axis of the mesh. From the second backward of a step on, gradients are scaled as well.

    Raises ShardingError for a loss of several elements, a weight that is negative or not finite, and a model
    that is not sharded; StateError for units that divide gradients by another number than that of the ranks
    which see different data. In backward, StateError where gradients of some parameters, or on some ranks, were
    dropped since the last weighted loss and others were not, where a backward without weight has left some, or
    one that has failed; MisuseError for two weighted losses in one backward, for another loss beside it, and for
    a loss that reaches other models. After a backward that has failed, a step of an optimizer is a StateError
    until gradients are dropped: they are incomplete.
    """
    if loss.numel() != 1:
        raise ShardingError(
            f"weighted_loss: the loss has shape {tuple(loss.shape)}. Pass the mean over what weight counts."
        )
    units = units_of(model)
    if not units and dist.is_initialized() and dist.get_world_size() > 1:
        raise ShardingError(
            f"weighted_loss: {type(model).__name__} is not sharded, so nothing averages its gradients over "
            "ranks. Pass the model that fully_shard, replicate or FullyShardedDataParallel was applied to."
        )
    _check_divisors(units)
    own = _checked(weight)
    weighted: torch.Tensor = _Weighted.apply(loss, own, model)  # type: ignore[no-untyped-call]
    return weighted


def _checked(weight: object) -> float | torch.Tensor:
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise ShardingError(
                f"weighted_loss: weight has shape {tuple(weight.shape)}. Pass this rank's total."
            )
        if not weight.is_cpu:  # reading it would stall the host
            return weight.detach().reshape(())
        weight = weight.item()
    value = float(weight) if isinstance(weight, numbers.Real) else -1.0
    if not 0 <= value < math.inf:
        raise ShardingError(f"weighted_loss: weight is {weight!r}. Pass 0 or a positive number.")
    return value


def _check_divisors(units: list[Unit]) -> None:
    """Raise StateError unless every unit divides gradients by the number of ranks with other data."""
    if not units:
        return
    num_ranks = widest(units).data_parallel_size
    for unit in units:
        divisor = unit.config.gradient_divide_factor or unit.mesh.plan.data_parallel_size
        if unit.config.comm_hook is None and divisor != num_ranks:
            raise StateError(
                f"weighted_loss: {unit.label} divides its gradients by {divisor:g}, but {num_ranks} ranks see "
                f"different data. Call set_gradient_divide_factor({num_ranks}) on its module."
            )


class _Weighted(torch.autograd.Function):
    """The identity, whose backward scales the gradient."""

    @staticmethod
    def forward(
        ctx: Any, loss: torch.Tensor, weight: float | torch.Tensor, model: nn.Module
    ) -> torch.Tensor:
        ctx.weight, ctx.model = weight, weakref.ref(model)
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        model = ctx.model()
        if model is None:
            return None, None, None  # nobody is left to have gradients
        share = add_weight(ctx.weight, model, grad.device)
        return grad * share.to(grad.device, grad.dtype), None, None
