"""Memory that the ranks of one host share, and the counters by which they wait for each other.

Everything lives in anonymous memory files (``memfd_create``): a peer opens one through
``/proc/PID/fd/N`` and maps it, and the descriptor is closed. A file never has a name in the file
system, so a crash leaks nothing, and the size of ``/dev/shm`` in a container does not matter.

[Note: Ordering] A rank writes data, then a counter; a peer reads the counter, then the data. On x86
stores become visible in order. Elsewhere a `Fence` orders them. Every counter is an aligned
8-byte word that one rank writes. BARRIER, POSTED and CONSUMED only grow, so a peer that reads late
sees at least what it waits for. OFFER_FD, REFUSAL and BITS may take any value, and are read between
two barriers.
"""

import ctypes
import dataclasses
import errno
import functools
import logging
import mmap
import os
import sys
import time
import weakref

import torch.distributed as dist

import fullshard.host as host  # noqa: PLR0402  (`from fullshard` would ask for a public name)
from fullshard.errors import AllocationError
from fullshard.peers import flight_record, status_board
from fullshard.peers.agreed_order import AgreedOrder
from fullshard.peers.flight_record import Fence, FlightRecord, keep_record, known_record
from fullshard.peers.groups import exchange, timeout_s
from fullshard.peers.status_board import StatusSlots
from fullshard.peers.store import tcp_store
from fullshard.peers.waits import WaitReporter, lost_in
from fullshard.peers.watchdog import has_watchdog, watchdog

_WORDS_PER_RANK = 8  # a cache line, so that writing a counter does not slow down another rank's
_WORD_BITS = 62  # of a signed 8-byte word, for flags
# Of each rank, and so in the control memory: counters of all ranks, the flight record, statuses.
_COUNTERS_NBYTES = _WORDS_PER_RANK * 8
_CONTROL_NBYTES = _COUNTERS_NBYTES + flight_record.NBYTES + status_board.NBYTES
# A waiting rank spins first (a counter takes 2-3 us to arrive), then yields its core, then sleeps.
_SPIN_S = 50e-6
_YIELD_S = 2e-3
_LATE_S = 0.05  # of waiting, after which a peer counts as far behind, and is looked after
_FILES = (
    3  # of a rank that shares memory: to offer it, to map it, and to stop waiting for others' ends
)
_LIVENESS_S = 0.1  # between two checks whether peers still live, which are system calls
# Backends that have no processes behind their ranks, who could never agree on anything.
WITHOUT_PROCESSES = {"fake"}

logger = logging.getLogger("fullshard")


