"""Ranks come together, or say within the time who did not. Ranks are threads here, over one store."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from fullshard.tools.doctor.facts import Knock
from fullshard.tools.doctor.together import Meeting, MeetingError, _door, join, knock_at_hosts
from fullshard.tools.launch import Place
from tests.tools.doctor.examinations import exam


def _run(
    body: Callable[[Meeting], Any], *, came: int, num_ranks: int, timeout_s: float
) -> list[Any]:
    """Return what each of the ranks that came returns."""
    store = dist.HashStore()
    meetings = [
        Meeting(store, rank=r, num_ranks=num_ranks, timeout_s=timeout_s) for r in range(came)
    ]
    with concurrent.futures.ThreadPoolExecutor(came) as pool:
        return list(pool.map(body, meetings))


def test_all_are_let_through_when_the_last_one_comes() -> None:
    def body(meeting: Meeting) -> tuple[bool, Any]:
        meeting.post("value", meeting.rank * 10)
        return meeting.arrive("step"), meeting.posted("value", 2 - meeting.rank)

    assert _run(body, came=3, num_ranks=3, timeout_s=20) == [(True, 20), (True, 10), (True, 0)]


def test_one_that_is_unwell_is_known_to_all() -> None:
    def body(meeting: Meeting) -> bool:
        return meeting.arrive("step", is_well=meeting.rank != 1)

    assert _run(body, came=3, num_ranks=3, timeout_s=20) == [False, False, False]


def test_one_that_does_not_come_is_named_in_time() -> None:
    def body(meeting: Meeting) -> tuple[bool, list[int]]:
        return meeting.arrive("step"), meeting.came("step")

    began = time.monotonic()
    assert _run(body, came=2, num_ranks=3, timeout_s=0.5) == [(False, [0, 1])] * 2
    assert time.monotonic() - began < 5


def test_nobody_is_let_through_after_others_gave_up() -> None:
    store = dist.HashStore()
    first, last = (Meeting(store, rank=r, num_ranks=2, timeout_s=0.3) for r in range(2))
    assert not first.arrive("step")
    first.give_up("step")
    assert not last.arrive("step")


def _place(port: int) -> Place:
    return Place(1, 2, 1, 2, "127.0.0.1", port, None)


def test_a_place_where_nobody_listens_is_an_error_with_the_reason() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(MeetingError, match="Connection refused"):
        join(_place(port), has_agent_store=False, timeout_s=0.5)
    assert time.monotonic() - began < 5


def test_hosts_that_are_not_reached_are_named() -> None:
    facts = exam(3, per_host=1, machines={"addresses": ("localhost",)}).ranks
    unknown = dataclasses.replace(facts[2].machine, addresses=("node2.invalid",))
    # The second one names an interface, whose address then counts.
    chosen = dataclasses.replace(
        facts[1], machine=unknown, environment={"GLOO_SOCKET_IFNAME": "lo"}
    )
    facts = [facts[0], chosen, dataclasses.replace(facts[2], machine=unknown)]

    def body(meeting: Meeting) -> list[Knock]:
        return knock_at_hosts(meeting, facts[meeting.rank], [0, 1, 2])

    first, second, third = _run(body, came=3, num_ranks=3, timeout_s=20)
    assert [(k.target, bool(k.error)) for k in first] == [(1, False), (2, True)]
    assert [(k.target, bool(k.error)) for k in second] == [(0, False), (2, True)]
    assert [(k.target, bool(k.error)) for k in third] == [(0, False), (1, False)]
    assert [k.address.partition(":")[0] for k in first] == ["127.0.0.1", "node2.invalid"]


def test_a_door_is_open_at_its_address_alone() -> None:
    with _door("127.0.0.1") as port:
        socket.create_connection(("127.0.0.1", port), 5).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 5)
