"""The memory of one bucket's reduced gradients, used again once nobody has them."""

from collections.abc import Callable, Iterable, Sequence

import torch

from fullshard.comm.interface import shard_views
from fullshard.engine.references import python_uses, storage_uses, tensor_uses
from fullshard.plan.layout import BucketLayout


class GradientShards:
    """One bucket's reduced gradients, as one tensor and as views of it.

    as_one: hand it out as one.
    wrapped: the views as they are handed out, each made by its function of ``wraps``.

    The memory is reused for the next step once nobody but this object refers to it, so a gradient
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
        self.device = device
        self.flat = torch.empty(
            bucket.shard_numel,
            dtype=bucket.dtype,
            device=device,
            pin_memory=pin_memory and torch.accelerator.is_available(),
        )
        self.views = [self.flat] if as_one else shard_views(bucket, self.flat, rank)
        self.wrapped = [wrap(view) for wrap, view in zip(wraps, self.views, strict=True)]
        self._storages = [view.untyped_storage() for view in self.views]
        self._addresses = [storage._cdata for storage in self._storages]
        self._own_uses = self._uses() if tensor_uses is not None else 0

    @property
    def is_unused(self) -> bool:
        """Whether no gradient is in use any more."""
        return tensor_uses is not None and self._uses() == self._own_uses

    def is_unused_except_on(self, shards: Iterable[torch.Tensor]) -> bool:
        """The same, but for what a step on shards leaves on them: their gradients of the last one."""
        if tensor_uses is None:
            return False
        others = self._uses() - self._own_uses
        return others == 0 or others == sum(
            shard.grad is view for shard, view in zip(shards, self.views, strict=True)
        )

    def _uses(self) -> int:
        """Count who refers to the gradients and their memory, from Python and from C++ (``.grad``)."""
        tensors, storages = self.wrapped, self._storages
        uses = sum(map(python_uses, tensors)) + sum(map(python_uses, storages))
        uses += sum(map(python_uses, self.views))  # what `to_local` returns without gradients
        return uses + sum(map(tensor_uses, tensors)) + sum(map(storage_uses, self._addresses))
