"""A unit's reduction between its start and its end, as a value."""

import dataclasses
from typing import Protocol

import torch

from fullshard.comm.interface import Reduction
from fullshard.engine.gradients.deposits import BucketGradients
from fullshard.engine.gradients.recipe import Recipe
from fullshard.engine.gradients.shards import GradientShards
from fullshard.engine.runtime import Runtime


@dataclasses.dataclass(slots=True)
class BucketInFlight:
    gradients: BucketGradients
    recipe: Recipe
    reduction: Reduction
    total: torch.Tensor
    shards: GradientShards | None  # whose memory ``total`` is, or None: scratch
    takers: tuple[bool, ...] | None  # of a flat bucket: who gets something


class Reducer(Protocol):
    """What started a reduction and finishes it: `reduction.UnitGradients`."""

    runtime: Runtime

    @property
    def overlaps(self) -> bool: ...

    @property
    def are_on_host(self) -> bool: ...

    def finish(self, in_flight: "InFlight") -> None: ...


@dataclasses.dataclass(slots=True)
class InFlight:
    """A unit's reduction between start and finish, with everything it needs."""

    gradients: Reducer
    buckets: list[BucketInFlight]
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
