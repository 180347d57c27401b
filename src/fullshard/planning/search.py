"""Find how to train: the fastest ways that fit, why the others are slower, and what was left out.

    result = search_training("8b", TrainingSetup(machine, ranks=64, batch=4))
    print(result)                       # the ten best, what each pays, the Pareto front
    print(result.program)               # `fully_shard` as the best one has it

Ways come in the order of the least time that they can take (`planning.bounds`). A way is planned only if that and
its least memory leave it a chance, so the result is that of planning them all, as a test checks.
"""

import bisect
import collections
import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any

from fullshard.plan import amounts
from fullshard.plan.actions import ActionKind
from fullshard.plan.keeping import choose_kept
from fullshard.plan.unit_plan import plan_unit
from fullshard.plan.workload import Workload
from fullshard.planning.bounds import Bound, step_bound
from fullshard.planning.calibration import CalibratedCosts
from fullshard.planning.choices import (
    Choice,
    NothingFitsError,
    SearchError,
    SearchSpace,
    default_space,
    group_units,
)
from fullshard.planning.costs import CostError, Costs
from fullshard.planning.estimate import Estimate
from fullshard.planning.programs import launch_line, program_of
from fullshard.planning.setup import OFFLOADS, TrainingSetup
from fullshard.planning.subject import Model, Subject
from fullshard.planning.training import MemoryPlan, context_nbytes, plan_steps

