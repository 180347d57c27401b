"""Reduction by a user's function (a communication hook), in place of the unit's own."""

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

    The hook sees undivided gradients in ``out``'s dtype and divides them itself. It may give its
    tensors other memory, as PyTorch's compressing hooks do.
    """
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
