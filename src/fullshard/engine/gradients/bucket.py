"""One bucket of gradients: how it is reduced, in which memory, and who gets the result.

A `Recipe` plans it: in which dtypes, divided by what, and what follows. Which dtypes full, reduced and
sharded gradients have, `plan.gradient_dtypes` says; two come between:

| dtype | used for | is | why |
| --- | --- | --- | --- |
| wire | what travels over the shard axis where ranks form the sums | the narrower of full and \
reduce dtype; the reduce dtype for sums of several backwards by rows | the sum is wide in any case, so \
widening before it adds bytes and no precision |
| total | forming the sum over the shard axis | reduce dtype promoted with float32; the reduce dtype \
where a backend sums what travels in it (NCCL, custom collectives), a communication hook reduces, or \
there is one rank | rounding errors do not grow with the number of ranks |

With float32 parameters and ``MixedPrecisionPolicy(param_dtype=bfloat16)``, bfloat16 travels, and the
float32 sum is formed in the memory of the gradients. It is rounded there to what bfloat16 can express,
if that is the reduce dtype. Where that is float32 (torch 2.15), the sum is the gradient.
"""

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Sequence

import torch

from fullshard.comm.interface import Scaling, Sum, shard_views
from fullshard.engine.guard.uses import python_uses
from fullshard.engine.params.flat import show_gradient
from fullshard.engine.params.managed import ManagedParameter, ShardHolder, Watch
from fullshard.engine.runtime import Runtime
from fullshard.plan.gradient_buckets import wire_dtype
from fullshard.plan.gradient_dtypes import may_overflow
from fullshard.plan.layout import BucketLayout
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig
from fullshard.torch_private import WithoutSubclasses, local_part, storage_uses, tensor_uses

_sharded, _gradient = operator.attrgetter("sharded"), operator.attrgetter("sharded.grad")
_all_hooks = operator.attrgetter("sharded._backward_hooks", "sharded._post_accumulate_grad_hooks")
_NONES, _WATCH = itertools.repeat(None), frozenset([Watch])
# PyTorch's engine asks for means in these, as sums in them do not overflow.
_AVERAGED = (torch.float32, torch.bfloat16)
# Pieces of gradient memory that one bucket keeps for reuse. Two, since a reduction may begin while
# the gradients of the last one are still there to be added to.
_POOLED = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """How a bucket is reduced under one configuration.

    config, accumulated: what the recipe was made from. It holds while they are the same.
    over_shards, over_replicas: the sum over the shard axis, then the one over the replicate axis.
    sums_replicas: there is a second sum.
    divisor: by which the second sum is divided; the first one divides by itself.
    total_dtype: see the table above.
    is_final: the sum over the shard axis has the dtype and device of the gradients and is reduced in
        this backward, so that it may be formed in their memory, if that is free.
    is_deposited: the sum over the shard axis is the gradient: nothing rounds it, adds to it or looks
        at it, and the reduce-scatter says who gets one.
    """

    config: UnitConfig
    accumulated: bool
    over_shards: Sum
    over_replicas: Sum
    sums_replicas: bool
    divisor: float
    total_dtype: torch.dtype
    is_final: bool
    is_deposited: bool


