"""What was done to every byte of memory, and whether events order it.

Four rules:

    race    two operations touch one byte, at least one writes it, and neither is over before the
            other begins
    reuse   memory that nobody refers to any more goes back to its home, the lane that was current
            when it was allocated; the caching allocator gives it to the next allocation there. By
            then all that other lanes do to it has to be over, as far as the home lane knows. (With
            `record_stream` the allocator itself would ask, and the engine does without.)
    born    memory that one lane allocates may be what that lane has freed, and still uses as that: another
            lane may touch it only after all that its home was given before
    keep    memory of a collective that runs on its group's lane is kept until the home lane has
            waited for it, whether or not anything is allocated meanwhile
"""

from __future__ import annotations

import bisect
import enum
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fullshard.torch_private import swap_memory
from tests.streams.lanes import HOST, GroupLane, Lanes, Moment

if TYPE_CHECKING:
    from tests.streams.capturing import Capture

# A tensor of more pieces than this counts with all between its first and its last byte.
_MAX_PIECES = 512


class Place(enum.Enum):
    """Where memory is. PINNED: on the host, where the device copies without the host's help."""

    DEVICE = enum.auto()
    HOST = enum.auto()
    PINNED = enum.auto()


class Access(NamedTuple):
    """One operation's use of a range of addresses. what: its name, for reports."""

    start: int
    stop: int
    lane: Hashable
    number: int
    writes: bool
    what: str

    def __str__(self) -> str:
        return f"{name_of(self.lane)} {'writes' if self.writes else 'reads'} ({self.what})"


class Block:
    """Memory from its allocation until it is freed. home: the lane that it goes back to."""

    def __init__(self, storage: torch.UntypedStorage, home: Hashable, place: Place) -> None:
        self.start = storage.data_ptr()
        self.stop = self.start + storage.nbytes()
        self.home = home
        self.place = place
        self.accesses: list[Access] = []
        self.born = 0  # operations of its home until it was allocated
        self.graphs: dict[Capture, None] = {}  # that use it, and did not allocate it


