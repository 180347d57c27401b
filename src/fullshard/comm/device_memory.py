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

What this file asks of a device, `cuda_ipc` has for CUDA.
"""

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.cuda_ipc import CudaIpc
from fullshard.comm.interface import Done, ShardBuffer, Work, named_in, shard_views
from fullshard.comm.ring import StagingComm
from fullshard.comm.shared_memory import UnavailableError
from fullshard.errors import CommError
from fullshard.peers.groups import exchange, own_group
from fullshard.plan.layout import BucketLayout
from fullshard.plan.ways import RingStretch

_TURNS = 4  # reductions that may be under way at once: see [Note: Turns]
_FEW_PARAMS = 512  # flags per reduction and rank that there is room for from the start


class _Events(NamedTuple):
    """One rank's events, each list used in turns (see [Note: Turns])."""

    fence: list[Any]
    posted: list[Any]
    consumed: list[Any]


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


class DeviceMemoryComm(StagingComm):
    """Communication of ranks of one host that reach each other's device memory.

    Building it raises UnavailableError, on every rank, if one of them cannot.
    """

    overlaps = True
    max_under_way = _TURNS

    def __init__(self, group: dist.ProcessGroup, device: CudaIpc) -> None:
        self.name = f"peer memory (one host, {device.name})"
        super().__init__(group)
        self._device = device
        self._group = weakref.ref(group)  # which keeps this
        self._peers = [rank for rank in range(self.size) if rank != self.rank]
        self._own_events, self._peer_events = self._connect()
        self._num_fences = 0
        # Event after the last all-gather's copies. The lane runs copies in order, so it covers all.
        self._last_read: Any = None
        self._parts: list[torch.Tensor] = []  # of the ring, in rank order
        # Flags of reductions, in memory of the hosts.
        self._flag_memory, self._most_flags = memoryview(b""), 0

    # Shards

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
        self, shards: ShardBuffer, unsharded: torch.Tensor, label: str, offset: int = 0
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

    # Events beside the ring's counters: see [Note: Two orders]. The ring sets or waits for the counter at the same
    # moment, so every record comes before its counter, and every wait after it.

    def before_post(self, sequence: int) -> None:
        self._device.record(self._own_events.posted[sequence % _TURNS])

    def before_read(self, sequence: int) -> None:
        for peer in self._peer_events:
            self._device.wait(peer.posted[sequence % _TURNS])

    def before_release(self, sequence: int) -> None:
        self._device.record(self._own_events.consumed[sequence % _TURNS])

    def before_reuse(self, sequence: int) -> None:
        for peer in self._peer_events:
            self._device.wait(peer.consumed[sequence % _TURNS])

    # Gradients

    def enlarge(self, nbytes: int) -> None:
        # Hosts have consumed all reductions, but devices may still read peers' old parts. Each rank
        # waits for its own device, then for the others, before it frees a part.
        self._device.finish()
        self.memory.barrier("enlarging the gradient ring")
        self._parts = []  # freed before the new ones are allocated, to need no room for both
        self._parts = self._share(self._device.allocate(nbytes), "allocating the gradient ring")

    def _part(
        self, stretch: RingStretch, rank: int, offset: int, numel: int, dtype: torch.dtype
    ) -> torch.Tensor:
        start = stretch.start + offset
        return self._parts[rank][start : start + numel * dtype.itemsize].view(dtype)

    def _flags(self, stretch: RingStretch, num_params: int) -> list[memoryview]:
        if num_params > self._most_flags:
            self._most_flags = max(2 * num_params, _FEW_PARAMS)
            size = _TURNS * self.size * self._most_flags
            # Reductions under way hold views of the old memory, and read their flags there.
            try:
                self._flag_memory = self.memory.allocate(size, "allocating flags")
            except UnavailableError as reason:
                raise CommError(f"{self.name}: {reason}.") from reason
        turn, width = stretch.sequence % _TURNS, self._most_flags
        starts = [(turn * self.size + rank) * width for rank in range(self.size)]
        return [self._flag_memory[start : start + num_params] for start in starts]

    # Connecting

    def _connect(self) -> tuple[_Events, list[_Events]]:
        """Return this rank's events and the peers', once all ranks reach each other's memory.

        Raises UnavailableError, on every rank, if one of them cannot.
        """
        device, problem = self._device, None
        offer: Any = None
        try:
            numbers = (2, _TURNS, _TURNS)
            own = _Events(*([device.create_event() for _ in range(n)] for n in numbers))
            probe = device.allocate(1)
            handles = _Events(*([*map(device.export_event, each)] for each in own))
            offer = {peer: (handles, device.export(probe)) for peer in self._peers}
        # Whatever a driver or an allocator raises, other ranks wait in the exchange: so it becomes
        # a value that all get.
        except Exception as error:
            problem = f"rank {dist.get_rank()} cannot offer {device.name} memory: {error}"
        offers = self._exchange((problem, offer), "connecting")
        problem = next((theirs for theirs, _ in offers if theirs is not None), None)
        events: list[_Events] = []
        if problem is None:
            try:
                for peer in self._peers:
                    handles, memory = offers[peer][1][self.rank]
                    events.append(_Events(*([*map(device.open_event, each)] for each in handles)))
                    device.open(memory)
            except Exception as error:
                problem = (
                    f"rank {dist.get_rank()} cannot open a peer's {device.name} memory: {error}"
                )
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
        """Return every rank's value, in rank order. Every rank must call it."""
        self.memory.barrier(label)  # a rank that is gone, or elsewhere, is named there
        group = self._group()
        assert group is not None  # the caller uses it
        return exchange(value, own_group(group))


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
