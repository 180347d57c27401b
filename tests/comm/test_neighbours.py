"""Connections by which ranks of several hosts notice that a process has ended."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import cast

import pytest

from fullshard.comm.neighbours import Neighbours
from fullshard.comm.notices import Board


class Doors:
    """Stands for the store, and keeps what ranks post there."""

    def __init__(self) -> None:
        self.lines: dict[tuple[str, int], list[str]] = {}

    def own_addresses(self) -> list[str]:
        return ["127.0.0.1"]

    def post_lines(self, key: str, rank: int, lines: list[str]) -> None:
        self.lines[key, rank] = lines

    def read_lines(self, key: str, ranks: list[int], _timeout_s: float) -> dict[int, list[str]]:
        return {rank: self.lines[key, rank] for rank in ranks if (key, rank) in self.lines}


@pytest.fixture
def doors() -> Doors:
    return Doors()


@pytest.fixture
def ring(doors: Doors) -> Iterator[list[Neighbours]]:
    """Return three ranks, numbers 4, 5 and 7, that have met."""
    members = [Neighbours(rank, cast("Board", doors)) for rank in (4, 5, 7)]
    for each in members:
        each.open()
    for each in members:
        each.meet([4, 5, 7])
    yield members
    for each in members:
        each.close()


def ended(rank: Neighbours) -> set[int]:
    """Return what a rank has seen end, after a moment."""
    found: set[int] = set()
    for _ in range(20):
        found |= rank.ended()
        time.sleep(0.005)
    return found


def test_both_neighbours_see_that_a_rank_has_ended(ring: list[Neighbours]) -> None:
    assert [ended(each) for each in ring] == [set(), set(), set()]
    ring[1].close()
    assert [ended(each) for each in (ring[0], ring[2])] == [{5}, {5}]
    assert [ended(each) for each in (ring[0], ring[2])] == [set(), set()], "it is told once"


def test_a_stranger_is_sent_away(ring: list[Neighbours], doors: Doors) -> None:
    _, port, host, *_ = doors.lines["door", 4]
    for said in (b"GET / HTTP/1.1", b'["of another job", 5]', b"[" * 64, b"5"):
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(said)
            assert ended(ring[0]) == set()
            assert stranger.recv(1) == b""
    assert ended(ring[0]) == set()


def test_without_the_next_rank_it_goes_on(doors: Doors) -> None:
    alone = Neighbours(0, cast("Board", doors))
    alone.open()
    alone.meet([0, 1])
    assert ended(alone) == set()
    doors.lines["door", 1] = ["token", "1", "127.0.0.1"]  # where nobody listens
    alone.meet([0, 1])
    assert ended(alone) == set()
    alone.close()


def test_a_forked_child_keeps_none_of_its_parents_connections(ring: list[Neighbours]) -> None:
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