_NUM_BEST = 10
_NUM_EXCLUDED, _MOST_TRIED = 5, 20
_CLEARLY_LESS = 0.95
_NOTICED, _ROUNDED = 1e-3, 1e-9  # of a step: what a difference is worth saying, and what is none
_NEAR = 2  # times the memory: what needs more attracts nobody


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A way to train, planned.

    unsharded: names of units that stay whole after forward because there is memory for them.
    time: seconds, by what they go to; they add up to `step_s`.
    """

    choice: Choice
    unsharded: tuple[str, ...]
    step_s: float
    time: tuple[tuple[str, float], ...]
    memory: MemoryPlan

    def __str__(self) -> str:
        num, memory = len(self.unsharded), self.memory
        kept = f" ({num} unit{'s' if num > 1 else ''} kept)" if num else ""
        on_host = (
            f"; {amounts.nbytes(memory.host_nbytes)} of host memory, {amounts.nbytes(memory.per_host_nbytes)} on a host"
            if memory.host_nbytes
            else ""
        )
        return f"{amounts.seconds(self.step_s):>9} {amounts.nbytes(memory.needed_nbytes):>9}  {self.choice}{kept}{on_host}"

    def as_dict(self) -> dict[str, Any]:
        return {
            **self.choice._asdict(),
            "unsharded": list(self.unsharded),
            "step_s": self.step_s,
            "time_s": dict(self.time),
            "needed_nbytes": self.memory.needed_nbytes,
            "memory_nbytes": dict(self.memory.parts),
            "in_host_memory_nbytes": self.memory.host_nbytes,
            "in_host_memory_per_host_nbytes": self.memory.per_host_nbytes,
        }


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """What a search found.

    best: the fastest that fit, the first being the fastest. reasons: of each, why it is not better than the first.
    front: no other way is both faster and smaller than one of these; the fastest first.
    excluded: that would be faster, if there were room. program, launch: Python and a shell line for the best one.
    num_choices, num_planned: how many ways there were, and how many had to be planned.
    left_out: others, of which a machine that was measured cannot say how long they take: reasons, and how many.
    """

    setup: TrainingSetup
    best: tuple[Candidate, ...]
    reasons: tuple[str, ...]
    front: tuple[Candidate, ...]
    excluded: tuple[Candidate, ...]
    limit_nbytes: int
    program: str
    launch: str
    num_choices: int
    num_planned: int
    left_out: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{self.num_choices} ways on {self.setup.ranks} ranks, {self.num_planned} of them planned; "
            f"a rank has {amounts.nbytes(self.limit_nbytes)}",
            *(f"{num} others left out. {reason}" for reason, num in self.left_out),
            "",
        ]
        for number, (each, reason) in enumerate(zip(self.best, self.reasons, strict=True), 1):
            lines += [f"{number:3} {each}", f"        {reason}"]
        lines += ["", "No other way is faster and smaller than one of these:"]
        lines += [f"    {each}" for each in _thinned(self.front)]
        if self.excluded:
            lines += ["", "Faster, and too large:"]
        for each in self.excluded:
            over = amounts.nbytes(each.memory.needed_nbytes - self.limit_nbytes)
            lines += [f"    {each}", f"        {over} too much"]
        return "\n".join([*lines, "", self.launch, "", self.program])

    def as_dict(self) -> dict[str, Any]:
        """Return the result as numbers and texts; names end in their unit."""
        return {
            "best": [
                {**each.as_dict(), "reason": reason}
                for each, reason in zip(self.best, self.reasons, strict=True)
            ],
            "front": [each.as_dict() for each in self.front],
            "excluded": [
                {**each.as_dict(), "over_nbytes": each.memory.needed_nbytes - self.limit_nbytes}
                for each in self.excluded
            ],
            "limit_nbytes": self.limit_nbytes,
            "num_choices": self.num_choices,
            "num_planned": self.num_planned,
            "left_out": dict(self.left_out),
            "launch": self.launch,
            "program": self.program,
        }


def search_training(
    model: Model | Subject,
    setup: TrainingSetup,
    *,
    space: SearchSpace | None = None,
    limit_nbytes: int | None = None,
    progress: Callable[[str], object] | None = None,
) -> SearchResult:
    """Return the fastest ways to train that fit.

    model: see `plan_training`. setup: what is not searched; each rank has as many sequences in a step as it says.
    space: None takes what is worth it. limit_nbytes: of a rank; None is all that its GPU has. progress: is told how
    far it is.

    On a machine that was measured, ways are left out that were not, such as replicas.

    Raises SearchError for an empty space and a limit that is none, and NothingFitsError, with the smallest way and what would help.
    """
    subject = model if isinstance(model, Subject) else Subject(model)
    if not all(isinstance(unit, str) for unit in subject.units or ()):
        raise SearchError(
            "A search joins layers to units itself. Name each module alone: units=('layers.0', 'layers.1', ...)."
        )
    if limit_nbytes is not None:
        if type(limit_nbytes) is not int or limit_nbytes < 1:
            raise SearchError(
                f"limit_nbytes is {limit_nbytes!r}: expected a whole number of bytes, such as 80 << 30."
            )
        gpu = dataclasses.replace(setup.machine.gpu, memory_nbytes=limit_nbytes)
        machine = dataclasses.replace(setup.machine, gpu=gpu)
        setup = dataclasses.replace(setup, machine=machine)
    search = _Search(subject, setup, progress or str)  # which says nothing
    if space is None:
        workload = subject.workload(dataclasses.replace(setup, checkpointing="none"))
        space = default_space(setup, workload, takes_batch=subject.takes_batch)
    return search.run([*space.choices(setup.ranks, setup.batch * setup.accumulation)])


class _Search:
    """Plans ways, each once."""

    def __init__(
        self, subject: Subject, setup: TrainingSetup, say: Callable[[str], object] = str
    ) -> None:
        self._subject, self._setup, self._say = subject, setup, say
        self._limit = round(setup.machine.gpu.memory_nbytes)
        self._workloads: dict[tuple[int, str, int], Workload] = {}
        self._costs: dict[tuple[Hashable, ...], Costs | CalibratedCosts] = {}
        self._bounds: dict[Choice, Bound] = {}
        self._left_out: collections.Counter[str] = collections.Counter()
        self._planned: dict[Choice, Candidate] = {}
        self._gathers: dict[Choice, dict[int, float]] = {}  # what those of each unit cost

    # Ways as the planner takes them

    def _setup_of(self, choice: Choice, unsharded: Iterable[str] = ()) -> TrainingSetup:
        return dataclasses.replace(
            self._setup,
            shard_size=choice.shard_size,
            batch=choice.sequences,
            accumulation=choice.num_microbatches,
            reduces_each=choice.reduces_each,
            reshard_after_forward=choice.reshard_after_forward,
            unsharded=("", *unsharded),  # the root's backward comes first
            checkpointing=choice.checkpointing,
            offload=choice.offload,
        )

    def _workload(self, choice: Choice) -> Workload:
        key = choice.sequences, choice.checkpointing, choice.layers_per_unit
        if key not in self._workloads:
            single = self._subject.workload(self._setup_of(choice))
            self._workloads[key] = group_units(single, choice.layers_per_unit)
        return self._workloads[key]

    def _costs_of(self, choice: Choice) -> Costs | CalibratedCosts:
        # Costs remember stretches by identity; all groupings of a workload have the same ones.
        key: tuple[Hashable, ...] = choice.sequences, choice.checkpointing, choice.shard_size
        if self._setup.is_home:  # whose figures may lack the rest
            key = *key, choice.offload, choice.reshard_after_forward
        if key not in self._costs:
            self._costs[key] = self._setup_of(choice).costs(self._workload(choice))
        return self._costs[key]

    def _room_nbytes(self, choice: Choice) -> int:
        """Return how many bytes of tensors fit."""
        return self._limit - context_nbytes(self._setup_of(choice))

    def bound(self, choice: Choice) -> Bound:
        """Return the least that a way takes."""
        if choice not in self._bounds:
            self._bounds[choice] = (self._filled_bound if choice.fills else self._bound)(choice)
        return self._bounds[choice]

    def _bound(self, choice: Choice) -> Bound:
        workload, costs = self._workload(choice), self._costs_of(choice)
        settings = self._setup_of(choice).step_settings(workload)
        return step_bound(workload, settings, costs, offload=choice.offload)

    def _filled_bound(self, choice: Choice) -> Bound:
        base = self.bound(choice._replace(fills=False))
        whole = self.bound(choice._replace(fills=False, reshard_after_forward=False))
        room = max(0, self._room_nbytes(choice) - base.after_forward_nbytes)
        return base._replace(step_s=max(whole.step_s, base.step_s - room * base.saved_s))

    def plan(self, choice: Choice) -> Candidate:
        """Return a way with its time and memory. One that would fill, and cannot, is that without."""
        if choice not in self._planned:
            self._say(f"planned {len(self._planned)} of {len(self._bounds)} ways; now {choice}")
            self._planned[choice] = self._fill(choice) if choice.fills else self._plan(choice)
        return self._planned[choice]

    def _plan(self, choice: Choice, unsharded: tuple[str, ...] = ()) -> Candidate:
        setup, costs = self._setup_of(choice, unsharded), self._costs_of(choice)
        planned = plan_steps(self._workload(choice), setup, costs)
        if not unsharded:
            self._gathers[choice] = _gather_seconds(planned.estimate)
        time = tuple(planned.parts.items())
        return Candidate(choice, unsharded, sum(planned.parts.values()), time, planned.memory)

    def _fill(self, choice: Choice) -> Candidate:
        """Return a way with units whole after forward: those that save the most, as memory is left."""
        bare = choice._replace(fills=False)
        all_whole = bare._replace(reshard_after_forward=False)
        base, whole = self.plan(bare), self.plan(all_whole)
        costly, cheap = self._gathers[bare], self._gathers[all_whole]
        units = self._workload(choice).units
        saved_ns = [0] + [
            round(1e9 * (costly.get(n, 0.0) - cheap.get(n, 0.0))) for n in range(1, len(units))
        ]
        sharding = self._setup_of(choice).sharding
        sizes = [plan_unit(unit.params, sharding).gathered_nbytes for unit in units]
        left = self._room_nbytes(choice) - base.memory.tensors_nbytes
        while any(kept := choose_kept(sizes, saved_ns, left)):
            names = tuple(unit.name for unit, stays in zip(units, kept, strict=True) if stays)
            if len(names) == len(units) - 1:
                return whole
            found = self._plan(choice, names)
            over = found.memory.tensors_nbytes - self._room_nbytes(choice)
            if over <= 0:
                return found
            taken = sum(size for size, stays in zip(sizes, kept, strict=True) if stays)
            left = min(left, taken) - over
        return base

    def _fits(self, candidate: Candidate) -> bool:
        return candidate.memory.needed_nbytes <= self._limit

    # The search

    def run(self, every: Sequence[Choice]) -> SearchResult:
        choices = [*self._measured(every)]
        order = sorted(choices, key=lambda choice: (self.bound(choice)[:2], choice))
        known, found = {*choices}, list[Candidate]()
        for choice in order:
            bound = self.bound(choice)
            if bound.nbytes <= self._room_nbytes(choice) and not self._is_hopeless(choice, found):
                candidate = self.plan(choice)
                # A way that keeps nothing, or all, is another one.
                is_new = candidate.choice == choice or candidate.choice not in known
                known.add(candidate.choice)
                if is_new and self._fits(candidate):
                    bisect.insort(found, candidate, key=_rank)
        if not found:
            raise NothingFitsError(self._why_nothing_fits(choices))
        return self._result(found, choices)

    def _measured(self, choices: Sequence[Choice]) -> Iterator[Choice]:
        """Yield the ways of which the machine's figures say how long they take; count the others."""
        for choice in choices:
            try:
                self.bound(choice)
            except CostError as error:
                self._left_out[str(error)] += 1
            else:
                yield choice
        if sum(self._left_out.values()) == len(choices):
            raise SearchError(
                f"None of {len(choices)} ways was measured. {' '.join(self._left_out)}"
            )

    def _is_hopeless(self, choice: Choice, found: Sequence[Candidate]) -> bool:
        """Whether a way can be neither among the best nor on the front. found: the fastest first."""
        bound = self.bound(choice)
        if len(found) < _NUM_BEST or found[_NUM_BEST - 1].step_s >= bound.step_s:
            return False
        least = bound.nbytes + context_nbytes(self._setup_of(choice))
        return any(
            each.step_s < bound.step_s and each.memory.needed_nbytes <= least for each in found
        )

    def _result(self, found: list[Candidate], choices: Sequence[Choice]) -> SearchResult:
        first, best = found[0], tuple(found[:_NUM_BEST])
        excluded = tuple(self._attractive(first, choices))
        single = self._workload(first.choice._replace(layers_per_unit=1))
        setup = self._setup_of(first.choice)
        return SearchResult(
            setup=self._setup,
            best=best,
            reasons=tuple(_reason(each, first) for each in best),
            front=tuple(pareto_front(found)),
            excluded=excluded,
            limit_nbytes=self._limit,
            program=program_of(first.choice, first.unsharded, setup, single),
            launch=launch_line(setup),
            num_choices=len(choices),
            num_planned=len(self._planned.keys() & {*choices}),
            left_out=tuple(self._left_out.items()),
        )

    def _attractive(self, first: Candidate, choices: Sequence[Choice]) -> list[Candidate]:
        """Return ways that would be faster than the first if they fitted: of each kind the smallest."""
        found: dict[tuple[str, bool | int], Candidate] = {}
        num_tried = 0
        for choice in sorted(choices, key=lambda choice: (self.bound(choice).nbytes, choice)):
            kind = choice.checkpointing, choice.reshard_after_forward
            may_be = not choice.fills and self.bound(choice).step_s < first.step_s
            if not may_be or kind in found or num_tried == _MOST_TRIED:
                continue
            num_tried += choice not in self._planned
            candidate = self.plan(choice)
            is_near = self._limit < candidate.memory.needed_nbytes <= _NEAR * self._limit
            if is_near and candidate.step_s < first.step_s:
                found[kind] = candidate
        return sorted(found.values(), key=_rank)[:_NUM_EXCLUDED]

    # When nothing fits

    def _why_nothing_fits(self, choices: Sequence[Choice]) -> str:
        smallest: Candidate | None = None
        for choice in sorted(choices, key=lambda choice: (self.bound(choice).nbytes, choice)):
            least = self.bound(choice).nbytes
            if smallest is not None and least >= smallest.memory.tensors_nbytes:
                break
            if not choice.fills:
                found = self.plan(choice)
                both = [found] if smallest is None else [smallest, found]
                smallest = min(both, key=lambda each: each.memory.needed_nbytes)
        assert smallest is not None
        needed = smallest.memory.needed_nbytes
        helping = [*self._helping(smallest.choice)]
        return (
            f"None of {len(choices)} ways fits into {amounts.nbytes(self._limit)}. The smallest needs {amounts.nbytes(needed)}, "
            f"{amounts.nbytes(needed - self._limit)} too much: {smallest.choice}. "
            + (f"It fits with {' or with '.join(helping)}." if helping else _NOTHING_HELPS)
        )

    def _helping(self, choice: Choice) -> Iterator[str]:
        """Yield what would make a way fit."""
        setup = self._setup
        for times in () if setup.is_home else (2, 4, 8, 16, 32):
            more = choice._replace(shard_size=choice.shard_size * times)
            if self._fits(self._elsewhere(more, ranks=setup.ranks * times)):
                yield f"{setup.ranks * times} ranks"
                break
        for times in (2, 4, 8, 16, 32):
            seq = setup.seq // times
            if seq and self._fits(self._elsewhere(choice, seq=seq)):
                yield f"sequences of {seq} tokens"
                break
        for offload in () if setup.is_home else OFFLOADS:
            other = choice._replace(offload=offload)
            if other != choice and self._fits(self._elsewhere(other)):
                yield f"offload={offload!r}"
                break

    def _elsewhere(self, choice: Choice, **changes: Any) -> Candidate:
        setup = dataclasses.replace(self._setup, shard_size=None, **changes)
        return _Search(self._subject, setup).plan(choice)


