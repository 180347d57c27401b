"""Waits for other ranks: what is reported of slow ones, who is named as gone, when a rank gives up, how it waits for Gloo.

Who has said something of itself (see `watchdog`) is quoted. Of a rank that is silent though its process lives, the system tells
a little: whether it is stopped, and its stack if py-spy is installed.

The error of a collective says that a connection broke, but not whose. So after an error a rank looks which of the processes on
its host are gone, and asks those of other hosts.

Gloo pairs collectives by their order alone, so ranks on different paths could wait for ever or exchange the wrong bytes. While a
rank waits for it, it compares flight records, and asks its watchdog.
"""

import contextlib
import datetime
import logging
import os
import re
import time
import traceback
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch.distributed as dist

import fullshard.host as host  # noqa: PLR0402  (`from fullshard` would ask for a public name)
from fullshard.errors import (
    CommError,
    DivergenceError,
    FullshardError,
    PeerLostError,
    PeerTimeoutError,
)
from fullshard.peers import diagnosis
from fullshard.peers.flight_record import (
    FlightRecord,
    key_of,
    known_record,
    last_entry_of,
    latest_moment,
)
from fullshard.peers.paths import counting, name_ranks
from fullshard.peers.stacks import call_of, is_of_distributed, look_at_process
from fullshard.peers.status import RankStatus, State
from fullshard.peers.status_board import PROCESS_KEY
from fullshard.peers.store import store_in_time
from fullshard.peers.watchdog import explain_failure, has_watchdog, watchdog
from fullshard.torch_private import default_group

logger = logging.getLogger("fullshard")

_SLOW_S = 8.0  # of waiting, before the first report
_LONGER = 4.0  # times as long, before the next
_FRAMES_SHOWN = 12
# Between two comparisons: rare enough to cost nothing, often enough that ranks on different paths
# end in a second with an error that says so.
_COMPARE_EVERY = datetime.timedelta(seconds=0.5)
# How long to look for a process that is gone: a dying one closes its connections before it ends.
_GRACE_S = 1.0
_ASK_EVERY_S = 0.1  # in the store, by all ranks, which others are there
# In errors that may mean that a rank is gone. Gloo raises plain RuntimeErrors, so their words are all there is to go by.
_OF_TIME = "timed out|timeout"
_OF_CONNECTIONS = f"connection|closed by peer|broken pipe|{_OF_TIME}|socket|remote process"


# Ranks that are late


class WaitReporter:
    """Looks around in one wait for others. label: what the rank waits in. timeout_s: when it gives up.

    Ranks that are out of reach may come back, as after a link did: they are reported at once, and given up like others.
    record: in which others may enter something else meanwhile; None if there is none.
    """

    def __init__(self, label: str, timeout_s: float, record: FlightRecord | None) -> None:
        self._label = label
        self._timeout_s = timeout_s
        self._record = record
        self._started = time.perf_counter()
        self._next_report_s = _SLOW_S
        self._unreached: frozenset[int] = frozenset()  # that have been reported
        self._reported = ""  # of what late ranks do

    def check(self, late: Collection[int]) -> None:
        """Report ranks that are late, by their global numbers, now and then; to be called often.

        Raises DivergenceError if a rank has taken another path, what the watchdog has found, and the error of `end` if it
        took too long.
        """
        if self._record is not None:
            self._record.compare()
        watchdog().check()
        waited = time.perf_counter() - self._started
        if waited > self._timeout_s:
            raise self.end(late)
        unreached = watchdog().board.unreached.intersection(late)
        if waited > self._next_report_s or unreached - self._unreached:
            self._next_report_s *= _LONGER
            self._unreached = unreached
            if not self._is_reported_by_another():
                head, doing = self._describe(late)
                said = " Nothing has changed." if doing == self._reported else doing
                logger.warning("%s", counting(head + said))
                self._reported = doing

    def _is_reported_by_another(self) -> bool:
        """Whether a lower rank waits in the same, whose report is enough for all."""
        if self._record is None:
            return False
        board = watchdog().board
        # What ranks out of reach have posted may no longer be true.
        lower = {rank for rank in self._record.ranks if rank < dist.get_rank()} - board.unreached
        return any(
            each.state is State.WAITS
            and each.where == self._label
            and self._record.key in each.waited
            for each in board.read(lower).values()
        )

    def end(self, late: Collection[int]) -> CommError:
        """Return the error for ranks that did not come in time: lost if one does not answer at all."""
        described = "".join(self._describe(late))
        text = f"{described}\nThe process group's timeout is over. "
        if watchdog().board.unreached.intersection(late):
            text += f"Look at that rank's host and the network{diagnosis.RESTART}."
            return PeerLostError(counting(text))
        text += "If that rank is only slow, allow more: init_process_group(timeout=...)."
        return PeerTimeoutError(counting(text))

    def _describe(self, late: Collection[int]) -> tuple[str, str]:
        """Return who waits for whom, in a line, and what those do that are late."""
        waited = time.perf_counter() - self._started
        head = f"rank {dist.get_rank()} has waited {waited:.0f} s at {self._label}"
        if not late:
            return f"{head}. All ranks have arrived; what they send is still on its way.", ""
        board = watchdog().board
        # Of ranks that this one is not connected to, others may know.
        statuses = board.read(range(dist.get_world_size()))
        said = {rank: by for by, each in statuses.items() for rank in each.unreached}
        pids = board.processes(late)
        are_alive = pids.keys() >= {*late} and pids.keys().isdisjoint(said.keys() | board.unreached)
        head = f"{head} for {name_ranks(late)}, {'alive but ' * are_alive}not here yet."
        parts = [""]
        for rank in sorted(late):
            if rank in board.unreached:
                parts.append(
                    f"rank {rank} is out of reach: its host does not answer. If the link comes back, the job continues."
                )
            elif rank in said:
                parts.append(
                    f"rank {rank} is out of reach for rank {said[rank]}: its host does not answer."
                )
            else:
                parts.append(what_it_does(rank, pids.get(rank), statuses.get(rank)))
        return head, "\n".join(parts)


