"""`join`: ranks with different numbers of batches end an epoch together."""

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist

from fullshard.comm.backends import any_device
from fullshard.comm.outside_steps import run_collective
from fullshard.errors import ShardingError, StateError

logger = logging.getLogger("fullshard")

T = TypeVar("T")

_LABEL = "asking which ranks have another batch"


class JoinedBatches(Generic[T]):
    """An iterator over this rank's batches that ends on all ranks after the same number. See `join`.

    weight: 1.0 while the last batch that came was this rank's own, 0.0 where it was repeated.
    """

    def __init__(
        self, batches: Iterable[T], *, until_last: bool, group: dist.ProcessGroup | None
    ) -> None:
        self.weight = 1.0
        self._own = iter(batches)
        self._until_last = until_last
        self._group = group
        self._num_taken = 0
        self._is_over = False
        self._last: list[T] = []  # this rank's last batch, once it has had one

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        own = list(itertools.islice(self._own, 1)) if self.weight else []
        have = _everyones(bool(own), self._group)
        without = [rank for rank, has in have.items() if not has]
        if without and (len(without) == len(have) or not self._until_last):
            self._end(without, have)
            raise StopIteration
        if without and not self._num_taken:
            self._is_over = True
            raise StateError(
                f"join: ranks {without} have no batch at all, so none that they could repeat until the last "
                "rank is done. Give every rank a batch, or end with the first: until='first'."
            )
        self._num_taken += 1
        self.weight = float(bool(own))
        self._last = own or self._last
        return self._last[0]

    def _end(self, without: list[int], have: dict[int, bool]) -> None:
        self._is_over = True
        self._last = []
        if len(without) < len(have):
            logger.info(
                "join: an epoch ended on all ranks after %d batches, since ranks %s had no more.",
                self._num_taken,
                without,
            )


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


def _everyones(has: bool, group: dist.ProcessGroup | None) -> dict[int, bool]:
    """Return which ranks, by their numbers in the job, have another batch."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return {dist.get_rank() if dist.is_initialized() else 0: has}
    ranks = dist.get_process_group_ranks(group)
    have = torch.zeros(len(ranks), dtype=torch.int32, device=any_device(group))
    have[dist.get_rank(group)] = has
    run_collective(dist.all_reduce, have, group=group, label=_LABEL)
    return dict(zip(ranks, map(bool, have.tolist()), strict=True))
