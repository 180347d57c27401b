"""A thread that looks after a rank which stands still, and ends what can never go on.

Most divergence of ranks is found in the flight record, when they meet. Where they never meet, as one is in a
collective of the program's own (a barrier, a checkpoint on rank 0), or has left, nothing would ever
tell. So each process has one thread, the watchdog:

    every 0.5 s     has the rank entered or noted anything in its flight records?
    still for 1 s   post what it does (a `RankStatus`), every time
    blocked         read the others' statuses; compare tails of flight records; ask `diagnosis`
    a verdict       raise it where the rank waits

The rank raises it itself in a wait of fullshard's (`check`). In a function of torch.distributed it
cannot: no backend's wait can be ended from outside, only by the other ranks' ends. So the error is left
with the interpreter, which raises it as soon as the call returns or fails. If that takes longer than
`_GRACE_S`, as all ranks are in such calls, the watchdog writes the error to stderr and ends the process.

[Note: Torn down] torchrun, and others that start ranks, end all of them 0 to 0.2 s after one has ended: long before an error
could be raised and printed where the others wait. So the watchdog waits for the ends of ranks of its host (pidfd_open(2)), and
says at once who has ended, and how: of a process that nobody has waited for yet, the system tells that (proc(5), `exit_code`). One
that was asked to end (SIGTERM, SIGINT, SIGHUP) is no news: all are. No signal is handled for this: a handler of the program's
would be in its way, Python runs none while the main thread is in C++, and a rank that does not end when it is told to is worse.

What a rank says last, its **last words**, stays readable for ranks of its host: that it has ended, where,
and with which exception.
"""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch.distributed as dist

from fullshard.errors import DivergenceError, FullshardError, PeerLostError, message_of
from fullshard.host import is_running
from fullshard.local_ranks import says_ends
from fullshard.peers import divergence
from fullshard.peers.diagnosis import describe_end, describe_still, judge
from fullshard.peers.flight_record import (
    FlightRecord,
    flight_records,
    key_of,
    last_entry_of,
    latest_moment,
    refusal,
)
from fullshard.peers.groups import abort
from fullshard.peers.stacks import (
    call_of,
    counts_of_groups,
    line_in_program,
    lines_of,
    raise_in,
    runs_program_beside,
    shown_stack,
)
from fullshard.peers.status import STEADY_BEATS, GroupCounts, RankStatus, State, Verdict
from fullshard.peers.status_board import StatusBoard
from fullshard.process_hooks import before_exit, start_thread
from fullshard.torch_private import default_group, distributed_world

logger = logging.getLogger("fullshard")

_TICK_S = 0.5
_PAUSE_S = 0.1  # between two looks whether others have gone
_STILL_S = 1.0  # without progress, before a rank says what it does
_HOLD_S = 1.5  # for other ranks to come to their verdicts too
_GRACE_S = 4.0  # for a call of torch.distributed to end after the verdict
# Statuses at which it looks at those of others: often at first, seldom in a long wait.
_JUDGES_AT = {*range(STEADY_BEATS, 16), *(1 << power for power in range(4, 32))}
_REPORTED_AT = 14  # statuses, of ranks whose collectives run on a device
_TOLD_AT = {1, STEADY_BEATS}  # statuses that go to the store
_TORN_DOWN_S = 0.1  # for this process to be ended too, where nobody can tell how another one ended
_OUTLAST_S = 5.0  # for others to read that rank 0 has ended, whose process may be the store's
_EXIT_CODE = 1


