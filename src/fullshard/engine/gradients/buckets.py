"""The buckets in which one unit's gradients are reduced, and the recipe of each.

Only gradients of trainable parameters travel. So buckets follow from which parameters are trainable,
never from which have a gradient, and all ranks agree on their sizes. Freezing and unfreezing make
other buckets; those of every choice are kept, since programs alternate between a few.

Where a parameter takes gradients of any dtype (``grad_dtype = None``), the dtype of the last one is
planned for, and the compute dtype before the first. So they have to come in one dtype on all ranks,
as in PyTorch; a ``reduce_dtype`` makes that certain.
"""

import dataclasses
import itertools
import operator
import weakref
from collections.abc import Sequence

import torch

from fullshard.comm.interface import Comm
from fullshard.engine.gradients.deposits import BucketGradients, GradientShards
from fullshard.engine.gradients.recipe import Recipe, make_recipe, wire_dtype
from fullshard.engine.params.buffers import KEPT_NBYTES
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.runtime import Runtime
from fullshard.plan.builders import rows_layout
from fullshard.plan.gradient_dtypes import GradientDtypes, common_dtype, reduce_dtypes
from fullshard.plan.layout import BucketLayout, ParamSpec, UnitLayout
from fullshard.plan.mesh import MeshPlan
from fullshard.policies import UnitConfig

_is_trained = operator.attrgetter("sharded.requires_grad")


