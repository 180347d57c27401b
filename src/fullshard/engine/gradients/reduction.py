"""From the gradients autograd leaves on unsharded parameters to those on sharded ones.

    start    take full gradients, hand them to the reduce-scatter       (after a unit's backward)
    finish   all-reduce over the replicate axis, divide, set ``.grad``  (one unit later, or at the
             end of backward: ranks that are a little apart do not wait for each other)

Sizes never depend on which gradients exist: a missing one travels as zeros, so ranks that used
different parameters still agree on every collective. A parameter that no rank had a gradient for
keeps ``grad=None``.
"""

import functools
import itertools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fullshard.comm.hooked import reduce_by_hook
from fullshard.comm.interface import Comm
from fullshard.engine.gradients.accumulation import (
    Accumulation,
    FlatAccumulation,
    RowsAccumulation,
    Unreduced,
)
from fullshard.engine.gradients.buckets import GradientBuckets
from fullshard.engine.gradients.deposits import BucketGradients, PartialSum, run_gradient_hooks
from fullshard.engine.gradients.in_flight import BucketInFlight, InFlight
from fullshard.engine.gradients.shards import GradientShards
from fullshard.engine.params.managed import ShardHolder
from fullshard.engine.runtime import Lane, Runtime, no_grad, outside_transforms
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig

_BLOCK_NUMEL = 1 << 16  # elements that stay in cache


class CompleteGradients(NamedTuple):
    """Full gradients, one per parameter, None where there is none.

    is_wide: they are sums of several backwards, in the reduce dtype.
    """

    grads: list[torch.Tensor | None]
    is_wide: bool


