"""Communication of ranks on one host that reach each other's device memory.

Each rank keeps its shards on its own device, and every rank of the group can read them: several
devices of one host, or several ranks on one device, which NCCL does not serve at all. An all-gather
is copies from the peers' shards straight to where parameters belong; gradients are staged in a ring
(see `ring`) of which each rank keeps its part, and summed in rank order.

[Note: Two orders] The host runs ahead of its device. That a peer's device has done something is an
*event* of the peer, which streams wait for; that the event has been recorded at all is a *counter*
in host memory, which the host waits for first: a wait for an event means its latest record. So
hosts wait for hosts and streams for streams, and no host for a device. Whatever a record depends
on was in some stream before it, in real time; so there is no cycle of waits. Events are used in
turns, so that a rank that is ahead has not recorded the one again that others still wait for.

What this asks of a device is `PeerDevice`; `cuda_ipc` has it for CUDA.
"""

import dataclasses
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from fullshard.comm.exchange import exchange_through_store
from fullshard.comm.interface import (
    Comm,
    Done,
    Reduction,
    ShardBuffer,
    Sum,
    Work,
    add_in_order,
    shard_views,
)
from fullshard.comm.packing import copy_in_gradients
from fullshard.comm.ring import Order, Ring, Stretch
from fullshard.comm.shared_memory import SharedMemory, UnavailableError
from fullshard.errors import CommError
from fullshard.plan.layout import BucketLayout, DirectRule

_TURNS = 4  # reductions that may be under way at once
_MAIL_NBYTES = 1 << 16  # of handles that a rank offers at once
_FEW_PARAMS = 512

# A memory's or an event's handle, to be opened in another process: picklable, whatever it is.
Handle = Any


class PeerDevice(Protocol):
    """What reaching into other processes' memory asks of a device.

    Events are recorded on and waited for by the current stream.
    """

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return zeroed bytes that can be exported."""

    def export(self, memory: torch.Tensor) -> Handle:
        """Offer memory to one other process."""

    def open(self, handle: Handle) -> torch.Tensor:
        """Return another process's memory. Raises an exception that says why it cannot."""

    def create_event(self) -> Any: ...

    def export_event(self, event: Any) -> Handle: ...

    def open_event(self, handle: Handle) -> Any: ...

    def record(self, event: Any) -> None: ...

    def wait(self, event: Any) -> None: ...

    def mark(self) -> Any:
        """Return an event of this process alone, recorded now."""

    def finish(self) -> None:
        """Let the host wait for all of the device's work (while setting up)."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Events:
    """One rank's events, each used in turns."""

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
    """What streams wait for beside the ring's counters."""

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
    """Shards that peers read, beside the peers' own; ``ranks`` has all of them in rank order."""

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
        """Copy every rank's shards to where they belong. The views are made once."""
        if self.unsharded is not unsharded:
            self.unsharded = unsharded
            self.targets, self.sources = _copies(self.bucket, self.ranks, unsharded)
        if self.targets:
            torch._foreach_copy_(self.targets, self.sources, non_blocking=True)


