"""Memory that the ranks of one host share, and the flags by which they wait for each other.

Everything lives in anonymous memory files (``memfd_create``): a peer opens one through
``/proc/PID/fd/N``, maps it, and the descriptor is closed. There is never a name in the file
system, so a crash leaks nothing, and the size of ``/dev/shm`` in a container does not matter.

[Note: Ordering] Ranks write data, then a counter; a peer reads the counter, then the data. On x86
stores become visible in order; elsewhere `_fence` orders them: releasing and taking a lock are a
release and an acquire operation, and neither moves past the other. Counters are aligned 8-byte
words, written by one rank each, and only ever grow.
"""

import contextlib
import dataclasses
import errno
import functools
import logging
import mmap
import os
import select
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist

from fullshard.comm import ledger
from fullshard.comm.backends import timeout_s
from fullshard.comm.exchange import exchange_through_group
from fullshard.comm.ledger import Ledger
from fullshard.errors import PeerLostError, PeerTimeoutError

logger = logging.getLogger("fullshard")

_WORDS_PER_RANK = 8  # one cache line, so that ranks do not share one
_WORD_BITS = 62
_CONTROL_NBYTES = _WORDS_PER_RANK * 8 + ledger.NBYTES  # counters of all ranks, then the ledger
_SPIN_S = 50e-6  # as long as a core each is likely: a flag takes 2-3 us
_YIELD_S = 2e-3
_LIVENESS_S = 0.1
_SLOW_S = 30.0
# Before Python 3.13 every mapping keeps a descriptor open, which counts against the limit on files.
_MAPPING: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}


