"""A unit's gradients, from the full ones that autograd leaves to those on sharded parameters.

`UnitGradients.reduce` hands full gradients to the reduce-scatter after the unit's backward. What it
returns is under way: `queue` finishes it and gives parameters their gradients.

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

import torch
import torch.distributed as dist

from fullshard.comm.hooked import reduce_by_hook
from fullshard.comm.interface import Comm
from fullshard.engine.gradients.accumulation import (
    FlatAccumulation,
    RowsAccumulation,
    Unreduced,
)
from fullshard.engine.gradients.buckets import GradientBuckets
from fullshard.engine.gradients.deposits import (
    BucketGradients,
    GradientShards,
    run_gradient_hooks,
)
from fullshard.engine.gradients.queue import BucketInFlight, Destination, InFlight, ReducedUnit
from fullshard.engine.params.managed import ShardHolder
from fullshard.engine.runtime import Lane, Runtime, no_grad, outside_transforms
from fullshard.plan.mesh import MeshPlan
from fullshard.plan.trace import Kind
from fullshard.policies import UnitConfig

_NONES = itertools.repeat(None)


class UnitGradients:
    """Reduces one unit's gradients and keeps their memory.

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
        self.runtime = runtime
        self.buckets = GradientBuckets(mesh, shard_comm, replicate_comm, runtime)
        self.unreduced = Unreduced()
        self._mesh = mesh
        self._is_alone = mesh.data_parallel_size == 1
        self._has_warned = False  # of a gradient that other ranks may have

    def reduce(self, grads: list[torch.Tensor | None], unit: ReducedUnit) -> InFlight | None:
        """Start reducing full gradients, plus what was accumulated before. Collective.

        grads: one per parameter, or None. Sums over the shard axis are under way when this returns.
        Returns None if nothing has to be reduced, which must be so on all ranks or on none (see the
        module's [Note: Missing gradients]), or if one rank's gradients have become ``.grad``.
        """
        is_wide = False
        if self.unreduced.is_holding:  # the same on every rank: it follows from calls
            self.accumulate(grads)
            grads = self.take_unreduced()
            is_wide = self.buckets.flat_layout is None
        elif not self.unreduced.is_empty:
            self.unreduced.note_reduced()
        for grad in grads:
            if grad is not None:
                break
        else:
            if not self._must_reduce(unit.config):
                return None
        if self.buckets.takes_any:
            self.buckets.follow(grads)
        if self._is_alone and self._hand_over_all(grads, unit):
            return None
        observer = unit.observer
        if observer is not None:
            observer.begin(Kind.REDUCE_SCATTER, unit)
        if not self.runtime.has_streams:
            with no_grad():
                buckets = self._start(grads, unit, accumulated=is_wide)
            in_flight = InFlight(unit, buckets, [])
        else:
            # The lane waits for compute, which has yet to form the gradients. Memory that is
            # allocated inside, scratch and gradients, belongs to the lane.
            with self.runtime.following(Lane.REDUCE), no_grad():
                buckets = self._start(grads, unit, accumulated=is_wide)
            # Full gradients belong to compute. They are held until it has waited for the lane: freed
            # now, they would be given to compute again and written to while the lane reads them.
            in_flight = InFlight(unit, buckets, list(grads))
        # After the buckets and their takers were chosen by it, before the queue finishes what was
        # started, which may owe gradients again.
        self.buckets.owed.clear()
        if observer is not None:
            observer.end()
        return in_flight

    def _must_reduce(self, config: UnitConfig) -> bool:
        """Whether there is something to reduce even without any gradient. The same on all ranks."""
        if config.reduces_unused:
            return True
        return config.all_reduce_grads and self.has_partial

    def _hand_over_all(self, grads: Sequence[torch.Tensor | None], unit: ReducedUnit) -> bool:
        """With one data-parallel rank, set full gradients as ``.grad`` without copying them.

        Returns False, and does nothing, if they have to be scaled, cast, moved, handed to a user's
        reduction or joined to one flat gradient first.
        """
        config = unit.config
        if self._mesh.data_parallel_size > 1 or config.gradient_divide_factor not in (None, 1.0):
            return False
        if config.comm_hook or config.all_reduce_hook or config.reduces_unused:
            return False
        buckets = self.buckets.current()
        # All are asked before the first is handed over: a unit goes one way or the other as a whole.
        for each in buckets:
            recipe = self.buckets.recipe(each, config, accumulated=False, label=unit.entered_as)
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

    def _start(
        self, grads: Sequence[torch.Tensor | None], unit: ReducedUnit, *, accumulated: bool
    ) -> list[BucketInFlight]:
        """Start the reduce-scatter of every bucket, in the same order on all ranks."""
        in_flight, config = [], unit.config
        buckets = self.buckets.current()
        # Before anything is reduced: a reduction looks for what waits in its own bucket only.
        if self._mesh.replicate_size > 1:
            self._carry_partial(buckets)
        for each in buckets:
            bucket = each.bucket
            full = list(map(grads.__getitem__, each.indices))
            if self.buckets.hides_presence and not all(map(operator.is_not, full, _NONES)):
                self._warn_of_missing(each, full, config)
            # Sums have the reduce dtype already, and what came wider is not to be rounded.
            is_wide = accumulated or (each.may_be_wider and each.comes_wider(full))
            recipe = each.recipe
            if recipe is None or recipe.config is not config or recipe.accumulated is not is_wide:
                recipe = self.buckets.recipe(
                    each, config, accumulated=is_wide, label=unit.entered_as
                )
            to = Destination(each, recipe)
            if config.comm_hook is not None:
                reduction = reduce_by_hook(config.comm_hook, bucket, full, to.take())
            else:
                reduction = self.buckets.shard_comm.reduce_scatter(
                    bucket, full, to.take, recipe.over_shards
                )
            takers = each.takers() if bucket.is_flat else None
            in_flight.append(BucketInFlight(each, recipe, reduction, to, takers))
        return in_flight

    def _warn_of_missing(
        self, bucket: BucketGradients, full: Sequence[torch.Tensor | None], config: UnitConfig
    ) -> None:
        """Warn, once, of a trained parameter without a gradient that other ranks may have.

        Most ways of communicating send along which gradients a rank has. Where the host would have
        to wait for its device for that (NCCL), and with custom collectives, each rank goes by its
        own: if only other ranks used a parameter, this rank's part of it is not updated.
        """
        buckets = self.buckets
        if self._has_warned or bucket.bucket.is_flat or config.reduces_unused:
            return  # in a flat bucket, and with `reduces_unused`, every trained parameter gets one
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

    def _carry_partial(self, buckets: Sequence[BucketGradients]) -> None:
        """Move sums that wait for their all-reduce from other buckets to those of this reduction.

        Parameters were frozen or unfrozen since. The buckets in use include those that are owed, so
        nothing is left behind.
        """
        for each in self.buckets.known:
            if each.partial is not None and each not in buckets:
                for bucket in buckets:
                    bucket.take_over(each)
                self.runtime.scratch.give(each.partial.total)  # added to another by now
                each.partial = None

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add full gradients, one per parameter or None, to what waits for a later reduction.

        Sums of flat units have the dtype that autograd computes in, since users see them; others
        have the reduce dtype, as in PyTorch.
        """
        self.buckets.owe_trainable()
        self.unreduced.add(grads, self._new_accumulation)

    def _new_accumulation(self) -> RowsAccumulation | FlatAccumulation:
        params, flat_layout = self.buckets.params, self.buckets.flat_layout
        if flat_layout is None:
            return RowsAccumulation(params, self.buckets.sum_dtypes())
        return FlatAccumulation(flat_layout, params, self.runtime.device)

    @property
    def accumulated(self) -> list[torch.Tensor]:
        """All that backwards have added up, each element once: gradients, and sums that wait."""
        unreduced = self.unreduced
        covered = unreduced.covered  # first: it forgets what users have dropped
        holders = dict.fromkeys(param.holder for param in self.buckets.params)
        reduced = [h.local_grad for h in holders if not unreduced.shows(h)]
        grads = [grad for grad in reduced if grad is not None]
        return [*unreduced.memory, *covered, *self.partial_sums, *grads]

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
        self.buckets.owed.clear()
        for each in self.buckets.known:
            each.partial = None
        if self.unreduced.is_holding:
            self.take_unreduced()

    def take_unreduced(self) -> list[torch.Tensor | None]:
        """Return what `accumulate` kept, one sum per parameter or None, and forget it."""
        # Where units stay gathered in peers' memory, nothing else in a step comes and goes that is as
        # large as the sums of all units, so their pages would.
        takes_pages = not (self.runtime.has_streams or self.buckets.shard_comm.overlaps)
        return self.unreduced.take(keep_memory=takes_pages or not self.frees_unused)

    @property
    def frees_unused(self) -> bool:
        """Whether large gradient memory that nobody uses is freed before forward.

        It is where they are computed: activations need the room until the next backward, and new
        memory costs a device's allocator little, and the host's nothing while activations come and go
        in the same heap. Gradients that are offloaded keep theirs, since pinning new memory costs.
        """
        are_offloaded = bool(self.buckets.params) and self.buckets.params[0].local.is_cpu
        return not (self.runtime.has_streams and are_offloaded)

    def begin_forward(self) -> None:
        """Take note that a forward of the model begins, and free large memory that nobody uses."""
        if not self.unreduced.is_empty:
            self.unreduced.begin()
        if self.buckets.large and self.frees_unused:
            for each in self.buckets.large:
                each.free_unused()

    @property
    def has_partial(self) -> bool:
        """Whether sums over the shard axis wait for their all-reduce."""
        return bool(self.partial_sums)

    def flat_gradients(self) -> list[torch.Tensor | None]:
        """Return the memory of the gradients, 1-D, one per bucket; None where it is not ours."""
        return [each.in_use for each in self.buckets.current()]

    @property
    def partial_sums(self) -> list[torch.Tensor]:
        """The sums over the shard axis that wait for their all-reduce."""
        return [each.partial.total for each in self.buckets.known if each.partial is not None]

    @property
    def pooled(self) -> list[GradientShards]:
        """The memory of reduced gradients: in use, or kept for the next step."""
        return [shards for each in self.buckets.known for shards in each.pool]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of gradient shards: in use, being made, or kept for the next step."""
        return sum(shards.flat.nbytes for shards in self.buckets.alive)
