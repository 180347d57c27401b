"""The reductions of one model that are under way, in the order in which they were started.

All ranks start them in the same order, which is the order in which collectives pair; so they are
also finished in that order.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from fullshard.comm.interface import Reduction
from fullshard.engine.gradients.deposits import BucketGradients, GradientShards
from fullshard.engine.gradients.recipe import Recipe
from fullshard.engine.observer import Observer
from fullshard.engine.runtime import Lane, Runtime
from fullshard.plan.trace import Kind


@dataclasses.dataclass(slots=True)
class BucketInFlight:
    """One bucket of a reduction that was started.

    total: the sum over the shard axis, once ``reduction`` was waited for: 1-D.
    shards: the gradient memory that ``total`` is; None if it is scratch.
    takers: for each holder of a flat bucket, whether it gets a gradient; None for other buckets,
        where ``reduction`` says it. Settled at the start: parameters may be frozen until the end.
    """

    gradients: BucketGradients
    recipe: Recipe
    reduction: Reduction
    total: torch.Tensor
    shards: GradientShards | None
    takers: tuple[bool, ...] | None


class Reducer(Protocol):
    """The part of `unit_gradients.UnitGradients`, which starts and finishes reductions, used here."""

    runtime: Runtime

    @property
    def overlaps(self) -> bool: ...

    @property
    def are_on_host(self) -> bool: ...

    def finish(self, in_flight: "InFlight") -> None: ...


@dataclasses.dataclass(slots=True)
class InFlight:
    """A unit's reduction from start to release, with the tensors that it reads.

    grads: the full gradients, if a side stream still reads them when the call returns (see the lanes
        of `engine.runtime`); else empty.
    event: recorded on that stream when the reduction was finished; None without streams.
    """

    gradients: Reducer
    buckets: list[BucketInFlight]
    grads: list[torch.Tensor | None]
    event: torch.Event | None = None
    is_finished: bool = False

    @property
    def is_for_host(self) -> bool:
        """Whether the lane copies gradients to the host, which has to wait before it reads them."""
        return self.event is not None and self.gradients.are_on_host

    def finish(self) -> None:
        """Wait for the sums and give them to the sharded parameters. Collective with replicas."""
        self.gradients.finish(self)
        self.is_finished = True

    def release(self) -> None:
        """Let compute wait for the reduction, and drop what it holds."""
        # In this order: what is dropped may be given to compute at once, while the lane reads it.
        self.gradients.runtime.wait(self.event)
        self.buckets.clear()
        self.grads.clear()

    @property
    def results(self) -> list[torch.Tensor]:
        """Gradient memory that sums are formed in; other sums are formed in scratch and copied."""
        return [item.shards.flat for item in self.buckets if item.shards is not None]

    @property
    def temporaries(self) -> list[torch.Tensor]:
        """Everything else that the reduction holds: scratch, what travels, full gradients."""
        totals = () if self.is_finished else (i.total for i in self.buckets if i.shards is None)
        sources = (tensor for item in self.buckets for tensor in item.reduction.tensors)
        return [*totals, *sources, *(grad for grad in self.grads if grad is not None)]

    def discard(self) -> None:
        """Wait for collectives under way, whose memory must not go before, and drop the result.

        Where nothing runs by itself there is nothing to wait for, and the peers may never come.
        """
        runtime = self.gradients.runtime
        with runtime.on(Lane.REDUCE):
            if not self.is_finished and self.gradients.overlaps:
                for item in self.buckets:
                    item.reduction.wait()
            # Anew: if an exception came before the end of `finish`, there is no event that covers
            # what the lane reads.
            self.event = runtime.record()
        self.release()


class ReductionQueue:
    """Finishes and releases reductions, oldest first.

    A reduction is *started* (its collective runs), then *finished* (gradients are in ``.grad``; on a
    device, the lane has been given the work that puts them there), then *released* (compute waits
    for the lane, and what the lane reads may be freed).

    max_held: how many reductions may hold memory, as long as the oldest of them is finished.
    """

    def __init__(self) -> None:
        self.max_held = 1
        self.observer: Observer | None = None
        self._held: collections.deque[InFlight] = collections.deque()  # not released yet
        self._unfinished: collections.deque[InFlight] = collections.deque()  # the newest of `_held`
        # The last released one that copies gradients to host memory: `release` waits for it.
        self._for_host: InFlight | None = None

    @property
    def held(self) -> Sequence[InFlight]:
        """The reductions that hold memory: not released yet, oldest first."""
        return self._held

    def add(self, in_flight: InFlight, *, keep: int) -> None:
        """Take over a reduction that was started; finish all but the last ``keep``."""
        self._held.append(in_flight)
        self._unfinished.append(in_flight)
        self.finish(keep=keep)

    def finish(self, *, keep: int = 0) -> None:
        """Finish all but the last ``keep`` reductions."""
        while len(self._unfinished) > keep:
            # It leaves the queue only afterwards: if finishing raises, `discard` still finds it.
            self._wait_for(self._unfinished[0], self._unfinished[0].finish)
            self._unfinished.popleft()
        # A finished one still holds full gradients that its lane reads. Releasing it makes compute
        # wait for the lane, since the allocator gives freed memory to compute at once. Later is
        # better for time, earlier for memory: `max_held` chooses.
        while len(self._held) > self.max_held and self._held[0].is_finished:
            self._release_first()

    def release(self) -> None:
        """Release all reductions. They have to be finished.

        When this returns, compute waits for all of them, and offloaded gradients are in host memory.
        """
        while self._held:
            self._release_first()
        if self._for_host is not None:
            runtime, event = self._for_host.gradients.runtime, self._for_host.event
            # The host waits once: a lane works in order, so its last event covers those before.
            runtime.finish(event)
            self._for_host = None

    def _release_first(self) -> None:
        in_flight = self._held.popleft()
        self._wait_for(in_flight, in_flight.release)
        if in_flight.is_for_host:
            self._for_host = in_flight

    def discard(self) -> None:
        """Forget all reductions, after an exception ended the iteration. Their results are lost."""
        for in_flight in self._held:
            in_flight.discard()
        self._held.clear()
        self._unfinished.clear()

    def _wait_for(self, in_flight: InFlight, wait: Callable[[], None]) -> None:
        if self.observer is not None:
            self.observer.begin(Kind.WAIT_REDUCE_SCATTER, in_flight.gradients)
        wait()
        if self.observer is not None:
            self.observer.end()
