"""Gather whole tensors from what the ranks hold, a bucket at a time.

The ranks tell each other once which boxes they hold, and plan alike (`plan.gathering`). Then each bucket
is one exchange of bytes, whatever dtypes are in it: an all-gather, or, where the ranks' messages differ
much in size, a broadcast of each; to one rank, a gather.

[Note: Memory of a bucket] Beyond the whole tensors that are yielded, a rank has its own message and
those received: at most about three times ``bucket_nbytes``, and on ranks that receive nothing, only their
own message.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fullshard.comm.calls import all_gather
from fullshard.comm.outside_steps import gather_objects, run_collective
from fullshard.errors import StateError
from fullshard.peers.groups import any_device, moves, place_in_job
from fullshard.plan.boxes import tiling_fault, whole_box
from fullshard.plan.gathering import Bucket, DividedTensor, MessagePart, plan_buckets
from fullshard.state.copies import own_share
from fullshard.state.holdings import Holding
from fullshard.state.unit_parts import HeldBox

_LABEL = "gathering whole tensors"

# An all-gather pads messages to the longest. If that moves more than this many times what there is, each
# rank's message is broadcast instead.
_MOST_PADDING = 2


def gathered_wholes(
    holdings: Sequence[Holding],
    group: dist.ProcessGroup | None,
    *,
    to_rank: int | None = None,
    bucket_nbytes: int,
    device: torch.device | None = None,
) -> Iterator[tuple[Holding, torch.Tensor | None]]:
    """Gather whole tensors from all ranks' holdings; yield each with its holding. Collective.

    holdings: of the same tensors in the same order on all ranks, `numbered`. They may have any mix of
        dtypes and any division. group: all ranks that hold them; None is the default group, and without
        one this process is alone.
    to_rank: the only rank that gets tensors, by its number in the job; the others get None in their place.
    device: of the whole tensors; by default where this rank holds them.

    Every tensor is new memory, which this iterator does not keep. The call itself is collective, and each
    step may be: all ranks have to go on to the end in step. Where one stops, the next step of the others
    waits for it until the group's timeout.

    Raises StateError, on all ranks alike, if ranks hold different tensors or lack elements.
    """
    place = place_in_job(group)
    many = place.size > 1
    ranks = dist.get_process_group_ranks(group) if many else [0]
    shares: dict[str, list[HeldBox]] = {}
    for holding in map(own_share, holdings):
        shares.setdefault(holding.name, []).extend(holding.boxes)
    own = _Told(
        tuple((h.name, tuple(h.shape), h.dtype) for h in holdings),
        tuple(tuple(held.box for held in shares.get(h.name, ())) for h in holdings),
        next((held.view.device.type for h in holdings for held in h.boxes), "cpu"),
        to_rank,
        bucket_nbytes,
    )
    facts = gather_objects(own, group, _LABEL) if many else [own]
    _check(facts, ranks)
    tensors = [
        DividedTensor(holding.shape, holding.dtype.itemsize, [each.boxes[index] for each in facts])
        for index, holding in enumerate(holdings)
    ]
    views = [shares.get(h.name, []) for h in holdings]
    receiver = None if to_rank is None else ranks.index(to_rank)
    travels_on = _wire_device(facts, group) if many else torch.device("cpu")
    wire = _Wire(group, place.size, place.rank, receiver, travels_on)
    return _gather(list(holdings), views, tensors, wire, bucket_nbytes, device)


class _Told(NamedTuple):
    """What a rank tells the others.

    tensors: names, shapes and dtypes. boxes: that it sends. to_rank, bucket_nbytes: its arguments.
    """

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    boxes: tuple[tuple[Any, ...], ...]
    device_type: str
    to_rank: int | None
    bucket_nbytes: int


def _check(facts: Sequence[_Told], ranks: Sequence[int]) -> None:
    """Raise StateError if ranks want or hold different things, or not every element exactly once.

    ranks: of the job, those that the facts are from.
    """
    for name in ("to_rank", "bucket_nbytes"):
        first = getattr(facts[0], name)
        for rank, each in zip(ranks, facts, strict=True):
            if (value := getattr(each, name)) != first:
                raise StateError(
                    f"{name} is {first!r} on rank {ranks[0]} and {value!r} on rank {rank}. Call this with the same "
                    "arguments on all ranks of the group."
                )
    to_rank, bucket_nbytes = facts[0].to_rank, facts[0].bucket_nbytes
    if to_rank is not None and to_rank not in ranks:
        shown = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))
        raise StateError(f"to_rank is {to_rank!r}, but ranks {shown} have this model.")
    if bucket_nbytes < 1:
        raise StateError(f"A bucket of {bucket_nbytes} bytes holds nothing. Give a positive size.")
    for rank, each in zip(ranks, facts, strict=True):
        if each.tensors != facts[0].tensors:
            only_one = set(facts[0].tensors) ^ set(each.tensors)
            differing = sorted(name for name, _, _ in only_one)[:3] or ["their order"]
            raise StateError(
                f"Ranks {ranks[0]} and {rank} hold different tensors: {', '.join(differing)}. Call this with the same "
                "model on all ranks of the group."
            )
    for index, (name, shape, _) in enumerate(facts[0].tensors):
        if fault := tiling_fault(shape, [box for each in facts for box in each.boxes[index]]):
            raise StateError(
                f"{name} of shape {shape}: {fault} of those that the ranks hold. Call this on all ranks "
                "of the mesh, with one copy of the model among them."
            )


def _wire_device(facts: Sequence[_Told], group: dist.ProcessGroup | None) -> torch.device:
    """Return the device on which bytes travel: that of the tensors if the group can, alike on all ranks."""
    kinds = sorted({each.device_type for each in facts} - {"cpu"})
    if kinds and moves(group, kinds[0]):
        return torch.device(kinds[0], torch.accelerator.current_device_index())
    return any_device(group)


@torch.no_grad()
def _gather(
    holdings: Sequence[Holding],
    views: Sequence[Sequence[HeldBox]],
    tensors: Sequence[DividedTensor],
    wire: "_Wire",
    bucket_nbytes: int,
    device: torch.device | None,
) -> Iterator[tuple[Holding, torch.Tensor | None]]:
    home = next((held.view.device for h in holdings for held in h.boxes), wire.device)
    wholes: dict[int, torch.Tensor] = {}

    def whole_of(index: int) -> torch.Tensor:
        if index not in wholes:
            holding = holdings[index]
            own = holding.boxes[0].view.device if holding.boxes else home
            wholes[index] = torch.empty(holding.shape, dtype=holding.dtype, device=device or own)
        return wholes[index]

    def view_of(part: MessagePart) -> torch.Tensor:
        held = views[part.tensor][part.number]
        return held.view[part.box.within(held.box)]

    def put(part: MessagePart, message: torch.Tensor) -> None:
        whole = whole_of(part.tensor)
        own = part.rank == wire.rank
        source = view_of(part) if own else _slot(message, part, whole.dtype)
        whole[part.box.within(whole_box(tuple(whole.shape)))].copy_(source)

    for bucket in plan_buckets(tensors, num_ranks=wire.num_ranks, bucket_nbytes=bucket_nbytes):
        received = wire.exchange(bucket, view_of)
        if wire.receives:
            for part in bucket.parts:
                put(part, received[part.rank])
        received = []
        for index in bucket.complete:
            whole = whole_of(index) if wire.receives else None
            wholes.pop(index, None)
            yield holdings[index], whole
            del whole  # a tensor belongs to whoever took it


def _slot(message: torch.Tensor, part: MessagePart, dtype: torch.dtype) -> torch.Tensor:
    nbytes = part.box.numel * dtype.itemsize
    return message[part.start : part.start + nbytes].view(dtype).view(part.box.shape)


class _Wire(NamedTuple):
    """The ranks of a group among whom messages are exchanged, and this one's number.

    to_rank: the only one that receives; None if all do. device: on which bytes travel.
    """

    group: dist.ProcessGroup | None
    num_ranks: int
    rank: int
    to_rank: int | None
    device: torch.device

    @property
    def receives(self) -> bool:
        return self.to_rank in (None, self.rank)

    def exchange(
        self, bucket: Bucket, view_of: Callable[[MessagePart], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Send this rank's parts of a bucket; return the messages of all ranks as bytes.

        This rank's own is not among them where that saves sending it.
        """
        nbytes = [0 if rank == self.to_rank else n for rank, n in enumerate(bucket.nbytes)]
        longest = max(nbytes)
        if self.num_ranks == 1 or not longest:
            return [torch.empty(0, device="cpu")] * self.num_ranks
        is_even = longest * self.num_ranks <= _MOST_PADDING * sum(nbytes) and self.to_rank is None
        message = self._empty(longest if is_even else nbytes[self.rank])
        for part in bucket.parts:
            if part.rank == self.rank != self.to_rank:
                view = view_of(part)
                _slot(message, part, view.dtype).copy_(view)
        run = functools.partial(run_collective, group=self.group, label=_LABEL)
        if is_even:
            received = self._empty(longest * self.num_ranks)
            run(all_gather, received, message)
            return list(received.split(longest))
        if self.to_rank is not None:
            sent = [len(message) if rank == self.to_rank else 0 for rank in range(self.num_ranks)]
            arriving = nbytes if self.receives else [0] * self.num_ranks
            received = self._empty(sum(arriving))
            run(dist.all_to_all_single, received, message, arriving, sent)
            return list(received.split(arriving))
        messages = [message if r == self.rank else self._empty(n) for r, n in enumerate(nbytes)]
        for rank, each in enumerate(messages):
            if len(each):
                run(dist.broadcast, each, group_src=rank)
        return messages

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)