class UnavailableError(Exception):
    """Shared memory cannot be had; the message is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Introduction:
    """What a rank tells the others before they share anything."""

    rank: int
    global_rank: int
    pid: int
    host: str
    control_fd: int | None
    problem: str | None


class SharedMemory:
    """A group of ranks on one host that map the same memory.

    Build it with `connect`. Counters of each rank: arrivals at `barrier`, the offered descriptor,
    reductions posted and consumed (for `PeerMemoryComm`), once it has given up because of a lost
    rank, that rank plus one, why it could not map what was offered last (an errno, or 0), and what
    it has to say in `agree`.
    """

    BARRIER, OFFER_FD, POSTED, CONSUMED, GAVE_UP, REFUSAL, BITS = range(7)
    _connections: ClassVar["weakref.WeakSet[SharedMemory]"] = weakref.WeakSet()

    def __init__(
        self,
        introductions: list[_Introduction],
        rank: int,
        control: mmap.mmap,
        pidfds: dict[int, int],
        timeout_s: float,
    ) -> None:
        """pidfds: of every other rank, by rank."""
        self.rank = rank
        self.size = len(introductions)
        self.timeout_s = timeout_s
        self._peers = introductions
        self._control = control
        counters_nbytes = self.size * _WORDS_PER_RANK * 8
        self._words = memoryview(control)[:counters_nbytes].cast("q")
        self._lock = threading.Lock()
        self._lock.acquire()
        self._arrivals = 0
        self._spin_s = _SPIN_S if self.size <= (os.cpu_count() or 1) else 0.0
        self._pidfds = select.poll()
        self._rank_of_pidfd = {pidfd: peer for peer, pidfd in pidfds.items()}
        for pidfd in self._rank_of_pidfd:
            self._pidfds.register(pidfd, select.POLLIN)
        self.ledger = Ledger(
            rank,
            [peer.global_rank for peer in introductions],
            memoryview(control)[counters_nbytes:],
            self._fence,
        )
        self._connections.add(self)

    @classmethod
    def give_up(cls, lost_rank: int) -> None:
        """Tell all who may wait for this process that it will not come: a rank was lost."""
        for connection in cls._connections:
            connection.set(cls.GAVE_UP, lost_rank + 1)

    def __del__(self) -> None:
        for pidfd in getattr(self, "_rank_of_pidfd", ()):
            with contextlib.suppress(OSError):
                os.close(pidfd)

    @classmethod
    def connect(
        cls,
        group: dist.ProcessGroup,
        exchange: Callable[[Any, dist.ProcessGroup], list[Any]] | None = None,
    ) -> "SharedMemory":
        """Join the group's ranks. Raises UnavailableError on every rank if one of them cannot.

        exchange: tells all ranks what each has to say; None takes the group's own collectives.
        """
        exchange = exchange or exchange_through_group
        rank, size = group.rank(), group.size()
        nbytes = size * _CONTROL_NBYTES
        control: mmap.mmap | None = None
        fd, host, problem = None, "", _platform_problem()
        # A limit may be that of one rank, so each says what it cannot do, and all go on together.
        try:
            if problem is None:
                host = host_identity()
                fd = _create_file(nbytes) if rank == 0 else None
        except OSError as error:
            problem = f"cannot share memory: {error}"
        mine = _Introduction(rank, dist.get_rank(), os.getpid(), host, fd, problem)
        introductions: list[Any] = exchange(mine, group)
        problem = _common_problem(introductions)
        pidfds: dict[int, int] = {}
        if problem is None:
            try:
                control = _open_peer_file(introductions[0].pid, introductions[0].control_fd, nbytes)
                for peer in introductions:
                    if peer.rank != rank:
                        pidfds[peer.rank] = os.pidfd_open(peer.pid)
            except OSError as error:
                problem = f"rank {dist.get_rank()} cannot open a peer's memory: {error}"
        problems = [p for p in exchange(problem, group) if p is not None]
        if fd is not None:
            os.close(fd)
        if problems or control is None:
            for pidfd in pidfds.values():
                os.close(pidfd)
            raise UnavailableError(problems[0])
        return cls(introductions, rank, control, pidfds, timeout_s(group))

    def allocate(self, nbytes: int, label: str) -> mmap.mmap:
        """Map zeroed memory that all ranks share. Every rank has to call it with the same size.

        Raises UnavailableError, on every rank and with the same words, if one of them cannot: the
        host has too little memory, or a rank may not make files of this size or open more.
        """
        nbytes = max(nbytes, mmap.PAGESIZE)
        fd, offered, refusal = -1, 0, 0
        memory: mmap.mmap | None = None
        if self.rank == 0:
            try:
                offered = fd = _create_file(nbytes)
            except OSError as error:
                offered = -(error.errno or errno.EIO)
            self.set(self.OFFER_FD, offered)
        self.barrier(label)
        offered = self.get(0, self.OFFER_FD)
        if offered >= 0:
            try:
                memory = _open_peer_file(self._peers[0].pid, offered, nbytes)
            except OSError as error:
                refusal = error.errno or errno.EIO
        self.set(self.REFUSAL, -offered if self.rank == 0 and offered < 0 else refusal)
        # Nobody writes these words again before all have come here once more, and so have read them.
        self.barrier(label)
        if fd >= 0:
            os.close(fd)
        for peer in self._peers:
            if refusal := self.get(peer.rank, self.REFUSAL):
                raise UnavailableError(
                    f"{label}: rank {peer.global_rank} cannot share {nbytes} bytes: "
                    f"{os.strerror(refusal)}"
                )
        assert memory is not None
        return memory

    def barrier(self, label: str) -> None:
        """Return once every rank is here; what they wrote before is then visible.

        Raises DivergenceError if a rank is somewhere else in the sequence.
        """
        self.ledger.enter(label)
        self._arrivals += 1
        self.set(self.BARRIER, self._arrivals)
        self.wait_all(self.BARRIER, self._arrivals, label)

    def agree(self, bits: int, num_bits: int) -> int:
        """Combine every rank's bits by "or". Every rank has to call it with the same ``num_bits``."""
        result = 0
        for start in range(0, num_bits, _WORD_BITS):
            self.set(self.BITS, bits >> start & ((1 << _WORD_BITS) - 1))
            self.barrier("agreeing on writes")
            for rank in range(self.size):
                result |= self.get(rank, self.BITS) << start
            self.barrier("agreed on writes")  # before anybody overwrites its own
        return result

    def get(self, rank: int, counter: int) -> int:
        return self._words[rank * _WORDS_PER_RANK + counter]

    def set(self, counter: int, value: int) -> None:
        """Publish one of this rank's counters, after everything it wrote before."""
        self._fence()
        self._words[self.rank * _WORDS_PER_RANK + counter] = value

    def wait_all(self, counter: int, value: int, label: str) -> None:
        """Return once the counter is at least ``value`` on every rank.

        Raises PeerLostError if one of them dies, DivergenceError if one took another path,
        PeerTimeoutError if one never comes.
        """
        words = self._words
        slots = range(counter, self.size * _WORDS_PER_RANK, _WORDS_PER_RANK)
        if all(words[slot] >= value for slot in slots):
            self._fence()
            return
        started = time.perf_counter()
        checked, warned = started, False
        while not all(words[slot] >= value for slot in slots):
            now = time.perf_counter()
            waited = now - started
            if waited < self._spin_s:
                continue
            if waited < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(20e-6 if waited < 0.05 else 200e-6)
            if now - checked > _LIVENESS_S:
                checked = now
                self.ledger.compare()
                self._check_alive(counter, value, label)
                if waited > _SLOW_S and not warned:
                    warned = True
                    logger.warning("%s", self._describe_wait(counter, value, label, waited))
                if waited > self.timeout_s:
                    raise PeerTimeoutError(
                        self._describe_wait(counter, value, label, waited)
                        + " Giving up: look for a rank that took another path through the model."
                    )
        self._fence()

    def _fence(self) -> None:
        """See [Note: Ordering]."""
        self._lock.release()
        self._lock.acquire()

    def _late(self, counter: int, value: int) -> list[int]:
        return [peer.global_rank for peer in self._peers if self.get(peer.rank, counter) < value]

    def _describe_wait(self, counter: int, value: int, label: str, waited: float) -> str:
        late = ", ".join(str(rank) for rank in self._late(counter, value))
        return (
            f"{label} (rank {self._peers[self.rank].global_rank}): waited {waited:.0f} s for "
            f"rank {late}, which is alive but has not arrived."
        )

    def _check_alive(self, counter: int, value: int, label: str) -> None:
        lost = [self._rank_of_pidfd[fd] for fd, _ in self._pidfds.poll(0)]
        # A rank that arrived before it exited has done its part; only the late ones are missed.
        missed = [rank for rank in sorted(lost) if self.get(rank, counter) < value]
        for peer in self._peers:
            if self.get(peer.rank, self.GAVE_UP) and self.get(peer.rank, counter) < value:
                cause = self.get(peer.rank, self.GAVE_UP) - 1
                self.give_up(cause)
                raise PeerLostError(
                    f"{label} (rank {self._peers[self.rank].global_rank}): rank {cause} died or "
                    f"left, so rank {peer.global_rank} gave up. The cause is in rank {cause}'s own "
                    "output; restart from the last checkpoint."
                )
        if missed:
            self.give_up(self._peers[missed[0]].global_rank)
            names = ", ".join(
                f"rank {self._peers[rank].global_rank} (pid {self._peers[rank].pid})"
                for rank in missed
            )
            raise PeerLostError(
                f"{label} (rank {self._peers[self.rank].global_rank}): {names} died or left while "
                "this rank waited for it. The cause is in that rank's own output; restart from "
                "the last checkpoint."
            )


