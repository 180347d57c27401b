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
import logging
import os
import secrets
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence

from fullshard.host import read_addresses
from fullshard.peers.store import tcp_store
from fullshard.process_hooks import AFTER_FORK

logger = logging.getLogger("fullshard")

_CONNECT_S = 2.0
_TRY_EVERY_S = 2.0  # to connect to a rank that is out of reach
# Seconds of silence, seconds between probes, and their number. Not every system has all of them.
_PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
_HELLO_NBYTES = 64
_HELLO_S = 1.0  # for whoever connects to say who it is
_MOST_STRANGERS = 8  # that may be about to say so; a rank that is sent away comes again

# Where a rank can be reached: what whoever comes has to say, the port, and the address.
Door = tuple[str, int, str]


class Connections:
    """The ranks that this one is connected to. find: returns where a rank can be reached; KeyError if nobody knows."""

    def __init__(self, rank: int, find: Callable[[int], Door]) -> None:
        self._rank = rank
        self._find = find
        self._server: socket.socket | None = None
        self._token = secrets.token_hex(16)
        self._ranks: dict[socket.socket, int] = {}
        # Those who have not said who they are, and since when.
        self._strangers: dict[socket.socket, float] = {}
        self._closed: set[int] = set()  # whose connection was closed since they were looked for
        self.unreached: set[int] = set()  # whose connection broke, though they may live
        self._tried_at = 0.0  # when those were looked for last
        _all.add(self)
        # A worker that loads data, say, would keep its parent's connections open.
        AFTER_FORK.add(_close_all, "connections to other hosts are the parent's")

    def open(self) -> Door | None:
        """Return where this rank can be reached from now on; None if it was open, or cannot be reached."""
        for address in own_addresses() if self._server is None else ():
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            # Not with what the host's name stands for elsewhere.
            with contextlib.suppress(OSError):
                server = socket.create_server((address, 0), family=family, backlog=_MOST_STRANGERS)
                server.setblocking(False)
                self._server = server
                return self._token, server.getsockname()[1], address
        if self._server is None:
            logger.info("rank %d cannot be reached by others: no address to listen at", self._rank)
        return None

    def meet(self, ranks: Sequence[int]) -> None:
        """Connect this rank to the next one of a group. To be called once all ranks of the group are open.

        Where no connection can be had, as through a firewall, ranks go on without.
        """
        following = ranks[(ranks.index(self._rank) + 1) % len(ranks)]
        if following == self._rank or following in self._ranks.values():
            return
        try:
            self._connect(following)
        except (OSError, KeyError) as reason:
            logger.info("rank %d is not connected to rank %d: %s", self._rank, following, reason)

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
        ended: set[int] = set()
        broken = self._closed | self.unreached
        if not broken or now - self._tried_at < _TRY_EVERY_S:
            return ended
        for rank in broken:
            try:
                self._connect(rank)
            except (OSError, KeyError) as reason:
                if rank in self._closed or isinstance(reason, ConnectionRefusedError):
                    ended.add(rank)
        self._closed.clear()
        self.unreached -= ended
        self._tried_at = time.monotonic()
        return ended

    def close(self) -> None:
        """Close all connections, as the end of the process would."""
        for each in [*self._ranks, *self._strangers, *filter(None, [self._server])]:
            each.close()
        self._server, self._ranks, self._strangers, self.unreached = None, {}, {}, set()

    def _connect(self, rank: int) -> None:
        token, port, host = self._find(rank)
        connection = socket.create_connection((host, port), timeout=_CONNECT_S)
        connection.sendall(f"{token} {self._rank}".encode().ljust(_HELLO_NBYTES))
        _watch(connection)
        self._ranks[connection] = rank
        self.unreached.discard(rank)

    def _let_in(self, now: float) -> None:
        """Accept who has come, and send away who has not said in time who it is."""
        for each, since in list(self._strangers.items()):
            if now - since > _HELLO_S:
                self._drop(each)
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
            self.unreached |= self._drop(connection)
            return
        token, _, rank = received.partition(b" ")
        if connection in self._strangers and token == self._token.encode():
            del self._strangers[connection]
            self._ranks[connection] = int(rank)
            self.unreached.discard(int(rank))
            return
        # Closed; or a rank that has said more than who it is, which none does.
        self._closed |= self._drop(connection)

    def _drop(self, connection: socket.socket) -> set[int]:
        """Close a connection. Returns the rank behind it, if that was the last one to it."""
        connection.close()
        self._strangers.pop(connection, None)
        rank = self._ranks.pop(connection, None)
        if rank is None or rank in self._ranks.values():
            return set()
        self._tried_at = 0.0
        return {rank}


def own_addresses() -> list[str]:
    """Return addresses of this host by which others reach it, the likeliest first.

    That of the interface that Gloo is told to take, that by which this host reaches the store's, what its name
    stands for, which is where Gloo listens otherwise, and as Gloo's the loopback.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")
    interfaces = read_addresses() if any(chosen) else {}
    found = [interfaces[name] for name in chosen if name in interfaces]
    with contextlib.suppress(OSError):
        if (store := tcp_store()) is not None:
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