class GradientBuckets:
    """Chooses and keeps the buckets of one unit's gradients.

    shard_comm, replicate_comm: for the sums over the shard axis and over the replicate axis.
    params: the unit's parameters, in the order of their indices.
    flat_layout: the layout of a flat unit, else None.
    hides_presence: whether ranks do not tell each other which parameters have a gradient.
    known: the buckets of every choice of trainable parameters, and of dtypes, there has been.
    large: those of them whose memory is freed when nobody uses it.
    takes_any: whether some gradients are planned for the dtype in which the last ones came.
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
        self._note_presence()
        self.known: list[BucketGradients] = []
        self.large: list[BucketGradients] = []
        self.takes_any = False
        self.owed: set[int] = set()
        self.flat_layout: UnitLayout | None = None
        self.alive: weakref.WeakSet[GradientShards] = weakref.WeakSet()
        self._mesh = mesh
        self._runtime = runtime
        self._specs: list[ParamSpec] = []
        self._config = UnitConfig()  # of `bind`
        self._dtypes: list[GradientDtypes] = []
        self._first_dtypes = self._dtypes  # before any gradient was seen
        self._plans: dict[tuple[GradientDtypes, ...], int] = {}  # numbers all there have been
        self._plan = 0  # number of the one in effect
        # By that number and by which parameters are trainable.
        self._divided: dict[tuple[int, tuple[bool, ...]], list[BucketGradients]] = {}

    def bind(
        self,
        params: Sequence[ManagedParameter],
        specs: Sequence[ParamSpec],
        config: UnitConfig,
        flat_layout: UnitLayout | None = None,
    ) -> None:
        """Set the parameters, and forget all buckets, with sums that wait in them.

        specs: of all parameters, in the order of their indices. config: says in which dtypes
        gradients are reduced.
        flat_layout: of a flat unit, whose gradients lie as its parameters do.
        """
        self.params, self._specs = list(params), list(specs)
        self.flat_layout = flat_layout
        self._config = config
        self._divided.clear()
        self.known.clear()
        self.large.clear()
        self._plans.clear()
        self._plan_dtypes([None] * len(self.params))
        self._first_dtypes = self._dtypes
        self.takes_any = any(map(_is_open, self._dtypes))
        for param, dtypes in zip(self.params, self._dtypes, strict=True):
            param.set_accumulation_dtype(dtypes.unsharded)

    def _plan_dtypes(self, seen: Sequence[torch.dtype | None]) -> None:
        """Plan the dtypes of all gradients. ``seen``: those in which the last ones came, or None."""
        pairs = zip(self.params, seen, strict=True)
        self._dtypes = [param.gradient_dtypes(self._config, dtype) for param, dtype in pairs]
        self._plan = self._plans.setdefault(tuple(self._dtypes), len(self._plans))

    def are_outdated(self, config: UnitConfig) -> bool:
        """Return whether gradients have other dtypes since `bind`.

        By the `grad_dtype` of a parameter, which somebody has set, or by the configuration.
        """
        return self._first_dtypes != [param.gradient_dtypes(config) for param in self.params]

    def follow(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Plan for the dtypes in which gradients came, where parameters take any (`takes_any`)."""
        seen = [
            grad.dtype if grad is not None and _is_open(known) else known.full
            for grad, known in zip(grads, self._dtypes, strict=True)
        ]
        if seen != [known.full for known in self._dtypes]:
            self._plan_dtypes(seen)

    def sum_dtypes(self) -> list[torch.dtype | None]:
        """Return in which dtype each parameter's gradients add up unreduced; None: as they come."""
        return [None if _is_open(each) else each.reduced for each in self._dtypes]

    def use_comms(self, *, shard: Comm | None = None, replicate: Comm | None = None) -> None:
        """Reduce over other groups from now on. Buckets stay as they are."""
        self.shard_comm = shard or self.shard_comm
        self.replicate_comm = replicate or self.replicate_comm
        self._note_presence()
        self.forget_recipes()

    def _note_presence(self) -> None:
        comms = self.shard_comm, self.replicate_comm
        self.hides_presence = not all(comm.tells_presence for comm in comms)

    def forget_recipes(self) -> None:
        """Drop all recipes, since something beside the configuration has changed."""
        for bucket in self.known:
            bucket.recipe = None

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

    def needs(self) -> dict[Comm, list[int]]:
        """Return, for each communication, the bytes that it stages per bucket, for `Comm.prepare`."""
        needs: dict[Comm, list[int]] = {self.shard_comm: [], self.replicate_comm: []}
        for bucket in self.current():
            wire = wire_dtype(bucket.bucket, bucket.reduce_dtype, accumulated=False)
            needs[self.shard_comm].append(self.shard_comm.staged_nbytes(bucket.bucket, wire))
            needs[self.replicate_comm].append(
                self.replicate_comm.summed_nbytes(bucket.bucket, wire)
            )
        return needs

    def current(self) -> list[BucketGradients]:
        """Return the buckets of the parameters that are trainable now or owed a gradient."""
        mask = tuple(map(_is_trained, self.params))
        if self.owed:
            mask = tuple([trained or index in self.owed for index, trained in enumerate(mask)])
        buckets = self._divided.get((self._plan, mask))
        if buckets is None:
            buckets = self._divided[self._plan, mask] = self._make(mask)
        return buckets

    def _make(self, mask: Sequence[bool]) -> list[BucketGradients]:
        """Make the buckets of the parameters that a mask, by index, chooses."""
        trainable = list(itertools.compress(itertools.count(), mask))
        buckets = [
            BucketGradients(
                bucket,
                indices,
                list(dict.fromkeys(self.params[index].holder for index in indices)),
                reduce_dtype=reduce_dtype,
                shard_rank=self._mesh.shard_rank,
                runtime=self._runtime,
                owed=self.owed,
                alive=self.alive,
            )
            for bucket, indices, reduce_dtype in self._divide(trainable)
        ]
        self.known += buckets
        self.large += [each for each in buckets if each.bucket.shard_nbytes > KEPT_NBYTES]
        return buckets

    def _divide(
        self, trainable: Sequence[int]
    ) -> list[tuple[BucketLayout, list[int], torch.dtype]]:
        """Return the buckets of some parameters, each with its parameters' indices and reduce dtype.

        trainable: indices, ascending. A flat bucket is reduced as a whole if anything in it is
        trainable, so that every piece of a gradient lies as the piece of the parameter does.
        """
        if self.flat_layout is not None:
            flat = [
                (each, [param.index for param in each.params]) for each in self.flat_layout.buckets
            ]
            return [
                (each, indices, self._dtypes[indices[0]].reduced)
                for each, indices in flat
                if not set(indices).isdisjoint(trainable)
            ]
        reduced = reduce_dtypes(
            [self._specs[index].dtype for index in trainable],
            [self._dtypes[index].reduced for index in trainable],
        )
        layout = rows_layout(
            self._gradient_specs(trainable, reduced),
            shard_size=self._mesh.shard_size,
            rule=self.shard_comm.rule,
        )
        # This layout counts the trainable parameters alone; map its indices back to the unit's.
        return [
            (
                each,
                [trainable[param.index] for param in each.params],
                common_dtype(reduced[param.index] for param in each.params),
            )
            for each in layout.buckets
        ]

    def _gradient_specs(
        self, trainable: Sequence[int], reduced: Sequence[torch.dtype]
    ) -> list[ParamSpec]:
        """Return the specs of gradients, whose dtypes decide which of them travel together."""
        full = [self._dtypes[index].full for index in trainable]
        shard = [
            self._dtypes[index].shard or dtype
            for index, dtype in zip(trainable, reduced, strict=True)
        ]
        if self.shard_comm.joins_dtypes:
            full = reduce_dtypes(shard, full)
        return [
            dataclasses.replace(self._specs[index], dtype=s, compute_dtype=f)
            for index, f, s in zip(trainable, full, shard, strict=True)
        ]

    def recipe(
        self, bucket: BucketGradients, config: UnitConfig, *, accumulated: bool, label: str
    ) -> Recipe:
        """Return how a bucket is reduced: the recipe of its last reduction, if that still holds.

        accumulated: whether gradients are sums of several backwards, in the reduce dtype.
        """
        known = bucket.recipe
        if known is not None and known.accumulated == accumulated and known.config == config:
            return known
        bucket.recipe = make_recipe(
            bucket.bucket,
            config,
            self._mesh,
            reduce_dtype=bucket.reduce_dtype,
            sum_dtype=self.shard_comm.accumulate_dtype,
            wants_means=self.shard_comm.wants_means,
            accumulated=accumulated,
            is_offloaded=bucket.device != self._runtime.device,
            label=label,
        )
        return bucket.recipe


def _is_open(dtypes: GradientDtypes) -> bool:
    """Whether a parameter's gradients have, and are reduced in, the dtype in which they come."""
    return dtypes.shard is None and dtypes.unsharded.is_any
