"""A unit's reduction between its start and its release, as a value."""

import dataclasses
from typing import Protocol

import torch

from fullshard.comm.interface import Reduction
from fullshard.engine.gradients.deposits import BucketGradients
from fullshard.engine.gradients.recipe import Recipe
from fullshard.engine.gradients.shards import GradientShards
from fullshard.engine.runtime import Lane, Runtime


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
    """The part of `reduction.UnitGradients`, which starts and finishes reductions, used here."""

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