def ledger_of(group: dist.ProcessGroup) -> Ledger | None:
    """Return the ledger of a group, the same every time; None if its ranks cannot share memory.

    For ranks that communicate in another way. Every rank of the group has to call it.
    """
    if type(group) is not dist.ProcessGroup:
        return None  # ranks may be threads
    if group not in _ledgers:
        try:
            _ledgers[group] = SharedMemory.connect(group).ledger
        except UnavailableError as reason:
            logger.info("ranks are not compared: %s", reason)
            _ledgers[group] = None
    return _ledgers[group]


def known_ledger(group: dist.ProcessGroup) -> Ledger | None:
    """Return the ledger of a group if it has one by now. No communication."""
    return _ledgers.get(group)


_ledgers: "weakref.WeakKeyDictionary[dist.ProcessGroup, Ledger | None]"
_ledgers = weakref.WeakKeyDictionary()


def _platform_problem() -> str | None:
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    return f"this Python lacks os.{missing[0]}" if missing else None


@functools.cache
def host_identity() -> str:
    """Name the set of processes that can open each other's files: kernel, pid space and user.

    Raises OSError where there is no /proc.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"


def _common_problem(introductions: list[_Introduction]) -> str | None:
    for peer in introductions:
        if peer.problem is not None:
            return f"rank {peer.global_rank}: {peer.problem}"
    if len({peer.host for peer in introductions}) > 1:
        return "the ranks are on different hosts, in different containers, or of different users"
    if len({peer.pid for peer in introductions}) < len(introductions):
        return "several ranks live in one process"
    return None


def _create_file(nbytes: int) -> int:
    fd = os.memfd_create("fullshard")
    try:
        os.posix_fallocate(fd, 0, nbytes)  # an error now rather than a SIGBUS at first use
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_peer_file(pid: int, fd: int, nbytes: int) -> mmap.mmap:
    mapped = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # Populated at once: a page fault costs more than the copy of a page.
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(mapped, nbytes, flags=flags, **_MAPPING)
    finally:
        os.close(mapped)
