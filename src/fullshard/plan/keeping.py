"""Choose which units stay unsharded from forward to backward: those that save the most within a budget of bytes.

    forward     gather a, a, gather b, b, gather c, c          c is last
    backward    gather c, c, gather b, b, gather a, a          a unit that stays needs no gather here

What a gather costs is what of it is exposed: the time in which nothing is computed. Where a run or a plan of one
tells that, it counts. Else `weigh_by_bytes` estimates it.
"""

import bisect
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fullshard.errors import ShardingError
from fullshard.plan.trace import Kind, RankTrace

# A gather of this size takes twice as long as the bytes alone would.
LATENCY_NBYTES = 1 << 20
_MOST_POINTS, _MOST_UNIONS = 4096, 1 << 16


class _Point(NamedTuple):
    """A set of units, as the bits of ``chosen``, the last unit's lowest: what it takes, and what it saves."""

    nbytes: int
    saved: int
    chosen: int


def choose_kept(nbytes: Sequence[int], saved: Sequence[int], budget: int) -> tuple[bool, ...]:
    """Return for each unit whether it stays, so that together they save the most.

    nbytes: of each unit, while it is unsharded. saved: by keeping it, in any unit of measurement. What saves nothing
    does not stay. Of sets that save the same, the one with fewer bytes stays, then that of later units, which stay
    for a shorter time.

    The best set there is, in nearly all models: their units have few sizes, and of one size those stay that save most.
    Where more than 4,096 sets are worth looking at, some are left out, for at most one part in 4,096 of all savings,
    once for each size or each 16 units of it.
    """
    alike: dict[int, list[int]] = {}
    for unit in reversed(range(len(nbytes))):
        if saved[unit] > 0:
            alike.setdefault(nbytes[unit], []).append(unit)
    front = [_Point(0, 0, 0)]  # sets that no other one beats: with more bytes, more is saved
    for units in sorted(alike.values(), key=len):
        units.sort(key=lambda unit: -saved[unit])
        points = [_Point(nbytes[u], saved[u], 1 << len(nbytes) - 1 - u) for u in units]
        front = _extended(_thinned(front), [*itertools.accumulate(points, _union)], budget)
    return tuple(bit == "1" for bit in f"{front[-1].chosen:0{len(nbytes)}b}"[: len(nbytes)])


def _union(one: _Point, other: _Point) -> _Point:
    return _Point(one.nbytes + other.nbytes, one.saved + other.saved, one.chosen | other.chosen)


def _extended(front: list[_Point], more: Sequence[_Point], budget: int) -> list[_Point]:
    """Return the best sets with one of ``more`` or none; of many at a time, since only the best need to stay in memory."""
    best, at_once = front, _MOST_UNIONS // len(front)
    for start in range(0, len(more), at_once):
        unions = (_union(a, b) for b in more[start : start + at_once] for a in front)
        within = [each for each in unions if each.nbytes <= budget]
        every = sorted((*_thinned(best), *within), key=lambda p: (p.nbytes, -p.saved, p.chosen))
        most = itertools.accumulate((each.saved for each in every), max, initial=-1)
        best = [each for each, before in zip(every, most, strict=False) if each.saved > before]
    return best


def _thinned(front: list[_Point]) -> list[_Point]:
    """Leave out sets if there are very many: of those that save nearly the same, all but the smallest."""
    if len(front) <= _MOST_POINTS:
        return front
    step = front[-1].saved / _MOST_POINTS
    kept = [front[0]]
    for each in front[1:]:
        if int(each.saved / step) > int(kept[-1].saved / step):
            kept.append(each)
    return kept


class Keepable(NamedTuple):
    """A unit that may stay.

    name: its path, or those of its modules. nbytes: of its whole parameters, but for what is read in place: what a
    gather brings, and what it takes to keep it. hides_nbytes: of all its whole parameters, as a measure of its
    backward, which hides the gather of the unit that is next; 0 if that does not run meanwhile.
    may_stay: keeping it saves a gather in backward.
    """

    name: str
    nbytes: int
    hides_nbytes: int
    may_stay: bool


def choose_units(
    units: Sequence[Keepable], budget: int, saved: Sequence[int] | None = None
) -> tuple[bool, ...]:
    """Return for each unit whether it stays, in a run (`keep_unsharded`) as in a plan of it.

    units: in the order of ``named_modules``. saved: by keeping each, as `choose_kept` takes it; None estimates it by
    sizes and order.

    Raises ShardingError for a budget in which no unit fits, with what it takes.
    """
    if saved is None:
        order = backward_order([unit.name.partition(", ")[0] for unit in units])
        beside = [0] * len(units)
        for before, number in itertools.pairwise(order):
            beside[number] = units[before].hides_nbytes
        saved = weigh_by_bytes([unit.nbytes for unit in units], beside)
    gains = [each if unit.may_stay else 0 for unit, each in zip(units, saved, strict=True)]
    _check_budget(budget, [unit for unit, gain in zip(units, gains, strict=True) if gain > 0])
    return choose_kept([unit.nbytes for unit in units], gains, budget)


