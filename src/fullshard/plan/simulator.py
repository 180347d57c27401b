"""Run a planned step on clocks: when each action begins and ends, what COMPUTE waits for, and the memory.

`simulate` gives times, `follow_memory` gives memory, which does not depend on them: it comes and goes in the order of
the host.

    host    issues the actions in order, each after its host seconds; where an action says so, waits for its end
    lane    does its actions one after another, each when those are over that it waits for
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fullshard.errors import FullshardError
from fullshard.plan.actions import Action, ActionKind, Change, Holding, Lane
from fullshard.plan.step import PlannedStep

_COMPUTING = frozenset(
    (ActionKind.FORWARD, ActionKind.RECOMPUTE, ActionKind.BACKWARD, ActionKind.OPTIMIZER)
)


class SimulationError(FullshardError, ValueError):
    """Durations that do not fit the actions, or actions that wait for one another."""


class Span(NamedTuple):
    """An action's times in seconds: when the host issues it, when it begins, when it ends."""

    issued_s: float
    start_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class Simulated:
    """The times of a step.

    spans: of the actions, in their order. step_s: until all is over.
    computing_s: seconds in which COMPUTE computes.
    exposed_s: seconds in which it does not, by kind and unit of what it waits for or does instead.
    host_bound_s: seconds in which it waits for the host alone. All three add up to ``step_s``, but for what lanes
    still do when COMPUTE and the host have ended.
    """

    spans: tuple[Span, ...]
    step_s: float
    computing_s: float
    exposed_s: Mapping[tuple[ActionKind, int], float]
    host_bound_s: float

    def exposed(self, kind: ActionKind) -> float:
        """Return the exposed seconds of one kind, of all units."""
        return sum(seconds for (each, _), seconds in self.exposed_s.items() if each is kind)


def simulate(
    actions: Sequence[Action], seconds: Sequence[float], host_s: Sequence[float]
) -> Simulated:
    """Return when each action of a step begins and ends.

    seconds: of each action on its lane. host_s: until the host has issued it.

    Raises SimulationError for other numbers of durations, negative ones, and ones that are not finite.
    """
    for place, action in enumerate(actions):
        if any(not 0 <= index < place for index in action.after):
            raise SimulationError(
                f"Action {place} ({action.kind.value}) waits for {action.after}: expected actions before it."
            )
    _check(actions, seconds, "seconds")
    _check(actions, host_s, "host_s")
    spans: list[Span] = []
    host, lanes = 0.0, dict.fromkeys(Lane, 0.0)  # when each has done what came so far
    for action, took, issuing in zip(actions, seconds, host_s, strict=True):
        issued = host + issuing
        start = max(issued, lanes[action.lane], *(spans[each].end_s for each in action.after))
        end = lanes[action.lane] = start + took
        spans.append(Span(issued, start, end))
        host = end if action.host_waits else issued
    return _account(actions, tuple(spans))


def _check(actions: Sequence[Action], durations: Sequence[float], name: str) -> None:
    if len(durations) != len(actions):
        raise SimulationError(
            f"{name} has {len(durations)} durations, and there are {len(actions)} actions."
        )
    if not all(0 <= each < math.inf for each in durations):
        place = next(n for n, each in enumerate(durations) if not 0 <= each < math.inf)
        raise SimulationError(
            f"{name}[{place}] is {durations[place]} for {actions[place].kind.value}: expected seconds, 0 or more."
        )


class Piece(NamedTuple):
    """A part of COMPUTE's time, in seconds: what it does, or what it waits for.

    kind: None while it waits for the host alone. unit: of what it does or waits for. action: index of the one that
    it is at.
    """

    kind: ActionKind | None
    unit: int
    action: int
    start_s: float
    end_s: float

    @property
    def is_computing(self) -> bool:
        return self.kind in _COMPUTING

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def pieces(actions: Sequence[Action], spans: Sequence[Span]) -> Iterator[Piece]:
    """Say what COMPUTE does at each moment, without gaps, from the beginning of a step to the end of COMPUTE."""
    over = 0.0
    for index, (action, span) in enumerate(zip(actions, spans, strict=True)):
        if action.lane is not Lane.COMPUTE:
            continue
        last = max(action.after, key=lambda each: spans[each].end_s, default=index)
        awaited = actions[last]
        reached = min(max(over, span.issued_s), span.start_s)
        does = (
            awaited if action.kind is ActionKind.WAIT else action
        )  # it finishes what it waits for
        yield from (
            piece
            for piece in (
                Piece(None, -1, index, over, reached),
                Piece(awaited.kind, awaited.unit, index, reached, span.start_s),
                Piece(does.kind, does.unit, index, span.start_s, span.end_s),
            )
            if piece.seconds > 0
        )
        over = span.end_s


