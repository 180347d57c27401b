"""A training step as data: which unit does what, in which order.

    >>> steps = plan_steps([0, 1, 2], resharded={1, 2})
    >>> print(format_steps(steps))
    0:unshard 0:forward 1:unshard 1:forward 1:reshard 2:unshard 2:forward 2:reshard \
2:unshard 2:backward 2:reshard 2:reduce 1:unshard 1:backward 1:reshard 1:reduce \
0:backward 0:reshard 0:reduce

This is how tests say what a step has to do; here prefetch is a pass over steps, which moves an
unshard to before the compute that precedes it. The runtime has no such plan: it records the order
it observes (`Recorder`), uses the last one to prefetch, and follows whatever really happens.
"""

import collections
import dataclasses
import enum
from collections.abc import Collection, Iterable, Sequence

from fullshard.errors import FullshardError


class ScheduleError(FullshardError, ValueError):
    """A schedule's text does not parse, or its steps contradict each other."""


class Op(enum.Enum):
    UNSHARD = "unshard"
    FORWARD = "forward"
    BACKWARD = "backward"
    RESHARD = "reshard"
    REDUCE = "reduce"


_COMPUTE = (Op.FORWARD, Op.BACKWARD)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    unit: int
    op: Op

    def __str__(self) -> str:
        return f"{self.unit}:{self.op.value}"


def plan_steps(
    forward_order: Sequence[int], *, resharded: Collection[int], reduced: bool = True
) -> tuple[Step, ...]:
    """Return one step of training for units that run forward in this order, without prefetch.

    ``resharded`` names the units that reshard after forward; a unit may run several times.
    """
    steps: list[Step] = []
    unsharded: set[int] = set()

    def unshard(unit: int) -> None:
        if unit not in unsharded:
            steps.append(Step(unit, Op.UNSHARD))
            unsharded.add(unit)

    def reshard(unit: int) -> None:
        steps.append(Step(unit, Op.RESHARD))
        unsharded.discard(unit)

    for unit in forward_order:
        unshard(unit)
        steps.append(Step(unit, Op.FORWARD))
        if unit in resharded:
            reshard(unit)
    for unit in reversed(forward_order):
        unshard(unit)
        steps.append(Step(unit, Op.BACKWARD))
        reshard(unit)
        if reduced:
            steps.append(Step(unit, Op.REDUCE))
    return tuple(steps)


def prefetch(steps: Sequence[Step], *, ahead: int = 1) -> tuple[Step, ...]:
    """Move every unshard before the ``ahead`` computations that precede it.

    Never past the same unit's reshard: ``1:reshard 1:unshard`` stays in this order.
    """
    result: list[Step] = []
    for step in steps:
        if step.op is not Op.UNSHARD:
            result.append(step)
            continue
        position = len(result)
        remaining = ahead
        for before in range(len(result) - 1, -1, -1):
            if result[before] == Step(step.unit, Op.RESHARD) or remaining == 0:
                break
            if result[before].op in _COMPUTE:
                position, remaining = before, remaining - 1
        result.insert(position, step)
    return tuple(result)


def format_steps(steps: Iterable[Step]) -> str:
    return " ".join(str(step) for step in steps)


def parse_steps(text: str) -> tuple[Step, ...]:
    """Parse what `format_steps` prints. Raises ScheduleError naming the word that is wrong."""
    steps = []
    for position, word in enumerate(text.split()):
        unit, _, op = word.partition(":")
        if not unit.isdigit() or op not in {member.value for member in Op}:
            raise ScheduleError(
                f"schedule word {position}, {word!r}: expected UNIT:OP, such as 3:unshard, with "
                f"OP one of {', '.join(member.value for member in Op)}."
            )
        steps.append(Step(int(unit), Op(op)))
    return tuple(steps)


