"""Notice within moments that another rank is gone, whatever the collectives are doing.

A collective whose peer died may fail at once (Gloo), after minutes (NCCL) or not at all, and its
error seldom says who died. So every rank keeps one TCP connection to rank 0, on which nothing is
sent while all is well. The kernel closes a dead process's sockets:

    rank 2 is killed  ->  rank 0 reads end-of-file from 2, sends "2 died" to the others
    rank 0 is killed  ->  every other rank reads end-of-file from 0
    rank 2 finishes   ->  it says goodbye first, and nobody is alarmed

Keep-alive probes do the same for a host that vanishes with its kernel, after a minute: a link that is down for less changes
nothing.
"""

import contextlib
import enum
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch.distributed as dist

_CONNECT_TIMEOUT_S = 60.0
_HELLO_S = 1.0  # for whoever connects to show the token; ranks do at once
_NOTICE = struct.Struct("<iB")  # rank, Fate
_HELLO = struct.Struct("<16si")  # token, rank


class Fate(enum.Enum):
    """How a rank left."""

    GOODBYE = 0
    FAILED = 1  # by an error of its own, which it has printed
    DIED = 2


class Address(NamedTuple):
    """Where rank 0 listens; the token keeps strangers out."""

    host: str
    port: int
    token: bytes


class Lifeline:
    """One rank's end. `on_loss(rank, fate)` runs once, in a thread, when a rank failed or died.

    Collective: every rank of the default process group constructs it, and closes it after a
    barrier. `host` is where the other ranks reach rank 0.
    """

    def __init__(self, host: str, on_loss: Callable[[int, Fate], None]) -> None:
        self.rank = dist.get_rank()
        self._on_loss = on_loss
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, socket.socket] = {}
        self._lock = threading.Lock()  # peers are dropped in the thread and written to from both
        self._leaving = False
        if self.rank == 0:
            self._gather(host)
        else:
            self._join()
        thread = threading.Thread(target=self._watch, name="fullshard-lifeline", daemon=True)
        thread.start()

    def leave(self, fate: Fate) -> None:
        """Tell the others how this rank ends: GOODBYE when all do, FAILED after an own error."""
        self._leaving = True
        self._tell(self.rank, fate)

    def _gather(self, host: str) -> None:
        with _listening_at(host) as server:
            server.settimeout(_CONNECT_TIMEOUT_S)
            token = secrets.token_bytes(16)
            address = Address(host, server.getsockname()[1], token)
            dist.broadcast_object_list([address], src=0)
            while len(self._peers) < dist.get_world_size() - 1:
                peer, _ = server.accept()
                peer.settimeout(_HELLO_S)
                hello = _receive(peer, _HELLO.size)
                if len(hello) < _HELLO.size or _HELLO.unpack(hello)[0] != token:
                    peer.close()  # not one of ours
                    continue
                self._add(_HELLO.unpack(hello)[1], peer)

    def _join(self) -> None:
        received: list[Address | None] = [None]
        dist.broadcast_object_list(received, src=0)
        address = received[0]
        assert address is not None
        peer = socket.create_connection((address.host, address.port), _CONNECT_TIMEOUT_S)
        peer.sendall(_HELLO.pack(address.token, self.rank))
        self._add(0, peer)

    def _add(self, rank: int, peer: socket.socket) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):
                peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._peers[rank] = peer
        self._selector.register(peer, selectors.EVENT_READ, rank)

    def _watch(self) -> None:
        while self._selector.get_map():
            for key, _ in self._selector.select():
                peer = self._peers[key.data]
                notice = _receive(peer, _NOTICE.size)
                if len(notice) == _NOTICE.size:
                    rank, number = _NOTICE.unpack(notice)
                    fate = Fate(number)
                else:
                    rank, fate = key.data, Fate.DIED
                if fate is Fate.GOODBYE or self._leaving:
                    self._drop(key.data)
                    continue
                self._drop(rank)
                self._tell(rank, fate)
                self._on_loss(rank, fate)
                return

    def _drop(self, rank: int) -> None:
        with self._lock:
            peer = self._peers.pop(rank, None)
            if peer is not None:
                self._selector.unregister(peer)
                peer.close()

    def _tell(self, rank: int, fate: Fate) -> None:
        with self._lock:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):  # it may be gone as well
                    peer.sendall(_NOTICE.pack(rank, fate.value))


def _listening_at(host: str) -> socket.socket:
    """Listen where others reach this host, or everywhere if that is no address of its own."""
    try:
        return socket.create_server((host, 0))
    except OSError:
        return socket.create_server(("", 0))


def _receive(peer: socket.socket, nbytes: int) -> bytes:
    """Read exactly `nbytes`, or fewer when the other side is gone."""
    data = b""
    with contextlib.suppress(OSError):  # reset and timed out mean the same as end-of-file here
        while len(data) < nbytes:
            part = peer.recv(nbytes - len(data))
            if not part:
                break
            data += part
    return data
