"""The reductions of one model that are under way: finished and released in the order of their start.

    start     the reduce-scatters are called (`UnitGradients.reduce`): after a unit's backward
    finish    what is left is done: sum over replicas, round, run the user's hook, set ``.grad``. One
              unit later, or at the end of backward: ranks a little apart do not wait for each other
    release   with streams: compute waits for the lane, and what the lane reads may be freed

All ranks start them in the same order, which is the order in which collectives pair; so they are
also finished in that order. On a device the host waits for none of it: to finish is to give the
lanes their work, and to record its end. What begins with a sum over replicas has a lane of its own,
on which it runs beside the reduce-scatter of the next unit.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from fullshard.comm.interface import Comm, Work
from fullshard.engine.gradients.bucket import BucketGradients, GradientShards, Recipe
from fullshard.engine.observer import Observer
from fullshard.engine.runtime import Lane, Runtime, no_grad
from fullshard.plan.trace import Kind
from fullshard.plan.ways import MAX_REPLICATED
from fullshard.policies import UnitConfig

_BLOCK_NUMEL = 1 << 16  # so many elements stay in cache


class ReducedUnit(Protocol):
    """The part of a `Unit` that its reductions use."""

    config: UnitConfig
    entered_as: str
    observer: Observer | None
    runtime: Runtime
    comm: Comm
    replicate_comm: Comm


class BucketReduction:
    """One bucket of a reduction that was started, and where its sum over the shard axis is formed.

    takers: for each holder of a flat bucket, whether it gets a gradient; None for other buckets,
        where the reduce-scatter says it. Settled at the start: parameters may be frozen until the end.
    total: the sum, once the reduce-scatter was waited for: 1-D. None before `take`.
    shards: the gradient memory that ``total`` is; None if it is scratch.
    """

    def __init__(
        self, gradients: BucketGradients, recipe: Recipe, takers: tuple[bool, ...] | None
    ) -> None:
        self.gradients = gradients
        self.recipe = recipe
        self.takers = takers
        self.total: torch.Tensor | None = None
        self.shards: GradientShards | None = None

    def take(self) -> torch.Tensor:
        """Return memory for the sum. To be called once."""
        gradients, recipe = self.gradients, self.recipe
        # There where the gradients are to be, if the sum may be formed there and there is none to add it to.
        if recipe.is_final and not gradients.has_gradient:
            self.shards = gradients.take_shards()
            self.total = self.shards.flat
        else:  # scratch, which `deposit` gives back
            scratch = gradients.runtime.scratch
            self.total = scratch.take(gradients.bucket.shard_numel, recipe.total_dtype)
        return self.total


class UnitReduction(NamedTuple):
    """A unit's reduction from start to release, with the tensors that it reads.

    buckets: each with its reduce-scatter, which refers to it.
    grads: the full gradients, if a side stream still reads them when the call returns (see the lanes
        of `engine.runtime`); else empty.
    end: recorded on the lane of reduce-scatters when it had read them, and what travelled; for the
        sums over replicas, on theirs, when all was done. None before, and without streams.
    """

    unit: ReducedUnit
    buckets: list[tuple[BucketReduction, Work]]
    grads: list[torch.Tensor | None]
    end: torch.Event | None = None

    @property
    def results(self) -> list[torch.Tensor]:
        """Gradient memory that sums are formed in; other sums are formed in scratch and copied."""
        shards = (item.shards for item, _ in self.buckets)
        return [each.flat for each in shards if each is not None]

    @property
    def temporaries(self) -> list[torch.Tensor]:
        """Everything else that the reduction holds: scratch, what travels, full gradients."""
        # With streams, also what was copied to gradients: it is held until the release.
        totals = (item.total for item, _ in self.buckets if item.shards is None)
        sources = (tensor for _, reduction in self.buckets for tensor in reduction.tensors)
        return [each for each in (*totals, *sources, *self.grads) if each is not None]


class ReductionQueue:
    """Finishes and releases reductions, oldest first.

    max_under_way: how many reductions may hold memory, as long as the oldest of them is finished.
    """

    def __init__(self) -> None:
        self.max_under_way = 1
        self.observer: Observer | None = None
        self._started: collections.deque[UnitReduction] = collections.deque()
        # Older than those, and with streams only: elsewhere, what is finished holds nothing.
        self._finished: collections.deque[UnitReduction] = collections.deque()
        # The same reductions, while they are summed over replicas: they hold sums over shards.
        self._replicated: list[UnitReduction] = []
        # Where the last released one that copies gradients to host memory ends: `release` waits.
        self._copied: tuple[Runtime, torch.Event | None] | None = None

    @property
    def under_way(self) -> Sequence[UnitReduction]:
        """The reductions that hold memory: not released yet, oldest first."""
        return [*self._replicated, *self._finished, *self._started]

    def make_way(self, unit: ReducedUnit) -> None:
        """Finish what ran beside a unit's backward, whose reduction is about to start."""
        # Its memory serves this one: scratch, and gradients to which this adds.
        if unit.comm.overlaps or any(each.unit is unit for each in self._started):
            self.finish()
        for in_flight in self._replicated:
            if in_flight.unit is unit:  # reduced before in this backward: the same gradient memory
                with unit.runtime.on(Lane.REDUCE):
                    unit.runtime.wait(in_flight.end)

    def add(self, in_flight: UnitReduction, *, keep: int) -> None:
        """Take over a reduction that was started; finish all but the last ``keep``."""
        self._started.append(in_flight)
        if len(self._started) > keep or self._finished:
            self.finish(keep=keep)

    def finish(self, *, keep: int = 0) -> None:
        """Finish all but the last ``keep`` reductions. Collective with replicas."""
        started, observer = self._started, self.observer
        while len(started) > keep:
            in_flight = started[0]
            if observer is not None:
                observer.begin(Kind.WAIT_REDUCE_SCATTER, in_flight.unit)
            read, end = _finish(in_flight)
            # It leaves the queue only now: if finishing raises, `discard` still finds it.
            started.popleft()
            if end is not read:  # from here on two: what was read, and what is summed over replicas
                self._replicated.append(in_flight._replace(grads=[], end=end))
                in_flight = in_flight._replace(buckets=[])
            if read is not None:
                self._finished.append(in_flight._replace(end=read))
            if observer is not None:
                observer.end()
        # A finished one still holds full gradients that its lane reads. Releasing it makes compute
        # wait for the lane, since the allocator gives freed memory to compute at once. Later is
        # better for time, earlier for memory: `max_under_way` chooses.
        while self._finished and len(self._finished) + len(started) > self.max_under_way:
            self._release(self._finished.popleft())
        if not self._replicated:
            return
        # Sums in gradient memory wait for the end of backward, where compute waits for them. Others hold
        # scratch, which belongs to the lane of reduce-scatters.
        scratch = [
            each
            for each in self._replicated
            if any(item.shards is None for item, _ in each.buckets)
        ]
        for oldest in scratch[:-MAX_REPLICATED]:
            with oldest.unit.runtime.on(Lane.REDUCE):
                oldest.unit.runtime.wait(oldest.end)
            self._replicated = [each for each in self._replicated if each is not oldest]

    def release(self) -> None:
        """Release all reductions. They have to be finished.

        When this returns, compute waits for all of them, and offloaded gradients are in host memory.
        """
        for queue in (self._finished, collections.deque(self._replicated)):
            while queue:
                self._release(queue.popleft())
            if self._copied is not None:
                runtime, end = self._copied
                # The host waits once: a lane works in order, so its last event covers those before.
                runtime.finish(end)
                self._copied = None
        self._replicated.clear()

    def _release(self, in_flight: UnitReduction) -> None:
        if self.observer is not None:
            self.observer.begin(Kind.WAIT_REDUCE_SCATTER, in_flight.unit)
        # Before `in_flight` goes: what it holds may be given to compute at once, while the lane reads.
        runtime = in_flight.unit.runtime
        runtime.wait(in_flight.end)
        if self.observer is not None:
            self.observer.end()
        buckets = in_flight.buckets
        if buckets and buckets[0][0].gradients.device.type == "cpu":
            # The lane copies gradients to the host, which has to wait before it reads them.
            self._copied = runtime, in_flight.end

    def discard(self) -> None:
        """Forget all reductions, after an exception ended the iteration. Their results are lost.

        Waits for collectives under way, whose memory must not go before. Where nothing runs by
        itself there is nothing to wait for, and the peers may never come.
        """
        for in_flight in self._started:
            if in_flight.unit.comm.overlaps:
                with in_flight.unit.runtime.on(Lane.REDUCE):
                    for _, reduction in in_flight.buckets:
                        reduction.wait()
        for runtime in {in_flight.unit.runtime for in_flight in self.under_way}:
            for lane in (Lane.REDUCE, Lane.ALL_REDUCE):
                with runtime.on(lane):
                    # Anew: if an exception came before the end of `_finish`, there is no event that
                    # covers what the lane reads.
                    end = runtime.record()
                runtime.wait(end)
        for queue in (self._finished, self._replicated, self._started):
            queue.clear()


