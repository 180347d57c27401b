"""From the gradients autograd leaves on unsharded parameters to those on sharded ones.

    start    take full gradients, hand them to the reduce-scatter       (after a unit's backward)
    finish   all-reduce over the replicate axis, divide, set ``.grad``  (one unit later, or at the
             end of backward: ranks that are a little apart do not wait for each other)

Sizes never depend on which gradients exist: a missing one travels as zeros, so ranks that used
different parameters still agree on every collective. A parameter that no rank had a gradient for
keeps ``grad=None``.
"""

import dataclasses
import itertools
import weakref
from collections.abc import Sequence

import torch

from fullshard.comm.hooked import reduce_by_hook
from fullshard.comm.interface import Comm, Reduction, Scaling, Sum, shard_views
from fullshard.engine.accumulation import show_gradient
from fullshard.engine.buffers import KEPT_NBYTES, GradientShards
from fullshard.engine.params import ManagedParameter, ShardHolder
from fullshard.engine.runtime import Lane, Runtime, no_grad
from fullshard.plan.layout import BucketLayout, ParamSpec, UnitLayout, rows_layout
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig

_BLOCK = 1 << 16  # elements that stay in cache
_POOLED = 2  # gradient memory kept for reuse: the current and, with accumulation, the next


@dataclasses.dataclass(slots=True)
class _BucketPlan:
    """The gradients of one bucket: which of the unit's parameters, and the memory kept for them.

    holders: who gets them: each parameter, or one for all of them.
    partial: sums over the shard axis whose all-reduce was put off.
    """

    bucket: BucketLayout
    indices: list[int]
    holders: list[ShardHolder]
    pool: list[GradientShards] = dataclasses.field(default_factory=list)
    partial: torch.Tensor | None = None
    recipe: "_Recipe | None" = None

    @property
    def has_gradient(self) -> bool:
        """Whether a holder has a gradient already."""
        for holder in self.holders:  # noqa: SIM110  (a third of the cost of `any`)
            if holder.sharded.grad is not None:
                return True
        return False


@dataclasses.dataclass(frozen=True, slots=True)
class _Recipe:
    """How a bucket is reduced under one configuration.

    total_dtype: in which the sum over the shard axis is formed.
    is_final: whether that sum is what the holders get, if they have no gradient yet.
    is_deposited: whether nothing happens to the sum before the holders get it.
    """

    config: UnitConfig
    accumulated: bool
    how: Sum
    reduce_dtype: torch.dtype
    total_dtype: torch.dtype
    is_final: bool
    is_deposited: bool


@dataclasses.dataclass(slots=True)
class _BucketInFlight:
    plan: _BucketPlan
    recipe: _Recipe
    reduction: Reduction
    total: torch.Tensor
    shards: GradientShards | None  # whose memory ``total`` is, or None: scratch


