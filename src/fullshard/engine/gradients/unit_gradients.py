"""From the gradients autograd leaves on unsharded parameters to those on sharded ones.

    start    take full gradients, hand them to the reduce-scatter       (after a unit's backward)
    finish   all-reduce over the replicate axis, divide, set ``.grad``  (one unit later, or at the
             end of backward: ranks that are a little apart do not wait for each other)

[Note: Missing gradients] Autograd leaves None on a parameter that a rank did not use. What follows:

- *None on some ranks.* Sizes follow from which parameters are trainable, so a missing gradient
  travels as zeros, and all ranks agree on every collective. The divisor stays the number of ranks.
  One flag per parameter travels along; if any rank had a gradient, all ranks set ``.grad``. No flags
  travel with custom collectives and where a backend sums by itself (NCCL, where reading flags would
  stall the host): there each rank goes by its own gradients, so a rank without one leaves ``.grad``
  as it was.
- *None on all ranks, or on the only one.* ``.grad`` stays as it was: None, or the sum of earlier
  backwards.
- *Replicas.* The flags of the shard axis are combined over the replicate axis, by the all-reduce. If
  that is put off, sum and flags wait together (`PartialSum`), and the all-reduce happens in a later
  backward even if that has no new gradients.
- *Flat units.* Nobody is asked. A buffer with anything trainable in it is reduced as a whole, and
  every trainable parameter of which this rank owns elements gets a gradient: zeros, if no rank had
  one. One rank whose gradients become ``.grad`` as they are (`_hand_over_all`) leaves None as None.
- *All of a unit's gradients are None.* A rank then starts no reduction. So the ranks have to agree
  in this, or the next collectives do not pair (DivergenceError, where ranks compare). Programs in
  which only some ranks use a unit ask for the next case.
- *`set_reduce_scatter_unused_params(True)`.* At the end of each backward that reduces, all ranks
  reduce the unit, and all its trainable parameters get gradients: zeros, if no rank had one.
- *Accumulation.* A missing gradient adds nothing to the sum. A parameter without any gradient since
  the last reduction counts as None in the next one. Parameters that were trainable when gradients
  were kept take part in it (`GradientBuckets.owed`), even if they were frozen meanwhile.
"""

import itertools
import operator
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.hooked import reduce_by_hook
from fullshard.comm.interface import Comm
from fullshard.engine.gradients.accumulation import (
    Accumulation,
    FlatAccumulation,
    RowsAccumulation,
    Unreduced,
)
from fullshard.engine.gradients.buckets import GradientBuckets
from fullshard.engine.gradients.deposits import (
    BucketGradients,
    GradientShards,
    PartialSum,
    run_gradient_hooks,
)
from fullshard.engine.gradients.queue import BucketInFlight, InFlight
from fullshard.engine.params.managed import ShardHolder
from fullshard.engine.runtime import Lane, Runtime, no_grad, outside_transforms
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig

_BLOCK_NUMEL = 1 << 16  # so many elements stay in cache


class CompleteGradients(NamedTuple):
    """Full gradients that are ready to be reduced: one per parameter, or None.

    is_wide: whether they are sums of several backwards, in the reduce dtype.
    """

    grads: list[torch.Tensor | None]
    is_wide: bool


