"""Connections between ranks of several hosts that break when a process ends, whatever has ended it.

A rank that is killed says nothing, and its host cannot be asked. But the system closes its connections. So
each rank of a group is connected to the next one, in a ring: either end of a connection that breaks sees it.
Nothing is sent but who it is. A process that is stopped, or that holds the interpreter's lock, keeps its
connections: it is slow, not lost.

Not every connection that breaks is a process that has ended. If a host is cut off or loses its power, nobody closes
anything, and the system gives the connection up by itself, after 7 s (`_PROBES`). So whoever sees one break connects again:

    connected           the rank is there, as after a link came back, and is out of reach no more
    refused             nobody listens there any more: it has ended, and all ranks are told
    no answer           it has ended too if it was its system that closed the connection; else it is out of reach,
                        and is tried again and again
"""

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import time
import weakref
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from fullshard.host import read_addresses
from fullshard.torch_private import default_store

logger = logging.getLogger("fullshard")

_DOOR = "door"  # under which ranks say where they can be reached
_FIND_S = 1.0  # for what it has said to be read
_CONNECT_S = 2.0
_TRY_EVERY_S = 2.0  # to connect to a rank that is out of reach
# Seconds of silence, seconds between probes, and their number. Not every system has all of them.
_PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
_HELLO_NBYTES = 64
_HELLO_S = 1.0  # for whoever connects to say who it is
_MOST_STRANGERS = 8  # that may be about to say so; a rank that is sent away comes again


class Doors(Protocol):
    """Where ranks say how they can be reached, and find others: the `StatusBoard`."""

    def post_lines(self, key: str, lines: Sequence[str]) -> None: ...

    def read_lines(
        self, key: str, ranks: Collection[int], timeout_s: float
    ) -> dict[int, Sequence[str]]: ...


