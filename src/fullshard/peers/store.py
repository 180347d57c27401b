"""The store that the ranks met in, asked so that every question ends in time.

torch's waits for an answer for as long as its connection lives. Where the host of the store was cut off, or its process is
stopped, that is for ever. So each question is asked on a thread of its own, which may stay behind; the thread that trains does not.
"""

import datetime
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fullshard.errors import CommError
from fullshard.host import files_left
from fullshard.process_hooks import start_thread
from fullshard.torch_private import default_store

_ANSWER_S = 5.0  # for an answer that only serves messages
_CONNECT_S = 10.0  # for a store that is there to let this process in
_LOOK_EVERY_S = 0.5  # at what the caller does meanwhile


class StoreInTime:
    """A store's methods, each of which raises CommError if there is no answer in time.

    While a question waits that took too long, others raise at once. Once it is answered, as after a link came back, so are others.
    meanwhile: called now and then while an answer is waited for, and gives up instead, by raising.
    """

    def __init__(
        self, store: Any, limit_s: float, meanwhile: Callable[[], None] | None = None
    ) -> None:
        self._store = store
        self._limit_s = limit_s
        self._meanwhile = meanwhile
        self._late: threading.Event | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._ask, getattr(self._store, name))

    def __contains__(self, key: str) -> bool:
        return bool(self.check([key]))

    def during(self, meanwhile: Callable[[], None]) -> "StoreInTime":
        """Return the same store, which calls this while an answer is waited for."""
        return StoreInTime(self._store, self._limit_s, meanwhile)

    def _ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if self._late is not None and not self._late.is_set():
            raise CommError("The store that the ranks met in does not answer.")
        ended, answers, errors = threading.Event(), [], []

        def ask() -> None:
            try:
                answers.append(method(*arguments))
            except BaseException as error:
                errors.append(error)
            ended.set()

        start_thread(ask, name="fullshard-store", why="asks the store, which may not answer")
        if self._meanwhile is not None:
            while not ended.wait(_LOOK_EVERY_S):
                self._meanwhile()
        elif not ended.wait(self._limit_s):
            self._late = ended
            raise CommError(
                f"The store that the ranks met in has not answered for {self._limit_s:.0f} s."
            )
        if errors:
            raise errors[0]
        return answers[0]


def tcp_store() -> dist.TCPStore | None:
    """Return the store that the ranks met in, without its prefixes; None if it is of another kind."""
    store: Any = default_store()
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store if isinstance(store, dist.TCPStore) else None


def store_in_time(limit_s: float = _ANSWER_S) -> StoreInTime:
    """Return the program's own connection to the store that ranks met in."""
    return StoreInTime(default_store(), limit_s)


def connected_store(limit_s: float = _ANSWER_S) -> StoreInTime:
    """Return a new connection to the store that ranks met in: the program's may be waiting in a call.

    Raises CommError where none can be had: torch would try again for as long as ranks may take to meet.
    """
    if files_left() == 0:
        raise CommError("This process may open no more files. Raise the limit (ulimit -n).")
    connection = store_in_time(min(limit_s, _CONNECT_S)).clone()
    connection.set_timeout(datetime.timedelta(seconds=limit_s))
    return StoreInTime(connection, limit_s)
