"""The buckets in which one unit's gradients are reduced, and the recipe of each.

Only gradients of trainable parameters travel. So buckets follow from which parameters are trainable,
never from which have a gradient, and all ranks agree on their sizes. Freezing and unfreezing make
other buckets; those of every choice are kept, since programs alternate between a few.
"""

import itertools
import weakref
from collections.abc import Sequence

from fullshard.comm.interface import Comm
from fullshard.engine.gradients.deposits import BucketGradients
from fullshard.engine.gradients.recipe import Recipe, make_recipe, wire_dtype
from fullshard.engine.gradients.shards import GradientShards
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.runtime import Runtime
from fullshard.plan.builders import rows_layout
from fullshard.plan.layout import BucketLayout, ParamSpec, UnitLayout
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig


class GradientBuckets:
    """Chooses and keeps the buckets of one unit's gradients.

    shard_comm, replicate_comm: for the sums over the shard axis and over the replicate axis.
    params: the unit's parameters, in the order of their indices.
    flat_layout: the layout of a flat unit, else None.
    owed: indices of parameters whose gradients were kept for a later reduction. They take part in
        the next one, even if they were frozen meanwhile. The same on all ranks.
    alive: all memory of reduced gradients that exists, for reports.
    """

    def __init__(
        self, mesh: MeshPlan, shard_comm: Comm, replicate_comm: Comm, runtime: Runtime
    ) -> None:
        self.shard_comm = shard_comm
        self.replicate_comm = replicate_comm
        self.params: list[ManagedParameter] = []
        self.owed: set[int] = set()
        self.flat_layout: UnitLayout | None = None
        self.alive: weakref.WeakSet[GradientShards] = weakref.WeakSet()
        self._mesh = mesh
        self._runtime = runtime
        self._specs: list[ParamSpec] = []
        self._by_trainable: dict[tuple[bool, ...], list[BucketGradients]] = {}

    def bind(
        self,
        params: Sequence[ManagedParameter],
        specs: Sequence[ParamSpec],
        flat_layout: UnitLayout | None = None,
    ) -> None:
        """Set the parameters, and forget all buckets, with sums that wait in them.

        specs: of all parameters, in the order of their indices.
        flat_layout: of a flat unit, whose gradients lie as its parameters do.
        """
        self.params, self._specs = list(params), list(specs)
        self.flat_layout = flat_layout
        self._by_trainable.clear()

    def use_comms(self, *, shard: Comm | None = None, replicate: Comm | None = None) -> None:
        """Reduce over other groups from now on. Buckets stay as they are."""
        self.shard_comm = shard or self.shard_comm
        self.replicate_comm = replicate or self.replicate_comm
        self.forget_recipes()

    def forget_recipes(self) -> None:
        """Drop all recipes, since something beside the configuration has changed."""
        for bucket in self.known:
            bucket.recipe = None

    @property
    def known(self) -> list[BucketGradients]:
        """The buckets of every choice of trainable parameters there has been."""
        return list(itertools.chain.from_iterable(self._by_trainable.values()))

    def owe_trainable(self) -> None:
        """Let the parameters that are trainable now take part in the next reduction.

        Call it when their gradients are kept for later, whether or not each has one.
        """
        self.owed.update(
            index for index, param in enumerate(self.params) if param.sharded.requires_grad
        )

    def layout(self) -> UnitLayout:
        """Plan the layout of the gradients of the parameters that are trainable now."""
        return UnitLayout(self._mesh.shard_size, tuple(each.bucket for each in self.current()))

    def needs(self, config: UnitConfig) -> dict[Comm, list[int]]:
        """Return, for each communication, the bytes that it stages per bucket, for `Comm.prepare`."""
        needs: dict[Comm, list[int]] = {self.shard_comm: [], self.replicate_comm: []}
        for bucket in (each.bucket for each in self.current()):
            wire = wire_dtype(bucket, config, accumulated=False)
            needs[self.shard_comm].append(self.shard_comm.staged_nbytes(bucket, wire))
            needs[self.replicate_comm].append(self.replicate_comm.summed_nbytes(bucket, wire))
        return needs

    def current(self) -> list[BucketGradients]:
        """Return the buckets of the parameters that are trainable now or owed a gradient."""
        mask = tuple([param.sharded.requires_grad for param in self.params])
        if self.owed:
            mask = tuple([trained or index in self.owed for index, trained in enumerate(mask)])
        buckets = self._by_trainable.get(mask)
        if buckets is None:
            buckets = self._by_trainable[mask] = [
                BucketGradients(
                    bucket,
                    indices,
                    list(dict.fromkeys(self.params[index].holder for index in indices)),
                    shard_rank=self._mesh.shard_rank,
                    runtime=self._runtime,
                    alive=self.alive,
                )
                for bucket, indices in self._divide(
                    list(itertools.compress(itertools.count(), mask))
                )
            ]
        return buckets

    def _divide(self, trainable: Sequence[int]) -> list[tuple[BucketLayout, list[int]]]:
        """Return the buckets of some parameters, each with the indices of its parameters.

        trainable: indices, ascending. A flat bucket is reduced as a whole if anything in it is
        trainable, so that every piece of a gradient lies as the piece of the parameter does.
        """
        if self.flat_layout is not None:
            flat = [
                (each, [param.index for param in each.params]) for each in self.flat_layout.buckets
            ]
            return [
                (each, indices) for each, indices in flat if not set(indices).isdisjoint(trainable)
            ]
        layout = rows_layout(
            [self._specs[index] for index in trainable],
            shard_size=self._mesh.shard_size,
            rule=self.shard_comm.rule,
        )
        # This layout counts the trainable parameters alone; map its indices back to the unit's.
        return [
            (each, [trainable[param.index] for param in each.params]) for each in layout.buckets
        ]

    def recipe(
        self, bucket: BucketGradients, config: UnitConfig, *, accumulated: bool, label: str
    ) -> Recipe:
        """Return how a bucket is reduced: the recipe of its last reduction, if that still holds.

        accumulated: whether gradients are sums of several backwards, in the reduce dtype.
        """
        known = bucket.recipe
        # Identity first: configurations are frozen, and comparing all their fields takes longer.
        is_same = known is not None and (known.config is config or known.config == config)
        if known is not None and is_same and known.accumulated == accumulated:
            return known
        bucket.recipe = make_recipe(
            bucket.bucket,
            config,
            self._mesh,
            sum_dtype=self.shard_comm.accumulate_dtype,
            accumulated=accumulated,
            is_offloaded=bucket.device != self._runtime.device,
            label=label,
        )
        return bucket.recipe
