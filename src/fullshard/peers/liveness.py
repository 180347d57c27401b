"""Naming the ranks that are gone when a collective fails, or while others wait for them.

The error of a collective says that a connection broke, but not whose. So each rank announces its
process in the store that the ranks met in, and after an error a rank looks which of the processes
on its host are gone.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Collection, Iterable

import torch.distributed as dist

import fullshard.host as host  # noqa: PLR0402  (`from fullshard` would ask for a public name)
from fullshard.errors import CommError, DivergenceError, FullshardError
from fullshard.peers import diagnosis
from fullshard.peers.flight_record import known_record, last_entry_of, latest_moment
from fullshard.peers.status_board import give_up
from fullshard.peers.store import store_in_time
from fullshard.peers.watchdog import watchdog
from fullshard.torch_private import default_group

# How long to look for a process that is gone: a dying one closes its connections before it ends.
_GRACE_S = 1.0
_ANSWER_S = 5.0  # of the store
_KEY = "fullshard/process/{}"
_CAME = "fullshard/came/{}/{}"  # by the group and the rank: to how many calls


# Default groups that this process was announced in. Once per group serves all units; once per unit
# would be hundreds of writes per rank to one store.
_announced: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def announce() -> None:
    """Write to the store which process this rank is, unless that was done already."""
    # It only serves messages. With an unusual store, or without /proc, these lack the rank's name.
    with contextlib.suppress(Exception):
        world = default_group()
        if world in _announced:
            return
        store = store_in_time(_ANSWER_S)
        store.set(_KEY.format(dist.get_rank()), f"{host.identity()} {os.getpid()}")
        _announced.add(world)


def leave_word(group: dist.ProcessGroup, number: int) -> None:
    """Leave word in the store that this rank has come to call ``number`` of those that a group counts."""
    with contextlib.suppress(Exception):  # as above
        store_in_time(_ANSWER_S).set(_CAME.format(group.group_name, group.rank()), str(number))


def absent_ranks(group: dist.ProcessGroup, number: int) -> list[int]:
    """Return the ranks of a group that have not come to a call; none if the store does not tell."""
    with contextlib.suppress(Exception):
        store = store_in_time(_ANSWER_S)
        keys = {rank: _CAME.format(group.group_name, rank) for rank in range(group.size())}
        return [
            rank
            for rank, key in keys.items()
            if not store.check([key]) or int(store.get(key)) < number
        ]
    return []


class naming_lost_ranks:  # noqa: N801  (a context manager, used like a function)
    """Turn the error of a failed collective into one that names the ranks that are gone.

    Raises PeerLostError if there are any, DivergenceError if ranks were doing different things, and
    CommError with the backend's own words otherwise. An error that has nothing to do with
    communication, such as a wrong shape, is left as it is.
    """

    __slots__ = ("_group", "_label")

    def __init__(self, group: dist.ProcessGroup, label: str) -> None:
        self._group = group
        self._label = label

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError):
            name_lost_ranks(error, self._group, self._label)


def name_lost_ranks(error: RuntimeError, group: dist.ProcessGroup, label: str) -> None:
    """Raise the error that `naming_lost_ranks` raises; return if it is not about communication.

    For ``except`` clauses on paths where entering a context would cost too much.
    """
    if isinstance(error, CommError | DivergenceError) or not _is_connection_error(error):
        return
    if (record := known_record(group)) is not None:
        # First: a rank that saw that paths differ may have left, and is not the cause.
        record.compare()
    lost = _lost_ranks(group)
    if not lost:
        others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
        raise _unreachable(others, label, str(error)) from error
    # Ranks that wait for this one in shared memory learn whom it lost, instead of losing it.
    give_up(lost[0])
    raise loss(lost, label) from error


def loss(ranks: Iterable[int], label: str) -> FullshardError:
    """Return the error for ranks that are gone while this one waits for them in ``label``."""
    words = {rank: watchdog().board.last_words(rank) for rank in sorted(ranks)}
    return diagnosis.loss(words, {rank: last_entry_of(rank) for rank in words}, _now(label))


def _unreachable(ranks: Collection[int], label: str, words: str) -> FullshardError:
    """Return the error for a connection that broke, though no process of this host has ended. words: the backend's."""
    board = watchdog().board
    if left := [rank for rank in ranks if board.last_words(rank) is not None]:
        return loss(left, label)
    # On other hosts: those whose connection broke too are there to say so, the lost one is not.
    missing = board.missing(ranks)
    if missing:
        return loss(missing, label)
    has_store = missing is not None or 0 not in ranks
    said = label if has_store else _now(label)
    return diagnosis.out_of_reach(said, dist.get_rank(), words, has_store=has_store)


def _now(label: str) -> str:
    return f"{label} ({moment})" if (moment := latest_moment()) else label


def check_alive(group: dist.ProcessGroup, label: str) -> None:
    """Raise PeerLostError if a process of another rank of the group on this host is gone."""
    if lost := _lost_ranks(group, within_s=0.0):
        raise loss(lost, label)


def _is_connection_error(error: RuntimeError) -> bool:
    """Return whether an error of a collective may mean that a rank is gone."""
    # Gloo raises plain RuntimeErrors, so their words are all there is to go by.
    words = ("connection", "closed by peer", "timed out", "timeout", "socket", "remote process")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _lost_ranks(group: dist.ProcessGroup, within_s: float = _GRACE_S) -> list[int]:
    """Return the group's ranks on this host whose processes are gone, waiting so long for one."""
    processes: dict[int, int] = {}
    with contextlib.suppress(Exception):  # the store may have died with its rank
        store = store_in_time(_ANSWER_S)
        for rank in dist.get_process_group_ranks(group):
            if store.check([_KEY.format(rank)]):
                where, _, pid = store.get(_KEY.format(rank)).decode().rpartition(" ")
                if where == host.identity():  # elsewhere the pid may be another process
                    processes[rank] = int(pid)
    deadline = time.monotonic() + within_s
    while True:
        lost = [rank for rank, pid in processes.items() if not host.is_running(pid)]
        if lost or not processes or time.monotonic() >= deadline:
            return lost
        time.sleep(0.02)