class Connections:
    """The ranks that this one is connected to. board: where ranks find each other."""

    def __init__(self, rank: int, board: Doors) -> None:
        self._rank = rank
        self._board = board
        self._server: socket.socket | None = None
        self._token = secrets.token_hex(16)
        self._ranks: dict[socket.socket, int] = {}
        # Those who have not said who they are, and since when.
        self._strangers: dict[socket.socket, float] = {}
        self._closed: set[int] = set()  # whose connection was closed since they were looked for
        self._unreached: set[int] = set()
        self._tried_at = 0.0  # when those were looked for last
        _all.add(self)

    def open(self) -> None:
        """Say where this rank can be reached, unless it has."""
        if self._server is None:
            try:
                self._open()
            except OSError as reason:
                logger.info("rank %d cannot be reached by others: %s", self._rank, reason)

    def meet(self, ranks: Sequence[int]) -> None:
        """Connect this rank to the next one of a group. To be called once all ranks of the group are open.

        Where no connection can be had, as through a firewall, ranks go on without.
        """
        following = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
        if following == self._rank or following in self._ranks.values():
            return
        try:
            self._connect(following)
        except (OSError, KeyError, ValueError) as reason:
            logger.info("rank %d is not connected to rank %d: %s", self._rank, following, reason)

    @property
    def unreached(self) -> frozenset[int]:
        """Ranks whose connection to this one broke, though they may live."""
        return frozenset(self._unreached)

    def ended(self) -> set[int]:
        """Return the ranks that have ended since this was asked last. To be called often."""
        now = time.monotonic()
        self._let_in(now)
        known = [*self._ranks, *self._strangers]  # another thread may add to it
        poll = select.poll()  # no limit on numbers of descriptors, as `select.select` has
        for each in known:
            poll.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        for each in known:
            if each.fileno() in ready:
                self._read(each)
        return self._looked_for(now) if self._closed or self._unreached else set()

    def close(self) -> None:
        """Close all connections, as the end of the process would."""
        server = [self._server] if self._server is not None else []
        for each in [*self._ranks, *self._strangers, *server]:
            each.close()
        self._server, self._ranks, self._strangers, self._unreached = None, {}, {}, set()

    def _open(self) -> None:
        for address in own_addresses():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                server = socket.create_server((address, 0), family=family, backlog=_MOST_STRANGERS)
            except OSError:
                continue  # what the host's name stands for elsewhere
            server.setblocking(False)
            self._server = server
            door = [self._token, str(server.getsockname()[1]), address]
            self._board.post_lines(_DOOR, door)
            return
        raise OSError("this host has no address that others are known to reach")

    def _connect(self, rank: int) -> None:
        token, port, host = self._board.read_lines(_DOOR, [rank], _FIND_S)[rank]
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        connection.sendall(json.dumps([token, self._rank]).encode().ljust(_HELLO_NBYTES))
        _watch(connection)
        self._ranks[connection] = rank
        self._unreached.discard(rank)

    def _let_in(self, now: float) -> None:
        """Accept who has come, and send away who has not said in time who it is."""
        for each, since in list(self._strangers.items()):
            if now - since > _HELLO_S:
                self._drop(each, self._closed)
        if self._server is None:
            return
        with contextlib.suppress(OSError):  # nobody more; or it may open no more files now
            while len(self._strangers) < _MOST_STRANGERS:
                stranger, _ = self._server.accept()
                self._strangers[stranger] = now
                _watch(stranger)

    def _read(self, connection: socket.socket) -> None:
        """Read what has come, which is a hello at most; drop the connection if it is broken, or a stranger's."""
        try:
            received = connection.recv(_HELLO_NBYTES)
        except BlockingIOError:
            return
        except OSError:  # reset, or nobody answers
            self._drop(connection, self._unreached)
            return
        if connection in self._strangers:
            with contextlib.suppress(ValueError, TypeError):
                token, rank = json.loads(received)
                if token == self._token:
                    self._strangers.pop(connection)
                    self._ranks[connection] = int(rank)
                    self._unreached.discard(int(rank))
                    return
        # Closed; or a rank that has said more than who it is, which none does.
        self._drop(connection, self._closed)

    def _drop(self, connection: socket.socket, among: set[int]) -> None:
        connection.close()
        self._strangers.pop(connection, None)
        rank = self._ranks.pop(connection, None)
        if rank is not None and rank not in self._ranks.values():
            among.add(rank)
            self._tried_at = 0.0

    def _looked_for(self, now: float) -> set[int]:
        """Connect again to ranks whose connection broke; return those that have ended."""
        ended: set[int] = set()
        if now - self._tried_at < _TRY_EVERY_S:
            return ended
        for rank in self._closed | self._unreached:
            try:
                self._connect(rank)
            # KeyError: the store does not tell its address.
            except (OSError, KeyError, ValueError) as reason:
                if rank in self._closed or isinstance(reason, ConnectionRefusedError):
                    ended.add(rank)
        self._closed.clear()
        self._unreached -= ended
        self._tried_at = time.monotonic()
        return ended


def own_addresses() -> list[str]:
    """Return addresses of this host by which others reach it, the likeliest first.

    That of the interface that Gloo is told to take, that by which this host reaches the store's, what its name
    stands for, which is where Gloo listens otherwise, and as Gloo's the loopback.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    interfaces = read_addresses() if any(chosen) else {}
    found = [interfaces[name] for name in chosen if name in interfaces]
    with contextlib.suppress(OSError, AttributeError):  # of stores without a host
        store: Any = default_store()
        while (inner := getattr(store, "underlying_store", None)) is not None:
            store = inner
        kind = socket.SOCK_DGRAM
        family, _, _, _, address = socket.getaddrinfo(store.host, store.port, type=kind)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # chooses a route, and sends nothing
            found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(address[0]) for *_, address in named]
    return [*dict.fromkeys(found), "127.0.0.1"]


def _watch(connection: socket.socket) -> None:
    """Have the system notice if the other end is silent."""
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


_all: "weakref.WeakSet[Connections]" = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_all):
        each.close()


# A forked child, such as a worker that loads data, would keep its parent's connections open.
os.register_at_fork(after_in_child=_close_all)
