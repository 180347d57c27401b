"""Where ranks post what they do, for others to read without any help of theirs.

Whoever reads a status does not know how it travelled. There are three ways:

    slots in shared memory  ranks of one host; can be read even after a rank has ended
    the store               that all ranks met in: statuses of ranks that share no memory, who is lost, roll calls, and
                            what ranks show each other
    connections             of ranks of several hosts: nothing is sent, but they break when a process ends

[Note: Torn statuses] A reader may come while the owner writes. So a slot begins with the length and a
checksum of what is in it, written last; what does not fit them is no status, and is read again later.
"""

import contextlib
import os
import pickle
import select
import threading
import time
import weakref
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import fullshard.host as host  # noqa: PLR0402  (`from fullshard` would ask for a public name)
from fullshard.errors import CommError
from fullshard.peers.connections import Connections
from fullshard.peers.status import RankStatus
from fullshard.peers.store import StoreInTime, connected_store, store_in_time

PROCESS_KEY = "fullshard/process/{}"  # in the store, by rank: its host and process
NBYTES = 8192  # of a rank's slot
_HEAD_NBYTES = 8  # length and checksum of what follows
_FEW_RANKS = 16
_FIND_S = 1.0  # for a rank to have said where it can be reached
_CLOSE_S = 1.0  # for another thread to see that its wait is over
_ROLL_EVERY_S = 1.0  # at which a rank that has others on other hosts looks whether it is asked for
_ROLL_CALL_S = 2.5  # for ranks to say that they are there, after a connection broke


