"""The memory of one bucket's reduced gradients, and how sharded parameters get them."""

import dataclasses
import itertools
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm.interface import shard_views
from fullshard.engine.gradients.accumulation import show_gradient
from fullshard.engine.gradients.recipe import Recipe
from fullshard.engine.gradients.shards import GradientShards
from fullshard.engine.params.buffers import KEPT_NBYTES
from fullshard.engine.params.managed import ManagedParameter, ShardHolder
from fullshard.engine.runtime import Runtime
from fullshard.plan.layout import BucketLayout

_POOLED = 2  # gradient memory kept for reuse: the current and, with accumulation, the next


@dataclasses.dataclass(slots=True)
class PartialSum:
    """A sum over the shard axis whose all-reduce was put off.

    present: for each holder, whether there was a gradient.
    """

    total: torch.Tensor
    present: tuple[bool, ...]


class BucketGradients:
    """The reduced gradients of one bucket.

    indices: which of the unit's parameters they are of.
    holders: who gets them: each parameter, or one for all of them.
    partial: what waits for its all-reduce.
    recipe: how they were reduced last.
    alive: all memory of gradients that is made is entered there.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        indices: Sequence[int],
        holders: Sequence[ShardHolder],
        *,
        shard_rank: int,
        runtime: Runtime,
        alive: weakref.WeakSet[GradientShards],
    ) -> None:
        self.bucket = bucket
        self.indices = list(indices)
        self.holders = list(holders)
        self.partial: PartialSum | None = None
        self.recipe: Recipe | None = None
        self.pool: list[GradientShards] = []
        # One holder gets the whole bucket.
        self.has_one_holder = bucket.is_flat and not isinstance(holders[0], ManagedParameter)
        self._shard_rank = shard_rank
        self._runtime = runtime
        self._alive = alive

    @property
    def device(self) -> torch.device:
        """Where the sharded parameters are."""
        return self.holders[0].local.device

    @property
    def has_gradient(self) -> bool:
        """Whether a holder has a gradient already."""
        for holder in self.holders:  # noqa: SIM110  (a third of the cost of `any`)
            if holder.sharded.grad is not None:
                return True
        return False

    @property
    def in_use(self) -> torch.Tensor | None:
        """The memory of the gradients that the holders have now, unless it lies elsewhere."""
        return next((shards.flat for shards in self.pool if self._is_in_use(shards)), None)

    def free_unused(self) -> None:
        """Free large memory that nobody uses."""
        if self.bucket.shard_nbytes > KEPT_NBYTES:
            self.pool = [shards for shards in self.pool if not self._is_unused(shards)]

    def takers(self, owed: Collection[ManagedParameter]) -> tuple[bool, ...]:
        """Say for each holder of a flat bucket whether it gets a gradient, whoever had one.

        It does if this rank has a part of it, and it is trainable or is one of ``owed``.
        """
        owners = {param.holder for param in owed}
        return tuple(
            (holder.sharded.requires_grad or holder in owners) and holder.sharded.numel() > 0
            for holder in self.holders
        )

    def add_partial(self, other: "BucketGradients") -> None:
        """Take over what waits in a bucket of another choice of parameters, of those in both."""
        assert other.partial is not None
        waiting = other.partial
        views = dict(zip(other.indices, other._part_of_each(waiting.total), strict=True))
        if views.keys().isdisjoint(self.indices):
            return
        if self.partial is None:
            scratch = self._runtime.scratch
            total = scratch.take(self.bucket.shard_numel, waiting.total.dtype).zero_()
            self.partial = PartialSum(total, (False,) * len(self.holders))
        for index, part in zip(self.indices, self._part_of_each(self.partial.total), strict=True):
            if index in views:
                part.add_(views[index])
        present = set(itertools.compress(other.holders, waiting.present))
        self.partial.present = tuple(
            had or holder in present
            for holder, had in zip(self.holders, self.partial.present, strict=True)
        )

    def _part_of_each(self, total: torch.Tensor) -> list[torch.Tensor]:
        return shard_views(self.bucket, total, self._shard_rank)

    def destination(self, recipe: Recipe) -> tuple[GradientShards | None, torch.Tensor]:
        """Choose where a sum goes: into the gradients' own memory if it is final as it comes."""
        if recipe.is_final and not self.has_gradient:
            shards = self._take(self._runtime.device)
            return shards, shards.flat
        return None, self._runtime.scratch.take(self.bucket.shard_numel, recipe.total_dtype)

    def deposit(
        self, total: torch.Tensor, shards: GradientShards | None, present: Sequence[bool]
    ) -> None:
        """Set or add to the sharded parameters' gradients.

        shards: whose memory ``total`` is; if None, it is scratch and given back.
        present: for each holder, whether there is a gradient.
        """
        scratch = total if shards is None else None
        if shards is None:
            device = self.device
            is_first = not self.has_gradient
            if is_first or device != total.device:
                shards = self._take(device)
                shards.flat.copy_(total, non_blocking=True)
                if not is_first:  # the host adds
                    self._runtime.finish(self._runtime.record())
        views = shards.views if shards is not None else self._views(total)
        for position, holder in enumerate(self.holders):
            if not present[position]:
                continue
            sharded = holder.sharded
            if sharded._backward_hooks:
                self._runtime.finish(self._runtime.record() if holder.local.is_cpu else None)
                run_gradient_hooks(holder, views[position])
            if sharded.grad is not None:
                local = holder.local_grad
                assert local is not None
                local.add_(views[position])
            elif shards is not None:
                sharded.grad = shards.wrapped[position]
            else:
                local = views[position].to(holder.local.device, sharded.dtype, copy=True)
                sharded.grad = holder.wrap_shard(local)
            if sharded._post_accumulate_grad_hooks:
                for hook in holder.post_accumulate_hooks:
                    self._runtime.finish(self._runtime.record() if holder.local.is_cpu else None)
                    hook(sharded)
        if scratch is not None:
            self._runtime.scratch.give(scratch)
        if shards is not None:
            self.pool.append(shards)
            del self.pool[:-_POOLED]

    def deposit_low(self, total: torch.Tensor, dtype: torch.dtype, present: Sequence[bool]) -> None:
        """Set or add to the gradients, which are in the reduce dtype. ``total`` is scratch."""
        # If offloaded: one copy of all, which the host waits for.
        views = self._views(total.to(self.device))
        for holder, view, is_present in zip(self.holders, views, present, strict=True):
            if not is_present:
                continue
            if holder.sharded._backward_hooks:
                run_gradient_hooks(holder, view)
            if holder.local_grad is not None:
                holder.local_grad.add_(view)
                continue
            show_gradient(holder.sharded, view.to(holder.local.device, dtype, copy=True))
        self._runtime.scratch.give(total)

    def _views(self, total: torch.Tensor) -> list[torch.Tensor]:
        """View a sum as what each holder gets of it."""
        if self.has_one_holder:
            return [total]
        return shard_views(self.bucket, total, self._shard_rank)

    def _take(self, device: torch.device) -> GradientShards:
        for position, shards in enumerate(self.pool):
            if shards.device == device and self._is_unused(shards):
                return self.pool.pop(position)
        with torch.inference_mode(False):
            shards = GradientShards(
                self.bucket,
                self._shard_rank,
                device,
                [holder.wrap_shard for holder in self.holders],
                as_one=self.has_one_holder,
                pin_memory=device != self._runtime.device,
            )
        self._alive.add(shards)
        return shards

    def _is_unused(self, shards: GradientShards) -> bool:
        return shards.is_unused_except_on(holder.local for holder in self.holders)

    def _is_in_use(self, shards: GradientShards) -> bool:
        return all(
            holder.sharded.grad is wrapped or not holder.sharded.numel()
            for holder, wrapped in zip(self.holders, shards.wrapped, strict=True)
        )


def run_gradient_hooks(holder: ShardHolder, local: torch.Tensor) -> None:
    """Pass a reduced gradient, as the sharded parameter's, through that one's `register_hook` hooks.

    Autograd never sees the sharded parameter, so nobody else runs them. What they return replaces
    the values of ``local``.
    """
    for hook in list((holder.sharded._backward_hooks or {}).values()):
        grad = holder.wrap_shard(local.to(holder.sharded.dtype))
        result = hook(grad)
        new: Any = grad if result is None else result
        new = new._local_tensor if isinstance(new, DTensor) else new
        if new is not local:
            local.copy_(new)
