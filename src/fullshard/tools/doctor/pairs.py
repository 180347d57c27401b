"""Which ranks exchange messages, and in which order: pure."""

import itertools
from collections.abc import Sequence

MOST_RANKS = 32
"""Up to so many ranks, each is paired with each other one."""

Pair = tuple[int, int]


def plan_turns(hosts: Sequence[int]) -> list[list[Pair]]:
    """Plan turns, in each of which a rank is in one pair at most.

    hosts: number of the host of each rank. Three ranks of hosts [0, 0, 1] take three turns:
    [(1, 2)], [(0, 2)], [(0, 1)] in some order. Of more than `MOST_RANKS`, the first ones of
    hosts are paired with each other, and all ranks of a host, so turns grow with hosts and with
    ranks of a host, not with their product.
    """
    if len(hosts) <= MOST_RANKS:
        return each_with_each(range(len(hosts)))
    members: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        members.setdefault(host, []).append(rank)
    within = [each_with_each(ranks) for ranks in members.values()]
    together = itertools.zip_longest(*within, fillvalue=())
    between = each_with_each([ranks[0] for ranks in members.values()])
    return [*between, *([pair for turn in turns for pair in turn] for turns in together)]


def each_with_each(members: Sequence[int]) -> list[list[Pair]]:
    """Pair everybody with everybody else, as many at a time as possible (the circle method)."""
    seats: list[int | None] = [*members, *[None] * (len(members) % 2)]
    half = len(seats) // 2
    turns = []
    for _ in range(len(seats) - 1):
        opposite = zip(seats[:half], reversed(seats[half:]), strict=True)
        turns.append(
            [(min(a, b), max(a, b)) for a, b in opposite if a is not None and b is not None]
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return turns