class Memory:
    """All blocks, what was done to them, and the place of every storage.

    report: called with what is wrong.
    """

    def __init__(self, lanes: Lanes, report: Callable[[str], None]) -> None:
        self._lanes = lanes
        self._report = report
        self._blocks: dict[int, Block] = {}  # by address
        self._starts: list[int] = []  # the addresses, ascending
        # By home, until it allocates again; the memory of a graph is given to nobody else.
        self._freed: dict[Hashable, list[Block]] = {}
        # By address, memory that was allocated in captures, and is kept by them.
        self._pools: weakref.WeakValueDictionary[int, Capture] = weakref.WeakValueDictionary()
        # By the address of the storage object, which stays the same when it is resized.
        self._of_storage: dict[int, tuple[weakref.ref[torch.UntypedStorage], Place, int]] = {}

    # Where memory is

    def place_of(self, storage: torch.UntypedStorage) -> Place:
        """Return where a storage is: on the host, unless it was allocated elsewhere."""
        known = self._of_storage.get(storage._cdata)
        if known is not None:
            return known[1]
        block = self._find(storage.data_ptr(), or_end=not storage.nbytes())
        return Place.HOST if block is None else block.place

    def _find(self, address: int, *, or_end: bool = False) -> Block | None:
        """Return the block of an address. or_end: it may lie right behind, if nothing begins there."""
        position = bisect.bisect_right(self._starts, address) - 1
        if position < 0:
            return None
        block = self._blocks[self._starts[position]]
        return block if address < block.stop + or_end else None

    @property
    def nbytes_on_device(self) -> int:
        """Return the bytes that somebody refers to."""
        return sum(
            block.stop - block.start
            for block in self._blocks.values()
            if block.place is Place.DEVICE
        )

    def is_known(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage, or the one that it is a part of, was allocated while this looked."""
        return storage._cdata in self._of_storage or self._find(storage.data_ptr()) is not None

    def blocks_of(self, tensors: Sequence[Tensor]) -> list[Block]:
        """Return the blocks that tensors' elements are in."""
        found = (self._find(tensor.data_ptr()) for tensor in tensors if tensor.numel())
        return [block for block in found if block is not None]

    def is_there(self, block: Block) -> bool:
        """Whether a block was not freed."""
        return self._blocks.get(block.start) is block

    def is_allocated(self, address: int) -> bool:
        """Whether a block begins there."""
        return address in self._blocks

    # Life of memory

    def allocate(self, storage: torch.UntypedStorage, place: Place, what: str) -> None:
        """Take note of new memory, which belongs to the current lane."""
        start = storage.data_ptr() if storage.nbytes() else 0
        self._know(storage, place, start)
        if not start:
            return
        home = self._lanes.current if place is Place.DEVICE else HOST
        if place is Place.DEVICE:
            if self._lanes.capture is None:
                self._check_reuse(home, what)
            else:
                self._lanes.capture.check_lane(home, f"an allocation ({what})")
                self._lanes.capture.keep(storage)
                self._pools[start] = self._lanes.capture
        if start not in self._blocks:
            bisect.insort(self._starts, start)
        block = self._blocks[start] = Block(storage, home, place)
        if place is Place.DEVICE:
            block.born = self._lanes.clock(home).get(home, 0)

    def resize(self, storage: torch.UntypedStorage, resize: Callable[[], object]) -> None:
        """Resize a storage: what it had is freed, and what it gets is of the current lane."""
        place, start = self.place_of(storage), storage.data_ptr()
        self.free(start)
        if start in self._pools:  # stays where it is, with the graph
            swap_memory(torch.UntypedStorage(0), storage)
        resize()
        self.allocate(storage, place, "resize_")

    def swap(self, storage: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
        """Take note that two storages exchange their memory, each block with its home."""
        places = [self._of_storage.get(each._cdata) for each in (storage, other)]
        for each, known in zip((other, storage), places, strict=True):
            self._know(each, *(known[1:] if known else (Place.DEVICE, 0)))

    def free(self, start: int) -> None:
        """Take note that nobody refers to memory any more."""
        block = self._blocks.pop(start, None)
        if block is None:
            return
        del self._starts[bisect.bisect_left(self._starts, start)]
        for graph in block.graphs:
            graph.note_freed(block)
        for access in block.accesses:
            if isinstance(access.lane, GroupLane) and not self._is_over(access, block.home):
                self._report(f"keep: {name_of(block.home)} is given memory back while {access}")
        if block.place is Place.DEVICE and block.accesses and start not in self._pools:
            self._freed.setdefault(block.home, []).append(block)

    def _know(self, storage: torch.UntypedStorage, place: Place, start: int) -> None:
        address = storage._cdata
        if address in self._of_storage:
            reference = self._of_storage[address][0]
        else:
            reference = weakref.ref(storage, lambda _: self._end(address))
        self._of_storage[address] = reference, place, start

    def _end(self, address: int) -> None:
        self.free(self._of_storage.pop(address)[2])

    def _check_reuse(self, home: Hashable, what: str) -> None:
        """Report what other lanes may still do to memory that an allocation may be given."""
        freed = self._freed.pop(home, None)
        if freed is None:
            return
        for access in itertools.chain.from_iterable(block.accesses for block in freed):
            if not self._is_over(access, home):
                self._report(
                    f"reuse: {name_of(home)} allocates ({what}) what it was given back while {access}"
                )

    def _is_over(self, access: Access, lane: Hashable) -> bool:
        """Whether an operation is over before the next one of a lane begins."""
        return access.lane == lane or self._lanes.clock(lane).get(access.lane, 0) >= access.number

    # Use of memory

    def use(self, tensor: Tensor, moment: Moment, *, writes: bool, what: str) -> None:
        """Take note of one operation on a tensor's memory, and report what it races with."""
        for start, stop in pieces(tensor):
            self.use_range(start, stop, moment, writes=writes, what=what)

    def use_range(self, start: int, stop: int, moment: Moment, *, writes: bool, what: str) -> None:
        """Take note of one operation on a range of addresses, and report what it races with."""
        block = self._find(start)
        if block is None:
            return
        access = Access(start, stop, moment.lane, moment.number, writes, what)
        if moment.lane != block.home and not moment.follows(block.home, block.born):
            self._report(
                f"born: {access} in memory that {name_of(block.home)} may still use as what it was before"
            )
        kept = []
        for old in block.accesses:
            if old.stop <= start or stop <= old.start:
                kept.append(old)
                continue
            is_over = old.lane == moment.lane or moment.follows(old.lane, old.number)
            if not is_over and (writes or old.writes):
                self._report(f"race: {access} while {old}")
            # What follows this one follows the other as well, and would race with it no less.
            is_within = start <= old.start and old.stop <= stop
            if not (is_over and is_within and (writes or not old.writes)):
                kept.append(old)
        kept.append(access)
        block.accesses = kept


def pieces(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield the ranges of addresses that a tensor's elements occupy, next ones joined.

    A (3, 2) view with strides (4, 1) of float32 has three pieces of 8 bytes, 16 bytes apart.
    """
    if tensor.numel() == 0:
        return
    itemsize = tensor.element_size()
    dims = sorted(
        (stride, size)
        for size, stride in zip(tensor.size(), tensor.stride(), strict=True)
        if size > 1 and stride > 0
    )
    run = 1  # elements that lie next to each other
    while dims and dims[0][0] <= run:
        stride, size = dims.pop(0)
        run += stride * (size - 1)
    base = tensor.data_ptr()
    if torch.Size([size for _, size in dims]).numel() > _MAX_PIECES:
        run += sum(stride * (size - 1) for stride, size in dims)
        dims = []
    steps: Sequence[Sequence[int]] = [range(0, stride * size, stride) for stride, size in dims]
    for offsets in itertools.product(*steps):
        start = base + sum(offsets) * itemsize
        yield start, start + run * itemsize


def name_of(lane: Hashable) -> str:
    """Return a lane's name for reports."""
    return lane.name if isinstance(lane, enum.Enum) else str(lane)
