"""Communication of ranks on one host that reach each other's device memory.

Each rank keeps its shards on its device, and every rank of the group can read them. Each rank may
have a device of its own, or several may share one, which NCCL does not support. An all-gather
copies peers' shards straight to where parameters belong. Gradients are staged in a ring (see
`ring`), of which each rank keeps its own part on its device, and are summed in rank order.

[Note: Two orders] The host runs ahead of its device, so there are two levels of waiting. A counter
in host memory says that a peer has *recorded* an event; the event says that the peer's device has
*finished* what came before it. Hosts wait for counters, streams wait for events, and no host waits
for a device. The counter always comes first: a stream that waits for an event waits for its latest
record, so a wait that is issued before the record would wait for an older one, or for nothing.

    this rank   copy to its part   record event   set counter
    peer                                          wait for counter   stream waits for event   read

There is no circle of waits: whatever a record depends on was put into some stream before it.

[Note: Turns] An event serves several fences or reductions in turn. It may be recorded again only
when every peer has issued its wait for the record before. For fences, two events are enough: a rank
that has passed fence n + 1 knows that all others have arrived there, which they do after their
waits of fence n. For reductions there are `_TURNS`, and the ring lets no rank claim the next one
before all ranks have consumed the one that used the same turn.

`PeerDevice` is what this file asks of a device; `cuda_ipc` has it for CUDA.
"""

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.interface import (
    Comm,
    Done,
    Reduction,
    ShardBuffer,
    Sum,
    Work,
    add_in_order,
    named_in,
    shard_views,
)
from fullshard.comm.packing import copy_in_gradients
from fullshard.comm.ring import Order, Ring, Stretch
from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.errors import CommError
from fullshard.peers.flight_record import FlightRecord, keep_record
from fullshard.peers.groups import exchange_through_store
from fullshard.plan.layout import BucketLayout, DirectRule

_TURNS = 4  # reductions that may be under way at once: see [Note: Turns]
_MAIL_NBYTES = 1 << 16  # room per rank for pickled handles
_FEW_PARAMS = 512  # flags per reduction and rank that there is room for from the start

# What another process opens memory or an event by: of a type of the device's, and picklable.
Handle = Any


class PeerDevice(Protocol):
    """The operations on one device that reading other processes' memory needs.

    Events are recorded on the current stream, and waited for by the current stream.
    """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory, 1-D in bytes, that can be exported."""

    def export(self, memory: torch.Tensor) -> Handle:
        """Return a handle by which one other process can open the memory."""

    def open(self, handle: Handle) -> torch.Tensor:
        """Return another process's memory. Raises an exception that says why if it cannot."""

    def create_event(self) -> Any:
        """Return a new event that can be exported."""

    def export_event(self, event: Any) -> Handle:
        """Return a handle by which other processes can open the event, any number of them."""

    def open_event(self, handle: Handle) -> Any:
        """Return another process's event."""

    def record(self, event: Any) -> None:
        """Record an event of this process on the current stream. The host does not wait."""

    def wait(self, event: Any) -> None:
        """Let the current stream wait for the event's latest record. The host does not wait."""

    def mark(self) -> Any:
        """Record a new event for this process alone, and return it."""

    def finish(self) -> None:
        """Wait on the host for all work of the device. Used while memory is set up."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Events:
    """One rank's events, each list used in turns (see [Note: Turns])."""

    fence: list[Any]
    posted: list[Any]
    consumed: list[Any]

    @staticmethod
    def create(device: PeerDevice) -> "_Events":
        def some(number: int) -> list[Any]:
            return [device.create_event() for _ in range(number)]

        return _Events(fence=some(2), posted=some(_TURNS), consumed=some(_TURNS))

    def map(self, function: Any) -> "_Events":
        return _Events(*(list(map(function, getattr(self, f.name))) for f in _FIELDS))


_FIELDS = dataclasses.fields(_Events)