def _check_budget(budget: int, units: Sequence[Keepable]) -> None:
    """Refuse a budget that holds none of these units. budget: in bytes; 0 asks for no unit."""
    if budget < 0:
        raise ShardingError(
            f"{budget} bytes to keep units unsharded: expected a number of bytes, 0 or more."
        )
    least = min(units, key=lambda unit: unit.nbytes, default=None)
    if least is not None and 0 < budget < least.nbytes:
        raise ShardingError(
            f"{budget} bytes to keep units unsharded hold none of them. The smallest, {least.name or 'the root'}, takes "
            f"{least.nbytes} bytes, and all {len(units)} that gather again in backward {sum(u.nbytes for u in units)}."
        )


def weigh_by_bytes(moved: Sequence[int], beside: Sequence[int]) -> tuple[int, ...]:
    """Estimate what of each unit's gather in backward is exposed, where no times are known.

    moved: bytes that the gather brings together. beside: bytes of the unit whose backward runs meanwhile, which
    takes the longer the larger it is; 0 where nothing runs.

    A gather takes as long as its bytes and `LATENCY_NBYTES`. Beside a unit of the same size half of it is hidden, and
    more of it beside a larger one. So units count whose gathers run beside little or nothing, such as the last ones
    of forward, and small ones, since each message takes its time.
    """
    taken = (size + LATENCY_NBYTES for size in moved)
    return tuple(each * each // (each + other) for each, other in zip(taken, beside, strict=True))


def backward_order(names: Sequence[str]) -> list[int]:
    """Return units in the order in which backward comes to them, of a model that runs its modules in their order.

    names: their paths, in the order of ``named_modules``. The forward of a module ends after those inside it.
    """
    ended: list[int] = []
    running: list[int] = []
    for number, name in enumerate(names):
        while running and not _is_inside(name, names[running[-1]]):
            ended.append(running.pop())
        running.append(number)
    return [*running, *reversed(ended)]


def _is_inside(name: str, outer: str) -> bool:
    return not outer or name.startswith(f"{outer}.")


# Of a run


class BackwardGathers(NamedTuple):
    """What a rank's trace shows of gathers in backward, for each unit.

    exposed_ns: nanoseconds of each step in which the rank started them or waited for them, by step, then by unit.
    are_gathered: whether there were any. are_used: whether it had a backward.
    """

    exposed_ns: tuple[tuple[int, ...], ...]
    are_gathered: tuple[bool, ...]
    are_used: tuple[bool, ...]


def backward_gathers(trace: RankTrace) -> BackwardGathers:
    """Find the gathers of backward in a trace: those after which a backward goes on, and no forward."""
    computed = [each for each in trace.timeline if each.kind in (Kind.FORWARD, Kind.BACKWARD)]
    ends = [each.end for each in computed]

    def is_in_backward(time: int) -> bool:
        place = bisect.bisect_right(ends, time)
        return place < len(computed) and computed[place].kind is Kind.BACKWARD

    exposed = [[0] * len(trace.units) for _ in trace.steps]
    starts = [step.start for step in trace.steps]
    for segment in trace.timeline:
        step = bisect.bisect_right(starts, segment.start) - 1
        is_gather = segment.kind in (Kind.ALL_GATHER, Kind.WAIT_ALL_GATHER) and segment.unit >= 0
        if is_gather and step >= 0 and is_in_backward(segment.start):
            exposed[step][segment.unit] += segment.end - segment.start
    gathered = {
        each.unit
        for each in trace.transfers
        if each.kind is Kind.ALL_GATHER and is_in_backward(each.start)
    }
    used = {each.unit for each in computed if each.kind is Kind.BACKWARD}
    units = range(len(trace.units))
    return BackwardGathers(
        tuple(map(tuple, exposed)),
        tuple(unit in gathered for unit in units),
        tuple(unit in used for unit in units),
    )


def exposed_of_all(ranks: Sequence[BackwardGathers]) -> tuple[int, ...]:
    """Return what a step has of each unit's gathers in backward, in nanoseconds: medians over the steps.

    Of ranks that wait for one another the one that comes last waits for the gather alone, so it counts.
    """
    steps = zip(*(rank.exposed_ns for rank in ranks), strict=True)
    of_steps = [[min(of_ranks) for of_ranks in zip(*step, strict=True)] for step in steps]
    return tuple(int(statistics.median(unit)) for unit in zip(*of_steps, strict=True))