def check_steps(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return every contradiction: compute while sharded, a reduction before its backward."""
    problems: list[str] = []
    unsharded: set[int] = set()
    differentiated: set[int] = set()
    for position, step in enumerate(steps):
        match step.op:
            case Op.UNSHARD if step.unit in unsharded:
                problems.append(f"step {position} ({step}): unit {step.unit} is unsharded already")
            case Op.UNSHARD:
                unsharded.add(step.unit)
            case Op.FORWARD | Op.BACKWARD if step.unit not in unsharded:
                problems.append(f"step {position} ({step}): unit {step.unit} is sharded")
            case Op.RESHARD if step.unit not in unsharded:
                problems.append(f"step {position} ({step}): unit {step.unit} is sharded already")
            case Op.RESHARD:
                unsharded.discard(step.unit)
            case Op.REDUCE if step.unit not in differentiated:
                problems.append(f"step {position} ({step}): no backward since the last reduce")
        if step.op is Op.BACKWARD:
            differentiated.add(step.unit)
        if step.op is Op.REDUCE:
            differentiated.discard(step.unit)
    return tuple(problems)


def first_difference(planned: Sequence[Step], observed: Sequence[Step]) -> str | None:
    """Say where two schedules part, or None: "step 4: planned 1:forward, observed 2:forward"."""
    for position in range(max(len(planned), len(observed))):
        was = str(planned[position]) if position < len(planned) else "nothing more"
        now = str(observed[position]) if position < len(observed) else "nothing more"
        if was != now:
            return f"step {position}: planned {was}, observed {now}"
    return None


# How often a unit may come after another one than before, until the oldest is forgotten.
_MOST_CHANGES = 256


class Recorder:
    """The order in which units really ran, and what the last pass says comes next.

    Many forwards may have no backward (an evaluation with gradients), and nobody says so. What is
    kept of them does not grow with their number: of each unit, runs of (the unit that ran before
    it, how many times in a row). Two passes over units 0, 1, 2 are, for unit 1, one run (0, 2).
    """

    def __init__(self) -> None:
        self._before: dict[int, collections.deque[tuple[int | None, int]]] = {}
        self._latest: int | None = None  # whose backward is to come
        self._pass: list[int] = []
        self._last_pass: list[int] = []
        self._agrees = True  # this pass with the last, so far

    def start_pass(self) -> None:
        """A forward of the whole model begins."""
        self._last_pass, self._pass = self._pass, []
        self._agrees = True

    def next_unit(self, unit: int) -> int | None:
        """Record that ``unit`` runs forward now; return the unit that followed in the last pass.

        Only while this pass agrees with the last one so far: after a divergence a guess would
        gather parameters nobody asked for.
        """
        self._pass.append(unit)
        count = len(self._pass)
        if not self._agrees or len(self._last_pass) <= count:
            return None
        self._agrees = self._last_pass[count - 1] == unit
        return self._last_pass[count] if self._agrees else None

    def expect_backward(self, unit: int) -> None:
        """Record a forward that may be differentiated."""
        runs = self._before.get(unit)
        if runs is None:
            runs = self._before[unit] = collections.deque(maxlen=_MOST_CHANGES)
        if runs and runs[-1][0] == self._latest:
            runs[-1] = self._latest, runs[-1][1] + 1
        else:
            runs.append((self._latest, 1))
        self._latest = unit

    def start_backward(self, unit: int) -> int | None:
        """Return the unit whose forward came just before that of ``unit`` which is differentiated.

        The last forward is taken to be differentiated first. None if nothing came before, or if it
        is differentiated more often than it ran.
        """
        runs = self._before.get(unit)
        if not runs:
            return None
        before, count = runs.pop()
        if count > 1:
            runs.append((before, count - 1))
        return before

    def end_iteration(self) -> None:
        self._before.clear()
        self._latest = None

    def forget(self) -> None:
        """After an exception: what was recorded says nothing about the next pass."""
        self.end_iteration()
        self._pass.clear()
        self._last_pass.clear()
