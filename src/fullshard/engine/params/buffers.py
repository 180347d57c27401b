"""The memory of one unit: who allocates, writes, reads and frees each part of it.

This table has all memory of the engine, also what others look after (in brackets).

| buffer | allocated | freed | written by | read by |
| --- | --- | --- | --- | --- |
| shards | when the unit is built, or at the first forward for meta parameters | with the unit | \
optimizer, state-dict loading | all-gather, peers |
| unsharded, private | at unshard, on the compute lane | at reshard, unless the user keeps it | all-gather | forward, \
backward |
| unsharded, in place | it is the shards' memory | never | optimizer | forward, backward |
| gradient shards | at the first reduction | when the user drops the gradients, then reused | \
reduction | optimizer |
| shards over a smaller group | at reshard after forward (``reshard_after_forward=N``) | at the gather for backward | \
reshard | all-gather |
| sums that wait (`gradients.accumulation`) | at the first backward that does not reduce | at the reduction; on the \
host kept one step more, to be used again | autograd | reduction |
| partial sums (`gradients.bucket`) | at a reduce-scatter whose all-reduce is put off | at that all-reduce | \
reduction | all-reduce |
| staging (`comm.packing.Regions`) | at the start of a collective | at its end: back to a pool, if large at once | \
shards, gradients | the collective |
| scratch (`comm.packing.Scratch`) | at a reduction | at its end: on the CPU back to a pool, of all models | \
reduction | reduction |
| rotation (`runtime.Rotation`), with streams | at unshard, as unsharded memory | at the end of a pass; from reshard on \
it serves other units | all-gather | forward, backward |
| rings and segments (`comm.ring`, `comm.shared_memory`) | with the unit | with the unit | all ranks of a host | the same |
| samples, sums of blocks (`checks.writes`) | at the first pass that takes some; in watched passes | with the unit; \
when ranks agree | copy of some words of shards | comparison |

[Note: Freed under its tensors] Autograd's graph saves the unsharded parameters in forward and reads
them in backward, after they were freed and gathered again. So they are created once and must stay
the same tensors over the same storage. A private buffer is freed by resizing that storage to 0
bytes, and allocated by resizing it back; the tensors over it are not touched. Two things follow:

- An all-gather overwrites memory that autograd has saved. It must not advance the version counters
  of the parameters, or backward raises "modified by an inplace operation". So the parameters are no
  views of the buffer that the all-gather writes to: views share a version counter, two tensors
  `set_` to one storage (`tensor_over`) do not.
- A program can keep a parameter or a view of one while there is no memory under it:
  `guard.uses` makes the use of such a tensor an error.
"""

import ctypes
import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

import torch

from fullshard.comm.interface import Comm, ShardBuffer, Work, tensor_over
from fullshard.comm.process_group import ProcessGroupComm
from fullshard.engine.runtime import Lane, Runtime
from fullshard.plan.builders import regroup
from fullshard.plan.layout import BucketLayout, UnitLayout
from fullshard.plan.ways import KEPT_NBYTES
from fullshard.torch_private import storage_uses, swap_memory


