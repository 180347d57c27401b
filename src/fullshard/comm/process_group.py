"""Communication through the collectives of ``torch.distributed``.

Direct parameters are gathered straight into place, and their gradients are reduced straight from
where autograd left them. The packed rest goes through one buffer. How collectives are called best
depends on the backend:

- NCCL: one coalesced all-gather per unit and one coalesced reduce-scatter per bucket; NCCL forms the sums.
  The engine calls them on a stream of its own, where they also run, so nothing has to wait for a
  stream of NCCL's.
- Gloo: one asynchronous call per direct parameter (its coalescing manager is four times slower);
  a reduce-scatter is an all-to-all and a local sum. It takes half the time of Gloo's own and is deterministic: terms
  are added in rank order, in float32 or wider. Gradients of direct parameters travel from where autograd left them,
  by one all-to-all each; all packed ones travel together in one more.
- Others: one call per direct parameter; the backend forms the sums.

Tools that watch collectives (debug modes, tests) see every call: see `calls`.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fullshard.comm.calls import GroupCalls, all_gather, reduce_scatter
from fullshard.comm.interface import Comm, Done, ShardBuffer, Sum, Work, add_in_order
from fullshard.comm.packing import (
    Landing,
    Region,
    Regions,
    Scratch,
    copy_in_gradients,
    pack_gradients,
    sent_parts,
    wire_gradient,
)
from fullshard.comm.shared_memory import WITHOUT_PROCESSES, record_of
from fullshard.peers.flight_record import FlightRecord, known_record
from fullshard.peers.groups import (
    backend_name,
    backend_names,
    backend_of,
    let_go_at_exit,
    own_group,
    timeout_s,
)
from fullshard.peers.waits import announce, name_lost_ranks, naming_lost_ranks, wait_comparing
from fullshard.plan.layout import BucketLayout
from fullshard.plan.ways import GLOO, NCCL
from fullshard.torch_private import coalescing_manager

_FEW_RANKS = 8  # beyond, one `torch.sum` instead of as many additions, each of which costs a call


@dataclasses.dataclass(slots=True)
class Pending:
    """Collectives under way, and what remains to be done once they are complete.

    finish: called once by ``wait``, after all ``works``. Returns what ``wait`` does.
    tensors: memory that the collectives read or write; kept alive until then.
    """

    works: list[Any]
    finish: Callable[[], tuple[bool, ...]]
    tensors: Sequence[torch.Tensor]
    comm: "ProcessGroupComm"
    label: str

    def wait(self) -> tuple[bool, ...]:
        self.comm.wait_all(self.works, self.label)
        self.works.clear()
        present = self.finish()
        # A second wait does nothing. `finish` may refer to memory that has gone back to a pool.
        self.finish = lambda: present
        self.tensors = ()
        return present


def _enter_nowhere(what: str, nbytes: int = 0) -> None:
    """Stand for `FlightRecord.enter` where ranks have no flight record."""


class ProcessGroupComm(Comm):
    """Communication through the collectives of one c10d process group, on any device and backend.

    group: the ranks, as the program has them. moving_group: what their bytes travel through.
    enter: enters in the flight record what all ranks do next, and how many bytes it moves; raises
        DivergenceError, before any data moves, if another rank has entered something else.
    sums_natively: whether the backend forms sums, in the dtype that travels.
    gather_regions, reduce_regions: pools of memory for packed parameters and packed gradients.
    """

    overlaps = True

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, in_own_group: bool = True
    ) -> None:
        """in_own_group: whether collectives run in a group of fullshard's own (see `own_group`)."""
        self.group = group
        self.in_own_group = in_own_group
        self.moving_group = own_group(group) if in_own_group else group
        self._calls = GroupCalls(self.moving_group)
        self.rank = group.rank()
        self.size = group.size()
        self.device = device
        self._scratch = Scratch.of(device)
        announce()
        self.backend = backend_name(group, device)
        if self.backend == "gloo":
            let_go_at_exit()
        self.is_nccl = device.type == "cuda" and self.backend == "nccl"
        self.needs_host = not self.is_nccl
        known = isinstance(group, dist.ProcessGroup)  # False for a user's stand-in
        self.sums_natively = known and self.backend != "gloo"
        # Whether ranks ask each other for flags that the host reads. With NCCL the host would have
        # to wait for its device for the answer.
        self.tells_presence = not self.sums_natively
        # ReduceOp.AVG saves the kernel that divides. The fake backend stands for NCCL and takes it
        # as well; Gloo has no AVG.
        self._averages = self.is_nccl or self.backend == "fake"
        self.gather_regions = Regions.of(device, "gather")
        self.reduce_regions = Regions.of(device, "reduce")
        self.name = f"process group ({self.backend})"
        self.rule = (NCCL if self.is_nccl else GLOO).rule

        # None until `compare_ranks`, since making one is collective; except if another
        # communication over the same group has made it already.
        self.record: FlightRecord | None = known_record(group) if known else None
        # Called before every collective, so without a method in between.
        self.enter = _enter_nowhere if self.record is None else self.record.enter
        self._timeout_s = timeout_s(group) if known else 0.0
        self._is_gloo = known and self.backend == "gloo"

    def compare_ranks(self) -> None:
        """Compare from now on what ranks do. Every rank must call it, before any collective."""
        if isinstance(self.group, dist.ProcessGroup):
            self.record = record_of(self.group, self.backend)
            self.enter = _enter_nowhere if self.record is None else self.record.enter

    def wait_all(self, works: Sequence[Any], label: str) -> None:
        """Wait for collectives. None stands for one that runs on the stream that called it.

        Raises DivergenceError if ranks turn out to do different things, PeerLostError if a rank
        died, CommError if one cannot be reached.
        """
        own = None if self.moving_group is self.group else self.moving_group
        try:
            for work in works:
                if work is None:
                    continue
                if self._is_gloo:
                    wait_comparing(work, self.record, label, self._timeout_s, moving=own)
                else:
                    work.wait()
        except RuntimeError as error:
            name_lost_ranks(error, self.group, label)
            raise

    def over(self, group: dist.ProcessGroup) -> "ProcessGroupComm":
        """Return the same kind of communication over another process group of the same ranks."""
        return ProcessGroupComm(group, self.device, in_own_group=False)

    @property
    def staging(self) -> Sequence[torch.Tensor]:
        return [*self.gather_regions.free, *self.reduce_regions.free]

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, label: str, offset: int = 0
    ) -> Work:
        assert not offset  # nothing is read in place: shards of other ranks are not in reach
        landing = shards.last_landing
        if landing is None or landing.unsharded is not unsharded:
            landing = shards.landing(unsharded)
        if not landing.nbytes:
            return Done()  # on every rank alike, so nobody waits for the others' collective
        # Before the first collective of this gather, so that a rank on another path finds out
        # before its bytes are taken for those of another unit.
        self.enter(label, landing.nbytes)
        gather, targets, sent = self._prepare_gather(shards, landing, label)
        try:
            if self.is_nccl:
                self._launch(all_gather, targets, sent)
            else:
                gather.works = list(map(self._calls.all_gather, targets, sent))
        except RuntimeError as error:
            name_lost_ranks(error, self.group, label)
            raise
        return gather

    def gather_unit(
        self, buffers: Sequence[tuple[ShardBuffer, torch.Tensor, int]], label: str
    ) -> list[Work]:
        if not self.is_nccl or len(buffers) < 2:
            return super().gather_unit(buffers, label)
        # As bytes, since one launch has one dtype.
        landings = [shards.landing(unsharded) for shards, unsharded, _ in buffers]
        self.enter(label, sum(landing.nbytes for landing in landings))
        gathers = [
            self._prepare_gather(shards, landing, label)
            for (shards, _, _), landing in zip(buffers, landings, strict=True)
            if landing.nbytes
        ]
        with naming_lost_ranks(self.group, label):
            self._launch(
                all_gather,
                [each.view(torch.uint8) for _, targets, _ in gathers for each in targets],
                [each.view(torch.uint8) for _, _, sent in gathers for each in sent],
            )
        return [gather for gather, _, _ in gathers]

    def _prepare_gather(
        self, shards: ShardBuffer, landing: Landing, label: str
    ) -> tuple[Pending, Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the gather of one bucket without its collectives, what they fill, and what they read."""
        sent = landing.sent
        if sent is None:  # the shards have another dtype or device than the unsharded buffer
            assert shards.flat is not None
            into = landing.unsharded
            cast = shards.flat.to(into.device, into.dtype, non_blocking=True)
            sent = sent_parts(shards.bucket, cast)
        if not landing.region_numel:
            return Pending([], tuple, sent, self, label), landing.direct, sent
        # The last of `sent` is what is packed.
        region = self.gather_regions.take(landing.region_numel, landing.unsharded.dtype)
        finish = functools.partial(landing.copy_out, region, self.gather_regions)
        gather = Pending([], finish, [*sent, region.memory], self, label)
        return gather, [*landing.direct, region.memory], sent

    def gather_bytes(self, source: torch.Tensor, label: str) -> tuple[torch.Tensor, Work]:
        """Start gathering a 1-D tensor of the same size from every rank.

        Returns what will be filled, rank by rank, and the work to wait for.
        """
        region = source.new_empty(self.size * source.numel())
        self.enter(label, region.nbytes)
        with naming_lost_ranks(self.group, label):
            if self.is_nccl:
                works = self._launch(all_gather, [region], [source])
            else:
                works = [self._calls.all_gather(region, source)]
        return region, Pending(works, tuple, (source,), self, label)

    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: Callable[[], torch.Tensor],
        how: Sum,
    ) -> Work:
        self.enter(how.label, self.size * bucket.shard_numel * how.wire_dtype.itemsize)
        try:
            if self.sums_natively:
                return self._reduce_scatter_native(bucket, grads, out(), how)
            return self._reduce_scatter_by_exchange(bucket, grads, out(), how)
        except RuntimeError as error:
            name_lost_ranks(error, self.group, how.label)
            raise

    def all_reduce(self, total: torch.Tensor, present: tuple[bool, ...], how: Sum) -> Work:
        wire = total.to(how.wire_dtype)  # `total` itself, if it has that dtype
        asked = present if self.tells_presence else ()
        flags = torch.tensor(asked, dtype=wire.dtype, device=wire.device)
        self.enter(how.label, wire.nbytes)
        with naming_lost_ranks(self.group, how.label):
            # NCCL runs on the calling stream (see the module's docstring): None instead of a work.
            works = [dist.all_reduce(wire, group=self.moving_group, async_op=not self.is_nccl)]
            if flags.numel():
                works.append(dist.all_reduce(flags, group=self.moving_group, async_op=True))

        def finish() -> tuple[bool, ...]:
            if wire is not total:
                total.copy_(wire)
            return tuple((flags != 0).tolist()) or present

        return Pending(works, finish, (), self, how.label)  # `finish` holds what is not `total`

    def agree(self, bits: int, num_bits: int) -> int:
        if self.record is None or WITHOUT_PROCESSES & backend_names(self.group):
            return bits  # without processes there is none to ask
        label = "agreeing on what was written to"
        self.enter(label, num_bits)
        each = [bits >> number & 1 for number in range(num_bits)]
        flags = torch.tensor(each, dtype=torch.uint8, device=self.device)
        # By the backend itself: programs and tests count the collectives of a step. As a work, so that a wait
        # for ranks that do something else ends.
        backend = backend_of(self.moving_group, self.device)
        options: Any = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MAX
        with naming_lost_ranks(self.group, label):
            work = backend.allreduce([flags], options)
        self.wait_all([work], label)
        return sum(flag << number for number, flag in enumerate(flags.tolist()))

    def accumulate_dtype(self, reduce_dtype: torch.dtype) -> torch.dtype:
        if self.sums_natively:
            return reduce_dtype  # the backend sums in the dtype that travels
        return super().accumulate_dtype(reduce_dtype)

    def _reduce_scatter_native(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        how: Sum,
    ) -> Work:
        """Start a reduce-scatter whose sums the backend forms, straight into ``out``."""
        scaling = how.scaling
        # A source may be the gradient itself: `Pending.tensors` keeps it from being reused until
        # the collective has read it. `bucket.direct` is the start of `bucket.params`.
        sources, targets, region = [], [], None
        if bucket.direct:
            sources = [
                wire_gradient(param, grad, out.dtype, out.device, divisor=scaling.before)
                for param, grad in zip(bucket.direct, grads, strict=False)
            ]
            targets = sent_parts(bucket, out)  # views of `out`: sums land in place
        if bucket.packed_numel or bucket.is_flat:
            region = pack_gradients(
                bucket, grads, self.reduce_regions, out.dtype, divisor=scaling.before
            )
            sources.append(region.memory)
            targets = targets or [out]
        # AVG divides by the number of ranks, so it serves no other divisor.
        averages = self._averages and how.may_average and scaling.after == self.size
        op = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        if self.is_nccl:
            works = self._launch(functools.partial(reduce_scatter, op=op), targets, sources)
        else:
            works = list(map(self._calls.reduce_scatter, targets, sources, itertools.repeat(op)))
        divisor = 1.0 if averages else scaling.after
        # This rank's own flags: asking the others would stall the host (see `tells_presence`).
        present = tuple(map(operator.is_not, grads, itertools.repeat(None)))

        def finish() -> tuple[bool, ...]:
            if region is not None:
                # The collective has read it; the next user fills it on the lane that waited here.
                self.reduce_regions.give(region)
            if divisor != 1.0:
                out.div_(divisor)
            return present

        return Pending(works, finish, sources, self, how.label)

    def _reduce_scatter_by_exchange(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: torch.Tensor,
        how: Sum,
    ) -> Work:
        """Start an all-to-all of terms, after which each rank sums its own shard (see `_sum_rows`)."""
        before, after = how.scaling.before, how.scaling.after
        present = tuple(grad is not None for grad in grads)
        works: list[Any] = []
        # What is sent, what arrives, and where its sum belongs. The first may be the gradient itself, which is not
        # reused meanwhile.
        moved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

        def exchange(source: torch.Tensor, target: torch.Tensor) -> None:
            """Send a part of ``source`` to each rank."""
            received = self._scratch.take(source.numel(), source.dtype)
            group = self.moving_group
            works.append(dist.all_to_all_single(received, source, group=group, async_op=True))
            moved.append((source, received, target))

        # `bucket.direct` is the start of `bucket.params`.
        for param, grad in zip(bucket.direct, grads, strict=False):
            source = wire_gradient(param, grad, how.wire_dtype, out.device, divisor=before)
            exchange(source, out.narrow(0, param.shard_offset, param.chunk_numel))
        region: Region | None = None
        if bucket.is_flat:
            # Nobody is asked for flags: each rank says which gradients it had itself.
            source = self._scratch.take(bucket.unsharded_numel, how.wire_dtype)
            copy_in_gradients(bucket, grads, source, divisor=before)
            exchange(source, out)
        else:
            # One more element per parameter and rank says whether this rank has a gradient for it. Flags
            # travel with the packed gradients, since a collective of their own would be a second call for
            # most units. So the packed exchange takes place even if no parameter is packed.
            region = pack_gradients(
                bucket,
                grads,
                self.reduce_regions,
                how.wire_dtype,
                divisor=before,
                num_extra=len(grads),
            )
            flags = torch.tensor(present, dtype=how.wire_dtype, device=out.device)
            region.memory.view(self.size, -1)[:, bucket.packed_numel :] = flags
            exchange(region.memory, out.narrow(0, bucket.packed_offset, bucket.packed_numel))

        def finish() -> tuple[bool, ...]:
            for _, received, total in moved:
                rows = received.view(self.size, -1)
                _sum_rows(rows[:, : total.numel()], total, divisor=after)
            if region is None:
                self._scratch.give(moved[-1][0])
                seen = present
            else:  # flags are behind the packed gradients, which come last
                self.reduce_regions.give(region)
                seen = tuple((rows[:, bucket.packed_numel :] != 0).any(0).tolist())
            for _, received, _ in moved:
                self._scratch.give(received)
            return seen

        tensors = [each for pair in moved for each in pair[:2]]
        return Pending(works, finish, tensors, self, how.label)

    def _launch(
        self,
        call: Callable[..., Any],
        targets: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
    ) -> list[Any]:
        """Call a collective of NCCL for each target, in one launch on the current stream; return what to wait for.

        No device is passed to torch's manager: with one, it would take its other way of
        coalescing, which still makes a call per collective.
        """
        with (
            contextlib.nullcontext()
            if len(targets) == 1
            else coalescing_manager(self.moving_group, async_ops=False)
        ):
            for target, source in zip(targets, sources, strict=True):
                call(target, source, group=self.moving_group, async_op=False)
        return []


def _sum_rows(terms: torch.Tensor, out: torch.Tensor, *, divisor: float) -> None:
    """Set ``out`` to the sum of the rows of ``terms``, one per rank, divided by ``divisor``."""
    if terms.size(0) <= _FEW_RANKS:
        add_in_order(terms.unbind(), out, divisor=divisor)
        return
    torch.sum(terms, 0, dtype=out.dtype, out=out)  # the same order in every run as well
    out.div_(divisor)