@dataclasses.dataclass(slots=True)
class InFlight:
    """A unit's reduction between start and finish, with everything it needs."""

    gradients: "UnitGradients"
    buckets: list[_BucketInFlight]
    config: UnitConfig
    grads: list[torch.Tensor | None]
    event: torch.Event | None = None
    is_finished: bool = False

    @property
    def is_for_host(self) -> bool:
        """Whether the host has to wait before anybody reads the gradients."""
        return self.event is not None and self.gradients.are_on_host

    def finish(self) -> None:
        """Form the sums and give them to the sharded parameters."""
        self.gradients.finish(self)
        self.is_finished = True

    def release(self) -> None:
        """Let compute wait for it, and drop what it held."""
        self.gradients.runtime.wait(self.event)
        self.buckets.clear()
        self.grads.clear()

    @property
    def results(self) -> list[torch.Tensor]:
        """The memory of gradients that are reduced into place."""
        return [item.shards.flat for item in self.buckets if item.shards is not None]

    @property
    def temporaries(self) -> list[torch.Tensor]:
        """What else it holds."""
        totals = () if self.is_finished else (i.total for i in self.buckets if i.shards is None)
        sources = (tensor for item in self.buckets for tensor in item.reduction.tensors)
        return [*totals, *sources, *(grad for grad in self.grads if grad is not None)]

    def discard(self) -> None:
        """Wait for what is under way and forget the result."""
        if not self.is_finished and self.gradients.overlaps:
            for item in self.buckets:
                item.reduction.wait()


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
        self._mesh = mesh
        self._shard_comm = shard_comm
        self._replicate_comm = replicate_comm
        self.runtime = runtime
        self._params: list[ManagedParameter] = []
        self._specs: list[ParamSpec] = []
        self._flat_layout: UnitLayout | None = None
        self._plans: dict[tuple[bool, ...], list[_BucketPlan]] = {}
        self._alive: weakref.WeakSet[GradientShards] = weakref.WeakSet()

    def use_comm(self, shard_comm: Comm) -> None:
        """Reduce like this over the shard axis; layouts stay as they are."""
        self._shard_comm = shard_comm
        for plan in itertools.chain.from_iterable(self._plans.values()):
            plan.recipe = None

    def bind(
        self,
        params: Sequence[ManagedParameter],
        specs: Sequence[ParamSpec],
        flat_layout: UnitLayout | None = None,
    ) -> None:
        """Say whose gradients these are. Forgets what was kept for others.

        flat_layout: of the parameters, which is that of their gradients then.
        """
        self._params, self._specs = list(params), list(specs)
        self._flat_layout = flat_layout
        self._plans.clear()

    def layout(self) -> UnitLayout:
        """Return the layout of the gradients of the parameters that are trainable now."""
        return UnitLayout(self._mesh.shard_size, tuple(plan.bucket for plan in self._plan()))

    def needs(self, config: UnitConfig) -> dict[Comm, list[int]]:
        """Return how many bytes each communication will stage at once, for `Comm.prepare`."""
        needs: dict[Comm, list[int]] = {self._shard_comm: [], self._replicate_comm: []}
        for plan in self._plan():
            bucket = plan.bucket
            wire = _wire_dtype(bucket, config, accumulated=False)
            needs[self._shard_comm].append(self._shard_comm.staged_nbytes(bucket, wire))
            needs[self._replicate_comm].append(bucket.shard_numel * wire.itemsize)
        return needs

    def hand_over(self, grads: Sequence[torch.Tensor | None], config: UnitConfig) -> bool:
        """Make full gradients the sharded parameters' own, where one rank has all of everything.

        Returns False, and does nothing, if they have to be summed, scaled, cast or moved first.
        """
        if self._mesh.data_parallel_size > 1 or config.gradient_divide_factor not in (None, 1.0):
            return False
        if config.comm_hook or config.all_reduce_hook or config.reduce_scatter_unused_params:
            return False
        plans = self._plan()
        for plan in plans:
            recipe = self._recipe(plan, config, accumulated=False)
            if not recipe.is_final or recipe.reduce_dtype != plan.bucket.dtype or _is_whole(plan):
                return False
        with no_grad():
            for plan in plans:
                for index, holder in zip(plan.indices, plan.holders, strict=True):
                    grad = grads[index]
                    if grad is not None and holder.sharded.requires_grad:
                        self._hand_over(grad, holder)
        return True

    def _hand_over(self, grad: torch.Tensor, holder: ShardHolder) -> None:
        local = holder.local_grad
        if local is not None:
            local.add_(grad)
        else:
            holder.sharded.grad = holder.wrap_shard(grad.to(holder.sharded.dtype).contiguous())
        for hook in holder.post_accumulate_hooks:
            hook(holder.sharded)

    def start(
        self, grads: Sequence[torch.Tensor | None], config: UnitConfig, *, accumulated: bool
    ) -> InFlight:
        """Start reducing full gradients, one a parameter; None where there is none.

        accumulated: whether they hold the sum of several backwards, in the reduce dtype.
        """
        if not self.runtime.has_streams:
            with no_grad():
                buckets = self._start_buckets(grads, config, accumulated=accumulated)
            return InFlight(self, buckets, config, [])
        ready = self.runtime.record()
        with self.runtime.on(Lane.REDUCE), no_grad():
            self.runtime.wait(ready)
            buckets = self._start_buckets(grads, config, accumulated=accumulated)
        return InFlight(self, buckets, config, list(grads))

    def _start_buckets(
        self, grads: Sequence[torch.Tensor | None], config: UnitConfig, *, accumulated: bool
    ) -> list[_BucketInFlight]:
        in_flight = []
        for plan in self._plan():
            recipe = self._recipe(plan, config, accumulated=accumulated)
            bucket = plan.bucket
            shards, total = self._destination(plan, recipe)
            full = [grads[index] for index in plan.indices]
            if config.comm_hook is not None:
                reduction = reduce_by_hook(config.comm_hook, bucket, full, total)
            else:
                reduction = self._shard_comm.reduce_scatter(bucket, full, total, recipe.how)
            in_flight.append(_BucketInFlight(plan, recipe, reduction, total, shards))
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

    def _finish_bucket(self, item: _BucketInFlight) -> None:
        present, recipe = item.reduction.wait(), item.recipe
        if recipe.is_deposited:
            self._deposit(item, present)
            return
        config = recipe.config
        if item.plan.bucket.is_flat or config.reduce_scatter_unused_params:
            present = (True,) * len(present)
        if not self._reduce_replicas(item, config):
            return
        _round(item.total, recipe.reduce_dtype)
        self._run_hook(item.total, config)
        if config.keep_low_precision_grads:
            self._deposit_low(item, config)
        else:
            self._deposit(item, present)

    def flat_gradients(self) -> list[torch.Tensor | None]:
        """Return the memory of flat gradients, a bucket at a time; None where they lie elsewhere."""
        return [
            next((shards.flat for shards in plan.pool if _is_in_use(plan, shards)), None)
            for plan in self._plan()
        ]

    @property
    def partial_sums(self) -> list[torch.Tensor]:
        """Sums over the shard axis that wait for their all-reduce."""
        plans = itertools.chain.from_iterable(self._plans.values())
        return [plan.partial for plan in plans if plan.partial is not None]

    @property
    def pooled(self) -> list[GradientShards]:
        """The memory of gradients that were reduced, in use or kept for the next step."""
        plans = itertools.chain.from_iterable(self._plans.values())
        return [shards for plan in plans for shards in plan.pool]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of gradient shards: in use, being made, or kept for the next step."""
        return sum(shards.flat.nbytes for shards in self._alive)

    @property
    def overlaps(self) -> bool:
        return self._shard_comm.overlaps

    @property
    def are_on_host(self) -> bool:
        """Whether gradients are offloaded."""
        return bool(self._params) and self._params[0].local.is_cpu

    def free_unused(self) -> None:
        """Free large gradient memory that nobody uses, where forward has a use for it.

        Over process groups that is so: unsharded parameters come and go with every unit, and take
        it from the allocator. Elsewhere memory is kept for the next backward, since new memory
        costs page faults, and on devices views of small parameters cost more than their memory.
        """
        if self.runtime.has_streams or not self._shard_comm.overlaps:
            return
        for plan in itertools.chain.from_iterable(self._plans.values()):
            if plan.bucket.shard_nbytes > KEPT_NBYTES:
                plan.pool = [shards for shards in plan.pool if not shards.is_unused]

    @property
    def has_partial(self) -> bool:
        """Whether sums over the shard axis wait for their all-reduce."""
        plans = itertools.chain.from_iterable(self._plans.values())
        return any(plan.partial is not None for plan in plans)

    def drop_partial(self) -> None:
        """Forget sums that were not all-reduced yet."""
        for plan in itertools.chain.from_iterable(self._plans.values()):
            plan.partial = None

    def _plan(self) -> list[_BucketPlan]:
        mask = tuple([param.sharded.requires_grad for param in self._params])
        plans = self._plans.get(mask)
        if plans is None:
            trainable = [index for index, yes in enumerate(mask) if yes]
            plans = self._plans[mask] = (
                self._plan_rows(trainable)
                if self._flat_layout is None
                else self._plan_flat(self._flat_layout, trainable)
            )
        return plans

    def _plan_rows(self, trainable: Sequence[int]) -> list[_BucketPlan]:
        layout = rows_layout(
            [self._specs[index] for index in trainable],
            shard_size=self._mesh.shard_size,
            rule=self._shard_comm.rule,
        )
        return [
            _BucketPlan(bucket, indices, [self._params[index] for index in indices])
            for bucket in layout.buckets
            for indices in [[trainable[param.index] for param in bucket.params]]
        ]

    def _plan_flat(self, layout: UnitLayout, trainable: Sequence[int]) -> list[_BucketPlan]:
        """Reduce a buffer whole if anything in it is trainable, so that pieces stay where they are."""
        plans = []
        for bucket in layout.buckets:
            indices = [param.index for param in bucket.params]
            if not set(indices).isdisjoint(trainable):
                holders = dict.fromkeys(self._params[index].holder for index in indices)
                plans.append(_BucketPlan(bucket, indices, list(holders)))
        return plans

    def _destination(
        self, plan: _BucketPlan, recipe: _Recipe
    ) -> tuple[GradientShards | None, torch.Tensor]:
        """Choose where a sum goes: into the gradients' own memory if it is final as it comes."""
        if recipe.is_final and not plan.has_gradient:
            shards = self._gradient_shards(plan, self.runtime.device)
            return shards, shards.flat
        return None, self.runtime.scratch.take(plan.bucket.shard_numel, recipe.total_dtype)

    def _recipe(self, plan: _BucketPlan, config: UnitConfig, *, accumulated: bool) -> _Recipe:
        known = plan.recipe
        if known is not None and known.config is config and known.accumulated == accumulated:
            return known
        bucket = plan.bucket
        reduce_dtype = total_dtype = _reduce_dtype(bucket, config)
        if config.comm_hook is None and self._mesh.data_parallel_size > 1:
            total_dtype = self._shard_comm.accumulate_dtype(reduce_dtype)
        scaling = self._scaling(config)
        if self._mesh.replicate_size > 1:
            scaling = Scaling(scaling.before, 1.0)  # the rest follows the all-reduce
        wire_dtype = _wire_dtype(bucket, config, accumulated=accumulated)
        is_final = (
            total_dtype == bucket.dtype
            and plan.holders[0].local.device == self.runtime.device
            and (config.all_reduce_grads or self._mesh.replicate_size == 1)
            and not config.keep_low_precision_grads
        )
        has_more_to_do = (
            bucket.is_flat
            or self._mesh.replicate_size > 1
            or reduce_dtype.itemsize < total_dtype.itemsize
            or config.all_reduce_hook is not None
            or config.keep_low_precision_grads
            or config.reduce_scatter_unused_params
        )
        plan.recipe = _Recipe(
            config,
            accumulated,
            Sum(
                wire_dtype,
                scaling,
                may_average=not config.force_sum_reduction,
                label=f"{self.label}: reduce-scatter",
            ),
            reduce_dtype,
            total_dtype,
            is_final,
            is_deposited=not has_more_to_do,
        )
        return plan.recipe

    def _reduce_replicas(self, item: _BucketInFlight, config: UnitConfig) -> bool:
        """Sum over the replicate axis. Returns False if that is put off."""
        if self._mesh.replicate_size == 1 or config.comm_hook is not None:
            return True
        plan, total = item.plan, item.total
        if plan.partial is not None:
            total.add_(plan.partial)
            self.runtime.scratch.give(plan.partial)
            plan.partial = None
        if not config.all_reduce_grads:
            plan.partial = total
            return False
        how = Sum(_reduce_dtype(plan.bucket, config), label=f"{self.label}: all-reduce")
        self._replicate_comm.all_reduce(total, how).wait()
        if (after := self._scaling(config).after) != 1.0:
            total.div_(after)
        return True

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

    def _deposit(self, item: _BucketInFlight, present: Sequence[bool]) -> None:
        """Set or add to the sharded parameters' gradients."""
        plan, shards = item.plan, item.shards
        if shards is None:
            device = plan.holders[0].local.device
            is_first = not plan.has_gradient
            if is_first or device != item.total.device:
                shards = self._gradient_shards(plan, device)
                shards.flat.copy_(item.total, non_blocking=True)
                if not is_first:  # the host adds
                    self.runtime.finish(self.runtime.record())
        views = shards.views if shards is not None else self._views(plan, item.total)
        is_flat = plan.bucket.is_flat
        for position, holder in enumerate(plan.holders):
            if not present[position] or (is_flat and not _takes_gradient(holder)):
                continue
            sharded = holder.sharded
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
                    self.runtime.finish(self.runtime.record() if holder.local.is_cpu else None)
                    hook(sharded)
        if item.shards is None:
            self.runtime.scratch.give(item.total)
        if shards is not None:
            plan.pool.append(shards)
            del plan.pool[:-_POOLED]

    def _deposit_low(self, item: _BucketInFlight, config: UnitConfig) -> None:
        """Set or add to the gradients, in the reduce dtype."""
        dtype = _reduce_dtype(item.plan.bucket, config)
        # If offloaded: one copy of all, which the host waits for.
        views = self._views(item.plan, item.total.to(item.plan.holders[0].local.device))
        for holder, view in zip(item.plan.holders, views, strict=True):
            if item.plan.bucket.is_flat and not _takes_gradient(holder):
                continue
            if holder.local_grad is not None:
                holder.local_grad.add_(view)
                continue
            show_gradient(holder.sharded, view.to(holder.local.device, dtype, copy=True))
        self.runtime.scratch.give(item.total)

    def _views(self, plan: _BucketPlan, total: torch.Tensor) -> list[torch.Tensor]:
        """View a sum as what each holder gets of it."""
        if _is_whole(plan):
            return [total]
        return shard_views(plan.bucket, total, self._mesh.shard_rank)

    def _gradient_shards(self, plan: _BucketPlan, device: torch.device) -> GradientShards:
        for position, shards in enumerate(plan.pool):
            if shards.device == device and shards.is_unused:
                return plan.pool.pop(position)
        with torch.inference_mode(False):
            shards = GradientShards(
                plan.bucket,
                self._mesh.shard_rank,
                device,
                [holder.wrap_shard for holder in plan.holders],
                whole=_is_whole(plan),
                pin_memory=device != self.runtime.device,
            )
        self._alive.add(shards)
        return shards

    def _scaling(self, config: UnitConfig) -> Scaling:
        """Return by what to divide: the number of ranks that see different data.

        Where sums travel or are formed in float16, part of it comes first, to avoid overflow.
        """
        factor = config.gradient_divide_factor or float(self._mesh.data_parallel_size)
        policy = config.mp_policy
        low = policy.reduce_dtype or policy.param_dtype
        # Sums over the shard axis travel over the replicate axis in the reduce dtype.
        overflows = low == torch.float16 and (
            self._mesh.replicate_size > 1 or self._shard_comm.accumulate_dtype(low) == low
        )
        if not overflows:
            return Scaling(after=factor)
        before = 1.0
        while factor % before == 0 and factor / before > before:
            before *= 2
        return Scaling(before, factor / before)