def what_it_does(rank: int, pid: int | None, status: RankStatus | None) -> str:
    """Say where a rank is, with its stack if it can be had. pid: its process on this host; None if that is unknown."""
    last = last_entry_of(rank)
    before = f" Its last operation: {last}." if last else ""
    if status is not None and status.beat:
        stack = "\n".join(["", *status.stack[-_FRAMES_SHOWN:]])
        return f"rank {rank}: {status}.{before} Its stack:{stack}"
    if pid is None:
        return f"rank {rank}: it has reported nothing of what it does.{before}"
    state, stack = look_at_process(pid)
    return f"rank {rank} (pid {pid}): it {state}.{before}{stack}"


def wait_comparing(
    work: Any,
    record: FlightRecord | None,
    label: str,
    timeout_s: float,
    *,
    moving: dist.ProcessGroup | None = None,
) -> None:
    """Wait for a collective of Gloo, and compare entries of the flight record while it lasts.

    record: of the group; None if it has none. label: what it is, for messages. timeout_s: when to give up.
    moving: the group of fullshard's own that it runs in; None if it runs where the program has collectives too.
    Raises DivergenceError if ranks turn out to take different paths, and PeerTimeoutError or PeerLostError if one
    does not come in time.
    """
    reporter = None
    try:
        if _ends_soon(work):
            return
        reporter = WaitReporter(label, timeout_s, record)
        keys: tuple[str, ...] = () if record is None else (record.key,)
        if moving is not None:
            keys += (key_of(moving),)
        in_group = "" if moving is not None or record is None else record.key
        with watchdog().waiting(label, keys, in_group=in_group):
            while True:
                reporter.check(_late(record, moving))
                if _ends_soon(work):
                    return
    except RuntimeError as error:
        # The backend's own clock may be ahead, and has no names. Where two collectives wait for one rank, it
        # ends only the first with its time, and the other with "Application timeout caused pair closure".
        if isinstance(error, FullshardError) or not re.search(_OF_TIME, str(error), re.I):
            raise
        reporter = reporter or WaitReporter(label, timeout_s, record)
        raise reporter.end(_late(record, moving)) from error


def _ends_soon(work: Any) -> bool:
    """Wait for a moment; return whether the collective has ended. Raises if it has failed."""
    try:
        work.wait(_COMPARE_EVERY)
    except RuntimeError:
        # A timeout of `wait` ends only the wait: the collective goes on, and may be waited for
        # again. If the work is completed, it has failed (and raises again) or has just ended.
        if not work.is_completed():
            return False
        work.wait()
    return True


def _late(record: FlightRecord | None, moving: dist.ProcessGroup | None) -> list[int]:
    """Return the global ranks that have entered less than this one, or all others if that is unknown."""
    if record is None or not record.is_shared:
        ranks = dist.get_process_group_ranks(moving) if record is None else record.ranks
        return [rank for rank in ranks if rank != dist.get_rank()]
    parts = [part for part in range(len(record.ranks)) if part != record.rank]
    last = {record.ranks[part]: record.last_of(part) for part in parts}
    return [rank for rank, entry in last.items() if entry is None or entry.place < record.place]


# Ranks that are gone


# Default groups that this process was announced in. Once per group serves all units; once per unit
# would be hundreds of writes per rank to one store.
_announced: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def announce() -> None:
    """Write to the store which process this rank is, unless that was done already."""
    # It only serves messages. With an unusual store, or without /proc, these lack the rank's name.
    with contextlib.suppress(Exception):
        world = default_group()
        if world not in _announced:
            key = PROCESS_KEY.format(dist.get_rank())
            store_in_time().set(key, f"{host.identity()} {os.getpid()}")
            _announced.add(world)