class UnavailableError(Exception):
    """Ranks cannot share memory; the message is the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Introduction:
    """A rank's message to the others, before they share memory.

    rank: its global number.
    control_fd: descriptor of the control memory, from rank 0 alone; else -1.
    problem: why this rank cannot share memory; None if it can.
    files: see `_files`; None if it needs none, as it has connected before.
    """

    rank: int
    pid: int
    host: str
    control_fd: int
    problem: str | None
    files: tuple[int, int] | None


class SharedMemory:
    """A group of ranks on one host that map the same memory.

    Each rank writes these words, and all ranks read them:

        BARRIER     number of barriers at which the rank has arrived
        OFFER_FD    rank 0: descriptor of the file it offers in `allocate`, or minus an errno
        POSTED      number of the last reduction that the rank has staged (see `ring`)
        CONSUMED    number of the last reduction that the rank has summed
        REFUSAL     0, or the errno by which its part of the last `allocate` failed
        BITS        its flags in `agree`
    """

    BARRIER, OFFER_FD, POSTED, CONSUMED, REFUSAL, BITS = range(6)

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Connect the group's ranks. Every rank must call it.

        Raises UnavailableError on every rank if one of them cannot share memory, AllocationError if one may
        open too few files to be connected at all.
        """
        self.rank, self.size = group.rank(), group.size()
        self.timeout_s = timeout_s(group)
        self._name = group.group_name
        nbytes = self.size * _CONTROL_NBYTES
        fd, host_id, problem = -1, "", _platform_problem()
        files = None if has_watchdog() else _files()
        # A limit may be that of one rank alone. So a failure becomes a value that all ranks get,
        # and all go the same way; an exception here would leave the others in the exchange.
        try:
            if problem is None:
                host_id = host.identity()
                fd = _create_file(nbytes) if self.rank == 0 else -1
        except OSError as error:
            problem = f"cannot share memory: {error}"
        mine = _Introduction(dist.get_rank(), os.getpid(), host_id, fd, problem, files)
        try:
            ranks: list[_Introduction] = exchange(mine, group)
            _check_files(ranks)
            problem = _common_problem(ranks)
            try:
                if problem is None:
                    control = _open_peer_file(ranks[0].pid, ranks[0].control_fd, nbytes)
                # A peer that lives waits in the exchange below, so its pid has not gone to another process.
                if pids := _processes_here(mine, ranks):
                    watchdog().board.note_processes(pids)
            except OSError as error:
                problem = f"rank {dist.get_rank()} cannot open a peer's memory: {error}"
            problems = [each for each in exchange(problem, group) if each is not None]
        finally:  # after the exchange, since only then all ranks have opened it
            if fd >= 0:
                os.close(fd)
        if problems:
            raise UnavailableError(problems[0])
        counters_nbytes = self.size * _COUNTERS_NBYTES
        record_end = counters_nbytes + self.size * flight_record.NBYTES
        self._words = control[:counters_nbytes].cast("q")
        self._entries = control[counters_nbytes:record_end]
        self.pids = {peer.rank: peer.pid for peer in ranks}  # by global rank
        self.slots = StatusSlots(self.rank, [*self.pids], control[record_end:])
        self._fence = Fence()
        self._arrivals = 0
        # With more ranks than cores, spinning would keep the rank that is waited for from running.
        self._spin_s = _SPIN_S if self.size <= (os.cpu_count() or 1) else 0.0

    @functools.cached_property
    def record(self) -> FlightRecord:
        """The flight record of the group, in this memory."""
        made = FlightRecord(self.rank, self.slots.ranks, self._entries, self._name)
        made.slots = self.slots
        return made

    def allocate(self, nbytes: int, label: str, detail: str = "") -> memoryview:
        """Map zeroed memory that all ranks share. Every rank must call it with the same size.

        detail: what it is for, on which ranks have to agree as well.

        Raises UnavailableError, on every rank and with the same words, if one of them cannot map
        it: the host has too little memory, or a limit of the rank on the size or number of files.
        """
        # Rank 0 makes a file and offers its descriptor; a barrier; all map it and say how that
        # went; a barrier; all read how it went, and rank 0 closes the descriptor.
        nbytes = max(nbytes, mmap.PAGESIZE)
        fd, offered, refusal = -1, 0, 0
        memory: memoryview | None = None
        if self.rank == 0:
            try:
                offered = fd = _create_file(nbytes)
            except OSError as error:
                offered = -(error.errno or errno.EIO)
            self.set(self.OFFER_FD, offered)
        self.barrier(label + detail, nbytes)
        offered = self.get(0, self.OFFER_FD)
        if offered >= 0:
            try:
                memory = _open_peer_file(next(iter(self.pids.values())), offered, nbytes)
            except OSError as error:
                refusal = error.errno or errno.EIO
        self.set(self.REFUSAL, -offered if self.rank == 0 and offered < 0 else refusal)
        # After it REFUSAL of all ranks can be read, and no rank needs the descriptor any more. All
        # write REFUSAL again only after the first barrier of the next `allocate`, where all arrive
        # after they have read it below; OFFER_FD, which rank 0 writes earlier, was read above.
        self.barrier(label)
        if fd >= 0:
            os.close(fd)
        for number, rank in enumerate(self.pids):
            if refusal := self.get(number, self.REFUSAL):
                raise UnavailableError(
                    f"{label}: rank {rank} cannot share {nbytes} bytes: {os.strerror(refusal)}"
                )
        assert memory is not None
        return memory

    def barrier(self, label: str, nbytes: int = 0) -> None:
        """Return once every rank is here. What ranks wrote before it is then visible to all.

        nbytes: a size on which ranks have to agree; 0 if there is none.
        Raises DivergenceError if a rank does something else at this place of the group's sequence,
        and as `wait_all`.
        """
        # First the flight record: a counter alone would let a rank pass whose peers wait somewhere else.
        self.record.enter(label, nbytes)
        self._arrivals += 1
        self.set(self.BARRIER, self._arrivals)
        self.wait_all(self.BARRIER, self._arrivals, label)

    def agree(self, bits: int, num_bits: int) -> int:
        """Return the bitwise "or" of all ranks' bits. Every rank must call it alike."""
        result = 0
        for start in range(0, num_bits, _WORD_BITS):
            self.set(self.BITS, bits >> start & ((1 << _WORD_BITS) - 1))
            self.barrier("agreeing on writes")
            for rank in range(self.size):
                result |= self.get(rank, self.BITS) << start
            # Everybody has read the word before its owner overwrites it, here or in the next call.
            self.barrier("agreed on writes")
        return result

    def get(self, rank: int, counter: int) -> int:
        """Return a rank's word, without any ordering: for that, use `wait_all` or `barrier`."""
        return self._words[rank * _WORDS_PER_RANK + counter]

    def set(self, counter: int, value: int) -> None:
        """Set one of this rank's words; everything it wrote before becomes visible first."""
        self._fence()
        self._words[self.rank * _WORDS_PER_RANK + counter] = value

    def wait_all(self, counter: int, value: int, label: str) -> None:
        """Return once the counter is at least ``value`` on every rank.

        What ranks wrote before they set it is then visible. Raises PeerLostError if one of them
        dies or gives up, DivergenceError if one took another path or will never come,
        PeerTimeoutError if one does not come within the group's timeout.
        """
        words = self._words
        slots = range(counter, self.size * _WORDS_PER_RANK, _WORDS_PER_RANK)
        # The usual case first, without asking for the time.
        if not all(words[slot] >= value for slot in slots):
            started = time.perf_counter()
            while not all(words[slot] >= value for slot in slots):
                waited = time.perf_counter() - started
                if waited < self._spin_s:
                    continue
                if waited < _YIELD_S:
                    os.sched_yield()
                elif waited < _LATE_S:
                    time.sleep(20e-6)
                else:
                    self._wait_for_late(counter, value, label)
        self._fence()  # between reading counters and reading data: see [Note: Ordering]

    def _wait_for_late(self, counter: int, value: int, label: str) -> None:
        """Wait as `wait_all`, for ranks that are far behind: latency matters less, causes more."""
        reporter = WaitReporter(label, self.timeout_s, self.record)
        checked = 0.0
        with watchdog().waiting(label, (self.record.key,)) as status:
            while late := self._late(counter, value):
                status["late"] = tuple(late)
                time.sleep(200e-6)
                now = time.perf_counter()
                if now - checked > _LIVENESS_S:
                    checked = now
                    # Before looking who is gone: a rank that has seen that paths differ raises and
                    # may leave, and the difference is the better error.
                    reporter.check(late)
                    self._check_alive(counter, value, label)

    def _late(self, counter: int, value: int) -> list[int]:
        """Return the global ranks whose counter is below ``value``."""
        return [rank for number, rank in enumerate(self.pids) if self.get(number, counter) < value]

    def _check_alive(self, counter: int, value: int, label: str) -> None:
        """Raise PeerLostError if a rank that has not arrived has exited, or given up as it lost another."""
        # First who has exited, then what their counters say, which are final then. In the other
        # order, a rank that arrives and exits in between would be taken for lost.
        exited = watchdog().board.exited(self.pids)
        # A rank that arrived before it exited has done its part; only late ones are missed.
        late = self._late(counter, value)
        missed = exited.intersection(late)
        for rank in late:
            status = self.slots.read(rank)
            if status is not None and status.verdict is not None and status.verdict.is_loss:
                missed.add(rank)
        if missed:
            raise lost_in(missed, label)