def _is_in_use(plan: _BucketPlan, shards: GradientShards) -> bool:
    """Whether the gradients that the holders have now are these."""
    return all(
        holder.sharded.grad is wrapped or not holder.sharded.numel()
        for holder, wrapped in zip(plan.holders, shards.wrapped, strict=True)
    )


def _is_whole(plan: _BucketPlan) -> bool:
    """Whether one holder gets the whole bucket."""
    return plan.bucket.is_flat and not isinstance(plan.holders[0], ManagedParameter)


def _takes_gradient(holder: ShardHolder) -> bool:
    """Whether there is anything to give: a rank may own nothing of a flat bucket's parameter."""
    return holder.sharded.requires_grad and holder.sharded.numel() > 0


def _round(total: torch.Tensor, dtype: torch.dtype) -> None:
    """Give a sum that was formed in a wider dtype the precision of the reduce dtype.

    A wider result would cost nothing, but programs expect the gradients that they know.
    """
    if dtype.itemsize < total.itemsize:
        # In blocks that stay in cache; on other devices a block would cost its launch.
        for block in total.split(_BLOCK) if total.is_cpu else (total,):
            block.copy_(block.to(dtype))


def _reduce_dtype(bucket: BucketLayout, config: UnitConfig) -> torch.dtype:
    return config.mp_policy.reduce_dtype or bucket.compute_dtype


def _wire_dtype(bucket: BucketLayout, config: UnitConfig, *, accumulated: bool) -> torch.dtype:
    """Return what travels: the narrower of gradient and reduce dtype, as sums are wide anyway."""
    reduce_dtype = _reduce_dtype(bucket, config)
    if accumulated or reduce_dtype.itemsize <= bucket.compute_dtype.itemsize:
        return reduce_dtype
    return bucket.compute_dtype