class _EventOrder(Order):
    """Events beside the ring's counters: see [Note: Two orders] and `Order` for when each runs.

    The ring sets or waits for the counter at the same moment, so every record comes before its
    counter, and every wait after it.
    """

    def __init__(self, device: PeerDevice, own: _Events, peers: Sequence[_Events]) -> None:
        self._device, self._own, self._peers = device, own, peers

    def before_post(self, sequence: int) -> None:
        self._device.record(self._own.posted[sequence % _TURNS])

    def before_read(self, sequence: int) -> None:
        for peer in self._peers:
            self._device.wait(peer.posted[sequence % _TURNS])

    def before_release(self, sequence: int) -> None:
        self._device.record(self._own.consumed[sequence % _TURNS])

    def before_reuse(self, sequence: int) -> None:
        for peer in self._peers:
            self._device.wait(peer.consumed[sequence % _TURNS])


@dataclasses.dataclass(slots=True)
class PeerShards(ShardBuffer):
    """This rank's shards, which peers read, and views of the peers' shards.

    ranks: every rank's shard buffer, 1-D, in rank order.
    unsharded, targets, sources: the buffer that was filled last, and the views to copy it by.
    """

    ranks: list[torch.Tensor] = dataclasses.field(default_factory=list)
    unsharded: torch.Tensor | None = None
    targets: list[torch.Tensor] = dataclasses.field(default_factory=list)
    sources: list[torch.Tensor] = dataclasses.field(default_factory=list)

    @property
    def landing_views(self) -> list[torch.Tensor]:
        return [each for each in self.targets if each is not self.unsharded]

    def forget_landing(self) -> None:
        self.unsharded = None
        self.targets, self.sources = [], []

    def copy_to(self, unsharded: torch.Tensor) -> None:
        """Copy every rank's shards to where they belong in an unsharded buffer."""
        # A unit is gathered into the same buffer in every step, so views are made once.
        if self.unsharded is not unsharded:
            self.unsharded = unsharded
            self.targets, self.sources = _copies(self.bucket, self.ranks, unsharded)
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)