class Watchdog:
    """What this process knows of standing still. One per process: `watchdog()`."""

    def __init__(self) -> None:
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        self.group = weakref.ref(default_group())
        self.board = StatusBoard(self._rank, self._world_size)
        self._ended = threading.Event()
        self._verdict: Verdict | None = None  # for `check` to raise
        self._delivered: Verdict | None = None  # left with the interpreter, and when
        self._delivered_at: float | None = None
        self._told: Verdict | None = None  # of its statuses
        self._waits: dict[int, dict[str, Any]] = {}  # by thread, of its status
        self._progress = -1
        self._still_since = time.monotonic()
        self._last: RankStatus | None = None
        self._groups: dict[str, GroupCounts] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, once."""
        self._thread = start_thread(
            self._watch, name="fullshard-watchdog", why="ends what can never go on, and says why"
        )
        # Before the interpreter ends, and also in children of multiprocessing, which call no
        # function of `atexit`. The thread must not be in C++ when the interpreter ends.
        before_exit(self.end, why="the thread fullshard-watchdog ends before the interpreter")

    def stop(self) -> None:
        """End the thread, without a word."""
        self._ended.set()
        self.board.close()

    # For the thread that trains

    @contextlib.contextmanager
    def waiting(
        self, label: str, groups: tuple[str, ...], *, in_group: str = ""
    ) -> Iterator[dict[str, Any]]:
        """Say that this thread waits in a collective of fullshard's, within the body, which may add to its status.

        groups: keys of the groups whose ranks it waits for. in_group: the one among them in which the
        program has collectives too, if that is so.
        """
        thread = threading.get_ident()
        facts = {"state": State.WAITS, "where": label, "waited": groups, "in_group": in_group}
        self._waits[thread] = facts
        try:
            yield facts
        finally:
            del self._waits[thread]

    def check(self) -> None:
        """Raise what the watchdog has found, once. To be called in every wait."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            raise verdict.error

    def raise_cause(self) -> None:
        """Raise what this rank was to raise, or what others have raised, whose ends broke its call."""
        cause = self._delivered
        with contextlib.suppress(Exception):
            for rank, status in self.board.read(range(self._world_size)).items():
                if rank != self._rank:
                    cause = cause or status.verdict
        if cause is not None:
            self.tell(cause)
            raise cause.error

    def settle(self, record: FlightRecord, place: int) -> FullshardError:
        """Return the error for ranks that differ at a place, in one rank's words on all of them."""
        found = divergence.settle(self.board, self._rank, record, place)
        self.tell(found)
        return found.error

    def tell(self, verdict: Verdict) -> None:
        """Have ranks that wait for this one raise what it is about to raise."""
        self._told = verdict
        # What was entered before the error is no progress since.
        self._progress, self._still_since = _progress(), time.monotonic()
        self.board.post(self._look())

    # The thread

    def _watch(self) -> None:
        gone: set[int] = set()
        while not self._ended.is_set():
            try:
                ended = self.board.wait_for_exit(self.board.neighbours - gone, _TICK_S)
                if self._ended.is_set():
                    return
                if ended:  # statuses are counted, and so posted at a steady pace: no tick
                    gone |= ended
                    self._report_ends(ended, self.board.neighbours - gone)
                else:
                    self._tick()
            except (
                Exception
            ):  # it only serves diagnosis: an error must not end a run, nor this thread
                self._ended.wait(_TICK_S)

    def _report_ends(self, ended: Collection[int], living: Collection[int]) -> None:
        """Say on one rank of this host which others have ended that should not have: see [Note: Torn down]."""
        codes = {rank: self.board.exit_code(rank) for rank in ended}  # while the system tells
        if min(living, default=self._rank) < self._rank or not says_ends():
            return  # another rank says it, or the program
        if (verdict := self._told or self._delivered) is not None and not verdict.is_loss:
            return  # it is why ranks end
        for rank, pid in self.board.processes(ended).items():
            code, words = codes[rank], self.board.last_words([rank]).get(rank)
            if code is None and words is None and self._ended.wait(_TORN_DOWN_S):
                return
            entered, own = last_entry_of(rank), last_entry_of(self._rank)
            if text := describe_end(rank, pid, code, words, entered, (self._rank, own)):
                logger.error("%s", text)

    def _tick(self) -> None:
        now = time.monotonic()
        self.board.keep_up()
        if (progress := _progress()) != self._progress:
            self._progress, self._still_since = progress, now
            if self._last is not None or self._told is not None:
                # Takes it back. A status of a rank that has moved says nothing true any more.
                self._last = self._told = None
                self.board.post(RankStatus(self._rank, State.RUNS, groups=self._groups))
            return
        if now - self._still_since < _STILL_S:
            return
        status, last = self._look(), self._last
        is_same = last is not None and all(
            getattr(status, name) == getattr(last, name)
            for name in ("state", "where", "at", "groups")
        )
        if last is not None and is_same:
            status = dataclasses.replace(status, beat=last.beat + 1)
        is_news = last is not None and status.unreached != last.unreached
        self._last = status
        # What is posted stays true until it is taken back, so a store is told seldom.
        self.board.post(status, to_store=is_news or status.beat in _TOLD_AT)
        if self._delivered_at is None and status.beat in _JUDGES_AT:
            self._judge(status)
        elif self._delivered_at is not None and not is_same:
            self._delivered_at = None  # the call has ended
        elif status.state is State.CALLS and now - (self._delivered_at or now) > _GRACE_S:
            # Not one in code of the program's, which may still come to its error, or write to disk.
            self._give_up(status)

    def _judge(self, own: RankStatus) -> None:
        """Deliver a verdict if the ranks' flight records differ, or this rank can never go on."""
        statuses = self.board.read(range(self._world_size))
        statuses[self._rank] = own
        if (verdict := self._find_verdict(own, statuses)) is not None:
            self._deliver(verdict, own)
        elif own.beat == _REPORTED_AT and own.on_device and self._rank == min(statuses):
            seconds = _STILL_S + _TICK_S * own.beat
            if text := describe_still(statuses, self._world_size, seconds):
                logger.warning("%s", text)

    def _find_verdict(self, own: RankStatus, statuses: dict[int, RankStatus]) -> Verdict | None:
        """Return what follows for this rank. statuses: of all that have posted one; those of killed ranks are added."""
        for record in flight_records() if own.is_blocked else ():
            try:
                record.compare()
            except DivergenceError:
                return self._told  # by `settle`
        if (found := divergence.find(self.board, self._rank, statuses)) is not None:
            return found
        for record in flight_records():
            if not record.is_on_device:
                continue
            silent = {r for r in record.ranks if r not in statuses or not statuses[r].has_gone}
            pids = self.board.processes(silent)
            killed = {rank for rank, pid in pids.items() if not is_running(pid)}
            for rank in killed | self.board.lost(silent):
                counts = {record.key: GroupCounts(len(record.ranks), 0, 0)}
                said = "a signal, or by os._exit"
                statuses[rank] = RankStatus(rank, State.ENDED, groups=counts, error=said)
        return judge(own, statuses)

    def _deliver(self, verdict: Verdict, own: RankStatus) -> None:
        """Have the rank raise a verdict."""
        if own.state is not State.WAITS:
            # Before others learn of it: one that ends breaks this rank's call.
            self._delivered, self._delivered_at = verdict, time.monotonic()
            raise_in(self._threads()[0], verdict.error)
            # Collectives that the device waits in: the host goes on then that waits for the device. Its own, and one
            # of torch.distributed's too if it is on the device.
            for group in list(distributed_world.pg_map):
                if key_of(group) in own.on_device:
                    with contextlib.suppress(Exception):
                        abort(group)
        if own.state is State.RUNS:  # perhaps waiting for its device, and so not to be reached
            logger.error("rank %d, at %s: %s", self._rank, own.at, verdict.text)
        if not verdict.is_loss:
            self._told = verdict._replace(ranks=())  # too many for a slot, perhaps
            self.board.post(dataclasses.replace(own, verdict=self._told))
        if own.state is State.WAITS:
            # Others that are stuck find a verdict too, before this rank raises and may end.
            self._wait_until_gone({*verdict.ranks} - {self._rank}, _HOLD_S, self._ended.wait)
            self._verdict = verdict

    def _wait_until_gone(
        self, ranks: Collection[int], limit_s: float, pause: Callable[[float], object]
    ) -> None:
        """Wait for others to end or to say that they will take part no more. pause: returns True to give up."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            found = self.board.read(ranks)
            if all(rank in found and found[rank].has_gone for rank in ranks) or pause(_PAUSE_S):
                return

    def _give_up(self, status: RankStatus) -> None:
        """End the process: its thread is in a call that neither returns nor fails."""
        verdict = self._delivered
        assert verdict is not None
        kind = type(verdict.error)
        error = f"{kind.__module__}.{kind.__qualname__}: {verdict.text}"
        print(
            "\n".join(status.stack),
            f"{error}\n[fullshard] Rank {self._rank} is blocked in a call of torch.distributed that nothing "
            "can interrupt, so its process is ended.",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        self._say_last(error)
        os._exit(_EXIT_CODE)

    # What this rank does

    def _threads(self) -> tuple[int, int]:
        """Return the thread that is looked at, which waits if one does, and the one that runs the model."""
        known = [each.thread for each in flight_records() if each.thread is not None]
        usual, waiting = [*known, threading.get_ident()][0], list(self._waits)
        return (usual if usual in waiting or not waiting else waiting[0]), usual

    def _look(self) -> RankStatus:
        """Return a status of what this rank does now."""
        thread, usual = self._threads()
        frames = sys._current_frames()
        has_groups = self.group() is not None and dist.is_initialized()
        in_call = call_of(frames.get(thread)) if has_groups else None
        lines, usual_lines = (lines_of(frames.get(each)) for each in (thread, usual))
        del frames
        doing: dict[str, Any] = {"state": State.LEFT}
        if has_groups:
            doing = self._waits.get(thread) or in_call or {"state": State.RUNS}
            self._groups = counts_of_groups()
        records = flight_records()
        return RankStatus(
            self._rank,
            beat=1,
            # A thread of autograd's runs no line of the program's, but one that called backward does.
            at=line_in_program(lines) or line_in_program(usual_lines),
            moment=latest_moment(),
            groups=self._groups,
            tails={each.key: each.tail() for each in records if not each.is_shared},
            has_threads=runs_program_beside(thread),
            on_device=tuple(each.key for each in records if each.is_on_device),
            unreached=tuple(sorted(self.board.unreached)),
            stack=shown_stack(lines),
            verdict=self._told,
            **doing,
        )

    # The end

    def end(self) -> None:
        """Say that this process ends, with the exception that is being handled if there is one, and stop the thread."""
        was_stopped = self._ended.is_set()  # as another default group has taken its place
        # The second is set when Python has printed the exception that ended the program. In children of
        # multiprocessing the exception is still on its way.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        is_ordinary = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and self._told is None and not was_stopped:  # else it was said with it
            for text in filter(None, (explain(error) for explain in explain_failure)):
                logger.error("%s", text)
        if isinstance(error, DivergenceError | PeerLostError) and self._told is None:
            self._told = Verdict(str(error), is_loss=isinstance(error, PeerLostError))
        text = ""
        if error is not None and not is_ordinary:
            last = traceback.extract_tb(error.__traceback__)[-1:]
            at = "".join(f" ({frame.filename}:{frame.lineno})" for frame in last)
            text = f"{type(error).__name__}: {message_of(error)}{at}"[:1000]
        self._say_last(text)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _TICK_S)
        if self._rank == 0 and self.board.has_other_hosts and not was_stopped:
            # The store may go with this process. Others read first that this rank has ended, or end too.
            others = {*range(1, self._world_size)}
            self._wait_until_gone(others - self.board.lost(others), _OUTLAST_S, time.sleep)
        self.board.close()

    def _say_last(self, error: str) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        self.board.wake()
        with contextlib.suppress(Exception):
            if has_groups := dist.is_initialized():
                self._groups = counts_of_groups()
            last = RankStatus(
                self._rank,
                State.ENDED,
                moment=latest_moment(),
                groups=self._groups,
                has_left=not has_groups,
                error=error if self._told is None else self._told.text,
                verdict=self._told,
            )
            self.board.post(last, is_last=True)


_watchdogs: dict[int, Watchdog] = {}
# Each says what made a call of torch.distributed fail whose error ends the program, or None.
explain_failure: list[Callable[[BaseException], str | None]] = []


def has_watchdog() -> bool:
    """Return whether this process has a watchdog for the default group that there is."""
    # A forked child has threads of its own; a new default group has other ranks.
    known = _watchdogs.get(os.getpid())
    return known is not None and known.group() is default_group()


def watchdog() -> Watchdog:
    """Return this process's watchdog, and start it. There has to be a default process group."""
    pid = os.getpid()
    if not has_watchdog():
        if pid in _watchdogs:
            _watchdogs[pid].stop()
        _watchdogs.clear()
        _watchdogs[pid] = Watchdog()
        refusal[1:] = [_watchdogs[pid].settle]
        _watchdogs[pid].start()
    return _watchdogs[pid]


def _progress() -> int:
    """Return a number that changes with all that this rank enters and notes."""
    return sum(record.progress for record in flight_records())
