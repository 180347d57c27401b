"""Measure connections: from host to host by plain TCP, and from rank to rank over Gloo."""

import concurrent.futures
import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from fullshard.tools.doctor.facts import Knock, Link, RankFacts
from fullshard.tools.doctor.meeting import Meeting
from fullshard.tools.doctor.pairs import Pair

_KNOCK_S = 5.0
_NUM_GREETINGS = 20
_NUM_LOADS = 3
_LOAD_NBYTES = 4 << 20


def knock_at_hosts(
    meeting: Meeting, facts: RankFacts, leaders: Sequence[int]
) -> tuple[tuple[Knock, ...], bool]:
    """Connect from each host to each other one, at the address that Gloo would use.

    leaders: the first rank of each host. Collective. Returns what this rank's host found, and
    whether every host reached all others.
    """
    is_leader = facts.rank in leaders
    knocks: list[Knock] = []
    with _door(_address(facts)) if is_leader else contextlib.nullcontext(0) as port:
        if is_leader:
            meeting.post("door", (_address(facts), port))
        is_open = meeting.arrive("doors")
        if is_leader and is_open:
            doors = {rank: meeting.posted("door", rank) for rank in leaders if rank != facts.rank}
            knocks = _knock(facts.rank, doors)
        all_good = meeting.arrive("knocks", is_well=not any(knock.error for knock in knocks))
    return tuple(knocks), all_good


@contextlib.contextmanager
def _door(address: str) -> Iterator[int]:
    """Listen on a free port where others look for this host, or everywhere if that is no address of its own.

    The kernel accepts: nothing is read, and all who came are sent away at the end.
    """
    try:
        server = socket.create_server((address, 0), backlog=1024)
    except OSError:
        server = socket.create_server(("", 0), backlog=1024)
    with server:
        yield server.getsockname()[1]


def _knock(source: int, doors: Mapping[int, tuple[str, int]]) -> list[Knock]:
    def knock(target: int) -> Knock:
        host, port = doors[target]
        try:
            socket.create_connection((host, port), _KNOCK_S).close()
        except OSError as error:
            return Knock(source, target, f"{host}:{port}", error.strerror or str(error))
        return Knock(source, target, f"{host}:{port}")

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(knock, doors))


def _address(facts: RankFacts) -> str:
    """Return the address that Gloo tells other hosts."""
    machine = facts.machine
    for name in facts.environment.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name in machine.interfaces:
            return machine.interfaces[name]
    return machine.addresses[0] if machine.addresses else machine.name


def measure_links(rank: int, turns: Sequence[Sequence[Pair]]) -> tuple[Link, ...]:
    """Exchange messages with this rank's partner of each turn, until one fails. Collective."""
    links = []
    for turn, pairs in enumerate(turns):
        for first, second in pairs:
            if rank not in (first, second):
                continue
            try:
                if rank == first:
                    links.append(_lead(first, second, turn))
                else:
                    _follow(first)
            except RuntimeError as error:
                links.append(Link(first, second, turn, error=str(error).splitlines()[0]))
                return tuple(links)
    return tuple(links)


def _lead(first: int, second: int, turn: int) -> Link:
    """Greet and send loads; the partner answers with the time on its clock."""
    word, load = _buffers()
    greetings = []
    for _ in range(_NUM_GREETINGS):
        clock, began = time.time(), time.perf_counter()
        dist.send(word, second)
        dist.recv(word, second)
        took = time.perf_counter() - began
        # The partner read its clock at some moment in between: half of the time, give or take that.
        greetings.append((took, word.item() - (clock + took / 2)))
    took, ahead = min(greetings)
    loads = []
    for _ in range(_NUM_LOADS):
        began = time.perf_counter()
        dist.send(load, second)
        dist.recv(word, second)
        loads.append(time.perf_counter() - began)
    speed = _LOAD_NBYTES / max(min(loads) - took / 2, 1e-9)
    return Link(first, second, turn, took / 2, speed, ahead, took / 2)


def _follow(first: int) -> None:
    word, load = _buffers()
    for _ in range(_NUM_GREETINGS):
        dist.recv(word, first)
        word.fill_(time.time())
        dist.send(word, first)
    for _ in range(_NUM_LOADS):
        dist.recv(load, first)
        dist.send(word, first)


def _buffers() -> tuple[torch.Tensor, torch.Tensor]:
    word = torch.zeros(1, dtype=torch.float64, device="cpu")
    return word, torch.zeros(_LOAD_NBYTES, dtype=torch.uint8, device="cpu")
