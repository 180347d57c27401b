"""Where ranks post what they do, for others to read without any help of theirs.

Ranks of one host have a slot each in memory that they share; it can be read even after the rank has
ended. For others there is the store that the ranks met in. Both carry a `RankStatus` as JSON.

[Note: Torn statuses] A reader may come while the owner writes. So a slot begins with the length and a
checksum of its text, written last; what does not fit them is no status, and is read again later.
The word after them only ever goes from 0 to the global number of a lost rank, plus one.
"""

import contextlib
import dataclasses
import json
import os
import socket
import time
import weakref
import zlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch.distributed as dist

from fullshard.errors import CommError
from fullshard.host import read_addresses
from fullshard.peers.standstill import GroupCounts, RankStatus, State
from fullshard.peers.store import StoreInTime, connected_store, store_in_time
from fullshard.torch_private import default_store

NBYTES = 8192  # of a rank's slot
_HEAD_NBYTES = 16  # length and checksum of the text; for which lost rank this one has given up
_FEW_RANKS = 16
_ANSWER_S = 5.0  # of the store
_KEY = "fullshard/status/{}/{}"  # epoch, rank
_LINES = "fullshard/lines"
_EPOCHS = "fullshard/epochs/{}"
_LOST = "fullshard/lost/{}"  # there if a rank is, under whose number there is another key
_ROLL = "fullshard/roll/{}"  # counts roll calls of an epoch


