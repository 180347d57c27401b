"""Waits for other ranks: what is reported of slow ones, when a rank gives up, and how it waits for Gloo.

Who has said something of itself (see `watchdog`) is quoted. Of a rank that is silent though its process lives, the system tells
a little: whether it is stopped, and its stack if py-spy is installed.

Gloo pairs collectives by their order alone, so ranks on different paths could wait for ever or exchange the wrong bytes. While a
rank waits for it, it compares flight records, and asks its watchdog.
"""

import datetime
import logging
import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from fullshard.errors import CommError, PeerLostError, PeerTimeoutError
from fullshard.peers.flight_record import FlightRecord, key_of, last_entry_of
from fullshard.peers.paths import name_ranks
from fullshard.peers.stacks import look_at_process
from fullshard.peers.status import RankStatus
from fullshard.peers.watchdog import watchdog

logger = logging.getLogger("fullshard")

_SLOW_S = 8.0  # of waiting, before the first report
_LONGER = 4.0  # times as long, before the next
_FRAMES_SHOWN = 12
# Between two comparisons: rare enough to cost nothing, often enough that ranks on different paths
# end in a second with an error that says so.
_COMPARE_EVERY = datetime.timedelta(seconds=0.5)


class WaitReporter:
    """Reports of one wait for others. label: what the rank waits in. timeout_s: when it gives up.

    Ranks that are out of reach may come back, as after a link did: they are reported at once, and given up like others.
    """

    def __init__(self, label: str, timeout_s: float) -> None:
        self._label = label
        self._timeout_s = timeout_s
        self._started = time.perf_counter()
        self._next_report_s = _SLOW_S
        self._unreached: set[int] = set()  # that have been reported

    def check(self, late: Mapping[int, int | None]) -> None:
        """Report ranks that are late, now and then. Raises the error of `end` if it took too long.

        late: by global rank, its process on this host; None if that is unknown.
        """
        waited = time.perf_counter() - self._started
        if waited > self._timeout_s:
            raise self.end(late)
        unreached = late.keys() & watchdog().board.unreached
        if waited > self._next_report_s or unreached - self._unreached:
            self._next_report_s *= _LONGER
            self._unreached = unreached
            logger.warning("%s", self._describe(late, waited))

    def end(self, late: Mapping[int, int | None]) -> CommError:
        """Return the error for ranks that did not come in time: lost if one does not answer at all."""
        waited = time.perf_counter() - self._started
        text = (
            f"{self._describe(late, waited)}\nGiving up, as the process group's timeout is over. "
        )
        if late.keys() & watchdog().board.unreached:
            return PeerLostError(
                f"{text}Look at that rank's host and the network; restart from the last checkpoint."
            )
        return PeerTimeoutError(
            f"{text}If that rank is only slow, allow more: init_process_group(timeout=...)."
        )

    def _describe(self, late: Mapping[int, int | None], waited: float) -> str:
        head = f"rank {dist.get_rank()} has waited {waited:.0f} s in {self._label}"
        if not late:
            return f"{head}. All ranks are there, so what they send is still on its way."
        board = watchdog().board
        # Of ranks that this one is not connected to, others may know.
        statuses = board.read(range(dist.get_world_size()))
        said = {rank: by for by, each in statuses.items() for rank in each.unreached}
        said |= dict.fromkeys(board.unreached, dist.get_rank())
        are_alive = all(late.values()) and not late.keys() & said.keys()
        parts = [f"{head} for {name_ranks(late)}, {'alive but ' * are_alive}not here yet."]
        for rank, pid in sorted(late.items()):
            if rank in board.unreached:
                parts.append(
                    f"rank {rank} is out of reach: its host does not answer. If the link comes back, all goes on."
                )
            elif rank in said:
                parts.append(
                    f"rank {rank} is out of reach for rank {said[rank]}: its host does not answer."
                )
            else:
                parts.append(what_it_does(rank, pid, statuses.get(rank)))
        return "\n".join(parts)


def what_it_does(rank: int, pid: int | None, status: RankStatus | None) -> str:
    """Say where a rank is, with its stack if it can be had. pid: its process on this host; None if that is unknown."""
    last = last_entry_of(rank)
    before = f" The last that it entered: {last}." if last else ""
    if status is not None and status.beat:
        stack = "\n".join(["", *status.stack[-_FRAMES_SHOWN:]])
        return f"rank {rank}: {status}.{before} Its stack, by its own watchdog:{stack}"
    if pid is None:
        return f"rank {rank}: it has said nothing of itself.{before}"
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
    if _ends_soon(work):
        return
    reporter = WaitReporter(label, timeout_s)
    keys: tuple[str, ...] = () if record is None else (record.key,)
    if moving is not None:
        keys += (key_of(moving),)
    in_group = "" if moving is not None or record is None else record.key
    with watchdog().waiting(label, keys, in_group=in_group):
        while True:
            if record is not None:
                record.compare()
            watchdog().check()
            late = _late(record, moving)
            reporter.check(late)
            try:
                if _ends_soon(work):
                    return
            except RuntimeError as error:
                # The backend's own clock may be ahead, and has no names.
                if "timed out" not in str(error).lower():
                    raise
                raise reporter.end(late) from error


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


def _late(record: FlightRecord | None, moving: dist.ProcessGroup | None) -> dict[int, int | None]:
    """Return the ranks that have entered less than this one, or all others if that is unknown.

    Each with its process on this host, if that is known.
    """
    if record is None or not record.is_shared:
        ranks = dist.get_process_group_ranks(moving) if record is None else list(record.ranks)
        return dict.fromkeys(rank for rank in ranks if rank != dist.get_rank())
    found: dict[int, int | None] = {}
    for part, rank in enumerate(record.ranks):
        entry = record.last_of(part)
        if part != record.rank and (entry is None or entry.place < record.place):
            found[rank] = record.pids.get(rank)
    return found