class StatusSlots:
    """The slots of the ranks of a group that share memory.

    ranks: their global numbers. memory: `NBYTES` per rank, zeroed.
    """

    def __init__(self, rank: int, ranks: Sequence[int], memory: memoryview) -> None:
        self.ranks = tuple(ranks)
        self._rank = rank
        self._memory = memory.cast("B")
        self._heads = self._memory.cast("q")
        _slots.add(self)

    def post(self, data: bytes) -> None:
        """Show a status in this rank's slot."""
        start = self._rank * NBYTES
        self._heads[start // 8] = 0
        self._memory[start + _HEAD_NBYTES : start + _HEAD_NBYTES + len(data)] = data
        self._heads[start // 8] = len(data) << 32 | zlib.crc32(data)

    def read(self, rank: int) -> RankStatus | None:
        """Return what a rank of the group, by its global number, shows; None if it is nothing."""
        start = self.ranks.index(rank) * NBYTES
        head = self._heads[start // 8]
        data = bytes(self._memory[start + _HEAD_NBYTES :][: head >> 32])
        if not data or zlib.crc32(data) != head & ((1 << 32) - 1):
            return None
        status: RankStatus = pickle.loads(data)
        return status


_slots: "weakref.WeakSet[StatusSlots]" = weakref.WeakSet()


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
            self._store = connected_store()
        # Of a store that an earlier default group has used, ranks must not read what they said then.
        # All ranks count alike.
        self._epoch = 0
        with contextlib.suppress(Exception):
            self._epoch = int(store_in_time().add(f"fullshard/epochs/{rank}", 1))
        self.has_other_hosts = False  # whether some rank met here shares no memory with this one
        self.connections = Connections(
            rank, lambda other: self.shown("door", [other], _FIND_S)[other]
        )
        self._processes: dict[int, int | None] = {}  # by rank; None of those of other hosts
        self._exit_codes: dict[int, int] = {}  # by rank, of those that have ended
        self._exits: dict[int, int] = {}  # by rank, files that can be read once it has ended
        self._wakes: int | None = None  # a file that ends a wait for these,
        self._woken = threading.Event()  # and what does so without one
        self._waiting = (
            threading.Lock()
        )  # while it is waited for: a number that is closed may be another file's at once
        with contextlib.suppress(AttributeError, OSError):  # not on Linux, or too few files
            self._wakes = os.eventfd(0)
        self._untold: set[int] = set()  # ranks of which all are to know that they have ended
        self._answered = 0  # the last roll call that this rank has answered
        self._answered_at = 0.0

    def serve_other_hosts(self) -> None:
        """Let ranks that share no memory with this one reach it."""
        self.has_other_hosts = True
        if (door := self.connections.open()) is not None:
            self.show("door", door)

    def keep_up(self) -> None:
        """Do what others wait for: answer roll calls, tell who has ended, send what the store did not take.

        To be called often, by one thread.
        """
        now = time.monotonic()
        if self.has_other_hosts and now - self._answered_at > _ROLL_EVERY_S:
            self._answered_at = now
            self._answer_roll()
        self._untold |= self.connections.ended()
        for rank in list(self._untold):
            with contextlib.suppress(Exception):  # of the store, which is told later
                if not self.last_words([rank]):
                    self._asked().set(self._key("lost", rank), "")
                    self._asked().set(self._key("lost"), "")
                self._untold.discard(rank)
        with self._lock:
            self._send_owed()

    def close(self) -> None:
        """Post nothing more, and close connections, as the end of the process would."""
        self._is_over = True
        self.connections.close()
        self.wake()
        if not self._waiting.acquire(timeout=_CLOSE_S):
            return
        exits, self._exits = self._exits, {}
        wakes, self._wakes = self._wakes, None
        for file in (*exits.values(), *(() if wakes is None else (wakes,))):
            os.close(file)
        self._waiting.release()

    # What ranks say of themselves

    def post(self, status: RankStatus, *, to_store: bool = True, is_last: bool = False) -> None:
        """Show this rank's status to all ranks that can see it; after the last one, none any more."""
        data = status.to_bytes(NBYTES - _HEAD_NBYTES)
        with self._lock:
            if self._is_over:
                return
            self._is_over = is_last
            for slots in list(_slots):
                slots.post(data)
            if to_store and self.needs_store:
                self._owed = data
                self._send_owed()

    def read(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return the statuses of these ranks, of those that have posted one."""
        asked = set(ranks)
        found: dict[int, RankStatus] = {}
        for slots in list(_slots):
            for rank in asked & set(slots.ranks):
                if (status := slots.read(rank)) is not None:
                    found[rank] = status
        if (missing := sorted(asked - set(found))) and self.needs_store:
            with contextlib.suppress(Exception):
                found |= self._read_store(missing)
        return dict(sorted(found.items()))

    def last_words(self, ranks: Iterable[int]) -> dict[int, RankStatus]:
        """Return what those of these ranks have said last that will take part in nothing any more."""
        return {rank: status for rank, status in self.read(ranks).items() if status.has_gone}

    # What the system says of ranks, and they of each other

    @property
    def needs_store(self) -> bool:
        # Where some rank shares no memory with this one.
        return len({rank for slots in _slots for rank in slots.ranks}) < self._world_size

    def note_processes(self, pids: Mapping[int, int]) -> None:
        """Note which processes ranks of this host are, all of which live. Raises OSError if this one may open too few files."""
        for rank in pids.keys() - self._exits.keys() - {self._rank}:
            self._exits[rank] = os.pidfd_open(pids[rank])
        self._processes |= pids
        self.wake()

    @property
    def neighbours(self) -> set[int]:
        """Other ranks of this host whose processes were noted."""
        return {*self._exits}

    def exited(self, ranks: Collection[int]) -> set[int]:
        """Return those of these neighbours whose processes have ended."""
        return self._readable(ranks, 0.0)

    def wait_for_exit(self, ranks: Collection[int], limit_s: float) -> set[int]:
        """Return those of these neighbours whose processes have ended, once there is one, or early after `wake`."""
        with self._waiting:
            if self._wakes is not None:
                return self._readable(ranks, limit_s, self._wakes)
        self._woken.wait(limit_s)
        self._woken.clear()
        return set()

    def _readable(self, ranks: Collection[int], limit_s: float, *more: int) -> set[int]:
        files = {file: rank for rank, file in self._exits.copy().items() if rank in ranks}
        poll = select.poll()
        for file in (*files, *more):
            poll.register(file, select.POLLIN)
        ready = {file for file, _ in poll.poll(limit_s * 1000)}
        for file in ready.intersection(more):
            os.eventfd_read(file)
        return {rank for file, rank in files.items() if file in ready}

    def exit_code(self, rank: int) -> int | None:
        """Return how a rank's process has ended, negative for a signal; None if it has not, or nobody can tell any more."""
        pid = self._processes.get(rank)
        if pid is not None and rank not in self._exit_codes:
            if (code := host.exit_code(pid)) is None:
                return None
            self._exit_codes[rank] = code
        return self._exit_codes.get(rank)

    def wake(self) -> None:
        """End `wait_for_exit` in another thread, or the next one."""
        if self._wakes is None:
            self._woken.set()
        else:
            os.eventfd_write(self._wakes, 1)

    def processes(self, ranks: Iterable[int]) -> dict[int, int]:
        """Return the processes of those of these ranks that are on this host, as noted or announced (see `waits`)."""
        asked = list(ranks)
        with contextlib.suppress(Exception):  # the store may have died with its rank
            # The program's own connection if there is no other.
            store = store_in_time() if self._store is None else self._store
            for rank in asked:
                # Asked once: many ranks may look often, while they wait in the store for one.
                if rank not in self._processes and (key := PROCESS_KEY.format(rank)) in store:
                    where, _, pid = store.get(key).decode().rpartition(" ")
                    # Elsewhere the pid may be another process.
                    self._processes[rank] = int(pid) if where == host.identity() else None
        return {rank: pid for rank in asked if (pid := self._processes.get(rank)) is not None}

    @property
    def unreached(self) -> frozenset[int]:
        """Ranks that do not answer this one over their own connection, though they may live."""
        return frozenset(self.connections.unreached)

    def lost(self, ranks: Collection[int]) -> set[int]:
        """Return those of ``ranks`` that share no memory with some rank, and have ended without a word."""
        if self.has_other_hosts or self.needs_store:
            with contextlib.suppress(Exception):
                store = self._asked()
                if self._key("lost") in store:
                    return {rank for rank in ranks if self._key("lost", rank) in store}
        return set()

    def missing(self, ranks: Collection[int]) -> set[int] | None:
        """Return those of these ranks whose watchdogs do not answer; None if the store does not answer either.

        Empty where all ranks are of one host: they are not asked.
        """
        if not self.has_other_hosts:
            return set()
        with contextlib.suppress(Exception):
            number = int(self._asked().add(self._key("roll"), 1))
            answered = self.shown(f"roll/{number}", ranks, _ROLL_CALL_S)
            self._asked().check([self._key("roll")])
            return set(ranks) - set(answered)
        return None

    # What ranks show under a key, for whoever asks

    def show(self, key: str, value: Any) -> None:
        """Show a value of this rank, which can be pickled, to whoever asks for the key."""
        with contextlib.suppress(Exception):
            self._asked().set(self._key("shown", key, self._rank), pickle.dumps(value))

    def shown(self, key: str, ranks: Collection[int], timeout_s: float) -> dict[int, Any]:
        """Return what these ranks show under the key, waiting for it so long."""
        found: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        with contextlib.suppress(Exception):
            store = self._asked()
            while len(found) < len(ranks) and time.monotonic() < deadline:
                for rank in set(ranks) - set(found):
                    if (place := self._key("shown", key, rank)) in store:
                        found[rank] = pickle.loads(store.get(place))
                time.sleep(0.02)
        return found

    # The store

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, ("fullshard", self._epoch, *parts)))

    def _asked(self) -> StoreInTime:
        if self._store is None or self._is_store_gone:  # it may have died with its rank
            raise CommError(
                "The store that the ranks met in has gone, or takes no second connection."
            )
        return self._store

    def _send_owed(self) -> None:
        if self._owed is not None:
            with contextlib.suppress(Exception):
                self._asked().set(self._key("status", self._rank), self._owed)
                self._owed = None

    def _read_store(self, ranks: Sequence[int]) -> dict[int, RankStatus]:
        store = self._asked()
        keys = {rank: self._key("status", rank) for rank in ranks}
        # One question for all if there are many: of a thousand ranks, each may ask.
        if not store.check([*keys.values()]):
            few = keys.items() if len(keys) <= _FEW_RANKS else ()
            keys = {rank: key for rank, key in few if key in store}
        data = store.multi_get([*keys.values()]) if keys else ()
        return {rank: pickle.loads(each) for rank, each in zip(keys, data, strict=True)}

    def _answer_roll(self) -> None:
        """Say that this rank is there, to all who have asked since the last time."""
        try:
            asked = int(self._asked().add(self._key("roll"), 0))
        except CommError:  # no answer now, as while a link is down
            return
        except Exception:
            # torch prints a warning for each time that it is asked. Kept all the same: a store in a file that
            # is dropped while no file can be opened ends the process.
            self._is_store_gone = True
            return
        for number in range(self._answered + 1, asked + 1):
            self.show(f"roll/{number}", None)
        self._answered = asked
