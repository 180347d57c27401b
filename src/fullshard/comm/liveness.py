"""Which ranks are still there, when a collective fails.

A collective's error says that a connection broke, not whose. Each rank announces its process in the
store that the ranks met in; after an error the others look which of those processes is gone.
"""

import contextlib
import os
import time
import weakref
from pathlib import Path

import torch.distributed as dist

from fullshard.comm.shared_memory import SharedMemory, host_identity, known_ledger
from fullshard.errors import CommError, PeerLostError

_GRACE_S = 1.0  # a dying process closes its connections before it is gone
_KEY = "fullshard/process/{}"


# The process's default groups that it was announced in: once each, however many units there are.
_announced: "weakref.WeakSet[dist.ProcessGroup]" = weakref.WeakSet()


def announce() -> None:
    """Say which process this rank is."""
    with contextlib.suppress(Exception):  # an unusual store, or no /proc: names will be missing
        world = dist.distributed_c10d._get_default_group()
        if world in _announced:
            return
        store = dist.distributed_c10d._get_default_store()
        store.set(_KEY.format(dist.get_rank()), f"{host_identity()} {os.getpid()}")
        _announced.add(world)


class naming_lost_ranks:  # noqa: N801  (a context manager, used like a function)
    """Turn a failed collective into an error that names the ranks that are gone.

    Raises PeerLostError if there are any, CommError with the backend's own words otherwise. An
    error that has nothing to do with communication (a wrong shape, say) stays as it is.
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
    """Raise what `naming_lost_ranks` says of an error, or return if it is none of communication.

    Raises DivergenceError if ranks were doing different things.

    For ``except`` where a context would cost too much.
    """
    if isinstance(error, CommError) or not _is_connection_error(error):
        return
    if (ledger := known_ledger(group)) is not None:
        ledger.compare()  # a rank that saw first that paths differ has left
    where = f"{label} (rank {dist.get_rank()})"
    lost = _lost_ranks(group)
    if not lost:
        raise CommError(f"{where}: a rank could not be reached: {error}") from error
    SharedMemory.give_up(lost[0])
    names = ", ".join(f"rank {rank}" for rank in lost)
    raise PeerLostError(
        f"{where}: {names} died or left while this rank waited for it. The cause is in that "
        "rank's own output; restart from the last checkpoint."
    ) from error


def _is_connection_error(error: RuntimeError) -> bool:
    words = ("connection", "closed by peer", "timed out", "timeout", "socket", "remote process")
    return isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)


def _lost_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the group's ranks on this host whose processes are gone."""
    processes: dict[int, int] = {}
    with contextlib.suppress(Exception):  # the store may have died with its rank
        store = dist.distributed_c10d._get_default_store()
        for rank in dist.get_process_group_ranks(group):
            if store.check([_KEY.format(rank)]):
                host, _, pid = store.get(_KEY.format(rank)).decode().rpartition(" ")
                if host == host_identity():
                    processes[rank] = int(pid)
    deadline = time.monotonic() + _GRACE_S
    while processes and time.monotonic() < deadline:
        lost = [rank for rank, pid in processes.items() if not _is_running(pid)]
        if lost:
            return lost
        time.sleep(0.02)
    return []


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # gone before, or while it was read
        return not Path("/proc/self").exists()  # without /proc, nothing can be said
    return state not in "ZX"