# The flight record of a group


def record_of(group: dist.ProcessGroup, backend: str) -> FlightRecord | None:
    """Return the flight record of a group, the same one every time; None if its ranks may be threads.

    backend: of the group. Over Gloo, ranks of one host share the flight record's memory; others have one each, and
    agree on the order of what they do. Over NCCL each rank has its own, also on one host: a host starts collectives far
    ahead of its device, and in a shared record whoever comes late would find the other one waiting for a device that
    never comes free. Every rank of the group must call it.
    """
    if type(group) is not dist.ProcessGroup:
        return None
    return known_record(group) or keep_record(group, _make_record(group, backend))


def _make_record(group: dist.ProcessGroup, backend: str) -> FlightRecord:
    shared: SharedMemory | None = None
    try:
        if backend in ("gloo", "nccl"):
            shared = SharedMemory(group)
    except UnavailableError as reason:
        logger.info("ranks share no flight record: %s", reason)
    if shared is not None and backend == "gloo":
        return shared.record
    ranks = dist.get_process_group_ranks(group)
    record = FlightRecord(group.rank(), ranks, None, name=group.group_name)
    if shared is not None:
        record.slots = shared.slots
    if backend in WITHOUT_PROCESSES:
        return record
    record.is_on_device = backend != "gloo"
    if shared is None:
        watchdog().board.serve_other_hosts()
    record.order = AgreedOrder.of(record, group)
    if shared is None and record.order is not None:
        watchdog().board.connections.meet(ranks)
    return record


