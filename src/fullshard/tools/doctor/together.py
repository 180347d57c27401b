"""What ranks do together: come together, connect hosts, send messages over Gloo, sum over NCCL, train a step.

They tell each other through a store (a `TCPStore`), which needs one connection from each rank to one host: what is
examined, Gloo and NCCL, may not work. Nothing here waits longer than its timeout.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import itertools
import pickle
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import fullshard
from fullshard.errors import FullshardError
from fullshard.tools.doctor.facts import Collective, Communication, Knock, Link, RankFacts
from fullshard.tools.launch import Place

T = TypeVar("T")

MOST_RANKS = 32
"""Up to so many ranks, each exchanges messages with each other one."""

_CONNECT_S = 3.0
_BETWEEN_TRIES_S = 0.2
_KNOCK_S = 5.0
_NUM_GREETINGS = 20
_NUM_LOADS = 3
_LOAD_NBYTES = 4 << 20
_REDUCED_NBYTES = 64 << 20
_NUM_REDUCTIONS = 3


class MeetingError(Exception):
    """A rank cannot reach the place where ranks meet; the message is the reason."""


@dataclasses.dataclass(frozen=True)
class Meeting:
    """One rank's access to what all ranks know. Keys are names of what is examined."""

    store: dist.Store
    rank: int
    num_ranks: int
    timeout_s: float

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
    while not is_server:  # first by a plain connection, which says why it fails
        try:
            socket.create_connection((host, port), _CONNECT_S).close()
            break
        except OSError as error:
            if time.monotonic() + _BETWEEN_TRIES_S > deadline:
                raise MeetingError(error.strerror or str(error)) from error
            time.sleep(_BETWEEN_TRIES_S)
    left = max(1.0, deadline - time.monotonic())
    try:
        store: dist.Store = dist.TCPStore(
            *(host, port, place.num_ranks, is_server, datetime.timedelta(seconds=left)),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (dist.DistError, ValueError) as error:
        raise MeetingError(_first_line(error)) from error
    store = dist.PrefixStore("fullshard/doctor", store)
    return Meeting(store, place.rank, place.num_ranks, timeout_s)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


# From host to host, by plain TCP


def knock_at_hosts(meeting: Meeting, facts: RankFacts, leaders: Sequence[int]) -> list[Knock]:
    """Connect from each host to each other one, at the address that Gloo would use. Collective.

    leaders: the first rank of each host.
    """

    def knock(target: int, place: tuple[str, int]) -> Knock:
        host, port = place
        try:
            socket.create_connection(place, _KNOCK_S).close()
        except OSError as error:
            return Knock(facts.rank, target, f"{host}:{port}", error.strerror or str(error))
        return Knock(facts.rank, target, f"{host}:{port}")

    is_leader = facts.rank in leaders
    knocks: list[Knock] = []
    with _door(_address(facts)) if is_leader else contextlib.nullcontext(0) as port:
        if is_leader:
            meeting.post("door", (_address(facts), port))
        is_open = meeting.arrive("doors")
        if is_leader and is_open:
            doors = {rank: meeting.posted("door", rank) for rank in leaders if rank != facts.rank}
            with concurrent.futures.ThreadPoolExecutor(16) as pool:
                knocks = list(pool.map(knock, doors, doors.values()))
        meeting.arrive("knocked")  # all doors stay open until then
    return knocks


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


def _address(facts: RankFacts) -> str:
    """Return the address that Gloo tells other hosts."""
    machine = facts.machine
    for name in facts.environment.get("GLOO_SOCKET_IFNAME", "").split(","):
        if name in machine.interfaces:
            return machine.interfaces[name]
    return machine.addresses[0] if machine.addresses else machine.name


# From rank to rank, over Gloo


def plan_pairs(hosts: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Plan which ranks exchange messages; each goes through its own pairs in this order, so that partners meet.

    hosts: the ranks of each host. Each rank meets each other one, up to `MOST_RANKS`. Of more, all ranks of a host
    meet, and the first ones of hosts. Pairs of one sum have no rank in common, and exchange at the same time.
    """
    everybody = [rank for ranks in hosts for rank in ranks]
    circles = [everybody]
    if len(everybody) > MOST_RANKS:
        circles = [[ranks[0] for ranks in hosts], *map(list, hosts)]
    pairs = (itertools.combinations(sorted(circle), 2) for circle in circles)
    return [pair for of_circle in pairs for pair in sorted(of_circle, key=sum)]


def measure_links(rank: int, pairs: Sequence[tuple[int, int]]) -> tuple[Link, ...]:
    """Exchange messages with this rank's partner of each pair, until one fails. Collective.

    Returns links that this rank led, or could not make.
    """
    links = []
    for turn, (first, second) in enumerate(pairs):
        try:
            if rank == first:
                links.append(_lead(first, second, turn))
            elif rank == second:
                _follow(first)
        except RuntimeError as error:
            links.append(Link(first, second, turn, error=_first_line(error)))
            break
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


# All ranks of a host, then all


def reduce_over_nccl(
    scopes: Sequence[Sequence[int]], device: torch.device, timeout_s: float
) -> tuple[Collective, ...]:
    """Sum a tensor over the ranks of each scope, in turn, until one fails. Collective.

    scopes: groups of ranks; every rank gives the same.
    """

    def reduce(ranks: tuple[int, ...], group: dist.ProcessGroup) -> Collective:
        # In a thread, which is left behind if NCCL waits for ever.
        pool = concurrent.futures.ThreadPoolExecutor(1, "fullshard-doctor-nccl")
        try:
            seconds = pool.submit(_reduce, group, device).result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise RuntimeError(f"no end within {timeout_s:g} s") from None
        pool.shutdown()
        return Collective(ranks, seconds, _REDUCED_NBYTES / seconds)

    return _in_turn(scopes, reduce, Collective, backend="nccl")


def try_fullshard(
    scopes: Sequence[Sequence[int]], device: torch.device
) -> tuple[Communication, ...]:
    """Shard a small model over the ranks of each scope and train it for a step. Collective.

    scopes: groups of ranks; every rank gives the same. Those of one rank are left out.
    """
    return _in_turn(
        [ranks for ranks in scopes if len(ranks) > 1],
        lambda ranks, group: Communication(ranks, device.type, _step(group, device)),
        lambda ranks, error: Communication(ranks, device.type, error=error),
    )


def _in_turn(
    scopes: Sequence[Sequence[int]],
    look: Callable[[tuple[int, ...], dist.ProcessGroup], T],
    failed: Callable[..., T],
    backend: str | None = None,
) -> tuple[T, ...]:
    """Try something in the process group of each scope that has this rank, until it fails. Collective.

    failed: makes the result of one that does, of its ranks and the error.
    """
    found: list[T] = []
    for scope in scopes:
        group, ranks = dist.new_group(list(scope), backend=backend), tuple(scope)
        if dist.get_rank() not in ranks:
            continue
        assert group is not None
        try:
            found.append(look(ranks, group))
        except (FullshardError, RuntimeError, ImportError) as error:
            return (*found, failed(ranks, error=_first_line(error)))
    return tuple(found)


def _reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds that an all-reduce takes. Raises RuntimeError if the sum is wrong."""
    load = torch.empty(_REDUCED_NBYTES // 4, dtype=torch.float32, device=device)
    times = []
    for _ in range(_NUM_REDUCTIONS):
        load.fill_(1.0)
        torch.accelerator.synchronize(device)
        began = time.perf_counter()
        dist.all_reduce(load, group=group)
        torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - began)
    if not bool((load == group.size()).all()):
        raise RuntimeError(f"the sum of {group.size()} ones is {load.min().item():g}")
    return min(times)


def _step(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return how fullshard communicates, after a forward and a backward."""
    model = nn.Linear(64, 64, device=device)
    fullshard.fully_shard(model, mesh=DeviceMesh.from_group(group, device.type))
    model(torch.ones(1, 64, device=device)).sum().backward()
    (unit,) = fullshard.describe(model).units
    return unit.communication