def make_recipe(
    bucket: BucketLayout,
    config: UnitConfig,
    mesh: MeshPlan,
    *,
    reduce_dtype: torch.dtype,
    sum_dtype: Callable[[torch.dtype], torch.dtype],
    wants_means: bool,
    accumulated: bool,
    is_offloaded: bool,
    label: str,
) -> Recipe:
    """Plan the reduction of a bucket of gradients: of shard dtype ``dtype``, full ``compute_dtype``.

    reduce_dtype: of the finished sum.
    sum_dtype: maps the reduce dtype to the total dtype (`Comm.accumulate_dtype`).
    wants_means: `Comm.wants_means`.
    accumulated: whether gradients are sums of several backwards, in the reduce dtype, or wide anyway.
    is_offloaded: whether sharded parameters are on another device than full gradients.
    label: of the unit in messages and flight records.
    """
    total_dtype = reduce_dtype
    if config.comm_hook is None and mesh.data_parallel_size > 1:
        total_dtype = sum_dtype(reduce_dtype)
    scaling, divisor = _scaling(config, mesh, reduce_dtype, sum_dtype), 1.0
    may_average = not config.force_sum_reduction
    if wants_means:
        may_average &= reduce_dtype in _AVERAGED
    # With replicas, what is divided after the sum is divided after the last sum.
    if mesh.replicate_size > 1:
        num_averaged = 1
        if wants_means and may_average and config.gradient_divide_factor in (None, mesh.shard_size):
            num_averaged = mesh.shard_size
        divisor = scaling.after / num_averaged
        scaling = Scaling(scaling.before, float(num_averaged))
    has_more_to_do = (
        bucket.is_flat  # who gets a gradient follows from the layout, not from the reduce-scatter
        or mesh.replicate_size > 1
        or reduce_dtype.itemsize < total_dtype.itemsize
        or config.all_reduce_hook is not None
        or config.keep_low_precision_grads
        or config.reduces_unused
    )
    return Recipe(
        config,
        accumulated,
        over_shards=Sum(
            wire_dtype(bucket, reduce_dtype, accumulated=accumulated),
            scaling,
            may_average=may_average,
            label=f"{label}: reduce-scatter",
        ),
        over_replicas=Sum(reduce_dtype, label=f"{label}: all-reduce"),
        # A communication hook reduces over all ranks.
        sums_replicas=mesh.replicate_size > 1 and config.comm_hook is None,
        divisor=divisor,
        total_dtype=total_dtype,
        is_final=(
            total_dtype == bucket.dtype
            and not is_offloaded
            # A sum that waits for its all-reduce is no gradient yet, and users must not see it.
            and (config.all_reduce_grads or mesh.replicate_size == 1)
            and not config.keep_low_precision_grads
        ),
        is_deposited=not has_more_to_do,
    )


def _scaling(
    config: UnitConfig,
    mesh: MeshPlan,
    reduce_dtype: torch.dtype,
    sum_dtype: Callable[[torch.dtype], torch.dtype],
) -> Scaling:
    """Return by what to divide: the user's factor, or the number of ranks that see different data.

    Where sums travel or are formed in float16, a power of two near the root of it comes before the
    sum, to avoid overflow, and the rest after it, to avoid underflow. 8 ranks: 4 before, 2 after.
    """
    factor = config.gradient_divide_factor or float(mesh.data_parallel_size)
    has_replicas = mesh.replicate_size > 1
    if not may_overflow(reduce_dtype, sum_dtype(reduce_dtype), has_replicas=has_replicas):
        return Scaling(after=factor)
    # As PyTorch chooses it. Powers of two divide without rounding.
    before = 1.0
    while factor % before == 0 and factor / before > before:
        before *= 2
    return Scaling(before, factor / before)


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
        holders: Sequence[ShardHolder],
        *,
        as_one: bool,
        pin_memory: bool,
    ) -> None:
        """Allocate the memory. rank: of this process on the shard axis. as_one: for one holder."""
        self.device = device
        self.flat = torch.empty(
            bucket.shard_numel,
            dtype=bucket.dtype,
            device=device,
            pin_memory=pin_memory and torch.accelerator.is_available(),
        )
        self.views = [self.flat] if as_one else shard_views(bucket, self.flat, rank)
        self.wrapped = [h.wrap_shard(view) for h, view in zip(holders, self.views, strict=True)]
        # All of them are made once and kept, so that the baseline below counts them. Views are what
        # `to_local` returns without gradients.
        self._storages = [view.untyped_storage() for view in self.views]
        self._objects = [*self.wrapped, *self.views, *self._storages]
        self._addresses = [storage._cdata for storage in self._storages]
        self._places = list(map(torch.Tensor.data_ptr, self.views))
        # Last, when every reference of this object is there.
        self._own_uses = self._uses() if tensor_uses is not None else 0

    def is_unused(self, holders: Sequence[ShardHolder] = ()) -> bool:
        """Return whether nobody else refers to the gradients or their memory; False if torch cannot say.

        The ``.grad`` of these holders' local shards does not count: `step_on_shards` sets that in a step
        and leaves it there. It is read by the next step alone, which sets it anew.
        """
        if tensor_uses is None or list(map(torch.Tensor.data_ptr, self.views)) != self._places:
            return False  # or sent to another process, by which torch gives a storage other memory
        others = self._uses() - self._own_uses
        if others == 0:
            return True
        pairs = zip(holders, self.views, strict=False)
        return others == sum(holder.local.grad is view for holder, view in pairs)

    def _uses(self) -> int:
        """Count references to the gradients and their memory, from Python and from C++ (``.grad``)."""
        uses = sum(map(python_uses, self._objects)) + sum(map(tensor_uses, self.wrapped))
        return uses + sum(map(storage_uses, self._addresses))


