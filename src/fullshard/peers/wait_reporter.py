"""What a rank says that waits for another: of slow ones, of those that are lost, and when it gives up.

Who has said something of itself (see `watchdog`) is quoted. Of a rank that is silent though its process
lives, the system tells a little: whether it is stopped, and its stack if py-spy is installed.
"""

import contextlib
import logging
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch.distributed as dist

from fullshard.errors import (
    CommError,
    FullshardError,
    PeerLostError,
    PeerTimeoutError,
)
from fullshard.peers import diagnosis
from fullshard.peers.flight_record import flight_records
from fullshard.peers.paths import name_ranks
from fullshard.peers.status import RankStatus
from fullshard.peers.watchdog import watchdog

logger = logging.getLogger("fullshard")

_SLOW_S = 8.0  # of waiting, before the first report
_LONGER = 4.0  # times as long, before the next
_PY_SPY_S = 5.0
_STATES = {"T": "is stopped by a signal (kill -CONT goes on)", "t": "is stopped by a debugger"}
_STATES |= {"D": "waits for a disk or a file system", "Z": "has ended"}


class WaitReporter:
    """One wait for others. label: what the rank waits in. timeout_s: when it gives up.

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
        unreached = watchdog().board.unreached
        # Of ranks that this one is not connected to, others may know.
        statuses = watchdog().board.read(range(dist.get_world_size()))
        said = {rank: by for by, each in sorted(statuses.items()) for rank in each.unreached}
        are_alive = all(late.values()) and not late.keys() & (unreached | said.keys())
        parts = [f"{head} for {name_ranks(late)}, {'alive but ' * are_alive}not here yet."]
        for rank, pid in sorted(late.items()):
            if rank in unreached:
                parts.append(
                    f"rank {rank} is out of reach: its host does not answer. If the link comes back, all goes on."
                )
            elif rank in said:
                parts.append(
                    f"rank {rank} is out of reach for rank {said[rank]}: its host does not answer."
                )
            else:
                parts.append(_what_it_does(rank, pid, statuses.get(rank)))
        return "\n".join(parts)


def _what_it_does(rank: int, pid: int | None, status: RankStatus | None) -> str:
    """Say where a rank is, with its stack if it can be had."""
    last = _last_entry(rank)
    before = f" The last that it entered: {last}." if last else ""
    if status is not None and status.beat:
        stack = "\n".join(["", *status.stack[-12:]])
        return f"rank {rank}: {status}.{before} Its stack, by its own watchdog:{stack}"
    if pid is None:
        return f"rank {rank}: it has said nothing of itself.{before}"
    state = _STATES.get(_process_state(pid), "lives, and says nothing: it moves, or holds the GIL")
    return f"rank {rank} (pid {pid}): it {state}.{before}{_stack_by_py_spy(pid)}"


def _process_state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _stack_by_py_spy(pid: int) -> str:
    """Return another process' Python stack, or why there is none."""
    command = shutil.which("py-spy")
    if command is None:
        return f" For its stack, install py-spy and run: py-spy dump --pid {pid}"
    try:
        done = subprocess.run(
            [command, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f" py-spy cannot tell its stack: {error}"
    return f" Its stack, by py-spy:\n{done.stdout or done.stderr}".rstrip()


def _last_entry(rank: int) -> str:
    """Return what a rank entered last in a flight record that this rank can read."""
    for record in flight_records():
        if rank in record.ranks:
            entry = record.last_of(record.ranks.index(rank))
            if entry is not None:
                return str(entry)
    return ""


def loss(ranks: Iterable[int], label: str) -> FullshardError:
    """Return the error for ranks that are gone while this one waits for them in ``label``."""
    gone = sorted(ranks)
    words = {rank: watchdog().board.last_words(rank) for rank in gone}
    return diagnosis.loss(words, {rank: _last_entry(rank) for rank in gone}, label + _now())


def _now() -> str:
    moments = [record.moment for record in flight_records()]
    return f" ({max(moments)})" if moments else ""


def unreachable(ranks: Iterable[int], label: str, words: str) -> FullshardError:
    """Return the error for a connection that broke, though no process of this host has ended.

    words: the backend's.
    """
    others = list(ranks)
    if left := [rank for rank in others if watchdog().board.last_words(rank) is not None]:
        return loss(left, label)
    # On other hosts: those whose connection broke too are there to say so, the lost one is not.
    missing = watchdog().board.missing(others)
    if missing:
        return loss(missing, label)
    has_store = missing is not None or 0 not in others
    return diagnosis.out_of_reach(
        label + (_now() if not has_store else ""), dist.get_rank(), words, has_store=has_store
    )
