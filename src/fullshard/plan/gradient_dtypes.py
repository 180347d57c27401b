"""Choose the dtypes in which a parameter's gradients are left by autograd, reduced, and given to optimizers.

A parameter may say itself in which dtype it wants its gradients (``parameter.grad_dtype = ...``,
torch 2.11 and later); None there means whatever autograd computes. If it says nothing, releases of
torch differ in what ``reduce_dtype=None`` means (`fsdp2.units`); `follows_param` stands for that.

| | `grad_dtype` not set | set to a dtype | set to None |
| --- | --- | --- | --- |
| full: left by autograd | compute dtype, or wider where the reduce dtype is | \
`reduce_dtype`, else `grad_dtype` | `reduce_dtype`, else as it comes |
| reduced: of a finished sum | `reduce_dtype`, else the parameter's (`follows_param`) or the compute \
dtype | `reduce_dtype`, else `grad_dtype` | `reduce_dtype`, else as it comes |
| shard: ``.grad`` of the sharded parameter | the parameter's | `grad_dtype` | that of the sum |

Gradients nearly always come in the compute dtype. An ``autograd.Function`` may return wider ones, and
where they are reduced in a wider dtype anyway, nothing is rounded on the way.

Sums of several backwards that wait for a reduction have the dtype that they are reduced in. If
parameters of one dtype in a unit ask for different ones, all are reduced in the one that holds each.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from fullshard.plan.layout import ParamSpec


class GradDtype(NamedTuple):
    """The dtype that autograd gives a tensor's gradients: ``Tensor.grad_dtype``, if it was set.

    dtype: None for any, which is known once a gradient is computed. Without ``is_set`` gradients have
        the tensor's own dtype.
    """

    is_set: bool = False
    dtype: torch.dtype | None = None


class GradientDtypes(NamedTuple):
    """The dtypes of one parameter's gradients: see the table above.

    shard: None for that of the sum. unsharded: what the unsharded form has to say, so that autograd
    leaves gradients so.
    """

    full: torch.dtype
    reduced: torch.dtype
    shard: torch.dtype | None
    unsharded: GradDtype = GradDtype()

    @property
    def takes_sums(self) -> bool:
        """True if autograd can add to sums of several backwards in place, which have the reduced dtype."""
        return self.unsharded.is_set or self.reduced == self.full


def gradient_dtypes(
    spec: ParamSpec,
    own: GradDtype,
    *,
    reduce_dtype: torch.dtype | None,
    follows_param: bool,
    reduces_elsewhere: bool = False,
    seen: torch.dtype | None = None,
) -> GradientDtypes:
    """Return the dtypes of the gradients of a parameter that is sharded by rows.

    own: what the parameter says. reduce_dtype: the policy's. follows_param: what it means if None.
    reduces_elsewhere: whether a gradient may be a partial sum that is completed over other ranks than
        the unit's. With ``follows_param`` it is, in the reduce dtype.
    seen: the dtype in which gradients came last, if the parameter takes any; None before the first.
    """
    if own.is_set:
        left = GradDtype(True, reduce_dtype or own.dtype)
        full = left.dtype or seen or spec.compute_dtype
        return GradientDtypes(full, full, own.dtype, left)
    reduced = reduce_dtype or (spec.dtype if follows_param else spec.compute_dtype)
    if reduced.itemsize <= spec.compute_dtype.itemsize:
        return GradientDtypes(spec.compute_dtype, reduced, spec.dtype)
    if reduces_elsewhere and follows_param:
        return GradientDtypes(reduced, reduced, spec.dtype, GradDtype(True, reduced))
    return GradientDtypes(spec.compute_dtype, reduced, spec.dtype, GradDtype(True, None))


def flat_gradient_dtypes(spec: ParamSpec, *, reduce_dtype: torch.dtype | None) -> GradientDtypes:
    """Return the dtypes of a flat unit's gradients, which lie in buffers of the compute dtype."""
    return GradientDtypes(spec.compute_dtype, reduce_dtype or spec.compute_dtype, spec.dtype)


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype that holds values of each of these; there has to be one at least."""
    return functools.reduce(torch.promote_types, dict.fromkeys(dtypes))


def may_overflow(reduce_dtype: torch.dtype, sum_dtype: torch.dtype, *, has_replicas: bool) -> bool:
    """Return whether sums travel or are formed in float16, so that gradients are divided before they are summed.

    sum_dtype: in which they are formed over the shard axis. Over the replicate axis they travel in the reduce dtype,
    whatever they were formed in.
    """
    return reduce_dtype == torch.float16 and (has_replicas or sum_dtype == reduce_dtype)


def reduce_dtypes(
    stored: Sequence[torch.dtype], wanted: Sequence[torch.dtype]
) -> list[torch.dtype]:
    """Return, for each parameter of a unit, the dtype that holds what all of its stored dtype want.

    PyTorch reduces all of a unit in one dtype, but takes parameters of one dtype only. Others, such
    as complex ones, do not change what these are reduced in.
    """
    pairs = list(zip(stored, wanted, strict=True))
    common = {
        each: common_dtype(w for s, w in pairs if s == each) for each in dict.fromkeys(stored)
    }
    return [common[each] for each in stored]