class DeviceMemoryComm(Comm):
    """Ranks of one host that reach each other's device memory.

    Raises UnavailableError, on every rank, where one of them cannot.
    """

    overlaps = True
    rule = DirectRule(even=False, min_nbytes=0)

    def __init__(self, group: dist.ProcessGroup, device: PeerDevice, kind: str) -> None:
        """kind: of memory, for messages."""
        self.name = f"peer memory (one host, {kind})"
        self.memory = SharedMemory.connect(group, exchange_through_store)
        self.rank, self.size = self.memory.rank, self.memory.size
        self._device = device
        self._mail = self.memory.allocate(self.size * _MAIL_NBYTES, "connecting")
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._own_events, self._peer_events = self._connect(kind)
        self._num_fences = 0
        self._last_read: Any = None
        order = _EventOrder(device, self._own_events, self._peer_events)
        self._ring = Ring(self.memory, self._enlarge, order, max_under_way=_TURNS)
        self._parts: list[torch.Tensor] = []  # of the ring, in rank order
        self._flags = memoryview(b"")
        self._flags_nbytes = 0

    # Shards

    def allocate_shards(
        self, bucket: BucketLayout, device: torch.device, *, pin_memory: bool
    ) -> ShardBuffer:
        nbytes = max(bucket.shard_nbytes, 1)
        memory = self._device.allocate(nbytes)
        if memory.device != device:
            raise CommError(
                f"{self.name}: shards have to be on {memory.device}, not on {device}. Offloaded "
                "ones take set_default_comm('process_group')."
            )
        parts = self._share(memory, "allocating shards")
        ranks = [part[: bucket.shard_nbytes].view(bucket.dtype) for part in parts]
        flat = ranks[self.rank]
        return PeerShards(bucket, shard_views(bucket, flat, self.rank), flat, ranks=ranks)

    def all_gather(
        self, shards: ShardBuffer, unsharded: torch.Tensor, *, first: int = 0, label: str
    ) -> Work:
        assert isinstance(shards, PeerShards)
        assert first == 0
        shards.copy_to(unsharded)
        self._last_read = self._device.mark()
        return Done()

    def fence(self, label: str) -> None:
        """See [Note: Two orders]: the hosts meet, and streams go on when all have come here."""
        device, turn = self._device, self._num_fences % 2
        self._num_fences += 1
        if self._last_read is not None:
            device.wait(self._last_read)
            self._last_read = None
        device.record(self._own_events.fence[turn])
        self.memory.barrier(label)
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
        out: torch.Tensor,
        how: Sum,
    ) -> Reduction:
        wire, numel = how.wire_dtype, bucket.shard_numel
        stretch = self._ring.claim(self.staged_nbytes(bucket, wire), how.label)
        staged = self._part(stretch, self.rank, 0, self.size * numel, wire)
        copy_in_gradients(bucket, grads, staged, divisor=how.scaling.before)
        combined_flags = self._post_flags(stretch, [grad is not None for grad in grads])

        def finish() -> tuple[bool, ...]:
            terms = self._terms(stretch, self.rank * numel * wire.itemsize, numel, wire)
            add_in_order(terms, out, divisor=how.scaling.after)
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
        # What peers still read of the old parts must be over before they are freed.
        self._device.finish()
        self.memory.barrier("enlarging the gradient ring")
        self._parts = []
        self._parts = self._share(self._device.allocate(nbytes), "allocating the gradient ring")

    def _part(
        self, stretch: Stretch, rank: int, offset: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """View what ``rank`` staged, from byte ``offset`` of the stretch on."""
        start = stretch.start + offset
        return self._parts[rank][start : start + numel * dtype.itemsize].view(dtype)

    def _terms(
        self, stretch: Stretch, offset: int, numel: int, dtype: torch.dtype
    ) -> list[torch.Tensor]:
        own = self._parts[self.rank].device
        parts = (self._part(stretch, rank, offset, numel, dtype) for rank in range(self.size))
        return [part.to(own, non_blocking=True) for part in parts]  # from other devices, a copy

    def _post_flags(
        self, stretch: Stretch, present: Sequence[bool]
    ) -> Callable[[], tuple[bool, ...]]:
        """Say which gradients this rank has. Returns what reads, later, which anybody has."""
        flags = self._flags_of(stretch.sequence, len(present))
        flags[self.rank][: len(present)] = bytes(present)
        return lambda: tuple(map(any, zip(*(row[: len(present)] for row in flags), strict=True)))

    def _flags_of(self, sequence: int, num_params: int) -> list[memoryview]:
        """Return where each rank says, in host memory, which gradients it had."""
        if num_params > self._flags_nbytes:
            self._flags_nbytes = max(2 * num_params, _FEW_PARAMS)
            size = _TURNS * self.size * self._flags_nbytes
            # Reductions under way keep what they have.
            try:
                self._flags = memoryview(self.memory.allocate(size, "allocating flags"))
            except UnavailableError as reason:
                raise CommError(f"{self.name}: {reason}.") from reason
        turn, width = sequence % _TURNS, self._flags_nbytes
        starts = [(turn * self.size + rank) * width for rank in range(self.size)]
        return [self._flags[start : start + width] for start in starts]

    # Connecting

    def _connect(self, kind: str) -> tuple[_Events, list[_Events]]:
        """Exchange events, and try whether memory can be reached."""
        device, problem = self._device, None
        offer: Any = None
        try:
            own = _Events.create(device)
            probe = device.allocate(1)
            offer = {
                peer: (own.map(device.export_event), device.export(probe)) for peer in self._peers
            }
        except Exception as error:  # whatever the driver or the allocator says
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
        """Return every rank's memory, this one's among them. Every rank has to call it."""
        offer = {peer: self._device.export(memory) for peer in self._peers}
        offers = self._exchange(offer, label)
        shared = [
            memory if rank == self.rank else self._device.open(offers[rank][self.rank])
            for rank in range(self.size)
        ]
        self.memory.barrier(label)  # nobody frees what a peer has yet to open
        return shared

    def _exchange(self, value: Any, label: str) -> list[Any]:
        """Return every rank's value, through host memory. Every rank has to call it."""
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
        self.memory.barrier(label)  # all have read before anybody writes again
        return values


def _copies(
    bucket: BucketLayout, ranks: Sequence[torch.Tensor], unsharded: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return what is written of an unsharded buffer, and from where, piece by piece."""
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
