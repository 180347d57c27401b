"""Memory that a rank keeps from one collective to the next, as a plan follows it.

Each method returns by how many bytes the rank's memory grows or shrinks. The engine's `comm.packing` does the same
with memory: it takes what is free, and keeps what is given back.
"""

import bisect
import collections
import mmap
from typing import NamedTuple

from fullshard.plan.layout import round_up
from fullshard.plan.ways import (
    LINE,
    POOLED_NBYTES,
    Region,
    RingStretch,
    choose_block,
    place_stretch,
)


class ScratchLedger:
    """Sizes of the free blocks of `comm.packing.Scratch`: see there. keeps: False where blocks go back at once."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._free: list[int] = []  # smallest first

    def take(self, nbytes: int) -> tuple[int, int]:
        """Return the size of the block that serves, and by how much memory grows."""
        if not self._keeps:
            return nbytes, nbytes
        place = choose_block(self._free, nbytes)
        if place is not None:
            return self._free.pop(place), 0
        # None is large enough. The largest is freed, since the new one serves its uses too.
        freed = self._free.pop() if self._free else 0
        return nbytes, nbytes - freed

    def give(self, block: int) -> int:
        """Take a block back; return by how much memory grows."""
        if not self._keeps:
            return -block
        bisect.insort(self._free, block)
        return 0


class RegionLedger:
    """Free regions of `comm.packing.Regions`, of all lanes."""

    def __init__(self) -> None:
        self._free: collections.Counter[tuple[str, Region]] = collections.Counter()

    def take(self, lane: str, region: Region) -> int:
        """Return by how much memory grows."""
        if self._free[lane, region]:
            self._free[lane, region] -= 1
            return 0
        return region.nbytes

    def give(self, lane: str, region: Region) -> int:
        """Take a region back; return by how much memory grows."""
        if region.nbytes <= POOLED_NBYTES:
            self._free[lane, region] += 1
            return 0
        return -region.nbytes


class Claim(NamedTuple):
    """A stretch of a ring that a reduction takes.

    sequence: its number. first: the latest reduction whose sum has to be formed before. grown: by how much memory grows.
    """

    sequence: int
    first: int
    grown: int


class RingLedger:
    """Stretches of a `comm.ring`. nbytes: of each rank's part. begin: where the next stretch begins if it fits."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.begin = 0
        self._sequence = 0
        self._taken: collections.deque[RingStretch] = collections.deque()

    def claim(self, nbytes: int) -> Claim:
        """Take the next stretch."""
        nbytes, before, first = round_up(nbytes, LINE), self.nbytes, 0
        if (
            nbytes > before
        ):  # new memory replaces the old one, so nobody may have anything to read in it
            self.nbytes, self.begin = round_up(nbytes, mmap.PAGESIZE), 0
            first = self._sequence
        start, overwritten = place_stretch(nbytes, self.begin, self.nbytes, self._taken)
        first = max(first, overwritten)
        while self._taken and self._taken[0].sequence <= first:
            self._taken.popleft()
        self._sequence += 1
        self.begin = start + nbytes
        self._taken.append(RingStretch(self._sequence, start, self.begin))
        return Claim(self._sequence, first, self.nbytes - before)