class UnitGradients:
    """Reduces one unit's gradients and keeps their memory."""

    def __init__(
        self,
        mesh: MeshPlan,
        shard_comm: Comm,
        replicate_comm: Comm,
        runtime: Runtime,
    ) -> None:
        self.label = ""
        self.runtime = runtime
        self.buckets = GradientBuckets(mesh, shard_comm, replicate_comm, runtime)
        self.unreduced = Unreduced()
        self._mesh = mesh

    def accumulate(self, grads: Sequence[torch.Tensor | None], config: UnitConfig) -> None:
        """Keep full gradients, one per parameter, for a later reduction.

        Those of flat units stay as autograd made them, since users see them; others are kept in the
        reduce dtype.
        """
        self.buckets.owe_trainable()
        self.unreduced.add(grads, functools.partial(self._new_accumulation, config))

    def _new_accumulation(self, config: UnitConfig) -> Accumulation:
        params, flat_layout = self.buckets.params, self.buckets.flat_layout
        if flat_layout is None:
            return RowsAccumulation(params, config.mp_policy.reduce_dtype)
        return FlatAccumulation(flat_layout, params, self.runtime.device)

    def set_label(self, label: str) -> None:
        """Be called this in messages and by profilers."""
        self.label = label
        self.buckets.forget_recipes()  # which have it in them

    def lend_unreduced(self) -> None:
        """Before backward: let autograd add to what `accumulate` keeps, in place."""
        if self.unreduced.is_holding:
            outside_transforms(self.unreduced.lend)()

    def drop_unreduced(self) -> None:
        """Forget what earlier backwards left to be reduced later."""
        self.drop_partial()
        self.take_unreduced()

    def take_unreduced(self) -> list[torch.Tensor | None]:
        """Return what `accumulate` kept, one sum per parameter, and forget it."""
        return self.unreduced.take(keep_memory=not self.frees_unused)

    def complete(
        self, grads: list[torch.Tensor | None], config: UnitConfig
    ) -> CompleteGradients | None:
        """Return what is to be reduced: these gradients and what was accumulated before.

        None if there is nothing, on all ranks alike, or if one rank has all of everything and the
        gradients have become the sharded parameters' own.
        """
        is_wide = False
        if self.unreduced.is_holding:  # the same on every rank
            self.accumulate(grads, config)
            grads = self.take_unreduced()
            is_wide = self.buckets.flat_layout is None
        else:
            self.unreduced.note_reduced()
        if not _has_any(grads) and not self._must_reduce(config):
            return None
        if self._mesh.data_parallel_size == 1 and self._hand_over_all(grads, config):
            return None
        return CompleteGradients(grads, is_wide)

    def _must_reduce(self, config: UnitConfig) -> bool:
        """Whether there is something to reduce without any gradients, on all ranks alike."""
        if config.reduce_scatter_unused_params:
            return True
        return config.all_reduce_grads and self.has_partial

    def _hand_over_all(self, grads: Sequence[torch.Tensor | None], config: UnitConfig) -> bool:
        """With one data-parallel rank, assign full gradients as ``.grad`` without copying.

        Returns False, and does nothing, if they have to be summed, scaled, cast or moved first.
        """
        if self._mesh.data_parallel_size > 1 or config.gradient_divide_factor not in (None, 1.0):
            return False
        if config.comm_hook or config.all_reduce_hook or config.reduce_scatter_unused_params:
            return False
        buckets = self.buckets.current()
        for each in buckets:
            recipe = self.buckets.recipe(each, config, accumulated=False, label=self.label)
            if (
                not recipe.is_final
                or recipe.reduce_dtype != each.bucket.dtype
                or each.has_one_holder
            ):
                return False
        with no_grad():
            for each in buckets:
                for index, holder in zip(each.indices, each.holders, strict=True):
                    grad = grads[index]
                    if grad is not None and (
                        holder.sharded.requires_grad or index in self.buckets.owed
                    ):
                        self._hand_over(grad, holder)
            self.buckets.owed.clear()
        return True

    def _hand_over(self, grad: torch.Tensor, holder: ShardHolder) -> None:
        if holder.sharded._backward_hooks:
            grad = grad.clone()
            run_gradient_hooks(holder, grad)
        local = holder.local_grad
        if local is not None:
            local.add_(grad)
        else:
            holder.sharded.grad = holder.wrap_shard(grad.to(holder.sharded.dtype).contiguous())
        for hook in holder.post_accumulate_hooks:
            hook(holder.sharded)

    def start(self, complete: CompleteGradients, config: UnitConfig) -> InFlight:
        """Start reducing what `complete` returned."""
        grads, accumulated = complete
        if not self.runtime.has_streams:
            with no_grad():
                buckets = self._start_buckets(grads, config, accumulated=accumulated)
            self.buckets.owed.clear()
            return InFlight(self, buckets, [])
        with self.runtime.following(Lane.REDUCE), no_grad():
            buckets = self._start_buckets(grads, config, accumulated=accumulated)
        self.buckets.owed.clear()
        return InFlight(self, buckets, list(grads))

    def _start_buckets(
        self, grads: Sequence[torch.Tensor | None], config: UnitConfig, *, accumulated: bool
    ) -> list[BucketInFlight]:
        in_flight = []
        buckets = self.buckets.current()
        if self._mesh.replicate_size > 1:
            self._carry_partial(buckets)
        for each in buckets:
            recipe = self.buckets.recipe(each, config, accumulated=accumulated, label=self.label)
            bucket = each.bucket
            shards, total = each.destination(recipe)
            full = [grads[index] for index in each.indices]
            if config.comm_hook is not None:
                reduction = reduce_by_hook(config.comm_hook, bucket, full, total)
            else:
                reduction = self.buckets.shard_comm.reduce_scatter(
                    bucket, full, total, recipe.over_shards
                )
            owed = (
                [self.buckets.params[index] for index in self.buckets.owed]
                if bucket.is_flat
                else ()
            )
            takers = each.takers(owed) if bucket.is_flat else None
            in_flight.append(BucketInFlight(each, recipe, reduction, total, shards, takers))
        return in_flight

    def finish(self, in_flight: InFlight) -> None:
        if not self.runtime.has_streams:
            with no_grad():
                for item in in_flight.buckets:
                    self._finish_bucket(item)
            return
        with self.runtime.on(Lane.REDUCE), no_grad():
            for item in in_flight.buckets:
                self._finish_bucket(item)
            in_flight.event = self.runtime.record()

    def _finish_bucket(self, item: BucketInFlight) -> None:
        present: tuple[bool, ...] | None
        present, recipe = item.reduction.wait(), item.recipe
        if recipe.is_deposited:
            item.gradients.deposit(item.total, item.shards, present)
            return
        config = recipe.config
        if item.takers is not None:
            present = item.takers
        elif config.reduce_scatter_unused_params:
            present = (True,) * len(present)
        present = self._reduce_replicas(item, present)
        if present is None:
            return
        _round(item.total, recipe.reduce_dtype)
        self._run_hook(item.total, config)
        if config.keep_low_precision_grads:
            item.gradients.deposit_low(item.total, recipe.reduce_dtype, present)
        else:
            item.gradients.deposit(item.total, item.shards, present)

    def flat_gradients(self) -> list[torch.Tensor | None]:
        """Return the memory of flat gradients, a bucket at a time; None where they lie elsewhere."""
        return [each.in_use for each in self.buckets.current()]

    @property
    def partial_sums(self) -> list[torch.Tensor]:
        """Sums over the shard axis that wait for their all-reduce."""
        return [each.partial.total for each in self.buckets.known if each.partial is not None]

    def _carry_partial(self, buckets: Sequence[BucketGradients]) -> None:
        """Let the parameters that are trainable now have what waits for its all-reduce."""
        for each in self.buckets.known:
            if each.partial is not None and each not in buckets:
                for bucket in buckets:
                    bucket.add_partial(each)
                self.runtime.scratch.give(each.partial.total)
                each.partial = None

    @property
    def pooled(self) -> list[GradientShards]:
        """The memory of gradients that were reduced, in use or kept for the next step."""
        return [shards for each in self.buckets.known for shards in each.pool]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of gradient shards: in use, being made, or kept for the next step."""
        return sum(shards.flat.nbytes for shards in self.buckets.alive)

    @property
    def overlaps(self) -> bool:
        return self.buckets.shard_comm.overlaps

    @property
    def are_on_host(self) -> bool:
        """Whether gradients are offloaded."""
        return bool(self.buckets.params) and self.buckets.params[0].local.is_cpu

    @property
    def frees_unused(self) -> bool:
        """Whether forward has a use for large gradient memory that nobody uses.

        Over process groups it has: unsharded parameters come and go with every unit, and take it
        from the allocator. Elsewhere memory is kept for the next backward, since new memory costs
        page faults, and on devices views of small parameters cost more than their memory.
        """
        return self.buckets.shard_comm.overlaps and not self.runtime.has_streams

    def free_unused(self) -> None:
        """Free large gradient memory that nobody uses."""
        for each in self.buckets.known:
            each.free_unused()

    @property
    def has_partial(self) -> bool:
        """Whether sums over the shard axis wait for their all-reduce."""
        return bool(self.partial_sums)

    def drop_partial(self) -> None:
        """Forget sums that were not all-reduced yet, and who has any."""
        self.buckets.owed.clear()
        for each in self.buckets.known:
            each.partial = None

    def _reduce_replicas(
        self, item: BucketInFlight, present: tuple[bool, ...]
    ) -> tuple[bool, ...] | None:
        """Sum over the replicate axis. Returns which gradients there are; None if it is put off.

        present: which of them this rank's part of the shard axis has.
        """
        bucket, recipe, total = item.gradients, item.recipe, item.total
        if self._mesh.replicate_size == 1 or recipe.config.comm_hook is not None:
            return present
        if bucket.partial is not None:
            present = tuple(map(operator.or_, present, bucket.partial.present))
            total.add_(bucket.partial.total)
            self.runtime.scratch.give(bucket.partial.total)
            bucket.partial = None
        if not recipe.config.all_reduce_grads:
            bucket.partial = PartialSum(total, present)
            # The same on all replicas, whoever had a gradient: the size of the next sum follows.
            owed = present if item.takers is not None else (True,) * len(present)
            owners = set(itertools.compress(bucket.holders, owed))
            self.buckets.owed.update(
                i for i in bucket.indices if self.buckets.params[i].holder in owners
            )
            return None
        is_agreed = item.takers is not None or recipe.config.reduce_scatter_unused_params
        flags = () if is_agreed else present
        reduction = self.buckets.replicate_comm.all_reduce(total, flags, recipe.over_replicas)
        present = reduction.wait() or present
        if recipe.divisor != 1.0:
            total.div_(recipe.divisor)
        return present

    def _run_hook(self, total: torch.Tensor, config: UnitConfig) -> None:
        """Let the user reduce further, over ranks that are not in the mesh."""
        if config.all_reduce_hook is None:
            return
        stream = config.all_reduce_hook_stream
        if stream is None or not self.runtime.has_streams:
            config.all_reduce_hook(total)
            return
        before = self.runtime.record()
        with stream:
            self.runtime.wait(before)
            config.all_reduce_hook(total)
            after = self.runtime.record()
        self.runtime.wait(after)


def _has_any(grads: Sequence[torch.Tensor | None]) -> bool:
    for grad in grads:  # noqa: SIM110  (a third of the cost of `any`)
        if grad is not None:
            return True
    return False


def _round(total: torch.Tensor, dtype: torch.dtype) -> None:
    """Give a sum that was formed in a wider dtype the precision of the reduce dtype.

    A wider result would cost nothing, but programs expect the gradients that they know.
    """
    if dtype.itemsize < total.itemsize:
        # In blocks that stay in cache; on other devices a block would cost its launch.
        for block in total.split(_BLOCK_NUMEL) if total.is_cpu else (total,):
            block.copy_(block.to(dtype))