# How ranks connect


def _platform_problem() -> str | None:
    """Return what this system or Python lacks for sharing memory."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    missing = [name for name in ("memfd_create", "pidfd_open") if not hasattr(os, name)]
    return f"this Python lacks os.{missing[0]}" if missing else None


def _files() -> tuple[int, int] | None:
    """Return how many files this process may open, and how many it needs for connections to the store; None if unknown.

    One of its own, and the other ends of all ranks' where the store is in this process.
    """
    left, store = host.files_left(), tcp_store()
    if left is None or store is None:
        return None
    try:
        return left, 1 + (dist.get_world_size() if host.is_listening(store.port) else 0)
    except OSError:  # there is no room to look
        return 0, 1


def _check_files(introductions: list[_Introduction]) -> None:
    """Raise AllocationError, on all ranks alike, if one of them may open too few files to be connected.

    Before any connection: the store would not let in others where its process may open no more, nor say so.
    """
    is_one_host = len({peer.host for peer in introductions}) == 1
    for peer in introductions:
        if peer.files is not None:
            left, for_store = peer.files
            needed = for_store + (len(introductions) - 1 + _FILES if is_one_host else 0)
            if left < needed:
                raise AllocationError(
                    f"Rank {peer.rank} may open {left} more files, and needs {needed} to be connected with "
                    f"the others, {for_store} of them for the store that the ranks met in. Raise its limit on open "
                    "files (ulimit -n), and start again."
                )


def _processes_here(mine: _Introduction, ranks: list[_Introduction]) -> dict[int, int]:
    """Return the processes of ranks of this host, by global ranks; none if some of them live in one process."""
    here = {peer.rank: peer.pid for peer in ranks if peer.host == mine.host and not peer.problem}
    return here if len({*here.values()}) == len(here) else {}


def _common_problem(introductions: list[_Introduction]) -> str | None:
    """Return why these ranks cannot share memory, in the same words on all ranks."""
    for peer in introductions:
        if peer.problem is not None:
            return f"rank {peer.rank}: {peer.problem}"
    if len({peer.host for peer in introductions}) > 1:
        return "the ranks are on different hosts, in different containers, or of different users"
    if len({peer.pid for peer in introductions}) < len(introductions):
        return "several ranks live in one process"
    return None


def _create_file(nbytes: int) -> int:
    """Return the descriptor of a new anonymous file of zeros. Raises OSError."""
    fd = os.memfd_create("fullshard")
    try:
        # Takes the memory now: with `ftruncate`, too little of it would be a SIGBUS at first use.
        os.posix_fallocate(fd, 0, nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open_peer_file(pid: int, fd: int, nbytes: int) -> memoryview:
    """Map a file that another process (or this one) has open, until nobody refers to it. Raises OSError."""
    # Not by Python's `mmap`, which keeps a descriptor open for as long, of which a process may have few.
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    # All pages now, since a page fault later costs more than copying a page.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    mapped = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    address = libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, mapped, 0)
    os.close(mapped)
    if address == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Every view of it keeps it. Not at the program's end, when tensors may still be used.
    weakref.finalize(memory, libc.munmap, address, nbytes).atexit = False
    return memoryview(memory).cast("B")
