"""The memory of one unit, and when each part of it exists.

| buffer | allocated | freed | written by | read by |
| --- | --- | --- | --- | --- |
| shards | when the unit is built, or at the first forward for meta parameters | with the unit | \
optimizer, state-dict loading | all-gather, peers |
| unsharded, private | at unshard, on the compute lane | at reshard | all-gather | forward, \
backward |
| unsharded, in place | it is the shards' memory | never | optimizer | forward, backward |
| gradient shards | at the first reduction | when the user drops the gradients, then reused | \
reduction | optimizer |

Unsharded parameters are created once and keep their identity: autograd's graph saves them. A
private buffer is freed by resizing its storage to nothing, under the tensors that view it; `kept`
and `kept_views` make the use of what somebody keeps meanwhile an error.
"""

import dataclasses
import itertools

import torch

from fullshard.comm.interface import Comm, ShardBuffer, Work, tensor_over
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.references import storage_uses
from fullshard.engine.runtime import Lane, Runtime
from fullshard.plan.builders import regroup
from fullshard.plan.layout import BucketLayout, UnitLayout

KEPT_NBYTES = 1 << 20  # a host buffer this small costs more to free than to keep


@dataclasses.dataclass(slots=True)
class _Unsharded:
    """One bucket's unsharded buffer, from element ``first`` on; what precedes is read in place."""

    flat: torch.Tensor
    offset: int
    nbytes: int
    stays_allocated: bool = False

    def __post_init__(self) -> None:
        self.stays_allocated = self.flat.is_cpu and self.nbytes <= KEPT_NBYTES

    @property
    def is_allocated(self) -> bool:
        return self.stays_allocated or self.flat.untyped_storage().size() == self.nbytes

    def allocate(self) -> None:
        if not self.is_allocated:
            self.flat.untyped_storage().resize_(self.nbytes)

    def free(self) -> None:
        if not self.stays_allocated:
            self.flat.untyped_storage().resize_(0)