class UnitGradients:
    """Reduces one unit's gradients and keeps their memory.

    label: how messages and profilers call the unit.
    buckets: which gradients travel together.
    unreduced: full gradients that wait for a later backward to reduce them.
    """

    def __init__(
        self,
        mesh: MeshPlan,
        shard_comm: Comm,
        replicate_comm: Comm,
        runtime: Runtime,
    ) -> None:
        self.label = ""
        self._entered_as = ""
        self.runtime = runtime
        self.buckets = GradientBuckets(mesh, shard_comm, replicate_comm, runtime)
        self.unreduced = Unreduced()
        self._mesh = mesh
        self._presence = PresenceWatch()

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add full gradients, one per parameter or None, to what waits for a later reduction.

        Sums of flat units have the dtype that autograd computes in, since users see them; others
        have the reduce dtype, as in PyTorch.
        """
        self.buckets.owe_trainable()
        self.unreduced.add(grads, self._new_accumulation)

    def _new_accumulation(self) -> Accumulation:
        params, flat_layout = self.buckets.params, self.buckets.flat_layout
        if flat_layout is None:
            return RowsAccumulation(params, self.buckets.sum_dtypes())
        return FlatAccumulation(flat_layout, params, self.runtime.device)

    def set_label(self, label: str, entered_as: str) -> None:
        """Change how messages and profilers call the unit."""
        self.label, self._entered_as = label, entered_as
        self.buckets.forget_recipes()  # they contain the label

    @property
    def accumulated(self) -> list[torch.Tensor]:
        """All that backwards have added up, each element once: gradients, and sums that wait."""
        unreduced = self.unreduced
        aside = unreduced.reduced_aside  # first: it forgets what users have dropped
        holders = dict.fromkeys(param.holder for param in self.buckets.params)
        reduced = [h.local_grad for h in holders if not unreduced.shows(h)]
        grads = [grad for grad in reduced if grad is not None]
        return [*unreduced.memory, *aside, *self.partial_sums, *grads]

    @property
    def has_hidden(self) -> bool:
        """Whether sums wait that users do not see as ``.grad``, and so cannot drop there."""
        is_shown = self.buckets.flat_layout is not None
        return self.has_partial or (self.unreduced.is_holding and not is_shown)

    def lend_unreduced(self) -> None:
        """Let autograd add to what `accumulate` keeps, in place, in the backward that begins."""
        # Sums are plain tensors: inside `torch.func` transforms they belong to no level.
        if self.unreduced.is_holding:
            outside_transforms(self.unreduced.lend)()

    def drop_unreduced(self) -> None:
        """Forget all that earlier backwards left to be reduced later: sums over shards, and full ones."""
        self.drop_partial()
        self.take_unreduced()

    def take_unreduced(self) -> list[torch.Tensor | None]:
        """Return what `accumulate` kept, one sum per parameter or None, and forget it."""
        return self.unreduced.take(keep_memory=not self.frees_unused)

    def complete(
        self, grads: list[torch.Tensor | None], config: UnitConfig
    ) -> CompleteGradients | None:
        """Return what has to be reduced: these gradients, plus what was accumulated before.

        Returns None if nothing has to be, which must be so on all ranks or on none (see the module's
        [Note: Missing gradients]), or if one rank's gradients have become ``.grad`` as they are.
        """
        is_wide = False
        if self.unreduced.is_holding:  # the same on every rank: it follows from calls
            self.accumulate(grads)
            grads = self.take_unreduced()
            is_wide = self.buckets.flat_layout is None
        else:
            self.unreduced.note_reduced()
        if not _has_any(grads) and not self._must_reduce(config):
            return None
        self.buckets.follow(grads)
        if self._mesh.data_parallel_size == 1 and self._hand_over_all(grads, config):
            return None
        return CompleteGradients(grads, is_wide)

    def _must_reduce(self, config: UnitConfig) -> bool:
        """Whether there is something to reduce even without any gradient. The same on all ranks."""
        if config.reduces_unused:
            return True
        return config.all_reduce_grads and self.has_partial

    def _hand_over_all(self, grads: Sequence[torch.Tensor | None], config: UnitConfig) -> bool:
        """With one data-parallel rank, set full gradients as ``.grad`` without copying them.

        Returns False, and does nothing, if they have to be scaled, cast, moved, handed to a user's
        reduction or joined to one flat gradient first.
        """
        if self._mesh.data_parallel_size > 1 or config.gradient_divide_factor not in (None, 1.0):
            return False
        if config.comm_hook or config.all_reduce_hook or config.reduces_unused:
            return False
        buckets = self.buckets.current()
        # All are asked before the first is handed over: a unit goes one way or the other as a whole.
        for each in buckets:
            recipe = self.buckets.recipe(each, config, accumulated=False, label=self._entered_as)
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
                        self._hand_over(grad, holder, each.bucket.dtype)
            self.buckets.owed.clear()
        return True

    def _hand_over(self, grad: torch.Tensor, holder: ShardHolder, dtype: torch.dtype) -> None:
        """Set or add one full gradient, with the hooks that `BucketGradients.deposit` runs.

        dtype: of the gradient that users get.
        """
        if holder.sharded._backward_hooks:
            # Hooks' results are written into it, and autograd's tensor may be in other hands as well.
            grad = grad.clone()
            run_gradient_hooks(holder, grad, dtype)
        local = holder.local_grad
        if local is not None:
            local.add_(grad)
        else:
            holder.sharded.grad = holder.wrap_shard(grad.to(dtype).contiguous())
        for hook in holder.post_accumulate_hooks:
            hook(holder.sharded)

    def start(self, complete: CompleteGradients, config: UnitConfig) -> InFlight:
        """Start reducing what `complete` returned. Collective.

        Sums over the shard axis are under way when this returns; `finish` waits for them.
        """
        grads, accumulated = complete
        if not self.runtime.has_streams:
            with no_grad():
                buckets = self._start_buckets(grads, config, accumulated=accumulated)
            # After the buckets and their takers were chosen by it, before `finish`, which may owe
            # gradients again.
            self.buckets.owed.clear()
            return InFlight(self, buckets, [])
        # The lane waits for compute, which has yet to form the gradients. Memory that is allocated
        # inside, scratch and gradients, belongs to the lane.
        with self.runtime.following(Lane.REDUCE), no_grad():
            buckets = self._start_buckets(grads, config, accumulated=accumulated)
        self.buckets.owed.clear()
        # Full gradients belong to compute. They are held until it has waited for the lane: freed
        # now, they would be given to compute again and written to while the lane reads them.
        return InFlight(self, buckets, list(grads))

    def _start_buckets(
        self, grads: Sequence[torch.Tensor | None], config: UnitConfig, *, accumulated: bool
    ) -> list[BucketInFlight]:
        """Start the reduce-scatter of every bucket, in the same order on all ranks."""
        in_flight = []
        buckets = self.buckets.current()
        # Before anything is reduced: `_reduce_replicas` looks for what waits in these buckets only.
        if self._mesh.replicate_size > 1:
            self._carry_partial(buckets)
        for each in buckets:
            full = [grads[index] for index in each.indices]
            self._presence.look(self.buckets, each, full, config)
            # Sums have the reduce dtype already, and what came wider is not to be rounded.
            is_wide = accumulated or each.comes_wider(full)
            recipe = self.buckets.recipe(each, config, accumulated=is_wide, label=self._entered_as)
            bucket = each.bucket
            shards, total = each.destination(recipe)
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
        """Wait for the sums over the shard axis and do what follows. Collective with replicas.

        On a device the host does not wait: this gives the lane its work, and records its end.
        """
        if not self.runtime.has_streams:
            with no_grad():
                for item in in_flight.buckets:
                    self._finish_bucket(item)
            return
        # `on`, not `following`: the lane needs nothing of compute but what `start` has waited for.
        with self.runtime.on(Lane.REDUCE), no_grad():
            for item in in_flight.buckets:
                self._finish_bucket(item)
            in_flight.event = self.runtime.record()

    def _finish_bucket(self, item: BucketInFlight) -> None:
        """Sum over replicas, round, run the user's hook and give parameters their gradients.

        In this order: the hook may add ranks that are not in the mesh, and finds the gradient as it
        will be; what it changes is not rounded again.
        """
        present: tuple[bool, ...] | None
        present, recipe = item.reduction.wait(), item.recipe
        # Most reductions end here.
        if recipe.is_deposited:
            item.gradients.deposit(item.total, item.shards, present)
            return
        # From here on `present` says who gets a gradient. See [Note: Missing gradients].
        config = recipe.config
        if item.takers is not None:
            present = item.takers
        elif config.reduces_unused:
            present = (True,) * len(present)
        present = self._reduce_replicas(item, present)
        if present is None:  # put off; `total` waits in the bucket
            return
        _round(item.total, recipe.reduce_dtype)
        self._run_hook(item.total, config)
        if config.keep_low_precision_grads:
            item.gradients.deposit_low(item.total, recipe.reduce_dtype, present)
        else:
            item.gradients.deposit(item.total, item.shards, present)

    def flat_gradients(self) -> list[torch.Tensor | None]:
        """Return the memory of the gradients, 1-D, one per bucket; None where it is not ours."""
        return [each.in_use for each in self.buckets.current()]

    @property
    def partial_sums(self) -> list[torch.Tensor]:
        """The sums over the shard axis that wait for their all-reduce."""
        return [each.partial.total for each in self.buckets.known if each.partial is not None]

    def _carry_partial(self, buckets: Sequence[BucketGradients]) -> None:
        """Move sums that wait for their all-reduce from other buckets to those of this reduction.

        Parameters were frozen or unfrozen since. The buckets in use include those that are owed, so
        nothing is left behind.
        """
        for each in self.buckets.known:
            if each.partial is not None and each not in buckets:
                for bucket in buckets:
                    bucket.add_partial(each)
                self.runtime.scratch.give(each.partial.total)  # added to another by now
                each.partial = None

    @property
    def pooled(self) -> list[GradientShards]:
        """The memory of reduced gradients: in use, or kept for the next step."""
        return [shards for each in self.buckets.known for shards in each.pool]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of gradient shards: in use, being made, or kept for the next step."""
        return sum(shards.flat.nbytes for shards in self.buckets.alive)

    @property
    def overlaps(self) -> bool:
        """Whether a sum over the shard axis that was started goes on without this process's help."""
        return self.buckets.shard_comm.overlaps

    @property
    def are_on_host(self) -> bool:
        """Whether sharded gradients are on the host, offloaded or because all is."""
        return bool(self.buckets.params) and self.buckets.params[0].local.is_cpu

    @property
    def frees_unused(self) -> bool:
        """Whether large gradient memory that nobody uses is freed before forward.

        In a device's memory it is: activations need the room until the next backward, and new memory
        costs its allocator little. So on the CPU over process groups, where unsharded parameters come
        and go with every unit and get the same pages from the allocator. With peer memory on the CPU,
        and for gradients that are offloaded, memory is kept: new one costs page faults, or pinning.
        """
        if self.runtime.has_streams:
            return not self.are_on_host
        return self.buckets.shard_comm.overlaps

    def free_unused(self) -> None:
        """Free gradient memory that nobody uses, except where it is small."""
        for each in self.buckets.known:
            each.free_unused()

    @property
    def has_partial(self) -> bool:
        """Whether sums over the shard axis wait for their all-reduce."""
        return bool(self.partial_sums)

    def drop_partial(self) -> None:
        """Forget sums that were not all-reduced yet, and which parameters are owed one."""
        self.buckets.owed.clear()
        for each in self.buckets.known:
            each.partial = None

    def _reduce_replicas(
        self, item: BucketInFlight, present: tuple[bool, ...]
    ) -> tuple[bool, ...] | None:
        """Sum over the replicate axis, in place, and divide. Collective, unless it is put off.

        present: for each holder, whether a rank of this replica had a gradient. Returns the same for
        all replicas together, or None if the all-reduce is put off.
        """
        bucket, recipe, total = item.gradients, item.recipe, item.total
        if self._mesh.replicate_size == 1 or recipe.config.comm_hook is not None:
            return present
        # Added before the all-reduce, so that one serves all micro-batches, and before it is put off
        # once more, so that there is never more than one sum that waits.
        if bucket.partial is not None:
            present = tuple(map(operator.or_, present, bucket.partial.present))
            total.add_(bucket.partial.total)
            self.runtime.scratch.give(bucket.partial.total)
            bucket.partial = None
        if not recipe.config.all_reduce_grads:
            bucket.partial = PartialSum(total, present)
            # Everybody in the bucket is owed, with or without a gradient: replicas may differ in
            # that, and the sizes of the next reduction follow from who is owed.
            owed = present if item.takers is not None else (True,) * len(present)
            owners = set(itertools.compress(bucket.holders, owed))
            self.buckets.owed.update(
                i for i in bucket.indices if self.buckets.params[i].holder in owners
            )
            return None
        # Flags travel only where replicas do not know the answer anyway.
        is_agreed = item.takers is not None or recipe.config.reduces_unused
        flags = () if is_agreed else present
        reduction = self.buckets.replicate_comm.all_reduce(total, flags, recipe.over_replicas)
        present = reduction.wait() or present
        if recipe.divisor != 1.0:
            total.div_(recipe.divisor)
        return present

    def _run_hook(self, total: torch.Tensor, config: UnitConfig) -> None:
        """Call the user's all-reduce hook on a finished sum, which it may change in place.

        On its own stream, if the user gave one; the lane goes on after it.
        """
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
    """Round a sum that was formed in a wider dtype to the reduce dtype's precision, in place.

    Keeping it wider would cost nothing, but losses would drift from those that PyTorch gives.
    """
    if dtype.itemsize < total.itemsize:
        # In blocks that stay in cache. On other devices at once, since each block costs a launch.
        for block in total.split(_BLOCK_NUMEL) if total.is_cpu else (total,):
            block.copy_(block.to(dtype))


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