class StatusSlots:
    """The slots of the ranks of a group that share memory.

    ranks: their global numbers. memory: `NBYTES` per rank, zeroed. fence: orders what this thread writes and reads around it.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], memory: memoryview, fence: Callable[[], None]
    ) -> None:
        self.ranks = tuple(ranks)
        self._rank = rank
        self._memory = memory.cast("B")
        self._heads = self._memory.cast("q")
        self._fence = fence
        _slots.add(self)

    def post(self, text: bytes) -> None:
        """Show a text in this rank's slot."""
        start = self._rank * NBYTES
        self._heads[start // 8] = 0
        self._memory[start + _HEAD_NBYTES : start + _HEAD_NBYTES + len(text)] = text
        self._heads[start // 8] = len(text) << 32 | zlib.crc32(text)

    def read(self, rank: int) -> bytes | None:
        """Return what a rank of the group, by its global number, shows; None if it is nothing."""
        start = self.ranks.index(rank) * NBYTES
        head = self._heads[start // 8]
        length = head >> 32
        if not 0 < length <= NBYTES - _HEAD_NBYTES:
            return None
        text = bytes(self._memory[start + _HEAD_NBYTES : start + _HEAD_NBYTES + length])
        return text if zlib.crc32(text) == head & ((1 << 32) - 1) else None

    def give_up(self, lost_rank: int) -> None:
        """Show that this rank will not come where others wait for it, as a rank was lost, by its global number."""
        self._fence()  # after all that it has done until then
        self._heads[self._rank * NBYTES // 8 + 1] = lost_rank + 1

    def gave_up(self, part: int) -> int | None:
        """Return because of which lost rank a rank of the group gave up; None if it has not."""
        lost = self._heads[part * NBYTES // 8 + 1]
        return lost - 1 if lost else None


_slots: "weakref.WeakSet[StatusSlots]" = weakref.WeakSet()


def give_up(lost_rank: int) -> None:
    """Tell ranks of this host that may wait for this process that it will not come, as a rank was lost."""
    for slots in list(_slots):
        slots.give_up(lost_rank)


class StatusBoard:
    """Everything that this rank can post to and read from. world_size: number of ranks."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        # Made now: to a store that has gone, connecting would be tried for as long as ranks may take to meet.
        self._store: StoreInTime | None = None
        self._is_store_gone = False
        with contextlib.suppress(Exception):
            self._store = connected_store(_ANSWER_S)
        self._answered = 0  # the last roll call that this rank has answered
        # Of a store that an earlier default group has used, ranks must not read what they said then.
        # All ranks count alike.
        self._epoch = 0
        with contextlib.suppress(Exception):
            self._epoch = int(store_in_time(_ANSWER_S).add(_EPOCHS.format(dist.get_rank()), 1))

    @property
    def needs_store(self) -> bool:
        """Whether some rank shares no memory with this one."""
        return len({rank for slots in _slots for rank in slots.ranks}) < self._world_size

    @property
    def is_reachable(self) -> bool:
        """Whether the store answers."""
        with contextlib.suppress(Exception):
            self._connected().check([_LINES])
            return True
        return False

    def post(self, status: RankStatus, *, to_store: bool = True) -> bool:
        """Show this rank's status to all ranks that can see it. Returns whether all can that should."""
        text = _encoded(status)
        for slots in list(_slots):
            slots.post(text)
        if to_store and self.needs_store:
            with contextlib.suppress(Exception):  # it may have died with its rank
                self._connected().set(_KEY.format(self._epoch, status.rank), text)
                return True
            return self._store is None or self._is_store_gone
        return True

    def read(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        """Return the statuses of these ranks, of those that have posted one."""
        texts: dict[int, bytes] = {}
        for slots in list(_slots):
            for rank in set(ranks) & set(slots.ranks):
                text = slots.read(rank)
                if text is not None:
                    texts[rank] = text
        missing = [rank for rank in ranks if rank not in texts]
        if missing and self.needs_store:
            with contextlib.suppress(Exception):
                texts.update(self._read_store(missing))
        return {rank: _decoded(text) for rank, text in texts.items()}

    def _read_store(self, ranks: Sequence[int]) -> dict[int, bytes]:
        store = self._connected()
        # One question for all if there are many: of a thousand ranks, each may ask.
        if not store.check([_KEY.format(self._epoch, rank) for rank in ranks]):
            if len(ranks) > _FEW_RANKS:
                return {}
            ranks = [rank for rank in ranks if store.check([_KEY.format(self._epoch, rank)])]
        keys = [_KEY.format(self._epoch, rank) for rank in ranks]
        return dict(zip(ranks, store.multi_get(keys), strict=True)) if keys else {}

    def post_lines(self, key: str, rank: int, lines: Sequence[str]) -> None:
        """Show lines of this rank to whoever asks for the key."""
        with contextlib.suppress(Exception):
            self._connected().set(f"{_LINES}/{self._epoch}/{key}/{rank}", json.dumps(list(lines)))

    def read_lines(
        self, key: str, ranks: Collection[int], timeout_s: float
    ) -> dict[int, Sequence[str]]:
        """Return what these ranks show under the key, waiting for it so long."""
        found: dict[int, Sequence[str]] = {}
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):
            while len(found) < len(ranks) and time.monotonic() < deadline:
                for rank in set(ranks) - set(found):
                    if self._connected().check([f"{_LINES}/{self._epoch}/{key}/{rank}"]):
                        found[rank] = json.loads(
                            self._connected().get(f"{_LINES}/{self._epoch}/{key}/{rank}")
                        )
                time.sleep(0.02)
        return found

    def own_addresses(self) -> list[str]:
        """Return addresses of this host by which others reach it, the likeliest first.

        That of the interface that Gloo is told to take, that by which this host reaches the store's, what its name
        stands for, which is where Gloo listens otherwise, and as Gloo's the loopback.
        """
        chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
        interfaces = read_addresses() if any(chosen) else {}
        found = [interfaces[name] for name in chosen if name in interfaces]
        with contextlib.suppress(OSError, AttributeError):  # of stores without a host
            store: Any = default_store()
            while (inner := getattr(store, "underlying_store", None)) is not None:
                store = inner
            kind = socket.SOCK_DGRAM
            family, _, _, _, address = socket.getaddrinfo(store.host, store.port, type=kind)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # chooses a route, and sends nothing
                found.append(str(probe.getsockname()[0]))
        with contextlib.suppress(OSError):
            named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
            found += [str(address[0]) for *_, address in named]
        return [*dict.fromkeys(found), "127.0.0.1"]

    def post_lost(self, rank: int) -> bool:
        """Tell all ranks that one has ended without a word. Returns whether the store knows it now."""
        with contextlib.suppress(Exception):
            self._connected().set(f"{_LOST.format(self._epoch)}/{rank}", "")
            self._connected().set(_LOST.format(self._epoch), "")
            return True
        return False

    def lost(self, ranks: Collection[int]) -> set[int]:
        """Return those of ``ranks`` of which a rank has said that they ended without a word."""
        with contextlib.suppress(Exception):
            key = _LOST.format(self._epoch)
            if self._connected().check([key]):
                return {rank for rank in ranks if self._connected().check([f"{key}/{rank}"])}
        return set()

    def call_roll(self, ranks: Collection[int], timeout_s: float) -> set[int]:
        """Return those of ``ranks`` whose watchdogs do not answer in time."""
        number = int(self._connected().add(_ROLL.format(self._epoch), 1))
        return set(ranks) - set(self.read_lines(f"roll/{number}", ranks, timeout_s))

    def answer_roll(self, rank: int) -> None:
        """Say that this rank is there, to all who have asked since the last time."""
        if self._store is None or self._is_store_gone:
            return
        try:
            asked = int(self._store.add(_ROLL.format(self._epoch), 0))
        except CommError:  # no answer now, as while a link is down
            return
        except Exception:
            # torch prints a warning for each time that it is asked. Kept all the same: a store in a file that
            # is dropped while no file can be opened ends the process.
            self._is_store_gone = True
            return
        for number in range(self._answered + 1, asked + 1):
            self.post_lines(f"roll/{number}", rank, [])
        self._answered = asked

    def _connected(self) -> StoreInTime:
        if self._store is None or self._is_store_gone:
            raise CommError(
                "The store that the ranks met in has gone, or takes no second connection."
            )
        return self._store


def _encoded(status: RankStatus) -> bytes:
    fields = dataclasses.asdict(status)
    stack = list(fields["stack"])
    while len(text := json.dumps(fields, default=list).encode()) > NBYTES - _HEAD_NBYTES:
        if stack:
            stack = stack[len(stack) // 2 + 1 :]
            fields["stack"] = stack
        else:
            fields["error"], fields["groups"], fields["tails"] = fields["error"][:2000], {}, {}
    return text


def _decoded(text: bytes) -> RankStatus:
    fields = json.loads(text)
    fields["state"] = State(fields["state"])
    fields["groups"] = {key: GroupCounts(**counts) for key, counts in fields["groups"].items()}
    for name in ("stack", "waited", "on_device", "unreached"):
        fields[name] = tuple(fields[name])
    return RankStatus(**fields)