@dataclasses.dataclass(slots=True, eq=False)
class PartialSum:
    """A sum over the shard axis whose all-reduce over the replicate axis was put off.

    bucket, indices: how it is arranged, and the unit's indices of the parameters in it; the very objects of the
        bucket that it was formed in.
    total: 1-D, ``bucket.shard_numel`` elements of the recipe's total dtype, in scratch memory.
    takers: holders of whose gradient any rank of the shard axis had a part.
    left: the indices whose part no newer sum has taken yet.
    """

    bucket: BucketLayout
    indices: list[int]
    total: torch.Tensor
    takers: set[ShardHolder]
    left: set[int]


class BucketGradients:
    """Gives the sharded parameters of one bucket their reduced gradients, and keeps the memory.

    bucket: the layout of the gradients. Its storage dtype is theirs, its compute dtype that of full
        gradients.
    reduce_dtype: of finished sums.
    indices: the unit's indices of the bucket's parameters, in bucket order.
    holders: the owners of the sharded parameters, in bucket order: one per parameter, or one for all
        inside a flat parameter. ``present`` and ``takers`` below are in this order.
    has_one_holder: one flat parameter gets the whole bucket, padding included.
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
        waiting: list[PartialSum],
        alive: weakref.WeakSet[GradientShards],
    ) -> None:
        """Begin without memory.

        owed, waiting: those of `BucketChoice`. alive: a set to which every piece of memory is added.
        """
        self.bucket = bucket
        self.indices = list(indices)
        self.holders = list(holders)
        self.reduce_dtype = reduce_dtype
        self.may_be_wider = reduce_dtype.itemsize > bucket.compute_dtype.itemsize
        self._has_come_wider = False
        self.recipe: Recipe | None = None
        self.pool: list[GradientShards] = []
        self.has_one_holder = bucket.is_flat and not isinstance(holders[0], ManagedParameter)
        self._shard_rank = shard_rank
        self.runtime = runtime
        self._owed = owed
        self._waiting = waiting
        self._alive = alive

    @property
    def device(self) -> torch.device:
        """The device of the sharded parameters: the host, if they are offloaded."""
        return self.holders[0].local.device

    @property
    def has_gradient(self) -> bool:
        """True if any sharded parameter of the bucket has a gradient."""
        with WithoutSubclasses():
            return any(map(operator.is_not, map(_gradient, self.holders), _NONES))

    @property
    def in_use(self) -> torch.Tensor | None:
        """The memory of the gradients that the holders have now, 1-D; None if it is not ours."""
        for shards in self.pool:
            pairs = zip(self.holders, shards.wrapped, strict=True)
            # Those that own no elements have none.
            if all(h.sharded.grad is wrapped or not h.sharded.numel() for h, wrapped in pairs):
                return shards.flat
        return None

    def comes_wider(self, full: Sequence[torch.Tensor | None]) -> bool:
        """Return whether a full gradient has come, now or before, that is wider than what was planned.

        Asked where it ``may_be_wider``. Where the ranks form the sums, they have to agree: a rank that has none when others' first
        ones come wider sends less, and all get a DivergenceError. Backends that sum get the reduce
        dtype in any case.
        """
        if not self._has_come_wider:
            size = self.bucket.compute_dtype.itemsize
            self._has_come_wider = any(
                grad is not None and grad.dtype.itemsize > size for grad in full
            )
        return self._has_come_wider

    def takers(self) -> tuple[bool, ...]:
        """Return, for each holder of a flat bucket, whether it gets a gradient: zeros, if need be.

        It does if this rank owns elements of it, and it is trainable or owed one: see
        `unit_gradients`, [Note: Missing gradients], on flat units.
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
        `queue.BucketReduction`.
        """
        gets = set(itertools.compress(self.holders, present))
        self._waiting.append(PartialSum(self.bucket, self.indices, total, gets, set(self.indices)))
        # Everybody in the bucket is owed, with or without a gradient: replicas may differ in that,
        # and the sizes of the next reduction follow from who is owed.
        owed = present if takers is not None else (True,) * len(self.holders)
        if self.has_one_holder:
            owed *= len(self.indices)
        self._owed.update(itertools.compress(self.indices, owed))

    def add_waiting(self, total: torch.Tensor, present: tuple[bool, ...]) -> tuple[bool, ...]:
        """Add what waits of its parameters for an all-reduce to a newer sum, in place.

        present: for each holder, whether the newer one has a gradient; returns it for both.
        """
        for waiting in list(self._waiting):
            if waiting.left.isdisjoint(self.indices):
                continue
            if waiting.indices is self.indices and len(waiting.left) == len(self.indices):
                total.add_(waiting.total)
            else:  # parameters were frozen or unfrozen since; by parameter, also under one holder
                parts = shard_views(waiting.bucket, waiting.total, self._shard_rank)
                views = dict(zip(waiting.indices, parts, strict=True))
                parts = shard_views(self.bucket, total, self._shard_rank)
                for index, part in zip(self.indices, parts, strict=True):
                    if index in waiting.left:
                        part.add_(views[index])
            pairs = zip(self.holders, present, strict=True)
            present = tuple(had or holder in waiting.takers for holder, had in pairs)
            waiting.left.difference_update(self.indices)
            if not waiting.left:
                self._waiting.remove(waiting)
                self.runtime.scratch.give(waiting.total)
        return present

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
                shards = self.take_shards(device)
                # One copy that casts, moves to the host, or both; pinned memory lets it go on behind
                # the host. `ReductionQueue.release` waits for it before anybody reads.
                shards.flat.copy_(total, non_blocking=True)
                # Not here: the host itself reads the copy, in `add_` below.
                if not is_first:
                    self.runtime.finish(self.runtime.record())
        if shards is None:
            self._set_each(self._views(total), present, self.bucket.dtype)
        elif self._sets_all(present):
            for holder, grad in zip(self.holders, shards.wrapped, strict=True):
                holder.sharded.grad = grad
        else:
            self._set_each(shards.views, present, self.bucket.dtype, wrapped=shards.wrapped)
        # After the last view was read; on a device the lane keeps its order.
        if scratch is not None:
            self.runtime.scratch.give(scratch)
        # Pooled while in use: `take_shards` asks who refers to it. Dropping the oldest frees nothing that
        # a gradient still uses. Memory of a graph is written to by each of its replays, so it is not.
        if shards is not None and not self.runtime.is_capturing:
            self.pool.append(shards)
            del self.pool[:-_POOLED]

    def _sets_all(self, present: Sequence[bool]) -> bool:
        """Return whether every holder gets a gradient, has none so far, and no hook looks at it."""
        if self.bucket.is_flat or not all(present):
            return False  # pieces may have optimizers to step as well, which are no hooks of theirs
        if len(set(map(id, map(_sharded, self.holders)))) < len(self.holders):
            return False  # tied after sharding: one has the gradients of both
        with WithoutSubclasses():  # by which torch reads a DTensor's attributes in half of the time
            hooks = filter(None, itertools.chain.from_iterable(map(_all_hooks, self.holders)))
            return not any(map(operator.is_not, map(_gradient, self.holders), _NONES)) and (
                _WATCH.issuperset(map(type, itertools.chain.from_iterable(map(dict.values, hooks))))
            )

    def deposit_low(self, total: torch.Tensor, dtype: torch.dtype, present: Sequence[bool]) -> None:
        """Set gradients of the reduce dtype (``keep_low_precision_grads``), or add to them.

        total: scratch, which is given back. dtype: the reduce dtype. present: as in `deposit`.
        """
        # If offloaded: one copy of all, for which the host waits.
        self._set_each(self._views(total.to(self.device)), present, dtype)
        self.runtime.scratch.give(total)

    def hand_over(self, full: Sequence[torch.Tensor | None]) -> None:
        """Set full gradients, one per parameter or None, as those of the sharded ones, or add them.

        For a bucket with one holder per parameter, on the only data-parallel rank.
        """
        own: list[torch.Tensor | None] = []
        for index, holder, grad in zip(self.indices, self.holders, full, strict=True):
            sharded = holder.sharded
            if grad is None or not (sharded.requires_grad or index in self._owed):
                own.append(None)
            else:  # hooks' results are written into it, and autograd's tensor may be in other hands
                own.append(grad.clone() if sharded._backward_hooks else grad)
        present = [grad is not None for grad in own]
        self._set_each(own, present, self.bucket.dtype, copies=False)

    def _set_each(
        self,
        views: Sequence[torch.Tensor | None],
        present: Sequence[bool],
        dtype: torch.dtype,
        *,
        wrapped: Sequence[torch.Tensor] | None = None,
        copies: bool = True,
    ) -> None:
        """Set or add gradients holder by holder, with the hooks of each: see `deposit`.

        views: the local gradients. dtype: of what is set where there is none so far: ``wrapped``, if
        given, else what ``views`` are. copies: those are scratch, to which the next reduction writes.
        """
        for position, view in itertools.compress(enumerate(views), present):
            assert view is not None
            holder = self.holders[position]
            sharded = holder.sharded
            for hook in holder.reduced_hooks if sharded._backward_hooks else ():
                # On the host, hooks read what the lane has copied there. The other case needs no
                # wait: they run on the lane. They get the gradient as users see it.
                self.runtime.finish(self.runtime.record() if holder.local.is_cpu else None)
                given = holder.wrap_shard(view.to(self.bucket.dtype))
                result = hook(given)
                new = local_part(given if result is None else result)
                if new is not view:
                    view.copy_(new)
            if sharded.grad is not None:
                local = holder.local_grad
                assert local is not None
                local.add_(view)
            elif wrapped is not None:
                sharded.grad = wrapped[position]
            else:
                local = view.to(holder.local.device, dtype, copy=copies).contiguous()
                if dtype == self.bucket.dtype:
                    sharded.grad = holder.wrap_shard(local)
                else:
                    show_gradient(sharded, local)
            # Pieces may have optimizers to step as well, which are no hooks of theirs.
            if sharded._post_accumulate_grad_hooks or self.bucket.is_flat:
                for hook in holder.post_accumulate_hooks:
                    self.runtime.finish(self.runtime.record() if holder.local.is_cpu else None)
                    hook(sharded)

    def _views(self, total: torch.Tensor) -> list[torch.Tensor]:
        """View a sum as the local gradient of each holder."""
        if self.has_one_holder:
            return [total]
        return shard_views(self.bucket, total, self._shard_rank)

    def take_shards(self, device: torch.device | None = None) -> GradientShards:
        """Return gradient memory that nobody uses: pooled if there is, else new.

        device: where; that of full gradients by default.
        """
        device = device or self.runtime.device
        for position, shards in enumerate(() if self.runtime.is_capturing else self.pool):
            if shards.device == device and shards.is_unused(self.holders):
                return self.pool.pop(position)
        # A user's gradient must be no inference tensor, wherever the first reduction happens.
        with torch.inference_mode(False):
            shards = GradientShards(
                self.bucket,
                self._shard_rank,
                device,
                self.holders,
                as_one=self.has_one_holder,
                pin_memory=device != self.runtime.device,
            )
        self._alive.add(shards)
        return shards