class DeviceMemoryComm(Comm):
    """Communication of ranks of one host that reach each other's device memory.

    Building it raises UnavailableError, on every rank, if one of them cannot.
    """

    overlaps = True
    gathers_alone = True
    rule = DirectRule(even=False, min_nbytes=0)

    def __init__(self, group: dist.ProcessGroup, device: PeerDevice, kind: str) -> None:
        """kind: name of the memory in messages, such as "CUDA IPC"."""
        self.name = f"peer memory (one host, {kind})"
        # Through the store: the group's collectives may not work here (NCCL, ranks on one GPU).
        self.memory = SharedMemory.connect(group, exchange_through_store)
        self.memory.record = keep_record(group, self.memory.record)
        self.rank, self.size = self.memory.rank, self.memory.size
        self._device = device
        self._mail = self.memory.allocate(self.size * _MAIL_NBYTES, "connecting")
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._own_events, self._peer_events = self._connect(kind)
        self._num_fences = 0
        # Event after the last all-gather's copies. The lane runs copies in order, so it covers all.
        self._last_read: Any = None
        order = _EventOrder(device, self._own_events, self._peer_events)
        self._ring = Ring(self.memory, self._enlarge, order, max_under_way=_TURNS)
        self._parts: list[torch.Tensor] = []  # of the ring, in rank order
        self._flags = memoryview(b"")
        self._flags_nbytes = 0

    # Shards

    @property
    def record(self) -> FlightRecord | None:
        return self.memory.record

    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        nbytes = max(bucket.shard_nbytes, 1)  # empty memory cannot be exported
        memory = self._device.allocate(nbytes)
        if memory.device != device:
            raise CommError(
                f"{self.name}: shards have to be on {memory.device}, not on {device}. For "
                "offloaded shards use set_default_comm('process_group')."
            )
        parts = self._share(memory, f"allocating shards{named_in(bucket)}")
        ranks = [part[: bucket.shard_nbytes].view(bucket.dtype) for part in parts]
        flat = ranks[self.rank]
        return PeerShards(bucket, shard_views(bucket, flat, self.rank), flat, ranks=ranks)

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, *, offset: int = 0, label: str
    ) -> Work:
        assert isinstance(shards, PeerShards)
        assert offset == 0
        # No wait for peers: a fence came after their last writes, and this stream is behind it.
        shards.copy_to(unsharded)
        self._last_read = self._device.mark()
        return Done()

    def fence(self, label: str) -> None:
        """Let hosts meet here, and let this stream wait until all ranks' streams have come here.

        See [Note: Two orders] and [Note: Turns].
        """
        device, turn = self._device, self._num_fences % 2
        self._num_fences += 1
        # The copies ran on the all-gather's lane, while the record below is of this stream. Peers
        # write to their shards after it, so this stream has to be behind the copies.
        if self._last_read is not None:
            device.wait(self._last_read)
            self._last_read = None
        device.record(self._own_events.fence[turn])
        self.memory.barrier(label)  # all ranks have recorded
        for peer in self._peer_events:
            device.wait(peer.fence[turn])

    # Gradients

    def staged_nbytes(self, bucket: BucketLayout, wire_dtype: torch.dtype) -> int:
        return self.size * bucket.shard_numel * wire_dtype.itemsize

    @property
    def held_nbytes(self) -> int:
        return self._ring.nbytes

    def prepare(self, staged_nbytes: Sequence[int]) -> None:
        self._ring.prepare(staged_nbytes)

    def reduce_scatter(
        self,
        bucket: BucketLayout,
        grads: Sequence[torch.Tensor | None],
        out: Callable[[], torch.Tensor],
        how: Sum,
    ) -> Reduction:
        wire, numel, total = how.wire_dtype, bucket.shard_numel, out()
        stretch = self._ring.claim(self.staged_nbytes(bucket, wire), how.label)
        staged = self._part(stretch, self.rank, 0, self.size * numel, wire)
        copy_in_gradients(bucket, grads, staged, divisor=how.scaling.before)
        combined_flags = self._post_flags(stretch, [grad is not None for grad in grads])

        # The ring calls it once all ranks have posted and this stream waits for their events.
        def finish() -> tuple[bool, ...]:
            terms = self._terms(stretch, self.rank * numel * wire.itemsize, numel, wire)
            add_in_order(terms, total, divisor=how.scaling.after)
            return combined_flags()

        return self._ring.post(stretch, finish, how.label)

    def all_reduce(self, total: torch.Tensor, present: tuple[bool, ...], how: Sum) -> Reduction:
        wire, numel = how.wire_dtype, total.numel()
        stretch = self._ring.claim(numel * wire.itemsize, how.label)
        self._part(stretch, self.rank, 0, numel, wire).copy_(total)
        combined_flags = self._post_flags(stretch, present)

        def finish() -> tuple[bool, ...]:
            add_in_order(self._terms(stretch, 0, numel, wire), total, divisor=1.0)
            return combined_flags()

        return self._ring.post(stretch, finish, how.label)

    def agree(self, bits: int, num_bits: int) -> int:
        return self.memory.agree(bits, num_bits)

    def abandon(self) -> None:
        self._ring.abandon()

    def _enlarge(self, nbytes: int) -> None:
        """Replace this rank's part of the ring by a larger one. Every rank calls it together."""
        # Hosts have consumed all reductions, but devices may still read peers' old parts. Each rank
        # waits for its own device, then for the others, before it frees a part.
        self._device.finish()
        self.memory.barrier("enlarging the gradient ring")
        self._parts = []  # freed before the new ones are allocated, to need no room for both
        self._parts = self._share(self._device.allocate(nbytes), "allocating the gradient ring")

    def _part(
        self, stretch: Stretch, rank: int, offset: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return a view of what ``rank`` staged, from byte ``offset`` of the stretch on."""
        start = stretch.start + offset
        return self._parts[rank][start : start + numel * dtype.itemsize].view(dtype)

    def _terms(
        self, stretch: Stretch, offset: int, numel: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        """Return every rank's part on this rank's device: a view if it is there, else a copy."""
        own = self._parts[self.rank].device
        parts = (self._part(stretch, rank, offset, numel, dtype) for rank in range(self.size))
        return [part.to(own, non_blocking=True) for part in parts]

    def _post_flags(
        self, stretch: Stretch, present: Sequence[bool]
    ) -> Callable[[], tuple[bool, ...]]:
        """Write which gradients this rank has, to memory that peers' hosts can read.

        Returns a function that returns which of them any rank has. It may be called once all ranks
        have posted the stretch: flags are written by the host before its counter.
        """
        flags = self._flags_of(stretch.sequence, len(present))
        flags[self.rank][: len(present)] = bytes(present)
        return lambda: tuple(map(any, zip(*(row[: len(present)] for row in flags), strict=True)))

    def _flags_of(self, sequence: int, num_params: int) -> list[memoryview]:
        """Return the host memory of each rank's flags for a reduction, in rank order."""
        if num_params > self._flags_nbytes:
            self._flags_nbytes = max(2 * num_params, _FEW_PARAMS)
            size = _TURNS * self.size * self._flags_nbytes
            # Reductions under way hold views of the old memory, and read their flags there.
            try:
                self._flags = memoryview(self.memory.allocate(size, "allocating flags"))
            except UnavailableError as reason:
                raise CommError(f"{self.name}: {reason}.") from reason
        turn, width = sequence % _TURNS, self._flags_nbytes
        starts = [(turn * self.size + rank) * width for rank in range(self.size)]
        return [self._flags[start : start + width] for start in starts]

    # Connecting

    def _connect(self, kind: str) -> tuple[_Events, list[_Events]]:
        """Return this rank's events and the peers', once all ranks reach each other's memory.

        Raises UnavailableError, on every rank, if one of them cannot.
        """
        device, problem = self._device, None
        offer: Any = None
        try:
            own = _Events.create(device)
            probe = device.allocate(1)
            offer = {
                peer: (own.map(device.export_event), device.export(probe)) for peer in self._peers
            }
        # Whatever a driver or an allocator raises, other ranks wait in the exchange: so it becomes
        # a value that all get.
        except Exception as error:
            problem = f"rank {dist.get_rank()} cannot offer {kind} memory: {error}"
        offers = self._exchange((problem, offer), "connecting")
        problem = next((theirs for theirs, _ in offers if theirs is not None), None)
        events: list[_Events] = []
        if problem is None:
            try:
                for peer in self._peers:
                    handles, memory = offers[peer][1][self.rank]
                    events.append(handles.map(device.open_event))
                    device.open(memory)
            except Exception as error:
                problem = f"rank {dist.get_rank()} cannot open a peer's {kind} memory: {error}"
        problems = self._exchange(problem, "connecting")
        if any(problems):
            raise UnavailableError(next(filter(None, problems)))
        return own, events

    def _share(self, memory: torch.Tensor, label: str) -> list[torch.Tensor]:
        """Return every rank's memory, in rank order. Every rank must call it."""
        offer = {peer: self._device.export(memory) for peer in self._peers}
        offers = self._exchange(offer, label)
        shared = [
            memory if rank == self.rank else self._device.open(offers[rank][self.rank])
            for rank in range(self.size)
        ]
        self.memory.barrier(label)  # before it, a peer may not have opened this rank's memory yet
        return shared

    def _exchange(self, value: Any, label: str) -> list[Any]:
        """Return every rank's value, passed through host memory. Every rank must call it."""
        data = pickle.dumps(value)
        if len(data) + 8 > _MAIL_NBYTES:
            raise CommError(
                f"{label}: {len(data)} bytes of handles for {self.size} ranks are more than "
                f"{_MAIL_NBYTES}. Use set_default_comm('process_group')."
            )
        start = self.rank * _MAIL_NBYTES
        self._mail[start : start + 8] = len(data).to_bytes(8, "little")
        self._mail[start + 8 : start + 8 + len(data)] = data
        self.memory.barrier(label)
        values = []
        for rank in range(self.size):
            start = rank * _MAIL_NBYTES
            nbytes = int.from_bytes(self._mail[start : start + 8], "little")
            values.append(pickle.loads(self._mail[start + 8 : start + 8 + nbytes]))
        self.memory.barrier(label)  # all have read, so the next call may write here
        return values


def _copies(
    bucket: BucketLayout, ranks: Sequence[torch.Tensor], unsharded: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return views of an unsharded buffer and, in the same order, of the shards to copy there.

    ranks: every rank's shard buffer, in rank order.
    """
    if bucket.is_flat:
        return list(unsharded.split(bucket.shard_numel)), list(ranks)
    targets, sources = [], []
    for param in bucket.params:
        whole = unsharded.narrow(0, param.unsharded_offset, param.spec.numel)
        whole = whole.view(param.spec.shape)
        for rank, flat in enumerate(ranks):
            start, stop = param.rows(rank)
            numel = param.shard_numel(rank)
            if numel:
                targets.append(whole.narrow(param.spec.shard_dim, start, stop - start))
                part = flat.narrow(0, param.shard_offset, numel)
                sources.append(part.view(param.shard_shape(rank)))
    return targets, sources
