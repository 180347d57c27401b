"""Communication of a group of one rank: nothing moves.

Unsharded parameters are the shards themselves, or a cast of them.
"""

from collections.abc import Callable, Sequence

import torch

from fullshard.comm.interface import Comm, Done, ShardBuffer, Sum, Work
from fullshard.comm.packing import copy_in_gradients
from fullshard.plan.layout import BucketLayout


class LocalComm(Comm):
    """Communication of one rank, which owns everything."""

    name = "local (one rank)"
    rank = 0
    size = 1
    overlaps = False
    needs_host = False

    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        made = super().allocate_shards(bucket, device, pin_memory=pin_memory)
        made.in_place = made.shards[: len(bucket.params) - len(bucket.packed)]
        return made

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, label: str, offset: int = 0
    ) -> Work:
        flat = shards.flat
        assert flat is not None
        # With one rank both buffers are arranged alike: same order, same padding.
        if unsharded.numel():
            unsharded.copy_(flat[offset:], non_blocking=True)
        return Done()

    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: Callable[[], torch.Tensor],
        how: Sum,
    ) -> Work:
        divisor = how.scaling.before * how.scaling.after
        copy_in_gradients(bucket, grads, out(), divisor=divisor)
        return Done(tuple(grad is not None for grad in grads))

    def all_reduce(self, total: torch.Tensor, present: tuple[bool, ...], how: Sum) -> Work:
        return Done(present)