_NOTHING_HELPS = (
    "Neither 32 times the ranks nor a 32nd of the sequence would be enough: the model needs "
    "other kinds of parallelism, or smaller units."
)


def _gather_seconds(estimate: Estimate) -> dict[int, float]:
    """Return what all gathers of each unit cost a step: what is exposed, and what they hold up beside it."""
    moving: dict[int, float] = {}
    for action, span in zip(estimate.step.actions, estimate.simulated.spans, strict=True):
        if action.kind is ActionKind.ALL_GATHER:
            moving[action.unit] = moving.get(action.unit, 0.0) + span.end_s - span.start_s
    exposed = estimate.simulated.exposed_s
    contention = estimate.costs.constants.contention
    found = {}
    for unit, seconds in moving.items():
        exposed_s = exposed.get((ActionKind.ALL_GATHER, unit), 0.0)
        found[unit] = exposed_s + contention * max(0.0, seconds - exposed_s)
    return found


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    return candidate.step_s, candidate.memory.needed_nbytes, candidate.choice


def pareto_front(candidates: Sequence[Candidate]) -> Iterable[Candidate]:
    """Yield those that no other one is faster and smaller than. candidates: the fastest first."""
    smallest: int | None = None
    for each in candidates:
        nbytes = each.memory.needed_nbytes
        if smallest is None or nbytes < smallest:
            smallest = nbytes
            yield each


