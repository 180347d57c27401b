"""Connections by which ranks of several hosts notice that a process has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fullshard.peers import connections
from fullshard.peers.connections import Connections, Door

Doors = dict[int, Door]  # where each rank can be reached


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Doors:
    monkeypatch.setattr(connections, "own_addresses", lambda: ["127.0.0.1"])
    return {}


@pytest.fixture
def ring(doors: Doors) -> Iterator[list[Connections]]:
    """Return three ranks, numbers 4, 5 and 7, that have met."""
    members = [Connections(rank, doors.__getitem__) for rank in (4, 5, 7)]
    for rank, each in zip((4, 5, 7), members, strict=True):
        door = each.open()
        assert door is not None
        assert each.open() is None, "it is open"
        doors[rank] = door
    for each in members:
        each.meet([4, 5, 7])
    yield members
    for each in members:
        each.close()


def ended(rank: Connections) -> set[int]:
    """Return what a rank has seen end, after a moment."""
    found: set[int] = set()
    for _ in range(20):
        found |= rank.ended()
        time.sleep(0.005)
    return found


def test_both_neighbours_see_that_a_rank_has_ended(ring: list[Connections]) -> None:
    assert [ended(each) for each in ring] == [set(), set(), set()]
    ring[1].close()
    assert [ended(each) for each in (ring[0], ring[2])] == [{5}, {5}]
    assert [ended(each) for each in (ring[0], ring[2])] == [set(), set()], "it is told once"


def test_a_stranger_is_sent_away(ring: list[Connections], doors: Doors) -> None:
    _, port, host = doors[4]
    for said in (b"GET / HTTP/1.1", b'["of another job", 5]', b"[" * 64, b"5"):
        with socket.create_connection((host, port), timeout=5) as stranger:
            stranger.sendall(said)
            assert ended(ring[0]) == set()
            assert stranger.recv(1) == b""
    assert ended(ring[0]) == set()


def test_whoever_says_nothing_is_sent_away_in_time_and_few_are_let_in(
    ring: list[Connections], doors: Doors
) -> None:
    _, port, host = doors[4]
    assert host == "127.0.0.1", "where it can be reached, and nowhere else"
    ended(ring[0])
    with contextlib.ExitStack() as stack:
        silent: list[socket.socket] = []
        with contextlib.suppress(TimeoutError):  # the system lets nobody more wait to be let in
            for _ in range(5 * connections._MOST_STRANGERS):
                waiting = socket.create_connection((host, port), timeout=0.2)
                silent.append(stack.enter_context(waiting))
        assert len(silent) > connections._MOST_STRANGERS
        descriptors = num_open()
        ended(ring[0])
        assert num_open() <= descriptors + connections._MOST_STRANGERS
        deadline = time.monotonic() + 10
        for each in silent:
            each.setblocking(False)
        while silent and time.monotonic() < deadline:
            assert ended(ring[0]) == set()
            silent = [each for each in silent if not _was_closed(each)]
        assert not silent
    assert [ended(each) for each in ring] == [set(), set(), set()]


def test_a_connection_that_breaks_is_made_again_where_the_rank_lives(
    ring: list[Connections], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a link was down. Until then the rank is out of reach, and not said to have ended."""
    assert [ended(each) for each in ring] == [set(), set(), set()]
    connect = socket.create_connection

    def no_answer(*_: object, **__: object) -> socket.socket:
        raise TimeoutError

    for is_last, to_connect in enumerate((no_answer, connect)):
        monkeypatch.setattr(socket, "create_connection", to_connect)
        monkeypatch.setattr(connections, "_TRY_EVERY_S", 0.0)
        if not is_last:
            for each in list(ring[1]._ranks):  # so that its system resets them
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.close()
            ring[1]._ranks.clear()
        assert [ended(each) for each in ring] == [set(), set(), set()]
        assert [each.unreached for each in (ring[0], ring[2])] == [set() if is_last else {5}] * 2
    ring[1].close()
    assert [ended(each) for each in (ring[0], ring[2])] == [{5}, {5}]


def num_open() -> int:
    """Return how many files this process has open."""
    return len([*Path("/proc/self/fd").iterdir()])


def _was_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_without_the_next_rank_it_goes_on(doors: Doors) -> None:
    alone = Connections(0, doors.__getitem__)
    alone.open()
    alone.meet([0, 1])
    assert ended(alone) == set()
    doors[1] = ("token", 1, "127.0.0.1")  # where nobody listens
    alone.meet([0, 1])
    assert ended(alone) == set()
    alone.close()


def test_a_forked_child_keeps_none_of_its_parents_connections(ring: list[Connections]) -> None:
    """Such as a worker that loads data, which may live on for seconds."""
    assert ended(ring[0]) == set()
    child = os.fork()
    if not child:
        time.sleep(60)
        os._exit(0)
    ring[1].close()
    found = ended(ring[0])
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert found == {5}
