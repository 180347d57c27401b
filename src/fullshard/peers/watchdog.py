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
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch.distributed as dist

from fullshard.errors import DivergenceError, FullshardError, PeerLostError
from fullshard.host import is_running
from fullshard.peers import divergence
from fullshard.peers.diagnosis import Verdict, describe_still, final_error, judge
from fullshard.peers.flight_record import (
    FlightRecord,
    flight_records,
    key_of,
    latest_moment,
    settle_by,
)
from fullshard.peers.groups import abort
from fullshard.peers.stacks import (
    call_of,
    counts_of_groups,
    describe_error,
    is_of_distributed,
    line_in_program,
    raise_in,
    runs_program_beside,
    stack_of,
)
from fullshard.peers.status import STEADY_BEATS, GroupCounts, RankStatus, State
from fullshard.peers.status_board import StatusBoard
from fullshard.process_hooks import before_exit, start_thread
from fullshard.torch_private import default_group, distributed_world

logger = logging.getLogger("fullshard")

_TICK_S = 0.5
_STILL_S = 1.0  # without progress, before a rank says what it does
_HOLD_S = 1.5  # for other ranks to come to their verdicts too
_GRACE_S = 4.0  # for a call of torch.distributed to end after the verdict
# Statuses at which it looks at those of others: often at first, seldom in a long wait.
_JUDGES_AT = {*range(STEADY_BEATS, 16), *(1 << power for power in range(4, 32))}
_REPORTED_AT = 14  # statuses, of ranks whose collectives run on a device
_TOLD_AT = {1, STEADY_BEATS}  # statuses that go to the store
_OUTLAST_S = 5.0  # for others to read that rank 0 has ended, whose process may be the store's
_EXIT_CODE = 1


class _Waiting(NamedTuple):
    """A wait in a collective of fullshard's. groups: `RankStatus.waited`, in_group: as there."""

    label: str
    groups: tuple[str, ...]
    in_group: str