class UnitBuffers:
    """Shards and unsharded parameters of one unit.

    shards: this rank's shard of each parameter, in its local shape.
    """

    def __init__(
        self,
        layout: UnitLayout,
        comm: Comm,
        runtime: Runtime,
        *,
        shard_device: torch.device,
        pin_memory: bool,
    ) -> None:
        self.layout = layout
        self.in_place = False
        self._own_uses = 0
        self._in_place_uses: dict[int, int] = {}  # by storage, of the unit alone
        self._comm = comm
        self._runtime = runtime
        self._buckets: list[ShardBuffer] = [
            comm.allocate_shards(bucket, shard_device, pin_memory=pin_memory)
            for bucket in layout.buckets
        ]
        self._unsharded: list[_Unsharded] = []
        self._freed: list[_Unsharded] = []  # those of them that do not stay allocated
        self._moves = False
        self._views: dict[int, torch.Tensor] = {}
        shards = {
            param.index: shard
            for buffer in self._buckets
            for param, shard in zip(buffer.bucket.params, buffer.shards, strict=True)
        }
        self.shards = [shards[index] for index in range(len(shards))]
        self._post_forward_shards: list[ShardBuffer] = []
        self._smaller_buckets: dict[tuple[int, int], BucketLayout] = {}  # by bucket and group size
        self._post_forward_comm: ProcessGroupComm | None = None
        self._bind(allow_in_place=True)
        self.may_be_in_place = self.in_place

    @property
    def flat_shards(self) -> list[torch.Tensor]:
        """This rank's shards of each bucket in one piece; flat buckets have that."""
        return [buffer.flat for buffer in self._buckets if buffer.flat is not None]

    @property
    def shard_memory(self) -> list[torch.Tensor]:
        """The memory of this rank's shards."""
        return [
            tensor
            for buffer in self._buckets
            for tensor in (buffer.shards if buffer.flat is None else [buffer.flat])
        ]

    @property
    def unsharded_memory(self) -> list[torch.Tensor]:
        """The memory of unsharded parameters and of what is kept for backward, not of shards."""
        kept = (buffer.flat for buffer in self._post_forward_shards)
        return [flat for flat in (*(u.flat for u in self._unsharded), *kept) if flat is not None]

    @property
    def mapped_nbytes(self) -> int:
        """What all ranks of the host share for the unit, 0 if they share nothing."""
        return sum(buffer.mapped_nbytes for buffer in self._buckets)

    @property
    def moves(self) -> bool:
        """Whether unsharding moves anything: not if all parameters are read in place."""
        return self._moves or bool(self._post_forward_shards)

    def unsharded(self, index: int) -> torch.Tensor:
        """The whole parameter in compute dtype; valid between unshard and free."""
        return self._views[index]

    def read_privately(self) -> None:
        """Stop reading shards in place: what is written to unsharded parameters stays there.

        Autograd may go on to refer to the shards, which are never freed.
        """
        self._bind(allow_in_place=False)

    def read_in_place(self) -> None:
        """Read shards in place again. Nobody may refer to the private buffers: see `is_in_use`."""
        self._bind(allow_in_place=True)

    def note_uses(self) -> None:
        """Count who refers to the private buffers when the unit alone does."""
        self._own_uses = self._uses()

    @property
    def is_in_use(self) -> bool:
        """Whether others refer to the private buffers as well: graphs, or what a user keeps."""
        return self._uses() > self._own_uses

    def unsharded_storages(self) -> list[torch.UntypedStorage]:
        """The memory of unsharded parameters, but for shards that no other rank writes to."""
        private = [each.flat.untyped_storage() for each in self._unsharded if each.nbytes]
        if not self.in_place or self._comm.size == 1:
            return private
        return [*private, *(each.untyped_storage() for each in self._readable_in_place())]

    def own_uses(self, storages: dict[int, torch.UntypedStorage]) -> int:
        """Count who refers to these storages when the unit alone does.

        Private ones are new. Those of shards may have been read before, and be kept by somebody.
        """
        self.forget_landings()
        in_place = {each.untyped_storage()._cdata for each in self._readable_in_place()}
        uses = {address: storage_uses(address) for address in storages}
        for address in uses.keys() & in_place:
            known = self._in_place_uses.get(address, uses[address])
            uses[address] = self._in_place_uses[address] = min(known, uses[address])
        return sum(uses.values())

    @property
    def landing_uses(self) -> int:
        """How many of the uses are views that gathers made to write to."""
        return sum(len(views) for views in self._landings())

    def own_views(self) -> list[torch.Tensor]:
        """What the unit itself has of the memory of unsharded parameters."""
        flats = [each.flat for each in self._unsharded]
        return [*flats, *self._views.values(), *itertools.chain(*self._landings())]

    def forget_landings(self) -> None:
        """Let go of the views that gathers made to write to."""
        for buffer in self._buckets:
            buffer.forget_landing()

    def _landings(self) -> list[list[torch.Tensor]]:
        return [buffer.landing_views for buffer in self._buckets]

    def _readable_in_place(self) -> list[torch.Tensor]:
        return [each for buffer in self._buckets for each in buffer.gathered]

    def _uses(self) -> int:
        self.forget_landings()
        return sum(storage_uses(each.flat.untyped_storage()._cdata) for each in self._unsharded)

    def holds_shards(self) -> bool:
        """Whether the unsharded buffers still have what this rank's shards say, as far as it is its.

        Compares contents: of most ways to write, version counters tell nothing.
        """
        for buffer, unsharded in zip(self._buckets, self._unsharded, strict=True):
            bucket = buffer.bucket
            if unsharded.nbytes == 0:
                continue  # read in place
            if bucket.is_flat:
                assert buffer.flat is not None
                own = unsharded.flat.view(bucket.shard_size, -1)[self._comm.rank]
                if not torch.equal(own, buffer.flat.to(own.device, own.dtype)):
                    return False
                continue
            for position, param in enumerate(bucket.params):
                if unsharded.offset and position < len(buffer.gathered):
                    continue  # read in place
                start, stop = param.rows(self._comm.rank)
                whole = self._views[param.index]
                own = whole.narrow(param.spec.shard_dim, start, stop - start)
                if not torch.equal(own, buffer.shards[position].to(own.device, own.dtype)):
                    return False
        return True

    def start_unshard(self, label: str, *, ordered: bool = False) -> list[Work]:
        """Start filling the unsharded buffers from all ranks' shards, or from what was kept.

        ordered: see `writes`, Note: Ordered gathers.
        """
        if not self.moves:
            return []
        for unsharded in self._freed:
            unsharded.allocate()
        if not self._runtime.has_streams:
            return self._start_gathers(label, ordered=ordered)
        # The memory may have been freed by compute just now.
        with self._runtime.following(Lane.ALL_GATHER):
            return self._start_gathers(label, ordered=ordered)

    def _start_gathers(self, label: str, *, ordered: bool) -> list[Work]:
        if ordered:
            self._comm.fence(label)
            works = self._start_gathers(label, ordered=False)
            self._comm.fence(label)
            return works
        if self._post_forward_shards:
            assert self._post_forward_comm is not None
            kept, self._post_forward_shards = self._post_forward_shards, []
            return [
                self._post_forward_comm.all_gather(buffer, unsharded.flat, label=label)
                for buffer, unsharded in zip(kept, self._unsharded, strict=True)
            ]
        return [
            self._comm.all_gather(buffer, unsharded.flat, first=unsharded.offset, label=label)
            for buffer, unsharded in zip(self._buckets, self._unsharded, strict=True)
        ]

    def gather_whole(self, label: str) -> dict[int, torch.Tensor]:
        """Gather every parameter into memory of its own, in the dtype of the shards.

        If this rank has all, its shards themselves.
        """
        if self.layout.shard_size == 1:
            return dict(enumerate(self.shards))
        whole = {}
        for buffer in self._buckets:
            bucket = buffer.bucket
            flat = torch.empty(
                bucket.unsharded_numel, dtype=bucket.dtype, device=self._runtime.device
            )
            self._comm.all_gather(buffer, flat, label=label).wait()
            buffer.forget_landing()
            whole.update(whole_views(bucket, flat))
        return whole

    def free_unsharded(self) -> None:
        for unsharded in self._freed:
            unsharded.free()

    def keep_post_forward(self, comm: ProcessGroupComm) -> dict[int, torch.Tensor]:
        """Free the unsharded buffers but for this rank's shards over a smaller group.

        Returns them by parameter. The next unshard gathers them over ``comm``.
        """
        self._post_forward_comm = comm
        kept: dict[int, torch.Tensor] = {}
        for bucket, unsharded in zip(self.layout.buckets, self._unsharded, strict=True):
            key = (len(self._post_forward_shards), comm.size)
            if key not in self._smaller_buckets:  # planned once, not in every forward
                self._smaller_buckets[key] = regroup(bucket, shard_size=comm.size)
            smaller = self._smaller_buckets[key]
            buffer = comm.allocate_shards(smaller, self._runtime.device, pin_memory=False)
            for param, shard in zip(smaller.params, buffer.shards, strict=True):
                start, stop = param.rows(comm.rank)
                whole = self._views[param.index]
                shard.copy_(whole.narrow(param.spec.shard_dim, start, stop - start))
                kept[param.index] = shard
            self._post_forward_shards.append(buffer)
            unsharded.free()
        return kept

    def drop_kept(self) -> None:
        self._post_forward_shards = []

    def _bind(self, *, allow_in_place: bool) -> None:
        bound: list[_Unsharded] = []
        views: dict[int, torch.Tensor] = {}
        in_place = False
        with torch.inference_mode(False):
            for buffer in self._buckets:
                reads_in_place = allow_in_place and self._is_readable_in_place(buffer)
                bound.append(self._bind_bucket(buffer, views, in_place=reads_in_place))
                in_place |= reads_in_place
        # Only now, when there is memory for all: until then things are as they were.
        self._unsharded, self._views, self.in_place = bound, views, in_place
        self._freed = [unsharded for unsharded in bound if not unsharded.stays_allocated]
        self._moves = any(unsharded.nbytes for unsharded in bound)

    def _is_readable_in_place(self, buffer: ShardBuffer) -> bool:
        """Whether parameters may be read where the shards are."""
        bucket, device = buffer.bucket, self._runtime.device
        return (
            bool(buffer.gathered)
            and bucket.dtype == bucket.compute_dtype
            and all(shard.device == device for shard in buffer.gathered)
        )

    def _bind_bucket(
        self, buffer: ShardBuffer, views: dict[int, torch.Tensor], *, in_place: bool
    ) -> _Unsharded:
        """Make one bucket's unsharded buffer, and add the parameters in it to ``views``."""
        bucket = buffer.bucket
        offset = bucket.direct_numel if in_place else 0
        numel = bucket.unsharded_numel - offset
        flat = torch.empty(numel, dtype=bucket.compute_dtype, device=self._runtime.device)
        unsharded = _Unsharded(flat, offset, flat.untyped_storage().size())
        for position, param in enumerate(bucket.params):
            if in_place and position < len(buffer.gathered):
                views[param.index] = buffer.gathered[position]
                continue
            # Not a view of `flat`: the all-gather writes there, and must not advance the version
            # counter of what autograd has saved.
            views[param.index] = tensor_over(
                flat.untyped_storage(),
                param.unsharded_offset - offset,
                param.spec.shape,
                flat.dtype,
            )
        unsharded.free()  # after `set_`, which makes a storage as large as the view needs
        return unsharded


def whole_views(bucket: BucketLayout, flat: torch.Tensor) -> dict[int, torch.Tensor]:
    """View an unsharded buffer as the parameters of the bucket, by index."""
    return {
        param.index: flat.narrow(0, param.unsharded_offset, param.spec.numel).view(param.spec.shape)
        for param in bucket.params
    }
