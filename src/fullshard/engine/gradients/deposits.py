"""One bucket's reduced gradients: the choice of their memory, and giving them to parameters."""

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.comm.interface import shard_views
from fullshard.engine.gradients.recipe import Recipe
from fullshard.engine.guard.uses import python_uses
from fullshard.engine.params.flat import show_gradient
from fullshard.engine.params.managed import ManagedParameter, ShardHolder
from fullshard.engine.runtime import Runtime
from fullshard.plan.layout import BucketLayout
from fullshard.torch_private import storage_uses, tensor_uses

# Pieces of gradient memory that one bucket keeps for reuse. Two, since a reduction may begin while
# the gradients of the last one are still there to be added to.
_POOLED = 2


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
        # All of them are made once and kept, so that the baseline below counts them. Views are what
        # `to_local` returns without gradients.
        self._storages = [view.untyped_storage() for view in self.views]
        self._objects = [*self.wrapped, *self.views, *self._storages]
        self._addresses = [storage._cdata for storage in self._storages]
        # Last, when every reference of this object is there.
        self._own_uses = self._uses() if tensor_uses is not None else 0

    @property
    def is_unused(self) -> bool:
        """Whether nobody else refers to the gradients or their memory; False if torch cannot say."""
        return tensor_uses is not None and self._uses() == self._own_uses

    def is_unused_but_on(self, holders: Sequence[ShardHolder]) -> bool:
        """Whether nobody else does, except for the ``.grad`` of the holders' local shards.

        `step_on_shards` sets that in a step and leaves it there. It is read by the next step alone,
        which sets it anew, so it need not keep the memory from being used again.
        """
        if tensor_uses is None:
            return False
        others = self._uses() - self._own_uses
        if others == 0:
            return True
        pairs = zip(holders, self.views, strict=True)
        return others == sum(holder.local.grad is view for holder, view in pairs)

    def _uses(self) -> int:
        """Count references to the gradients and their memory, from Python and from C++ (``.grad``)."""
        uses = sum(map(python_uses, self._objects)) + sum(map(tensor_uses, self.wrapped))
        return uses + sum(map(storage_uses, self._addresses))


@dataclasses.dataclass(slots=True)
class PartialSum:
    """A sum over the shard axis whose all-reduce over the replicate axis was put off.

    total: 1-D, ``bucket.shard_numel`` elements of the recipe's total dtype, in scratch memory.
    present: for each holder, whether any rank of the shard axis had a gradient.
    """

    total: torch.Tensor
    present: tuple[bool, ...]


