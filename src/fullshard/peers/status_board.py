"""Where ranks post what they do, for others to read without any help of theirs.

Whoever reads a status does not know how it travelled. There are three ways:

    slots in shared memory  ranks of one host; can be read even after a rank has ended
    the store               that all ranks met in: statuses of ranks that share no memory, who is lost, roll calls, and
                            lines that ranks show each other
    connections             of ranks of several hosts: nothing is sent, but they break when a process ends

[Note: Torn statuses] A reader may come while the owner writes. So a slot begins with the length and a
checksum of its text, written last; what does not fit them is no status, and is read again later.
The word after them only ever goes from 0 to the global number of a lost rank, plus one.
"""

import contextlib
import json
import threading
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Sequence

from fullshard.errors import CommError
from fullshard.peers.connections import Connections
from fullshard.peers.flight_record import Fence
from fullshard.peers.status import RankStatus
from fullshard.peers.store import StoreInTime, connected_store, store_in_time

NBYTES = 8192  # of a rank's slot
_HEAD_NBYTES = 16  # length and checksum of the text; for which lost rank this one has given up
_FEW_RANKS = 16
_ANSWER_S = 5.0  # of the store
_KEY = "fullshard/status/{}/{}"  # epoch, rank
_LINES = "fullshard/lines"
_EPOCHS = "fullshard/epochs/{}"
_LOST = "fullshard/lost/{}"  # there if a rank is, under whose number there is another key
_ROLL = "fullshard/roll/{}"  # counts roll calls of an epoch
_ROLL_EVERY_S = 1.0  # at which a rank that has others on other hosts looks whether it is asked for
_ROLL_CALL_S = 2.5  # for ranks to say that they are there, after a connection broke