def _finish(in_flight: UnitReduction) -> tuple[torch.Event | None, torch.Event | None]:
    """Finish a reduction.

    Returns the events after which nothing reads full gradients any more, and after which all is done:
    one and the same unless sums over replicas follow; None without streams.
    """
    unit, buckets = in_flight.unit, in_flight.buckets
    runtime = unit.runtime
    if not runtime.has_streams:
        with no_grad():
            for item, reduction in buckets:
                if item.recipe.is_deposited:  # most reductions, without a function in between
                    takers = reduction.wait()
                    assert item.total is not None
                    item.gradients.deposit(item.total, item.shards, takers)
                else:
                    _complete(item, _sum_shards(item, reduction), unit)
        return None, None
    # `on`, not `following`: the lane needs nothing of compute but what the start has waited for.
    with runtime.on(Lane.REDUCE), no_grad():
        sums = [(item, _sum_shards(item, reduction)) for item, reduction in buckets]
        if not any(item.recipe.sums_replicas for item, _ in buckets):
            for item, present in sums:
                _complete(item, present, unit)
            end = runtime.record()
            return end, end
        read = runtime.record()
    with runtime.on(Lane.ALL_REDUCE), no_grad():
        runtime.wait(read)
        for item, present in sums:
            _complete(item, present, unit)
        return read, runtime.record()