class BucketGradients:
    """Gives the sharded parameters of one bucket their reduced gradients, and keeps the memory.

    bucket: the layout of the gradients. Its storage dtype is theirs, its compute dtype that of full
        gradients.
    reduce_dtype: of finished sums.
    indices: the unit's indices of the bucket's parameters, in bucket order.
    holders: the owners of the sharded parameters, in bucket order: one per parameter, or one for all
        inside a flat parameter. ``present`` and ``takers`` below are in this order.
    has_one_holder: whether one flat parameter gets the whole bucket, padding included.
    partial: a sum that waits for its all-reduce, or None.
    recipe: of the last reduction, or None.
    pool: memory of gradients that were reduced, the newest last: in use, or to be used again.
    """

    def __init__(
        self,
        bucket: BucketLayout,
        indices: Sequence[int],
        holders: Sequence[ShardHolder],
        *,
        reduce_dtype: torch.dtype,
        shard_rank: int,
        runtime: Runtime,
        owed: set[int],
        alive: weakref.WeakSet[GradientShards],
    ) -> None:
        """Begin without memory.

        owed: `GradientBuckets.owed`. alive: a set to which every piece of memory is added.
        """
        self.bucket = bucket
        self.indices = list(indices)
        self.holders = list(holders)
        self.reduce_dtype = reduce_dtype
        self.may_be_wider = reduce_dtype.itemsize > bucket.compute_dtype.itemsize
        self._has_come_wider = False
        self.partial: PartialSum | None = None
        self.recipe: Recipe | None = None
        self.pool: list[GradientShards] = []
        self.has_one_holder = bucket.is_flat and not isinstance(holders[0], ManagedParameter)
        self._shard_rank = shard_rank
        self._runtime = runtime
        self._owed = owed
        self._alive = alive

    @property
    def device(self) -> torch.device:
        """The device of the sharded parameters: the host, if they are offloaded."""
        return self.holders[0].local.device

    @property
    def has_gradient(self) -> bool:
        """Whether any sharded parameter of the bucket has a gradient."""
        for holder in self.holders:  # noqa: SIM110  (a third of the cost of `any`)
            if holder.sharded.grad is not None:
                return True
        return False

    @property
    def in_use(self) -> torch.Tensor | None:
        """The memory of the gradients that the holders have now, 1-D; None if it is not ours."""
        return next((shards.flat for shards in self.pool if self._is_in_use(shards)), None)

    def comes_wider(self, full: Sequence[torch.Tensor | None]) -> bool:
        """Whether a full gradient has come, now or before, that is wider than what was planned.

        Where the ranks form the sums, they have to agree: a rank that has none when others' first
        ones come wider sends less, and all get a DivergenceError. Backends that sum get the reduce
        dtype in any case.
        """
        if self.may_be_wider and not self._has_come_wider:
            size = self.bucket.compute_dtype.itemsize
            self._has_come_wider = any(
                grad is not None and grad.dtype.itemsize > size for grad in full
            )
        return self._has_come_wider

    def free_unused(self) -> None:
        """Free pooled memory that nobody uses."""
        self.pool = [shards for shards in self.pool if not shards.is_unused_but_on(self.holders)]

    def takers(self) -> tuple[bool, ...]:
        """Return, for each holder of a flat bucket, whether it gets a gradient: zeros, if need be.

        It does if this rank owns elements of it, and it is trainable or owed one. No rank is asked
        whether it had a gradient: a flat buffer is reduced as a whole, as in PyTorch's FSDP1.
        """
        are_owed = [index in self._owed for index in self.indices]
        if self.has_one_holder:
            are_owed = [any(are_owed)]
        return tuple(
            (holder.sharded.requires_grad or is_owed) and holder.sharded.numel() > 0
            for holder, is_owed in zip(self.holders, are_owed, strict=True)
        )

    def put_off(
        self, total: torch.Tensor, present: tuple[bool, ...], *, takers: tuple[bool, ...] | None
    ) -> None:
        """Keep a sum over the shard axis, in scratch memory, for a later all-reduce.

        present: for each holder, whether any rank of the shard axis had a gradient. takers: as in
        `queue.BucketInFlight`.
        """
        self.partial = PartialSum(total, present)
        # Everybody in the bucket is owed, with or without a gradient: replicas may differ in that,
        # and the sizes of the next reduction follow from who is owed.
        owed = present if takers is not None else (True,) * len(self.holders)
        if self.has_one_holder:
            owed *= len(self.indices)
        self._owed.update(itertools.compress(self.indices, owed))

    def add_waiting(self, total: torch.Tensor, present: tuple[bool, ...]) -> tuple[bool, ...]:
        """Add the sum that waits for its all-reduce, if there is one, to a newer one, in place.

        present: for each holder, whether the newer one has a gradient; returns it for both.
        """
        if self.partial is None:
            return present
        waiting, self.partial = self.partial, None
        total.add_(waiting.total)
        self._runtime.scratch.give(waiting.total)
        return tuple(map(operator.or_, present, waiting.present))

    def take_over(self, other: "BucketGradients") -> None:
        """Add the sums that wait in a bucket of another choice of parameters, where both have one.

        For parameters that were frozen or unfrozen between micro-batches. ``other`` stays unchanged.
        """
        assert other.partial is not None
        waiting = other.partial
        views = dict(zip(other.indices, other._part_of_each(waiting.total), strict=True))
        if views.keys().isdisjoint(self.indices):
            return
        if self.partial is None:
            scratch = self._runtime.scratch
            # Zeros: this bucket may have parameters that the other has not, and padding.
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
        """View a sum as this rank's shard of each parameter, also under one holder."""
        return shard_views(self.bucket, total, self._shard_rank)

    def take_destination(self, recipe: Recipe) -> tuple[torch.Tensor, GradientShards | None]:
        """Take memory for a sum over the shard axis: of the gradients, or scratch.

        Returns a 1-D tensor of ``bucket.shard_numel`` elements, and the gradient memory that it is,
        or None. Gradient memory is chosen if the sum may be formed there (`Recipe.is_final`) and
        there is no gradient to add it to. `deposit` gives scratch back.
        """
        if recipe.is_final:
            for holder in self.holders:  # `has_gradient`, without the call
                if holder.sharded.grad is not None:
                    break
            else:
                shards = self._take(self._runtime.device)
                return shards.flat, shards
        return self._runtime.scratch.take(self.bucket.shard_numel, recipe.total_dtype), None

    def deposit(
        self, total: torch.Tensor, shards: GradientShards | None, present: Sequence[bool]
    ) -> None:
        """Set the sharded parameters' gradients, or add to the ones that they have.

        total: the finished sum, 1-D, ``bucket.shard_numel`` elements.
        shards: the gradient memory that ``total`` is; if None, it is scratch and is given back.
        present: for each holder, whether there is a gradient. Where there is none, ``.grad`` stays
            as it was.

        Hooks on sharded parameters run here: `register_hook` before the gradient is set or added,
        `register_post_accumulate_grad_hook` after it.
        """
        scratch = total if shards is None else None
        if shards is None:
            device = self.device
            is_first = not self.has_gradient
            # To gradients that are there, on the device of the sum, scratch is added below as it is.
            if is_first or device != total.device:
                shards = self._take(device)
                # One copy that casts, moves to the host, or both; pinned memory lets it go on behind
                # the host. `ReductionQueue.release` waits for it before anybody reads.
                shards.flat.copy_(total, non_blocking=True)
                # Not here: the host itself reads the copy, in `add_` below.
                if not is_first:
                    self._runtime.finish(self._runtime.record())
        views = shards.views if shards is not None else self._views(total)
        for position, holder in enumerate(self.holders):
            if not present[position]:
                continue
            sharded = holder.sharded
            if sharded._backward_hooks:
                # On the host, hooks read what the lane has copied there. The other case needs no
                # wait: they run on the lane.
                self._runtime.finish(self._runtime.record() if holder.local.is_cpu else None)
                run_gradient_hooks(holder, views[position], self.bucket.dtype)
            if sharded.grad is not None:
                local = holder.local_grad
                assert local is not None
                local.add_(views[position])
            elif shards is not None:
                sharded.grad = shards.wrapped[position]
            else:
                # Others have a gradient, this one has not. A copy: `total` is scratch, and the next
                # reduction writes to it.
                local = views[position].to(holder.local.device, self.bucket.dtype, copy=True)
                sharded.grad = holder.wrap_shard(local)
            if sharded._post_accumulate_grad_hooks:
                for hook in holder.post_accumulate_hooks:
                    self._runtime.finish(self._runtime.record() if holder.local.is_cpu else None)
                    hook(sharded)
        # After the last view was read; on a device the lane keeps its order.
        if scratch is not None:
            self._runtime.scratch.give(scratch)
        # Pooled while in use: `_take` asks who refers to it. Dropping the oldest frees nothing that
        # a gradient still uses.
        if shards is not None:
            self.pool.append(shards)
            del self.pool[:-_POOLED]

    def deposit_low(self, total: torch.Tensor, dtype: torch.dtype, present: Sequence[bool]) -> None:
        """Set gradients of the reduce dtype (``keep_low_precision_grads``), or add to them.

        total: scratch, which is given back. dtype: the reduce dtype. present: as in `deposit`.
        """
        # If offloaded: one copy of all, for which the host waits.
        views = self._views(total.to(self.device))
        for holder, view, is_present in zip(self.holders, views, present, strict=True):
            if not is_present:
                continue
            if holder.sharded._backward_hooks:
                run_gradient_hooks(holder, view, self.bucket.dtype)
            if holder.local_grad is not None:
                holder.local_grad.add_(view)
                continue
            # A copy: `total` is scratch, and the next reduction writes to it.
            show_gradient(holder.sharded, view.to(holder.local.device, dtype, copy=True))
        self._runtime.scratch.give(total)

    def _views(self, total: torch.Tensor) -> list[torch.Tensor]:
        """View a sum as the local gradient of each holder."""
        if self.has_one_holder:
            return [total]
        return shard_views(self.bucket, total, self._shard_rank)

    def _take(self, device: torch.device) -> GradientShards:
        """Return gradient memory on a device that nobody uses: pooled if there is, else new."""
        for position, shards in enumerate(self.pool):
            if shards.device == device and shards.is_unused_but_on(self.holders):
                return self.pool.pop(position)
        # A user's gradient must be no inference tensor, wherever the first reduction happens.
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

    def _is_in_use(self, shards: GradientShards) -> bool:
        """Whether this memory is the gradients of all holders that own any elements."""
        return all(
            holder.sharded.grad is wrapped or not holder.sharded.numel()
            for holder, wrapped in zip(self.holders, shards.wrapped, strict=True)
        )


def run_gradient_hooks(holder: ShardHolder, local: torch.Tensor, dtype: torch.dtype) -> None:
    """Run the `register_hook` hooks of a sharded parameter on its reduced gradient.

    Autograd never sees the sharded parameter, so nobody else runs them. They get the gradient as
    users see it (a DTensor, of this dtype); what they return is copied into ``local``.
    """
    # A list: a hook may remove itself.
    for hook in list((holder.sharded._backward_hooks or {}).values()):
        grad = holder.wrap_shard(local.to(dtype))
        result = hook(grad)
        new: Any = grad if result is None else result
        new = new._local_tensor if isinstance(new, DTensor) else new
        if new is not local:
            local.copy_(new)