class StatusSlots:
    """The slots of the ranks of a group that share memory.

    ranks: their global numbers. memory: `NBYTES` per rank, zeroed.
    """

    def __init__(self, rank: int, ranks: Sequence[int], memory: memoryview, fence: Fence) -> None:
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
    """Everything that this rank can post to and read from, by global ranks. world_size: number of ranks."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._lock = threading.Lock()  # the watchdog posts, and so does the program's end
        self._is_over = False
        self._owed: bytes | None = None  # to the store, which did not answer
        # Made now: to a store that has gone, connecting would be tried for as long as ranks may take to meet.
        self._store: StoreInTime | None = None
        self._is_store_gone = False
        with contextlib.suppress(Exception):
            self._store = connected_store(_ANSWER_S)
        # Of a store that an earlier default group has used, ranks must not read what they said then.
        # All ranks count alike.
        self._epoch = 0
        with contextlib.suppress(Exception):
            self._epoch = int(store_in_time(_ANSWER_S).add(_EPOCHS.format(rank), 1))
        self.has_other_hosts = False  # whether some rank met here shares no memory with this one
        self._connections = Connections(rank, self)
        self._untold: set[int] = set()  # ranks of which all are to know that they have ended
        self._answered = 0  # the last roll call that this rank has answered
        self._answered_at = 0.0

    def serve_other_hosts(self) -> None:
        """Let ranks that share no memory with this one reach it."""
        self.has_other_hosts = True
        self._connections.open()

    def meet(self, ranks: Sequence[int]) -> None:
        """Connect the ranks of a group, all of which serve each other. Every rank of the group must call it."""
        self._connections.meet(ranks)

    def keep_up(self) -> None:
        """Do what others wait for: answer roll calls, tell who has ended, send what the store did not take.

        To be called often, by one thread.
        """
        now = time.monotonic()
        if self.has_other_hosts and now - self._answered_at > _ROLL_EVERY_S:
            self._answered_at = now
            self._answer_roll()
        self._untold |= self._connections.ended()
        for rank in list(self._untold):
            if self.last_words(rank) is not None or self._post_lost(rank):
                self._untold.discard(rank)
        with self._lock:
            self._send_owed()

    def close(self) -> None:
        """Post nothing more, and close connections, as the end of the process would."""
        self._is_over = True
        self._connections.close()

    # What ranks say of themselves

    def post(self, status: RankStatus, *, to_store: bool = True, is_last: bool = False) -> None:
        """Show this rank's status to all ranks that can see it; after the last one, none any more."""
        text = status.to_text(NBYTES - _HEAD_NBYTES)
        with self._lock:
            if self._is_over:
                return
            self._is_over = is_last
            for slots in list(_slots):
                slots.post(text)
            if to_store and self.needs_store:
                self._owed = text
                self._send_owed()

    def read(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the statuses of these ranks, of those that have posted one."""
        asked = set(ranks)
        texts: dict[int, bytes] = {}
        for slots in list(_slots):
            for rank in asked & set(slots.ranks):
                if (text := slots.read(rank)) is not None:
                    texts[rank] = text
        missing = sorted(asked - set(texts))
        if missing and self.needs_store:
            with contextlib.suppress(Exception):
                texts |= self._read_store(missing)
        return {rank: RankStatus.from_text(texts[rank]) for rank in sorted(texts)}

    def last_words(self, rank: int) -> RankStatus | None:
        """Return what a rank that has left or ended has said last; None if it has said nothing."""
        status = self.read([rank]).get(rank)
        return status if status is not None and status.has_gone else None

    # What the system says of ranks, and they of each other

    @property
    def needs_store(self) -> bool:
        # Where some rank shares no memory with this one.
        return len({rank for slots in _slots for rank in slots.ranks}) < self._world_size

    @property
    def unreached(self) -> frozenset[int]:
        """Ranks that do not answer this one over their own connection, though they may live."""
        return self._connections.unreached

    def lost(self, ranks: Collection[int]) -> set[int]:
        """Return those of ``ranks`` that share no memory with some rank, and have ended without a word."""
        if self.has_other_hosts or self.needs_store:
            with contextlib.suppress(Exception):
                key = _LOST.format(self._epoch)
                if self._connected().check([key]):
                    return {rank for rank in ranks if self._connected().check([f"{key}/{rank}"])}
        return set()

    def missing(self, ranks: Collection[int]) -> set[int] | None:
        """Return those of these ranks whose watchdogs do not answer; None if the store does not answer either.

        Empty where all ranks are of one host: they are not asked.
        """
        if not self.has_other_hosts:
            return set()
        with contextlib.suppress(Exception):
            number = int(self._connected().add(_ROLL.format(self._epoch), 1))
            answered = self.read_lines(f"roll/{number}", ranks, _ROLL_CALL_S)
            self._connected().check([_LINES])
            return set(ranks) - set(answered)
        return None

    # Lines under a key, for whoever asks

    def post_lines(self, key: str, lines: Sequence[str]) -> None:
        """Show lines of this rank to whoever asks for the key."""
        with contextlib.suppress(Exception):
            self._connected().set(self._lines_key(key, self._rank), json.dumps(list(lines)))

    def read_lines(
        self, key: str, ranks: Collection[int], timeout_s: float
    ) -> dict[int, Sequence[str]]:
        """Return what these ranks show under the key, waiting for it so long."""
        found: dict[int, Sequence[str]] = {}
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):
            while len(found) < len(ranks) and time.monotonic() < deadline:
                for rank in set(ranks) - set(found):
                    if self._connected().check([self._lines_key(key, rank)]):
                        found[rank] = json.loads(self._connected().get(self._lines_key(key, rank)))
                time.sleep(0.02)
        return found

    # The store

    def _lines_key(self, key: str, rank: int) -> str:
        return f"{_LINES}/{self._epoch}/{key}/{rank}"

    def _connected(self) -> StoreInTime:
        if self._store is None or self._is_store_gone:
            raise CommError(
                "The store that the ranks met in has gone, or takes no second connection."
            )
        return self._store

    def _send_owed(self) -> None:
        if self._store is None or self._is_store_gone:  # it may have died with its rank
            self._owed = None
        elif self._owed is not None:
            with contextlib.suppress(Exception):
                self._store.set(_KEY.format(self._epoch, self._rank), self._owed)
                self._owed = None

    def _read_store(self, ranks: Sequence[int]) -> dict[int, bytes]:
        store = self._connected()
        # One question for all if there are many: of a thousand ranks, each may ask.
        if not store.check([_KEY.format(self._epoch, rank) for rank in ranks]):
            if len(ranks) > _FEW_RANKS:
                return {}
            ranks = [rank for rank in ranks if store.check([_KEY.format(self._epoch, rank)])]
        keys = [_KEY.format(self._epoch, rank) for rank in ranks]
        return dict(zip(ranks, store.multi_get(keys), strict=True)) if keys else {}

    def _post_lost(self, rank: int) -> bool:
        """Tell all ranks that one has ended without a word. Returns whether the store knows it now."""
        with contextlib.suppress(Exception):
            self._connected().set(f"{_LOST.format(self._epoch)}/{rank}", "")
            self._connected().set(_LOST.format(self._epoch), "")
            return True
        return False

    def _answer_roll(self) -> None:
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
            self.post_lines(f"roll/{number}", [])
        self._answered = asked
