"""A warning where ranks do not know of each other which parameters have a gradient.

Most ways of communicating send along which gradients a rank has (see `reduction`, Note: Missing gradients). Where
the host would have to wait for its device for that (NCCL), and with custom collectives, each rank goes by
its own. If only other ranks used a parameter, this rank's part of it is not updated.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.engine.gradients.buckets import GradientBuckets
from fullshard.engine.gradients.deposits import BucketGradients
from fullshard.policies import UnitConfig


class PresenceWatch:
    """Looks, for one unit, whether a gradient is missing that other ranks may have. Warns once."""

    def __init__(self) -> None:
        self._has_warned = False

    def look(
        self,
        buckets: GradientBuckets,
        bucket: BucketGradients,
        full: Sequence[torch.Tensor | None],
        config: UnitConfig,
    ) -> None:
        """Warn of a trained parameter without a gradient. full: this rank's gradients of the bucket."""
        if buckets.shard_comm.tells_presence and buckets.replicate_comm.tells_presence:
            return
        if self._has_warned:
            return
        if bucket.bucket.is_flat or config.reduces_unused:
            return  # every trained parameter gets one
        for index, grad in zip(bucket.indices, full, strict=True):
            if grad is None and buckets.params[index].sharded.requires_grad:
                self._has_warned = True
                warnings.warn(
                    f"{buckets.params[index].name} got no gradient on rank {dist.get_rank()}, and over "
                    f"{buckets.shard_comm.name} ranks do not tell each other which parameters have one. If "
                    "another rank has one, this rank's part is not updated, which is wrong. Freeze it, or call "
                    "set_unused(module, 'zero').",
                    stacklevel=2,
                )
                return
