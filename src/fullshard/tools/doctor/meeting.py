"""How ranks come together for an examination, and tell each other what they found.

All of it goes through a store (a `TCPStore`), which needs one connection from each rank to one
host: what is examined, Gloo and NCCL, may not work. Nothing here waits longer than its timeout.
"""

import datetime
import pickle
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard.tools.launch import Place

_CONNECT_S = 3.0
_BETWEEN_TRIES_S = 0.2


class MeetingError(Exception):
    """A rank cannot reach the place where ranks meet; the message is the reason."""


class Meeting:
    """One rank's access to what all ranks know. Keys are names of what is examined."""

    def __init__(self, store: dist.Store, *, rank: int, num_ranks: int, timeout_s: float) -> None:
        self.store = store
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout_s = timeout_s

    def post(self, name: str, value: Any) -> None:
        """Let others read a value of this rank."""
        self.store.set(f"{name}/{self.rank}", pickle.dumps(value))  # type: ignore[arg-type]

    def posted(self, name: str, rank: int) -> Any:
        """Return a rank's value of a name; it must have arrived there."""
        return pickle.loads(self.store.get(f"{name}/{rank}"))

    def arrive(self, name: str, *, is_well: bool = True) -> bool:
        """Wait until all ranks are here; return whether all came, in time, and all were well.

        Once a rank has given up waiting, nobody is let through any more.
        """
        if not is_well:
            self.store.set(f"{name}/unwell", "")
        self.store.set(f"{name}/came/{self.rank}", "")
        is_last = self.store.add(f"{name}/count", 1) == self.num_ranks
        if is_last and not self.store.check([f"{name}/given up"]):
            self.store.set(f"{name}/complete", "")
        try:
            self.store.wait([f"{name}/complete"], datetime.timedelta(seconds=self.timeout_s))
        except dist.DistError:  # the time is over
            return False
        return not self.store.check([f"{name}/unwell"])

    def give_up(self, name: str) -> None:
        """Let nobody through who comes later."""
        self.store.set(f"{name}/given up", "")

    def came(self, name: str) -> list[int]:
        """Return the ranks that are here by now."""
        ranks = range(self.num_ranks)
        return [rank for rank in ranks if self.store.check([f"{name}/came/{rank}"])]


def join(place: Place, *, has_agent_store: bool, timeout_s: float) -> Meeting:
    """Reach the place where ranks meet. Raises MeetingError if that takes too long.

    has_agent_store: whether torchrun runs the store; else rank 0 does.
    """
    host, port = place.master_host, place.master_port
    is_server = place.rank == 0 and not has_agent_store
    deadline = time.monotonic() + timeout_s
    # First by a plain connection, which says why it fails.
    if not is_server:
        _knock_until(host, port, deadline)
    left = max(1.0, deadline - time.monotonic())
    try:
        store = dist.TCPStore(
            host,
            port,
            place.num_ranks,
            is_master=is_server,
            timeout=datetime.timedelta(seconds=left),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, ValueError) as error:
        raise MeetingError(str(error).splitlines()[0]) from error
    return Meeting(
        dist.PrefixStore("fullshard/doctor", store),
        rank=place.rank,
        num_ranks=place.num_ranks,
        timeout_s=timeout_s,
    )


def _knock_until(host: str, port: int, deadline: float) -> None:
    while True:
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
            return
        except OSError as error:
            if time.monotonic() + _BETWEEN_TRIES_S > deadline:
                raise MeetingError(error.strerror or str(error)) from error
            time.sleep(_BETWEEN_TRIES_S)


class Watchdog:
    """Calls `on_stuck`, in a thread, if what was begun last does not end in time."""

    def __init__(self, on_stuck: Callable[[str], None]) -> None:
        self._on_stuck = on_stuck
        self._timer: threading.Timer | None = None

    def begin(self, what: str, limit_s: float) -> None:
        """Take what was begun before as ended, and allow this so many seconds."""
        self.end()
        self._timer = threading.Timer(limit_s, self._on_stuck, [what])
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """Watch nothing any more."""
        if self._timer is not None:
            self._timer.cancel()