def _total(item: BucketReduction) -> torch.Tensor:
    assert item.total is not None  # the reduce-scatter was waited for
    return item.total


def _sum_shards(item: BucketReduction, reduction: Work) -> tuple[bool, ...] | None:
    """Wait for a sum over the shard axis, and add one that waited for its all-reduce.

    Returns who gets a gradient of it, for each holder; None if its all-reduce is put off: the sum
    then waits in the bucket.
    """
    present, recipe = reduction.wait(), item.recipe
    # From here on `present` says who gets a gradient. See `unit_gradients`, Note: Missing gradients.
    if item.takers is not None:
        present = item.takers
    elif recipe.config.reduces_unused:
        present = (True,) * len(present)
    if recipe.sums_replicas:
        # Added before the all-reduce, so that one serves all micro-batches, and before it is put off
        # once more, so that there is never more than one sum that waits.
        present = item.gradients.add_waiting(_total(item), present)
        if not recipe.config.all_reduce_grads:
            item.gradients.put_off(_total(item), present, takers=item.takers)
            return None
    return present


def _complete(item: BucketReduction, present: tuple[bool, ...] | None, unit: ReducedUnit) -> None:
    """Sum over replicas, round, run the user's hook and give parameters their gradients.

    It is rounded to the reduce dtype, in place. In this order: the hook may add ranks that are not in the mesh, and finds the gradient as it
    will be; what it changes is not rounded again. present: what `_sum_shards` has returned.
    """
    if present is None:
        return
    recipe, total, reduce_dtype = item.recipe, _total(item), item.gradients.reduce_dtype
    if recipe.sums_replicas:
        present = _sum_replicas(item, present, unit.replicate_comm)
    if reduce_dtype.itemsize < total.itemsize:
        # Kept wider it would cost nothing, but losses would drift from those that PyTorch gives. In blocks that stay
        # in cache; on other devices at once, since each block costs a launch.
        for block in total.split(_BLOCK_NUMEL) if total.is_cpu else (total,):
            block.copy_(block.to(reduce_dtype))
    if recipe.config.all_reduce_hook is not None:
        _run_hook(total, recipe.config, unit.runtime)
    if recipe.config.keep_low_precision_grads:
        item.gradients.deposit_low(total, reduce_dtype, present)
    else:
        item.gradients.deposit(total, item.shards, present)


def _sum_replicas(item: BucketReduction, present: tuple[bool, ...], comm: Comm) -> tuple[bool, ...]:
    """Sum over the replicate axis, in place, and divide. Collective.

    present: for each holder, whether a rank of this replica had a gradient. Returns the same for
    all replicas together.
    """
    recipe, total = item.recipe, _total(item)
    # Flags travel only where replicas do not know the answer anyway.
    is_agreed = item.takers is not None or recipe.config.reduces_unused
    reduction = comm.all_reduce(total, () if is_agreed else present, recipe.over_replicas)
    present = reduction.wait() or present
    if recipe.divisor != 1.0:
        total.div_(recipe.divisor)
    return present


def _run_hook(total: torch.Tensor, config: UnitConfig, runtime: Runtime) -> None:
    """Call the user's all-reduce hook on a finished sum, which it may change in place.

    On its own stream, if the user gave one; the lane goes on after it.
    """
    assert config.all_reduce_hook is not None
    stream = config.all_reduce_hook_stream
    if stream is None or not runtime.has_streams:
        config.all_reduce_hook(total)
        return
    before = runtime.record()
    with stream:
        runtime.wait(before)
        config.all_reduce_hook(total)
        after = runtime.record()
    runtime.wait(after)
