"""The reductions of one model that are under way: finished and released in the order of their start.

    start     the reduce-scatters are called (`UnitGradients.reduce`): after a unit's backward
    finish    what is left is done: sum over replicas, round, run the user's hook, set ``.grad``. One
              unit later, or at the end of backward: ranks a little apart do not wait for each other
    release   with streams: compute waits for the lane, and what the lane reads may be freed

All ranks start them in the same order, which is the order in which collectives pair; so they are
also finished in that order. On a device the host waits for none of it: to finish is to give the
lane its work, and to record its end.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from fullshard.comm.interface import Comm, Reduction
from fullshard.engine.gradients.deposits import BucketGradients, GradientShards
from fullshard.engine.gradients.recipe import Recipe
from fullshard.engine.observer import Observer
from fullshard.engine.runtime import Lane, Runtime, no_grad
from fullshard.plan.trace import Kind
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


class Destination:
    """Where a bucket's sum over the shard axis is formed, chosen when `take` is called.

    total: the sum, once the reduction was waited for: 1-D. None before `take`.
    shards: the gradient memory that ``total`` is; None if it is scratch.
    """

    def __init__(self, gradients: BucketGradients, recipe: Recipe) -> None:
        self.total: torch.Tensor | None = None
        self.shards: GradientShards | None = None
        self._gradients, self._recipe = gradients, recipe

    def take(self) -> torch.Tensor:
        """Return memory for the sum. To be called once."""
        self.total, self.shards = self._gradients.take_destination(self._recipe)
        return self.total


class BucketInFlight(NamedTuple):
    """One bucket of a reduction that was started.

    takers: for each holder of a flat bucket, whether it gets a gradient; None for other buckets,
        where ``reduction`` says it. Settled at the start: parameters may be frozen until the end.
    """

    gradients: BucketGradients
    recipe: Recipe
    reduction: Reduction
    destination: Destination
    takers: tuple[bool, ...] | None


class InFlight(NamedTuple):
    """A unit's reduction from start to release, with the tensors that it reads.

    grads: the full gradients, if a side stream still reads them when the call returns (see the lanes
        of `engine.runtime`); else empty.
    end: recorded on that stream when the reduction was finished; None before, and without streams.
    """

    unit: ReducedUnit
    buckets: list[BucketInFlight]
    grads: list[torch.Tensor | None]
    end: torch.Event | None = None

    @property
    def is_for_host(self) -> bool:
        """Whether the lane copies gradients to the host, which has to wait before it reads them."""
        return bool(self.buckets) and self.buckets[0].gradients.device.type == "cpu"

    @property
    def results(self) -> list[torch.Tensor]:
        """Gradient memory that sums are formed in; other sums are formed in scratch and copied."""
        shards = (item.destination.shards for item in self.buckets)
        return [each.flat for each in shards if each is not None]

    @property
    def temporaries(self) -> list[torch.Tensor]:
        """Everything else that the reduction holds: scratch, what travels, full gradients."""
        is_finished = self.end is not None
        places = () if is_finished else (item.destination for item in self.buckets)
        totals = (each.total for each in places if each.shards is None)
        sources = (tensor for item in self.buckets for tensor in item.reduction.tensors)
        return [each for each in (*totals, *sources, *self.grads) if each is not None]


class ReductionQueue:
    """Finishes and releases reductions, oldest first.

    max_under_way: how many reductions may hold memory, as long as the oldest of them is finished.
    """

    def __init__(self) -> None:
        self.max_under_way = 1
        self.observer: Observer | None = None
        self._started: collections.deque[InFlight] = collections.deque()
        # Older than those, and with streams only: elsewhere, what is finished holds nothing.
        self._finished: collections.deque[InFlight] = collections.deque()
        # Where the last released one that copies gradients to host memory ends: `release` waits.
        self._copied: tuple[Runtime, torch.Event | None] | None = None

    @property
    def under_way(self) -> Sequence[InFlight]:
        """The reductions that hold memory: not released yet, oldest first."""
        return [*self._finished, *self._started]

    def add(self, in_flight: InFlight, *, keep: int) -> None:
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
            end = _finish(in_flight)
            # It leaves the queue only now: if finishing raises, `discard` still finds it.
            started.popleft()
            if end is not None:
                self._finished.append(in_flight._replace(end=end))
            if observer is not None:
                observer.end()
        # A finished one still holds full gradients that its lane reads. Releasing it makes compute
        # wait for the lane, since the allocator gives freed memory to compute at once. Later is
        # better for time, earlier for memory: `max_under_way` chooses.
        while self._finished and len(self._finished) + len(started) > self.max_under_way:
            self._release_first()

    def release(self) -> None:
        """Release all reductions. They have to be finished.

        When this returns, compute waits for all of them, and offloaded gradients are in host memory.
        """
        while self._finished:
            self._release_first()
        if self._copied is not None:
            runtime, end = self._copied
            # The host waits once: a lane works in order, so its last event covers those before.
            runtime.finish(end)
            self._copied = None

    def _release_first(self) -> None:
        in_flight = self._finished.popleft()
        runtime = in_flight.unit.runtime
        if self.observer is not None:
            self.observer.begin(Kind.WAIT_REDUCE_SCATTER, in_flight.unit)
        # Before `in_flight` goes: what it holds may be given to compute at once, while the lane reads.
        runtime.wait(in_flight.end)
        if self.observer is not None:
            self.observer.end()
        if in_flight.is_for_host:
            self._copied = runtime, in_flight.end

    def discard(self) -> None:
        """Forget all reductions, after an exception ended the iteration. Their results are lost.

        Waits for collectives under way, whose memory must not go before. Where nothing runs by
        itself there is nothing to wait for, and the peers may never come.
        """
        for in_flight in self.under_way:
            runtime = in_flight.unit.runtime
            with runtime.on(Lane.REDUCE):
                if in_flight.end is None and in_flight.unit.comm.overlaps:
                    for item in in_flight.buckets:
                        item.reduction.wait()
                # Anew: if an exception came before the end of `_finish`, there is no event that
                # covers what the lane reads.
                end = runtime.record()
            runtime.wait(end)
        self._finished.clear()
        self._started.clear()


def _finish(in_flight: InFlight) -> torch.Event | None:
    """Finish a reduction; return the event at its end, None without streams."""
    unit, buckets = in_flight.unit, in_flight.buckets
    runtime = unit.runtime
    if not runtime.has_streams:
        with no_grad():
            _finish_buckets(buckets, unit)
        return None
    # `on`, not `following`: the lane needs nothing of compute but what the start has waited for.
    with runtime.on(Lane.REDUCE), no_grad():
        _finish_buckets(buckets, unit)
        return runtime.record()


def _finish_buckets(buckets: Sequence[BucketInFlight], unit: ReducedUnit) -> None:
    """Wait for the sums over the shard axis, and give parameters their gradients."""
    for item in buckets:
        present = item.reduction.wait()
        if item.recipe.is_deposited:  # most reductions end here
            item.gradients.deposit(_total(item), item.destination.shards, present)
        else:
            _finish_sum(item, present, unit)


def _total(item: BucketInFlight) -> torch.Tensor:
    assert item.destination.total is not None  # the reduction was waited for
    return item.destination.total


def _finish_sum(item: BucketInFlight, present: tuple[bool, ...], unit: ReducedUnit) -> None:
    """Sum over replicas, round, run the user's hook and give parameters their gradients.

    In this order: the hook may add ranks that are not in the mesh, and finds the gradient as it
    will be; what it changes is not rounded again.
    """
    recipe, total = item.recipe, _total(item)
    config = recipe.config
    # From here on `present` says who gets a gradient. See `unit_gradients`, Note: Missing gradients.
    if item.takers is not None:
        present = item.takers
    elif config.reduces_unused:
        present = (True,) * len(present)
    if recipe.sums_replicas:
        of_all = _sum_replicas(item, total, present, unit.replicate_comm)
        if of_all is None:  # put off; `total` waits in the bucket
            return
        present = of_all
    _round(total, recipe.reduce_dtype)
    _run_hook(total, config, unit.runtime)
    if config.keep_low_precision_grads:
        item.gradients.deposit_low(total, recipe.reduce_dtype, present)
    else:
        item.gradients.deposit(total, item.destination.shards, present)


def _sum_replicas(
    item: BucketInFlight, total: torch.Tensor, present: tuple[bool, ...], comm: Comm
) -> tuple[bool, ...] | None:
    """Sum over the replicate axis, in place, and divide. Collective, unless it is put off.

    present: for each holder, whether a rank of this replica had a gradient. Returns the same for
    all replicas together, or None if the all-reduce is put off.
    """
    bucket, recipe = item.gradients, item.recipe
    # Added before the all-reduce, so that one serves all micro-batches, and before it is put off
    # once more, so that there is never more than one sum that waits.
    present = bucket.add_waiting(total, present)
    if not recipe.config.all_reduce_grads:
        bucket.put_off(total, present, takers=item.takers)
        return None
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
    if config.all_reduce_hook is None:
        return
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


def _round(total: torch.Tensor, dtype: torch.dtype) -> None:
    """Round a sum that was formed in a wider dtype to the reduce dtype's precision, in place.

    Keeping it wider would cost nothing, but losses would drift from those that PyTorch gives.
    """
    if dtype.itemsize < total.itemsize:
        # In blocks that stay in cache. On other devices at once, since each block costs a launch.
        for block in total.split(_BLOCK_NUMEL) if total.is_cpu else (total,):
            block.copy_(block.to(dtype))
