"""The paths of ranks through their models, and where they part.

An `Event` says that a rank ran a unit at a moment. Ranks may run different units in some programs
(experts, evaluation on one rank alone), so a difference is no error by itself. Where another check
has found one, the first difference tells where to look.
"""

import enum
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple


class StepPhase(enum.IntEnum):
    """The part of a step that a rank is in."""

    BETWEEN = 0
    FORWARD = 1
    EVALUATION = 2  # a forward without gradients
    LOSS = 3  # between forward and backward
    BACKWARD = 4

    def __str__(self) -> str:
        words = {"BETWEEN": "after the step's passes", "LOSS": "between forward and backward"}
        return words.get(self.name, self.name.lower())


class Moment(NamedTuple):
    """A step and a phase of it.

    Steps count from 1. A forward with gradients begins one after a backward, and where it calls a module that the
    step has called: submodules called one after the other are in one step, as the whole model called at once is.
    """

    step: int
    phase: StepPhase

    def __str__(self) -> str:
        if self.step:
            return f"step {self.step}, {self.phase}"
        return "before the first step" if self.phase is StepPhase.BETWEEN else str(self.phase)


class Event(NamedTuple):
    """A unit that a rank ran. model: numbers the models of a group.

    has_gradients: False after its backward, if that has left no gradient on any trained parameter of it.
    is_call: the program has called its module, from outside the model; what that runs comes after it.
    """

    moment: Moment
    model: int
    unit: str
    has_gradients: bool = True
    is_call: bool = False


def first_difference(trails: Mapping[int, Sequence[Event]]) -> str | None:
    """Return a sentence on where paths parted first; None if they did not, or nobody knows.

    trails: of each rank, what it ran, oldest first. The oldest may be missing; of the step that a
    trail begins in, it says nothing.

        {0: [step 4: a, b, c], 1: [step 4: a, c]}
        -> "Their paths parted in step 4, forward: rank 0 ran b; rank 1 ran c."
    """
    by_step = {
        rank: _by_step([event for event in events if event.has_gradients])
        for rank, events in trails.items()
    }
    for step in _common(by_step):
        paths = {rank: each[step] for rank, each in by_step.items()}
        ended = {rank for rank, each in by_step.items() if max(each) > step}
        for events in itertools.zip_longest(*paths.values()):
            at = dict(zip(paths, events, strict=True))
            # A rank that is still in this step may come to it later.
            known = {rank: event for rank, event in at.items() if event or rank in ended}
            if len(set(known.values())) > 1:
                return _sentence(step, known)
    return None


def without_gradients(trails: Mapping[int, Sequence[Event]]) -> dict[str, list[int]]:
    """Return, by the unit, the ranks without its gradients in the last step that all are in.

    A rank lacks them if its backward has left none, or, where all ran the same forward, has gone past the unit where
    another rank ran it.
    Units that no rank has gradients of are left out: on them the ranks agree.

        {0: [forward: a, b, c; backward: c, b], 1: [forward: a, b, c; backward: c, a]} -> {b: [1]}
    """
    by_step = {rank: _by_step(events) for rank, events in trails.items()}
    found: dict[str, set[int]] = {}
    for step in _common(by_step)[-1:]:
        backwards = {rank: _backward(each[step]) for rank, each in by_step.items()}
        ran_same = len({frozenset(own.ran) for own in backwards.values()}) == 1
        for other in backwards.values():
            for number, unit in enumerate(other.units):
                lacking = {
                    rank
                    for rank, own in backwards.items()
                    if unit in own.empty or (ran_same and own.is_past(unit, number))
                }
                found.setdefault(unit, set()).update(lacking)
    return {unit: sorted(ranks) for unit, ranks in found.items() if ranks}


class _Backward(NamedTuple):
    """One rank's backward. units: that left gradients, in order. empty: that left none. ran: in forward."""

    units: list[str]
    empty: set[str]
    ran: set[str]

    def is_past(self, unit: str, number: int) -> bool:
        """Whether it has left out a unit that another rank ran as the ``number``-th."""
        return unit in self.ran and number < len(self.units) and unit not in self.units


def _backward(events: Sequence[Event]) -> _Backward:
    empty = {event.unit for event in events if not event.has_gradients}
    done = [event.unit for event in events if event.moment.phase is StepPhase.BACKWARD]
    ran = {event.unit for event in events if event.moment.phase is StepPhase.FORWARD}
    return _Backward([unit for unit in done if unit not in empty], empty, ran)


def _common(by_step: Mapping[int, Mapping[tuple[int, int], object]]) -> list[tuple[int, int]]:
    """Return the steps that all of several ranks have, in order."""
    steps = map(set, by_step.values())
    return sorted(set.intersection(*steps)) if len(by_step) > 1 else []


def _by_step(events: Sequence[Event]) -> dict[tuple[int, int], list[Event]]:
    """Return a trail's events by (step, model), without those of its first, perhaps cut, step."""
    found: dict[tuple[int, int], list[Event]] = {}
    for event in events:
        found.setdefault((event.moment.step, event.model), []).append(event)
    if events and events[0].moment.step > 1:
        del found[events[0].moment.step, events[0].model]
    return found


def _sentence(step: tuple[int, int], events: Mapping[int, Event | None]) -> str:
    texts = {
        rank: f"{'called' if event.is_call else 'ran'} {event.unit} ({event.moment.phase})"
        if event
        else "ran nothing more"
        for rank, event in events.items()
    }
    ran = "; ".join(f"{ranks} {text}" for ranks, text in by_text(texts))
    return f"Their paths parted in step {step[0]}: {ran}."


def by_text(texts: Mapping[int, str]) -> list[tuple[str, str]]:
    """Return each text once, behind the names of the ranks that have it, by their lowest rank."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_of.setdefault(text, []).append(rank)
    return [(name_ranks(ranks), text) for text, ranks in ranks_of.items()]


def said(texts: Mapping[int, str]) -> str:
    """Return ``rank 0: x; ranks 1, 2: y``: each text once, by the ranks that have it."""
    return "; ".join(f"{ranks}: {text}" for ranks, text in by_text(texts))


def counting(text: str) -> str:
    """Return a message, with what its steps count from if it names one."""
    if not re.search(r"\bstep \d", text):
        return text
    separator = "\n" if "\n" in text else " "  # a stack's last line has no more to it
    return f"{text}{separator}Steps count from 1; a micro-batch is one."


def name_ranks(ranks: Iterable[int]) -> str:
    """Return ``rank 1`` or ``ranks 1, 2``."""
    names = sorted(ranks)
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(map(str, names))}"
