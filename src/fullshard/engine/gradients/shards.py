"""The memory of one bucket's reduced gradients, used again once nobody refers to it."""

from collections.abc import Callable, Iterable, Sequence

import torch

from fullshard.comm.interface import shard_views
from fullshard.engine.references import python_uses, storage_uses, tensor_uses
from fullshard.plan.layout import BucketLayout


class GradientShards:
    """One bucket's reduced gradients, as one tensor and as the gradients that users get.

    flat: 1-D, ``bucket.shard_numel`` elements of the bucket's storage dtype, uninitialised.
    views: the local gradient of each holder, in its local shape, over the memory of ``flat``.
    wrapped: the same as users see them (DTensors, or the views themselves): they become ``.grad``.

    The memory is used again in a later step once nobody but this object refers to it, so a gradient
    that the user keeps is never overwritten.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        rank: int,
        device: torch.device,
        wraps: Sequence[Callable[[torch.Tensor], torch.Tensor]],
        *,
        as_one: bool,
        pin_memory: bool,
    ) -> None:
        """Allocate the memory.

        rank: of this process on the shard axis.
        wraps: for each holder, the function from local to visible gradient.
        as_one: whether one holder gets the whole bucket, padding included.
        """
        self.device = device
        self.flat = torch.empty(
            bucket.shard_numel,
            dtype=bucket.dtype,
            device=device,
            pin_memory=pin_memory and torch.accelerator.is_available(),
        )
        self.views = [self.flat] if as_one else shard_views(bucket, self.flat, rank)
        self.wrapped = [wrap(view) for wrap, view in zip(wraps, self.views, strict=True)]
        # All of them are made once and kept, so that the baseline below counts them.
        self._storages = [view.untyped_storage() for view in self.views]
        self._addresses = [storage._cdata for storage in self._storages]
        # Last, when every reference of this object is there.
        self._own_uses = self._uses() if tensor_uses is not None else 0

    @property
    def is_unused(self) -> bool:
        """Whether nobody else refers to the gradients or their memory; False if torch cannot say."""
        return tensor_uses is not None and self._uses() == self._own_uses

    def is_unused_except_on(self, shards: Iterable[torch.Tensor]) -> bool:
        """Whether nobody else does, except for the ``.grad`` of the given shards.

        `step_on_shards` sets that in a step and leaves it there. It is read by the next step alone,
        which sets it anew, so it need not keep the memory from being used again.
        """
        if tensor_uses is None:
            return False
        others = self._uses() - self._own_uses
        return others == 0 or others == sum(
            shard.grad is view for shard, view in zip(shards, self.views, strict=True)
        )

    def _uses(self) -> int:
        """Count references to the gradients and their memory, from Python and from C++ (``.grad``)."""
        tensors, storages = self.wrapped, self._storages
        uses = sum(map(python_uses, tensors)) + sum(map(python_uses, storages))
        uses += sum(map(python_uses, self.views))  # what `to_local` returns without gradients
        return uses + sum(map(tensor_uses, tensors)) + sum(map(storage_uses, self._addresses))
