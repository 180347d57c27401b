"""Reduction by a user's function (a communication hook) instead of the unit's communication."""

from collections.abc import Sequence

import torch

from fullshard.comm.interface import Reduced, Reduction
from fullshard.comm.packing import copy_in_gradients
from fullshard.plan.layout import BucketLayout
from fullshard.policies import CommHook


def reduce_by_hook(
    hook: CommHook, bucket: BucketLayout, grads: Sequence[torch.Tensor | None], out: torch.Tensor
) -> Reduction:
    """Let a hook reduce a flat bucket's gradients; ``out`` gets this rank's shard.

    The hook gets undivided gradients in ``out``'s dtype and has to divide them itself. With one
    rank it is called with one tensor, which it reduces in place; otherwise with the full gradients
    and the tensor for the result, both 1-D.
    """
    # A tensor of its own over the same memory: a hook may set `result.data` to other memory, as
    # PyTorch's compressing hooks do, and `out` is the caller's.
    result = out.detach()
    if bucket.shard_size == 1:
        copy_in_gradients(bucket, grads, out)
        hook.function(hook.state, result)
    else:
        region = torch.empty(bucket.unsharded_numel, dtype=out.dtype, device=out.device)
        copy_in_gradients(bucket, grads, region)
        hook.function(hook.state, region, result)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)
    return Reduced(tuple(grad is not None for grad in grads))