@dataclasses.dataclass(slots=True)
class _Unsharded:
    """The private part of one bucket's unsharded memory, in the compute dtype, 1-D.

    offset: the bucket's unsharded element at which ``flat`` begins. The elements before it are read
        in place. 0 if nothing is.
    nbytes: the size of the storage while it is allocated; 0 if everything is read in place.
    stays_allocated: whether `free` does nothing.
    """

    flat: torch.Tensor
    offset: int
    nbytes: int
    stays_allocated: bool = False

    def __post_init__(self) -> None:
        # On other devices even small buffers are freed: their allocator reuses memory for less.
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
    """Shards and unsharded memory of one unit's plain parameters.

    shards: this rank's shard of each parameter, by index, in its local shape.
    in_place: whether some parameters are read where the shards of all ranks are.
    may_be_in_place: whether they can be, as long as nobody asks for private memory.
    stalls: whether the host waits for the device to compare contents.
    keeps_storage: whether private buffers stay allocated (`set_keep_unsharded_storage`).
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
        self.stalls = runtime.has_streams
        self.keeps_storage = False
        # References to memory while the unit alone refers to it: to private storages in sum, and to
        # each storage that is read in place, by address.
        self._own_uses = 0
        self._in_place_uses: dict[int, int] = {}
        self._comm = comm
        self._runtime = runtime
        self._buckets: list[ShardBuffer] = [
            comm.allocate_shards(bucket, shard_device, pin_memory=pin_memory)
            for bucket in layout.buckets
        ]
        self._unsharded: list[_Unsharded] = []
        self._freed: list[_Unsharded] = []  # the ones that are freed at reshard
        self._is_lent = False  # their memory is of `Rotation`
        self._moves = False
        # Without streams: the one bucket, what it is gathered into, and the offset of that; None if there
        # are several or none that moves.
        self._only: tuple[ShardBuffer, torch.Tensor, int] | None = None
        self._views: dict[int, torch.Tensor] = {}  # unsharded parameters, by index
        shards = {
            param.index: shard
            for buffer in self._buckets
            for param, shard in zip(buffer.bucket.params, buffer.shards, strict=True)
        }
        self.shards = [shards[index] for index in range(len(shards))]
        # Whole parameters that are read where the shards of all ranks are.
        self.readable = [each for buffer in self._buckets for each in buffer.in_place]
        # Where the memory of each tensor begins, unless torch has moved it.
        self.addresses = {
            each: each.data_ptr() for each in (*self.shards, *self.flat_shards, *self.readable)
        }
        # Shards over a smaller group, from forward to backward (`reshard_after_forward=N`).
        self._post_forward_shards: list[ShardBuffer] = []
        self._smaller_buckets: dict[tuple[int, int], BucketLayout] = {}  # by bucket and group size
        self._post_forward_comm: ProcessGroupComm | None = None
        self.bind(in_place=True)
        self.may_be_in_place = self.in_place

    @property
    def flat_shards(self) -> list[torch.Tensor]:
        """This rank's shard buffer of each bucket that has its shards in one piece, as flat ones do."""
        return [buffer.flat for buffer in self._buckets if buffer.flat is not None]

    def bring_home(self, valued: Collection[torch.Tensor]) -> bool:
        """Undo what ``share_memory_()`` does, and sending a tensor to another process: a storage gets other memory.

        valued: tensors of this rank's part whose values of now are kept; what else lies there may be older. Ranks
        read the memory of before. The other process keeps what it was sent. Returns whether the tensors alone were moved,
        and not others over their storages.
        """
        are_alone = False
        kept = [buffer.memory for buffer in self._buckets]
        for tensor, address in self.addresses.items():
            if tensor.data_ptr() != address and tensor.is_cpu and tensor.numel():
                words: Any = (ctypes.c_char * tensor.nbytes).from_address(address)
                words.memory = kept  # which lives as long as a tensor over it
                home = torch.frombuffer(words, dtype=tensor.dtype)
                if any(tensor is each for each in valued):
                    home.copy_(tensor.view(-1))
                if swap_memory is not None:  # so for all tensors over the storage
                    swap_memory(tensor.untyped_storage(), home.untyped_storage())
                else:
                    tensor.set_(home.untyped_storage(), 0, tensor.shape)  # type: ignore[call-overload]
                    are_alone = True
        return are_alone

    @property
    def shard_memory(self) -> list[torch.Tensor]:
        """The memory of this rank's shards, without duplicates."""
        return [
            tensor
            for buffer in self._buckets
            for tensor in (buffer.shards if buffer.flat is None else [buffer.flat])
        ]

    @property
    def unsharded_memory(self) -> list[torch.Tensor]:
        """Private unsharded buffers, and shards over a smaller group that backward will gather."""
        kept = (buffer.flat for buffer in self._post_forward_shards)
        return [flat for flat in (*(u.flat for u in self._unsharded), *kept) if flat is not None]

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of shared memory for the unit, all ranks of the host together; 0 if none is shared."""
        return sum(buffer.mapped_nbytes for buffer in self._buckets)

    @property
    def moves(self) -> bool:
        """True if unsharding moves data. It does not if all parameters are read in place."""
        return self._moves or bool(self._post_forward_shards)

    @property
    def may_rotate(self) -> bool:
        """Whether gathers may use the memory of `Rotation`."""
        return self._runtime.rotation is not None and not self.keeps_storage

    def unsharded(self, index: int) -> torch.Tensor:
        """Return the whole parameter in the compute dtype; it has memory from unshard to free."""
        return self._views[index]

    def note_uses(self) -> None:
        """Take today's references to the private buffers as the unit's own.

        Call it when the unsharded parameters are complete, and before anybody can see them: what
        is counted here never counts as in use.
        """
        self._own_uses = self._uses()

    @property
    def is_in_use(self) -> bool:
        """True if graphs or user code refer to the private buffers beside the unit."""
        return self._uses() > self._own_uses

    def unsharded_storages(self) -> list[torch.UntypedStorage]:
        """The storages under unsharded parameters that may be freed or that peers write to."""
        private = [each.flat.untyped_storage() for each in self._unsharded if each.nbytes]
        # With one rank a parameter that is read in place is that rank's shard: a view of it stays
        # right, as in a model that is not sharded.
        if not self.in_place or self._comm.size == 1:
            return private
        return [*private, *(each.untyped_storage() for each in self.readable)]

    def own_uses(self, storages: dict[int, torch.UntypedStorage]) -> int:
        """Return how many references to these storages, in sum, are the unit's own.

        storages: by address, from `unsharded_storages`. Call it when parameters were just bound.

        Private storages are new, so every reference is the unit's. Storages of shards are older,
        and a program may keep a view from an earlier time in place. So the least count ever seen
        is taken for them.
        """
        self.forget_landings()  # else today's landing views would count as the unit's for good
        in_place = {each.untyped_storage()._cdata for each in self.readable}
        uses = {address: storage_uses(address) for address in storages}
        for address in uses.keys() & in_place:
            known = self._in_place_uses.get(address, uses[address])
            uses[address] = self._in_place_uses[address] = min(known, uses[address])
        return sum(uses.values())

    @property
    def landing_uses(self) -> int:
        """How many references are views that all-gathers made of the memory they write to."""
        return sum(len(views) for views in self._landings())

    def own_views(self) -> list[torch.Tensor]:
        """Every tensor over unsharded memory that belongs to the unit itself."""
        flats = [each.flat for each in self._unsharded]
        return [*flats, *self._views.values(), *itertools.chain(*self._landings())]

    def forget_landings(self) -> None:
        """Drop the views that all-gathers made of the memory they write to; they are made anew."""
        for buffer in self._buckets:
            buffer.forget_landing()

    def _landings(self) -> list[list[torch.Tensor]]:
        return [buffer.landing_views for buffer in self._buckets]

    def _uses(self) -> int:
        # Landing views come and go with gathers; counted, they would look like a user's.
        self.forget_landings()
        return sum(storage_uses(each.flat.untyped_storage()._cdata) for each in self._unsharded)

    def holds_shards(self) -> bool:
        """Return whether this rank's part of the unsharded parameters still equals its shards.

        Compares contents: version counters miss ``p.data.mul_()`` and ``torch._foreach_*``. Other
        ranks' parts are not compared, so ranks may come to different answers.
        """
        for buffer, unsharded in zip(self._buckets, self._unsharded, strict=True):
            bucket = buffer.bucket
            if unsharded.nbytes == 0:
                continue  # read in place
            if bucket.is_flat:
                assert buffer.flat is not None
                own = unsharded.flat.view(bucket.shard_size, -1)[self._comm.rank]
                # Cast as the gather does: storage and compute dtype may differ.
                if not torch.equal(own, buffer.flat.to(own.device, own.dtype)):
                    return False
                continue
            for position, param in enumerate(bucket.params):
                if unsharded.offset and position < len(buffer.in_place):
                    continue  # read in place
                start, stop = param.rows(self._comm.rank)
                whole = self._views[param.index]
                own = whole.narrow(param.spec.shard_dim, start, stop - start)
                if not torch.equal(own, buffer.shards[position].to(own.device, own.dtype)):
                    return False
        return True

    def start_unshard(self, label: str, ordered: bool, after: torch.Event | None) -> list[Work]:
        """Allocate the unsharded buffers and start filling them. Collective, unless nothing moves.

        Sources are all ranks' shards, or those over the smaller group if `keep_post_forward` made
        some. Returns what has to be waited for before anybody reads.

        ordered: see `checks.writes`, [Note: Ordered gathers].
        after: nobody writes to shards after this event, until the reshard that follows. With streams,
            the gather then need not wait for all that compute was given. None: it waits.
        """
        if self._only is not None and not (ordered or self._post_forward_shards):
            for unsharded in self._freed:
                unsharded.allocate()
            buffer, flat, offset = self._only
            return [self._comm.all_gather(buffer, flat, label, offset)]
        if not (self._moves or self._post_forward_shards):
            return []
        rotation = self._runtime.rotation if self.may_rotate else None
        if after is not None and rotation is not None and not self._is_lent:
            storages = [(each.flat.untyped_storage(), each.nbytes) for each in self._freed]
            if not (self._post_forward_shards or any(each.is_allocated for each in self._freed)):
                with rotation.lending(self, storages, after):
                    self._is_lent = True
                    return self._start_gathers(label, ordered=ordered)
        # On the compute stream, not on the lane below: a caching allocator reuses memory in the
        # order of the stream that allocates, and it is compute that frees it again.
        for unsharded in self._freed:
            unsharded.allocate()
        if not self._runtime.has_streams:
            return self._start_gathers(label, ordered=ordered)
        # The allocator may have returned memory that compute, which runs behind the host, still
        # reads. The lane waits for what compute was given so far, then overwrites it.
        with self._runtime.following(Lane.ALL_GATHER):
            return self._start_gathers(label, ordered=ordered)

    def _start_gathers(self, label: str, *, ordered: bool) -> list[Work]:
        if ordered:
            # The first fence: all ranks have written what comes before this gather. The second:
            # all ranks have copied, so the next write cannot be seen by a slower one.
            self._comm.fence(label)
            works = self._start_gathers(label, ordered=False)
            self._comm.fence(label)
            return works
        if self._post_forward_shards:
            assert self._post_forward_comm is not None
            # Taken once: with the list empty, the next gather is over the whole group again.
            kept, self._post_forward_shards = self._post_forward_shards, []
            return self._post_forward_comm.gather_unit(
                [
                    (buffer, unsharded.flat, 0)
                    for buffer, unsharded in zip(kept, self._unsharded, strict=True)
                ],
                label,
            )
        pairs = zip(self._buckets, self._unsharded, strict=True)
        return self._comm.gather_unit([(b, u.flat, u.offset) for b, u in pairs], label)

    def gather_whole(self, label: str) -> dict[int, torch.Tensor]:
        """Return every whole parameter by index, in the dtype of the shards. Collective.

        In new memory, apart from the unsharded buffers; with one rank, the shards themselves.
        """
        if self.layout.shard_size == 1:
            return dict(enumerate(self.shards))
        runtime = self._runtime
        flats = [
            torch.empty(b.unsharded_numel, dtype=b.dtype, device=runtime.device)
            for b in self.layout.buckets
        ]
        # On the lane, whose pool of regions serves no other: a gather of another unit may be there.
        with runtime.following(Lane.ALL_GATHER):
            for buffer, flat in zip(self._buckets, flats, strict=True):
                self._comm.all_gather(buffer, flat, label).wait()
                buffer.forget_landing()  # it would keep `flat` alive until the next gather
            gathered = runtime.record()
        runtime.wait(gathered)
        whole = {}
        for bucket, flat in zip(self.layout.buckets, flats, strict=True):
            whole.update(whole_views(bucket, flat))
        return whole

    def free_unsharded(self) -> None:
        """Free the private buffers under the unsharded parameters, which stay as tensors."""
        if self.keeps_storage:
            return
        if self._is_lent:
            assert self._runtime.rotation is not None
            storages = [each.flat.untyped_storage() for each in self._freed]
            self._runtime.rotation.take_back(self, storages)
            self._is_lent = False
            return
        for unsharded in self._freed:
            unsharded.free()

    def keep_post_forward(self, comm: ProcessGroupComm) -> dict[int, torch.Tensor]:
        """Keep this rank's shards over a smaller group, and free the unsharded buffers.

        Returns those shards by index of the parameter, in the compute dtype. The next unshard
        gathers them over ``comm``, the group's; `drop_kept` forgets them.
        """
        self._post_forward_comm = comm
        kept: dict[int, torch.Tensor] = {}
        for bucket in self.layout.buckets:
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
        self.free_unsharded()  # after the copies above, which read it
        return kept

    def drop_kept(self) -> None:
        """Forget the shards over the smaller group: no backward came, and they may be outdated."""
        self._post_forward_shards = []

    def bind(self, *, in_place: bool) -> None:
        """Make private buffers and unsharded parameters, or read shards in place where that is possible.

        in_place: False gives all of them private memory, so that writes to them do not reach shards. That is
            safe while graphs refer to tensors over the shards, which are never freed. True drops private
            buffers, to which nobody else may refer, freed or not: check `is_in_use` first.
        """
        bound: list[_Unsharded] = []
        views: dict[int, torch.Tensor] = {}
        is_any_in_place, device = False, self._runtime.device
        # Inference tensors cannot be saved for backward, and these outlast this forward.
        with torch.inference_mode(False):
            for buffer in self._buckets:
                # Ranks of one host share them, on the compute device, in the dtype that is computed with.
                reads_in_place = (
                    in_place
                    and bool(buffer.in_place)
                    and buffer.bucket.dtype == buffer.bucket.compute_dtype
                    and all(shard.device == device for shard in buffer.in_place)
                )
                bound.append(self._bind_bucket(buffer, views, in_place=reads_in_place))
                is_any_in_place |= reads_in_place
        # Assigned last: if an allocation above raises, everything is as it was.
        self._unsharded, self._views, self.in_place = bound, views, is_any_in_place
        self._freed = [unsharded for unsharded in bound if not unsharded.stays_allocated]
        self._moves = any(unsharded.nbytes for unsharded in bound)
        self._only = None
        if len(bound) == 1 and self._moves and not self._runtime.has_streams:
            self._only = self._buckets[0], bound[0].flat, bound[0].offset

    def _bind_bucket(
        self, buffer: ShardBuffer, views: dict[int, torch.Tensor], *, in_place: bool
    ) -> _Unsharded:
        """Return one bucket's private buffer, freed, and add its parameters to ``views`` by index."""
        bucket = buffer.bucket
        offset = bucket.direct_numel if in_place else 0
        numel = bucket.unsharded_numel - offset
        flat = torch.empty(numel, dtype=bucket.compute_dtype, device=self._runtime.device)
        unsharded = _Unsharded(flat, offset, flat.untyped_storage().size())
        for position, param in enumerate(bucket.params):
            if in_place and position < len(buffer.in_place):
                views[param.index] = buffer.in_place[position]
                continue
            # No view of `flat`, to which the all-gather writes. See [Note: Freed under its tensors].
            views[param.index] = tensor_over(
                flat.untyped_storage(),
                param.unsharded_offset - offset,
                param.spec.shape,
                flat.dtype,
            )
        # Last: `set_` (in `tensor_over`) resizes a storage that is too small for the new tensor, so
        # freeing earlier would allocate all of it again.
        unsharded.free()
        return unsharded


def whole_views(bucket: BucketLayout, flat: torch.Tensor) -> dict[int, torch.Tensor]:
    """Return views of an unsharded buffer: each parameter of the bucket, by index, in its shape."""
    return {
        param.index: flat.narrow(0, param.unsharded_offset, param.spec.numel).view(param.spec.shape)
        for param in bucket.params
    }