def _account(actions: Sequence[Action], spans: tuple[Span, ...]) -> Simulated:
    """Add up what COMPUTE does."""
    exposed: dict[tuple[ActionKind, int], float] = collections.defaultdict(float)
    computing = host_bound = 0.0
    for piece in pieces(actions, spans):
        if piece.kind is None:
            host_bound += piece.seconds
        elif piece.is_computing:
            computing += piece.seconds
        else:
            exposed[piece.kind, piece.unit] += piece.seconds
    step_s = max((span.end_s for span in spans), default=0.0)
    return Simulated(spans, step_s, computing, dict(exposed), host_bound)


# Memory


class Held(NamedTuple):
    """Bytes of one use and unit; unit -1 for none."""

    holding: Holding
    unit: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a step.

    levels: for each action, the bytes of each use when it was issued, in the order of `Holding`.
    highest: for each action, the most bytes that are in use during it.
    peak_nbytes: the most of all. peak_action: the first action with it. at_peak: what they are used for.
    """

    levels: tuple[tuple[int, ...], ...]
    highest: tuple[int, ...]
    peak_nbytes: int
    peak_action: int
    at_peak: tuple[Held, ...]

    def at_peak_of(self, holding: Holding) -> int:
        """Return the bytes of one use at the peak."""
        return sum(each.nbytes for each in self.at_peak if each.holding is holding)


def follow_memory(step: PlannedStep) -> StepMemory:
    """Return the memory over a step."""
    order = {holding: place for place, holding in enumerate(Holding)}
    level = [0] * len(order)
    for change in step.resident:
        level[order[change.holding]] += change.nbytes
    total = sum(level)
    levels, highest = [], []
    for action in step.actions:
        highest.append(total + action.peak_nbytes)
        for change in action.changes:
            level[order[change.holding]] += change.nbytes
            total += change.nbytes
        levels.append(tuple(level))
    peak = max(highest, default=total)
    place = highest.index(peak) if highest else -1
    return StepMemory(tuple(levels), tuple(highest), peak, place, _held_during(step, place))


class Highest(NamedTuple):
    """What an action has changed at its highest moment, and what its kernels take then besides, in bytes."""

    changes: Sequence[Change]
    within_nbytes: int


def highest_of(action: Action) -> Highest:
    """Return what memory is like at the highest moment of an action."""
    sums = [0, *itertools.accumulate(each.nbytes for each in action.changes)]
    if action.kind in _COMPUTING and action.peak_nbytes > max(sums):
        before = action.num_before
        return Highest(action.changes[:before], action.peak_nbytes - sums[before])
    return Highest(action.changes[: sums.index(max(sums))], 0)


def _held_during(step: PlannedStep, place: int) -> tuple[Held, ...]:
    """Return what memory is used for at the highest moment of an action."""
    held: collections.Counter[tuple[Holding, int]] = collections.Counter()
    before = step.actions[: max(place, 0)]
    changes = [*step.resident, *(change for action in before for change in action.changes)]
    if place >= 0:
        action = step.actions[place]
        highest = highest_of(action)
        changes += [*highest.changes, *_within(action, highest.within_nbytes)]
    for change in changes:
        held[change.holding, change.unit] += change.nbytes
    return tuple(Held(holding, unit, n) for (holding, unit), n in held.items() if n)


def _within(action: Action, nbytes: int) -> list[Change]:
    """Return what kernels of an action use bytes for: gradients that they make, and temporary memory."""
    if action.kind is ActionKind.OPTIMIZER:
        return [Change(Holding.OPTIMIZER_TEMPORARIES, nbytes)]
    own = action.changes[action.num_before :]
    full = sum(c.nbytes for c in own if c.holding is Holding.FULL_GRADIENTS and c.nbytes > 0)
    made = min(full, nbytes)
    return [
        Change(Holding.FULL_GRADIENTS, made, action.unit),
        Change(Holding.ACTIVATIONS, nbytes - made),
    ]