@contextlib.contextmanager
def naming_lost_ranks(group: dist.ProcessGroup, label: str) -> Iterator[None]:
    """Turn the error of a failed collective into one that names the ranks that are gone: see `name_lost_ranks`."""
    try:
        yield
    except RuntimeError as error:
        name_lost_ranks(error, group, label)
        raise


def name_lost_ranks(error: RuntimeError, group: dist.ProcessGroup, label: str) -> None:
    """Raise an error that names the ranks that are gone; return if this one is not about communication.

    Raises PeerLostError if there are any, DivergenceError if ranks were doing different things, PeerTimeoutError
    if one has yet to shard a module, and CommError with the backend's own words otherwise. For ``except`` clauses on paths where entering a
    context would cost too much.
    """
    if isinstance(error, CommError | DivergenceError) or not _is_of_connection(error):
        return
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    absent: set[int] | None = set()
    if (record := known_record(group)) is not None:
        # First: a rank that saw that paths differ may have left, and is not the cause.
        record.compare()
    else:
        absent = _unannounced(others)
    missing: set[int] | None = None
    if absent is not None or has_watchdog():  # to start one takes long where the store is gone
        board = watchdog().board
        gone = lost_ranks(others, 0.0 if absent else _GRACE_S) or board.last_words(others)
        if absent and not gone:
            is_late = bool(re.search(_OF_TIME, str(error), re.I))
            raise diagnosis.never_came(absent, label, is_late=is_late) from error
        # On other hosts: those whose connection broke too are there to say so, the lost one is not.
        missing = set() if gone else board.missing(others)
        if gone or missing:
            raise lost_in(gone or missing or (), label) from error
    has_store = missing is not None or 0 not in others
    said = label if has_store else _now(label)
    raise diagnosis.out_of_reach(said, dist.get_rank(), str(error), has_store=has_store) from error


def explain_loss(error: BaseException) -> str | None:
    """Name the ranks whose ends have made a call of torch.distributed fail, whose error names none. Within 1 to 2 s."""
    if not (is_of_distributed(error) and _is_of_connection(error) and dist.is_initialized()):
        return None
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    label = (call_of(frame) or {}).get("where", "a call of torch.distributed")
    try:
        if has_watchdog():
            watchdog().raise_cause()
        assert isinstance(error, RuntimeError)
        name_lost_ranks(error, default_group(), label)
    except (DivergenceError, PeerLostError) as cause:
        return f"fullshard: this call failed on rank {dist.get_rank()} because of others: {cause}"
    except CommError:  # no rank is known to be gone
        pass
    return None


explain_failure.append(explain_loss)


def _is_of_connection(error: BaseException) -> bool:
    """Whether an error may mean that a rank is gone."""
    return isinstance(error, dist.DistError) or bool(re.search(_OF_CONNECTIONS, str(error), re.I))


def _unannounced(ranks: Collection[int]) -> set[int] | None:
    """Return those of these ranks that have not been announced, nor are within a moment; None if the store is gone."""
    store = store_in_time()
    keys = {rank: PROCESS_KEY.format(rank) for rank in ranks}
    deadline = time.monotonic() + _GRACE_S
    with contextlib.suppress(Exception):
        while not store.check([*keys.values()]):
            if time.monotonic() >= deadline:
                return {rank for rank, key in keys.items() if key not in store}
            time.sleep(_ASK_EVERY_S)
        return set()
    return None


def lost_in(ranks: Iterable[int], label: str) -> FullshardError:
    """Return the error for ranks that are gone while this one waits for them in ``label``.

    Ranks that wait for this one learn whom it has lost, instead of losing it.
    """
    lost = sorted(ranks)
    board = watchdog().board
    words = board.last_words(lost)
    said = {rank: words.get(rank) for rank in lost}
    codes = {rank: board.exit_code(rank) for rank in lost}
    entered = {rank: last_entry_of(rank) for rank in lost}
    verdict = diagnosis.loss(said, codes, entered, _now(label))
    watchdog().tell(verdict)
    return verdict.error


def _now(label: str) -> str:
    return f"{label} ({moment})" if (moment := latest_moment()) else label


def lost_ranks(ranks: Collection[int], within_s: float = _GRACE_S) -> list[int]:
    """Return those of other ranks on this host whose processes have ended, waiting so long for one."""
    processes = watchdog().board.processes(ranks)
    deadline = time.monotonic() + within_s
    while True:
        lost = [rank for rank, pid in processes.items() if not host.is_running(pid)]
        if lost or not processes or time.monotonic() >= deadline:
            return lost
        time.sleep(0.02)
