"""`join`: ranks with different numbers of batches end an epoch together."""

import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from fullshard.comm.outside_steps import run_collective
from fullshard.errors import ShardingError, StateError
from fullshard.peers.groups import any_device, place_in_job

logger = logging.getLogger("fullshard")

T = TypeVar("T")

# How many iterations of each group's ranks there were.
_counts: "weakref.WeakKeyDictionary[dist.ProcessGroup, int]" = weakref.WeakKeyDictionary()

_LABEL = "asking which ranks have another batch"


class JoinedBatches(Generic[T]):
    """Iterates over this rank's batches, and ends on all ranks after the same number. See `join`.

    Each ``for`` begins anew, with the next epoch.

    weight: 1.0 while the last batch that came was this rank's own, 0.0 where it was repeated.
    """

    def __init__(
        self, batches: Iterable[T], *, until_last: bool, group: dist.ProcessGroup | None
    ) -> None:
        self._batches = batches
        self._until_last = until_last
        self._group = group
        self._epoch: Iterator[T] | None = None
        self.weight = 1.0

    def __next__(self) -> T:
        """Return a batch without a loop, of the epoch that the first call begins."""
        self._epoch = self._epoch or iter(self)
        return next(self._epoch)

    def __iter__(self) -> Iterator[T]:
        """Begin anew: the next epoch."""
        self.weight = 1.0
        own, number = iter(self._batches), 1
        if (known := self._group or dist.group.WORLD) is not None:
            number = _counts[known] = _counts.get(known, 0) + 1
        last: list[T] = []  # this rank's last batch, once it has had one
        for num_taken in itertools.count():
            new = list(itertools.islice(own, 1)) if self.weight else []
            have = _everyones(bool(new), number, self._group)
            without = [rank for rank, has in have.items() if not has]
            if without and (len(without) == len(have) or not self._until_last):
                if len(without) < len(have):
                    logger.info(
                        "join: an epoch ended on all ranks after %d batches, since ranks %s had no more.",
                        num_taken,
                        without,
                    )
                return
            if without and not num_taken:
                raise StateError(
                    f"join: ranks {without} have no batch at all, so none that they could repeat until the last "
                    "rank is done. Give every rank a batch, or end with the first: until='first'."
                )
            self.weight = float(bool(new))
            last = new or last
            yield last[0]


def join(
    batches: Iterable[T],
    *,
    until: Literal["first", "last"] = "first",
    group: dist.ProcessGroup | None = None,
) -> JoinedBatches[T]:
    """Iterate over this rank's batches, and end on all ranks together. Collective at every batch.

        for inputs, labels in join(loader):
            ...

    batches: this rank's; ranks may have different numbers of them. group: the ranks; all by default.
    until: "first" ends when the first rank has no more; what others have left is not used. "last" ends when
        the last rank has no more: a rank that is done gets its last batch again, so that it takes part in
        what others do, and ``weight`` is 0.0. Let such a loss count for nothing:

            batches = join(loader, until="last")
            for inputs, labels in batches:
                loss = cross_entropy(model(inputs), labels)
                weighted_loss(loss, len(labels) * batches.weight, model).backward()

    All ranks have to take every batch: one that leaves the loop makes the others wait, and is named. Each
    batch costs an all-reduce of a number per rank; on NCCL it waits for the device.

    Raises ShardingError for another ``until``; StateError, on all ranks, for ranks without any batch with
    "last".
    """
    if until not in ("first", "last"):
        raise ShardingError(f"join: until is {until!r}. Pass 'first' or 'last'.")
    return JoinedBatches(batches, until_last=until == "last", group=group)


def _everyones(has: bool, number: int, group: dist.ProcessGroup | None) -> dict[int, bool]:
    """Return which ranks, by their numbers in the job, have another batch.

    number: of the iteration. Raises StateError, on all ranks, if they are in different ones.
    """
    place = place_in_job(group)
    if place.size == 1:
        return {place_in_job().rank: has}
    ranks = dist.get_process_group_ranks(group)
    told = torch.zeros(len(ranks), dtype=torch.int64, device=any_device(group))
    told[place.rank] = 2 * number + has
    run_collective(dist.all_reduce, told, group=group, label=_LABEL)
    by_rank = dict(zip(ranks, told.tolist(), strict=True))
    numbers = {rank: value // 2 for rank, value in by_rank.items()}
    if len({*numbers.values()}) > 1:
        known = group or dist.group.WORLD
        assert known is not None
        _counts[known] = max(numbers.values())  # a program that goes on begins together again
        said = ", ".join(f"rank {rank}: {number}" for rank, number in numbers.items())
        raise StateError(
            f"join: ranks are in different loops, by their numbers: {said}. One has left an earlier loop before "
            "its end, with break or an exception. Let every rank take every batch of a loop, and decide together "
            "when to leave it."
        )
    return {rank: bool(value % 2) for rank, value in by_rank.items()}
