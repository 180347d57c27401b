"""Connections between ranks of several hosts that break when a process ends, whatever has ended it.

A rank that is killed says nothing, and its host cannot be asked. But the system closes its connections. So
each rank of a group is connected to the next one, in a ring: either end of a connection that breaks sees
that the other has ended, and can tell all ranks. Nothing is sent but who it is. A process that is stopped, or
that holds the interpreter's lock, keeps its connections: it is slow, not lost.

If a host is cut off or loses its power, nobody closes anything. The system then finds out by itself, after
7 s (`_PROBES`).
"""

import contextlib
import json
import logging
import os
import secrets
import select
import socket
import weakref
from collections.abc import Sequence

from fullshard.comm.notices import Board

logger = logging.getLogger("fullshard")

_DOOR = "door"  # under which ranks say where they can be reached
_FIND_S = 1.0  # for what it has said to be read
_CONNECT_S = 2.0
# Seconds of silence, seconds between probes, and their number. Not every system has all of them.
_PROBES = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
_HELLO_NBYTES = 64


class Neighbours:
    """The ranks that this one is connected to. board: where ranks find each other."""

    def __init__(self, rank: int, board: Board) -> None:
        self._rank = rank
        self._board = board
        self._server: socket.socket | None = None
        self._token = secrets.token_hex(16)
        self._ranks: dict[socket.socket, int | None] = {}  # None until it has said who it is
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

    def ended(self) -> set[int]:
        """Return the ranks whose connection to this one has broken since this was asked last."""
        if self._server is not None:
            with contextlib.suppress(BlockingIOError):
                while True:
                    self._keep(self._server.accept()[0], None)
        poll = select.poll()  # no limit on numbers of descriptors, as `select.select` has
        known = [*self._ranks]  # another thread may add to it
        for each in known:
            poll.register(each, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(0)}
        broken = [each for each in known if each.fileno() in ready and self._is_over(each)]
        found = {self._ranks.pop(each) for each in broken}
        for each in broken:
            each.close()
        return {rank for rank in found if rank is not None}

    def close(self) -> None:
        """Close all connections, as the end of the process would."""
        for each in [*self._ranks, *([self._server] if self._server is not None else [])]:
            each.close()
        self._server, self._ranks = None, {}

    def _open(self) -> None:
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        server = socket.create_server(("", 0), family=family, dualstack_ipv6=has_both)
        server.setblocking(False)
        self._server = server
        door = [*self._board.own_addresses(), socket.gethostname()]
        port = str(server.getsockname()[1])
        self._board.post_lines(_DOOR, self._rank, [self._token, port, *door])

    def _connect(self, rank: int) -> None:
        token, port, *hosts = self._board.read_lines(_DOOR, [rank], _FIND_S)[rank]
        for number, host in enumerate(hosts):
            try:
                connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
                break
            except OSError:
                if number == len(hosts) - 1:
                    raise
        connection.sendall(json.dumps([token, self._rank]).encode().ljust(_HELLO_NBYTES))
        self._keep(connection, rank)

    def _keep(self, connection: socket.socket, rank: int | None) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _PROBES.items():
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._ranks[connection] = rank

    def _is_over(self, connection: socket.socket) -> bool:
        """Read what has come, which is a hello at most; return whether the connection is broken, or a stranger's."""
        try:
            received = connection.recv(_HELLO_NBYTES)
        except BlockingIOError:
            return False
        except OSError:  # reset, or nobody answers
            return True
        if not received or self._ranks[connection] is not None:
            return True  # closed; or a rank that has said more than who it is, which none does
        with contextlib.suppress(ValueError, TypeError):
            token, rank = json.loads(received)
            if token == self._token:
                self._ranks[connection] = int(rank)
                return False
        return True


_all: "weakref.WeakSet[Neighbours]" = weakref.WeakSet()


def _close_all() -> None:
    for each in list(_all):
        each.close()


# A forked child, such as a worker that loads data, would keep its parent's connections open.
os.register_at_fork(after_in_child=_close_all)
