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
  were kept take part in it (`BucketChoice.owed`), even if they were frozen meanwhile.

[Note: Buckets] Only gradients of trainable parameters travel. So buckets follow from which parameters
are trainable, never from which have a gradient, and all ranks agree on their sizes. Freezing and
unfreezing make other buckets; those of every choice are kept, since programs alternate between a few.

Where a parameter takes gradients of any dtype (``grad_dtype = None``), the dtype of the last one is
planned for, and the compute dtype before the first. So they have to come in one dtype on all ranks,
as in PyTorch; a ``reduce_dtype`` makes that certain.
"""

import itertools
import operator
import warnings
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.collectives import reduce_by_hook
from fullshard.comm.interface import Comm, Work
from fullshard.engine.gradients.accumulation import FlatSums, Sums, Unreduced
from fullshard.engine.gradients.bucket import (
    BucketGradients,
    GradientShards,
    PartialSum,
    Recipe,
    make_recipe,
)
from fullshard.engine.gradients.queue import BucketReduction, ReducedUnit, UnitReduction
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.runtime import Lane, Runtime, no_grad
from fullshard.plan.gradient_buckets import (
    GradientBucket,
    flat_buckets,
    rows_buckets,
    wire_dtype,
)
from fullshard.plan.gradient_dtypes import GradientDtypes
from fullshard.plan.layout import ParamSpec, UnitLayout
from fullshard.plan.mesh import MeshPlan
from fullshard.plan.trace import Kind
from fullshard.plan.ways import KEPT_NBYTES
from fullshard.policies import UnitConfig

_NONES = itertools.repeat(None)
_is_trained = operator.attrgetter("sharded.requires_grad")
_Divided = dict[tuple[bool, ...], list[BucketGradients]]


class UnitGradients:
    """Reduces one unit's gradients and keeps their memory.

    buckets: which gradients travel together; see [Note: Buckets].
    unreduced: full gradients that wait for a later backward to reduce them.
    """

    def __init__(
        self, mesh: MeshPlan, shard_comm: Comm, replicate_comm: Comm, runtime: Runtime
    ) -> None:
        self.runtime = runtime
        self.buckets = BucketChoice(mesh, shard_comm, replicate_comm, runtime)
        self.unreduced = Unreduced()
        self._mesh = mesh
        self._is_alone = mesh.data_parallel_size == 1
        self._has_warned = False  # of a gradient that other ranks may have

    def reduce(self, grads: list[torch.Tensor | None], unit: ReducedUnit) -> UnitReduction | None:
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
            # Something is to be reduced even without any gradient, or nothing: the same on all ranks.
            config = unit.config
            if not (config.reduces_unused or (config.all_reduce_grads and self.has_partial)):
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
            in_flight = UnitReduction(unit, buckets, [])
        else:
            # The lane waits for compute, which has yet to form the gradients. Memory that is
            # allocated inside, scratch and gradients, belongs to the lane.
            with self.runtime.following(Lane.REDUCE), no_grad():
                buckets = self._start(grads, unit, accumulated=is_wide)
            # Full gradients belong to compute. They are held until it has waited for the lane: freed
            # now, they would be given to compute again and written to while the lane reads them.
            in_flight = UnitReduction(unit, buckets, list(grads))
        # After the buckets and their takers were chosen by it, before the queue finishes what was
        # started, which may owe gradients again.
        self.buckets.owed.clear()
        if observer is not None:
            observer.end()
        return in_flight

    def _hand_over_all(self, grads: Sequence[torch.Tensor | None], unit: ReducedUnit) -> bool:
        """With one data-parallel rank, set full gradients as ``.grad`` without copying them.

        Returns False, and does nothing, if they have to be scaled, cast, moved, handed to a user's
        reduction or joined to one flat gradient first.
        """
        config, buckets = unit.config, self.buckets.current()
        if (
            config.gradient_divide_factor not in (None, 1.0)
            or config.comm_hook
            or config.all_reduce_hook
            or config.reduces_unused
            or config.keep_low_precision_grads
        ):
            return False
        # All are asked before the first is handed over: a unit goes one way or the other as a whole.
        for each in buckets:
            if (
                each.has_one_holder
                or each.reduce_dtype != each.bucket.dtype
                or each.device != self.runtime.device
            ):
                return False
        with no_grad():
            for each in buckets:
                each.hand_over(list(map(grads.__getitem__, each.indices)))
            self.buckets.owed.clear()
        return True

    def _start(
        self, grads: Sequence[torch.Tensor | None], unit: ReducedUnit, *, accumulated: bool
    ) -> list[tuple[BucketReduction, Work]]:
        """Start the reduce-scatter of every bucket, in the same order on all ranks."""
        in_flight: list[tuple[BucketReduction, Work]] = []
        config = unit.config
        buckets = self.buckets.current()
        for each in buckets:
            bucket = each.bucket
            full = list(map(grads.__getitem__, each.indices))
            if self.buckets.hides_presence and not all(map(operator.is_not, full, _NONES)):
                self._warn_of_missing(each, full, config)
            # Sums have the reduce dtype already, and what came wider is not to be rounded.
            is_wide = accumulated or (each.may_be_wider and each.comes_wider(full))
            recipe = each.recipe
            if recipe is None or recipe.config is not config or recipe.accumulated is not is_wide:
                recipe = self.buckets.plan(each, unit, accumulated=is_wide)
            item = BucketReduction(each, recipe, each.takers() if bucket.is_flat else None)
            if config.comm_hook is not None:
                reduction = reduce_by_hook(config.comm_hook, bucket, full, item.take())
            else:
                reduction = self.buckets.shard_comm.reduce_scatter(
                    bucket, full, item.take, recipe.over_shards
                )
            in_flight.append((item, reduction))
        return in_flight

    def _warn_of_missing(
        self, bucket: BucketGradients, full: Sequence[torch.Tensor | None], config: UnitConfig
    ) -> None:
        """Warn, once, of a trained parameter without a gradient that other ranks may have.

        This rank's part of it is then not updated: see [Note: Missing gradients], on flags.
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

    def accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add full gradients, one per parameter or None, to what waits for a later reduction."""
        buckets = self.buckets
        # All that are trainable now take part in the next reduction, whether or not each has a gradient.
        buckets.owed.update(itertools.compress(itertools.count(), map(_is_trained, buckets.params)))

        def make() -> Sums:
            if buckets.flat_layout is None:
                return Sums(buckets.params, buckets.sum_dtypes())
            return FlatSums(buckets.params, buckets.flat_layout, self.runtime.device)

        self.unreduced.add(grads, make)

    @property
    def accumulated(self) -> list[torch.Tensor]:
        """All that backwards have added up, each element once: gradients, and sums that wait."""
        sums = self.unreduced.sums
        covered = sums.covered  # first: it forgets what users have dropped
        holders = dict.fromkeys(param.holder for param in self.buckets.params)
        reduced = [h.local_grad for h in holders if not sums.shows(h)]
        grads = [grad for grad in reduced if grad is not None]
        return [*sums.memory, *covered, *self.partial_sums, *grads]

    @property
    def has_hidden(self) -> bool:
        """True if sums wait that users do not see as ``.grad``, and so cannot drop there."""
        is_shown = self.buckets.flat_layout is not None
        return self.has_partial or (self.unreduced.is_holding and not is_shown)

    def drop_unreduced(self) -> None:
        """Forget all that earlier backwards left to be reduced later: sums over shards, and full ones."""
        self.buckets.owed.clear()
        self.buckets.waiting.clear()
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
        """True if large gradient memory that nobody uses is freed before forward.

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
                each.pool = [s for s in each.pool if not s.is_unused(each.holders)]

    @property
    def partial_sums(self) -> list[torch.Tensor]:
        """The sums over the shard axis that wait for their all-reduce."""
        return [each.total for each in self.buckets.waiting]

    @property
    def has_partial(self) -> bool:
        return bool(self.buckets.waiting)

    @property
    def pooled(self) -> list[GradientShards]:
        """The memory of reduced gradients: in use, or kept for the next step."""
        return [shards for each in self.buckets.known for shards in each.pool]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of gradient shards: in use, being made, or kept for the next step."""
        return sum(shards.flat.nbytes for shards in self.buckets.alive)


class BucketChoice:
    """Chooses and keeps the buckets of one unit's gradients.

    shard_comm, replicate_comm: for the sums over the shard axis and over the replicate axis.
    params: the unit's parameters, in the order of their indices.
    flat_layout: the layout of a flat unit, else None.
    hides_presence: ranks do not tell each other which parameters have a gradient.
    known: the buckets of every choice of trainable parameters, and of dtypes, there has been.
    large: those of them whose memory is freed when nobody uses it.
    takes_any: some gradients are planned for the dtype in which the last ones came.
    owed: indices of parameters whose gradients were kept for a later reduction. They take part in
        the next one, even if they were frozen meanwhile. The same on all ranks.
    waiting: sums over the shard axis whose all-reduce was put off; of each parameter at most one.
    alive: all memory of reduced gradients that exists, for reports.
    """

    def __init__(
        self, mesh: MeshPlan, shard_comm: Comm, replicate_comm: Comm, runtime: Runtime
    ) -> None:
        self.params: list[ManagedParameter] = []
        self.known: list[BucketGradients] = []
        self.large: list[BucketGradients] = []
        self.takes_any = False
        self.owed: set[int] = set()
        self.waiting: list[PartialSum] = []
        self.flat_layout: UnitLayout | None = None
        self.alive: weakref.WeakSet[GradientShards] = weakref.WeakSet()
        self.shard_comm, self.replicate_comm = shard_comm, replicate_comm
        self.use_comms()
        self._mesh = mesh
        self._runtime = runtime
        self._specs: list[ParamSpec] = []
        self._config = UnitConfig()  # of `bind`
        self._dtypes: list[GradientDtypes] = []
        self._first_dtypes = self._dtypes  # before any gradient was seen
        # The buckets of all dtypes there have been, and of those in effect: by which are trainable.
        self._plans: dict[tuple[GradientDtypes, ...], _Divided] = {}
        self._divided: _Divided = {}

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
        self.known.clear()
        self.waiting.clear()
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
        self._divided = self._plans.setdefault(tuple(self._dtypes), {})

    def are_outdated(self, config: UnitConfig) -> bool:
        """Return whether gradients have other dtypes since `bind`: by a `grad_dtype`, or the configuration."""
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
        comms = self.shard_comm, self.replicate_comm
        self.hides_presence = not all(comm.tells_presence for comm in comms)
        self.forget_recipes()

    def forget_recipes(self) -> None:
        """Drop all recipes, since something beside the configuration has changed."""
        for bucket in self.known:
            bucket.recipe = None

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
                self.replicate_comm.summed_nbytes(bucket.bucket, bucket.reduce_dtype)
            )
        return needs

    def current(self) -> list[BucketGradients]:
        """Return the buckets of the parameters that are trainable now or owed a gradient."""
        mask = tuple(map(_is_trained, self.params))
        if self.owed:
            mask = tuple([trained or index in self.owed for index, trained in enumerate(mask)])
        buckets = self._divided.get(mask)
        if buckets is None:
            buckets = self._divided[mask] = self._make(mask)
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
                waiting=self.waiting,
                alive=self.alive,
            )
            for bucket, indices, reduce_dtype in self._divide(trainable)
        ]
        self.known += buckets
        self.large += [each for each in buckets if each.bucket.shard_nbytes > KEPT_NBYTES]
        return buckets

    def _divide(self, trainable: Sequence[int]) -> list[GradientBucket]:
        """Return the buckets of some parameters. trainable: their indices, ascending."""
        if self.flat_layout is not None:
            return flat_buckets(self.flat_layout, self._dtypes, trainable)
        return rows_buckets(
            self._specs,
            self._dtypes,
            trainable,
            shard_size=self._mesh.shard_size,
            rule=self.shard_comm.rule,
            joins_dtypes=self.shard_comm.joins_dtypes,
        )

    def plan(self, bucket: BucketGradients, unit: ReducedUnit, *, accumulated: bool) -> Recipe:
        """Plan how a bucket is reduced by the unit's configuration of now.

        accumulated: gradients are sums of several backwards, in the reduce dtype.
        """
        recipe = bucket.recipe = make_recipe(
            bucket.bucket,
            unit.config,
            self._mesh,
            reduce_dtype=bucket.reduce_dtype,
            sum_dtype=self.shard_comm.accumulate_dtype,
            wants_means=self.shard_comm.wants_means,
            accumulated=accumulated,
            is_offloaded=bucket.device != self._runtime.device,
            label=unit.entered_as,
        )
        return recipe


def _is_open(dtypes: GradientDtypes) -> bool:
    """Return whether a parameter's gradients have, and are reduced in, the dtype in which they come."""
    own = dtypes.unsharded
    return dtypes.shard is None and own.is_set and own.dtype is None