def _thinned(front: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield those that need clearly less than the one before."""
    before = math.inf
    for each in front:
        if each.memory.needed_nbytes <= _CLEARLY_LESS * before:
            before = each.memory.needed_nbytes
            yield each


def _reason(candidate: Candidate, first: Candidate) -> str:
    """Say what a way pays that the first does not, and what it gets for that."""
    if candidate is first:
        largest = sorted(first.time, key=lambda part: -part[1])[:3]
        return "the fastest: " + ", ".join(f"{name} {amounts.seconds(s)}" for name, s in largest)
    slower = candidate.step_s - first.step_s
    more = candidate.memory.needed_nbytes - first.memory.needed_nbytes
    memory = (
        f"{amounts.nbytes(abs(more))} {'more' if more > 0 else 'less'}" if more else "same memory"
    )
    other = dict(first.time)
    differences = [(name, s - other[name]) for name, s in candidate.time]
    differences.sort(key=lambda part: -abs(part[1]))
    said = ", ".join(
        f"{name} {'+' if s > 0 else '-'}{amounts.seconds(abs(s))}"
        for name, s in differences[:3]
        if abs(s) >= _NOTICED * first.step_s
    )
    is_same = slower < _ROUNDED * first.step_s
    text = "as fast as the first" if is_same else f"{amounts.seconds(slower)} slower"
    return f"{text}{said and f': {said}'}; {memory}"