class Watchdog:
    """What this process knows of standing still. One per process: `watchdog()`."""

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        self._group = weakref.ref(default_group())
        self.board = StatusBoard(self._rank, dist.get_world_size())
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._verdict: FullshardError | None = None  # for `check` to raise
        self._delivered: FullshardError | None = None  # left with the interpreter, and when
        self._delivered_at: float | None = None
        self._final = ""  # an error that all ranks raise which wait for this one
        self._about = ""  # the flight record and place at which ranks differ, if it is of that
        self._is_loss = False  # whether it is of a lost rank
        self._waits: dict[int, _Waiting] = {}  # by thread
        self._progress = -1
        self._still_since = time.monotonic()
        self._last: RankStatus | None = None
        self._groups: dict[str, GroupCounts] = {}
        self._world_size = dist.get_world_size()

    def start(self) -> None:
        """Start the thread, once."""
        self._thread = start_thread(
            self._watch, name="fullshard-watchdog", why="ends what can never go on, and says why"
        )
        # Before the interpreter ends, and also in children of multiprocessing, which call no
        # function of `atexit`. The thread must not be in C++ when the interpreter ends.
        before_exit(self._end, why="the thread fullshard-watchdog ends before the interpreter")

    def serves(self, group: dist.ProcessGroup) -> bool:
        return self._group() is group

    def stop(self) -> None:
        """End the thread, without a word."""
        self._ended.set()
        self.board.close()

    # For the thread that trains

    @contextlib.contextmanager
    def waiting(
        self, label: str, groups: tuple[str, ...] = (), *, in_group: str = ""
    ) -> Iterator[None]:
        """Say that this thread waits in a collective of fullshard's, within the body.

        groups: keys of the groups whose ranks it waits for. in_group: the one among them in which the
        program has collectives too, if that is so.
        """
        thread = threading.get_ident()
        before = self._waits.get(thread)
        self._waits[thread] = _Waiting(label, groups, in_group)
        try:
            yield
        finally:
            if before is None:
                del self._waits[thread]
            else:
                self._waits[thread] = before

    def check(self) -> None:
        """Raise what the watchdog has found, once. To be called in every wait."""
        verdict, self._verdict = self._verdict, None
        if verdict is not None:
            raise verdict

    def settle(self, record: FlightRecord, place: int) -> DivergenceError:
        """Return the error for ranks that differ at a place, in one rank's words on all of them.

        Ranks that wait for this one will raise it as well.
        """
        found = divergence.settle(self.board, self._rank, record, place)
        self._final, self._about = found.text, found.about
        # What was entered before the error is no progress since.
        self._progress, self._still_since = _progress(), time.monotonic()
        self.board.post(self._look())
        return DivergenceError(found.text)

    # The thread

    def _watch(self) -> None:
        while not self._ended.wait(_TICK_S):
            # It only serves diagnosis: an error of its own must not end a run, nor itself.
            with contextlib.suppress(Exception):
                self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        self.board.keep_up()
        if (progress := _progress()) != self._progress:
            self._progress, self._still_since = progress, now
            if self._last is not None or self._final:
                # Takes it back. A status of a rank that has moved says nothing true any more.
                self._last, self._final, self._about = None, "", ""
                self.board.post(RankStatus(self._rank, State.RUNS, groups=self._groups))
            return
        if now - self._still_since < _STILL_S:
            return
        status = self._look()
        is_same = status.is_like(self._last)
        if is_same and self._last is not None:
            status = dataclasses.replace(status, beat=self._last.beat + 1)
        is_news = self._last is not None and status.unreached != self._last.unreached
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
        verdict = self._find_verdict(own, statuses)
        if verdict is not None:
            self._about = verdict.about or self._about
            self._deliver(verdict.error, own, verdict.ranks)
        elif own.beat == _REPORTED_AT and own.on_device and self._rank == min(statuses):
            seconds = _STILL_S + _TICK_S * own.beat
            if text := describe_still(statuses, self._world_size, seconds):
                logger.warning("%s", text)

    def _find_verdict(self, own: RankStatus, statuses: dict[int, RankStatus]) -> Verdict | None:
        """Return what follows for this rank. statuses: of all that have posted one; those of killed ranks are added."""
        if own.is_blocked:
            for record in flight_records():
                try:
                    record.compare()
                except DivergenceError as error:
                    return Verdict(error)
        if (found := divergence.find(self.board, self._rank, statuses)) is not None:
            return Verdict(DivergenceError(found.text), found.about, found.ranks)
        for record in flight_records():
            for rank in self._killed(record, statuses) if record.is_on_device else ():
                counts = {record.key: GroupCounts(len(record.ranks), 0, 0)}
                said = "a signal, or by os._exit"
                statuses[rank] = RankStatus(rank, State.ENDED, groups=counts, error=said)
        return judge(own, statuses, self._world_size)

    def _killed(self, record: FlightRecord, statuses: Mapping[int, RankStatus]) -> set[int]:
        """Return the ranks of a flight record that have ended without a word."""
        silent = {
            rank for rank in record.ranks if rank not in statuses or not statuses[rank].has_gone
        }
        here = {rank for rank in silent & record.pids.keys() if not is_running(record.pids[rank])}
        return here | self.board.lost(silent)

    def _deliver(self, verdict: FullshardError, own: RankStatus, stuck: Iterable[int] = ()) -> None:
        """Have the rank raise a verdict. stuck: ranks that will find one too."""
        if own.state is not State.WAITS:
            # Before others learn of it: one that ends breaks this rank's call.
            self._delivered, self._delivered_at = verdict, time.monotonic()
            raise_in(self._thread_looked_at(), verdict)
            # Its own, and one of torch.distributed's too if it is on the device.
            self._free_device(own.on_device)
        if own.state is State.RUNS:  # perhaps waiting for its device, and so not to be reached
            logger.error("rank %d, at %s: %s", self._rank, own.at, verdict)
        if isinstance(verdict, DivergenceError):
            self._final = str(verdict)
            self.board.post(
                dataclasses.replace(own, error=self._final, is_final=True, about=self._about)
            )
        if own.state is State.WAITS:
            self._hold(set(stuck) - {self._rank})
            self._verdict = verdict

    def _free_device(self, keys: Collection[str]) -> None:
        """End groups' collectives on the device, so that the host goes on that waits for the device."""
        for group in list(distributed_world.pg_map):
            if key_of(group) in keys:
                with contextlib.suppress(Exception):
                    abort(group)

    def _hold(self, others: set[int]) -> None:
        """Wait for other stuck ranks to find their verdicts, before this one raises and may end."""
        deadline = time.monotonic() + _HOLD_S
        while time.monotonic() < deadline and not self._ended.wait(_TICK_S / 5):
            if self._have_gone(others):
                return

    def _have_gone(self, ranks: set[int]) -> bool:
        found = self.board.read(ranks)
        return all(rank in found and found[rank].has_gone for rank in ranks)

    def _give_up(self, status: RankStatus) -> None:
        """End the process: its thread is in a call that neither returns nor fails."""
        kind = type(self._delivered)
        error = f"{kind.__module__}.{kind.__qualname__}: {self._delivered}"
        print(
            "\n".join(status.stack),
            f"{error}\n[fullshard] Rank {self._rank}'s call of torch.distributed cannot be ended, so "
            "its process ends here.",
            sep="\n",
            file=sys.stderr,
            flush=True,
        )
        self._say_last(error)
        os._exit(_EXIT_CODE)

    # What this rank does

    @property
    def _usual_thread(self) -> int:
        """The thread that runs the model."""
        threads = [record.thread for record in flight_records()]
        return next((each for each in threads if each is not None), threading.get_ident())

    def _thread_looked_at(self) -> int:
        usual, waiting = self._usual_thread, list(self._waits)
        return usual if usual in waiting or not waiting else waiting[0]

    def _look(self) -> RankStatus:
        """Return a status of what this rank does now."""
        thread = self._thread_looked_at()
        waiting = self._waits.get(thread)
        frames = sys._current_frames()
        frame = frames.get(thread)
        state, where, op, meets_all = State.RUNS, "", "", False
        waited: tuple[str, ...] = ()
        if self._group() is None or not dist.is_initialized():
            state = State.LEFT
        elif waiting is not None:
            state, where, waited = State.WAITS, waiting.label, waiting.groups
        elif (call := call_of(frame)) is not None:
            state, where, op, waited = State.CALLS, call.name, call.op, call.groups
            meets_all = call.meets_all
        if state is not State.LEFT:
            self._groups = counts_of_groups()
        status = RankStatus(
            self._rank,
            state,
            beat=1,
            where=where,
            op=op,
            # A thread of autograd's runs no line of the program's, but one that called backward does.
            at=line_in_program(frame) or line_in_program(frames.get(self._usual_thread)),
            moment=latest_moment(),
            groups=self._groups,
            waited=waited,
            in_group="" if waiting is None else waiting.in_group,
            tails={each.key: each.tail() for each in flight_records() if not each.is_shared},
            has_threads=runs_program_beside(thread),
            meets_all=meets_all,
            on_device=tuple(each.key for each in flight_records() if each.is_on_device),
            error=self._final,
            is_final=bool(self._final),
            about=self._about,
            unreached=tuple(sorted(self.board.unreached)),
            stack=stack_of(frame),
        )
        # This function's own frame is among them and refers to them, which only the garbage collector
        # would end. Until then the variables of all frames live on, with what the model computed.
        del frame, frames
        return status

    # The end

    def _end(self) -> None:
        """Say that this process ends, and stop the thread."""
        # The second is set when Python has printed the exception that ended the program. In children of
        # multiprocessing the exception is still on its way.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        is_ordinary = isinstance(error, SystemExit) and error.code in (None, 0)
        if is_of_distributed(error) and (cause := self._cause_of_failure()) is not None:
            logger.error("rank %d: that call failed because ranks part: %s", self._rank, cause)
            error = cause
        if isinstance(error, DivergenceError | PeerLostError) and not self._final:
            self._final, self._is_loss = str(error), isinstance(error, PeerLostError)
        self._say_last("" if error is None or is_ordinary else describe_error(error))
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * _TICK_S)
        if self._rank == 0 and self.board.has_other_hosts:
            self._outlast_others()
        self.board.close()

    def _cause_of_failure(self) -> FullshardError | None:
        """Return what this rank was to raise, or what others have raised, whose ends broke its call."""
        if self._delivered is not None:
            return self._delivered
        with contextlib.suppress(Exception):
            statuses = self.board.read(range(self._world_size))
            for _, status in sorted(statuses.items()):
                if status.rank != self._rank and status.is_final:
                    return final_error(status)
        return None

    def _outlast_others(self) -> None:
        """Wait for the others to end, or to read that this rank has: the store may go with this process."""
        others = set(range(self._world_size)) - {self._rank}
        others -= self.board.lost(others)
        deadline = time.monotonic() + _OUTLAST_S
        while time.monotonic() < deadline:
            if self._have_gone(others):
                return
            time.sleep(_TICK_S / 5)

    def _say_last(self, error: str) -> None:
        if self._ended.is_set():
            return
        self._ended.set()
        with contextlib.suppress(Exception):
            if has_groups := dist.is_initialized():
                self._groups = counts_of_groups()
            last = RankStatus(
                self._rank,
                State.ENDED,
                moment=latest_moment(),
                groups=self._groups,
                has_left=not has_groups,
                error=self._final or error,
                is_final=bool(self._final),
                is_loss=self._is_loss,
                about=self._about,
            )
            self.board.post(last, is_last=True)


_watchdogs: dict[int, Watchdog] = {}


def has_watchdog() -> bool:
    """Whether this process has a watchdog for the default group that there is."""
    known = _watchdogs.get(os.getpid())
    return known is not None and known.serves(default_group())


def watchdog() -> Watchdog:
    """Return this process's watchdog, and start it. There has to be a default process group."""
    pid = os.getpid()
    known = _watchdogs.get(pid)
    # A forked child has threads of its own; a new default group has other ranks.
    if known is None or not known.serves(default_group()):
        if known is not None:
            known.stop()
        _watchdogs.clear()
        _watchdogs[pid] = Watchdog()
        settle_by(_watchdogs[pid].settle)
        _watchdogs[pid].start()
    return _watchdogs[pid]


def _progress() -> int:
    """Return a number that changes with all that this rank enters and notes."""
    return sum(record.progress for record in flight_records())
