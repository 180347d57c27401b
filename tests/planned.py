"""What the engine does in a step beside what `plan.step` says, on this rank.

`Executed` writes down what an observer is told, with the bytes of each use of memory at that moment. `observe`
makes a workload of what a model did, without any kernels: their time and memory are not looked at here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import re
import time
import weakref
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

import fullshard
from fullshard.comm import packing, process_group, select
from fullshard.engine.gradients import unit_gradients
from fullshard.engine.gradients.unit_gradients import UnitGradients
from fullshard.engine.iteration import Iteration
from fullshard.engine.module_state import state_of
from fullshard.engine.observer import Observer
from fullshard.engine.params import buffers
from fullshard.engine.params.shown import own_gradient
from fullshard.engine.unit import Unit, comms_of
from fullshard.plan import ledger, step_reductions, step_state
from fullshard.plan.actions import ActionKind, Holding, Lane
from fullshard.plan.layout import DirectRule
from fullshard.plan.step import PlannedStep
from fullshard.plan.trace import Kind
from fullshard.plan.ways import GLOO
from fullshard.plan.workload import Enter, Event, Leave, Run, Stretch, Workload, WorkloadUnit
from fullshard.watch import memory

_AT_HOME = (Holding.SHARDS, Holding.GRADIENT_SHARDS, Holding.OPTIMIZER)
SMALL = 256  # bytes: with so much in place of 1 MiB, small models have large buffers too

_USES = {
    Holding.SHARDS: ("SHARDS",),
    Holding.UNSHARDED: ("UNSHARDED",),
    Holding.FULL_GRADIENTS: ("FULL_GRADIENTS",),
    Holding.GRADIENT_SHARDS: ("GRADIENT_SHARDS", "KEPT"),
    Holding.COMMUNICATION: ("COMMUNICATION",),
    Holding.OPTIMIZER: ("OPTIMIZER",),
}


class Moment(NamedTuple):
    """What was done, to which unit, and the bytes of each use of memory after it."""

    what: str
    unit: int
    nbytes: dict[Holding, int]

    def __str__(self) -> str:
        return f"{self.what} {self.unit}: { ({h.value: n for h, n in self.nbytes.items() if n}) }"


@contextlib.contextmanager
def fresh_pools() -> Iterator[None]:
    """Let pools begin empty, and ranks connect anew, whatever other models have left."""
    with contextlib.ExitStack() as stack:
        for place, name, kind in (
            (packing, "_regions", weakref.WeakValueDictionary),
            (packing, "_scratch", weakref.WeakValueDictionary),
            (select, "_connected", weakref.WeakKeyDictionary),
            (select, "_agreed", weakref.WeakKeyDictionary),
        ):
            stack.enter_context(mock.patch.object(place, name, kind()))
        yield


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    """Let buffers of a few hundred bytes count as large, in the engine and in plans."""
    rule = DirectRule(even=True, min_nbytes=SMALL)
    way = dataclasses.replace(GLOO, rule=rule)
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (buffers, "KEPT_NBYTES", SMALL),
            (unit_gradients, "KEPT_NBYTES", SMALL),
            (step_state, "KEPT_NBYTES", SMALL),
            (step_reductions, "KEPT_NBYTES", SMALL),
            (packing, "POOLED_NBYTES", SMALL),
            (ledger, "POOLED_NBYTES", SMALL),
            (process_group, "GLOO", way),
        ):
            stack.enter_context(mock.patch.object(place, name, value))
        yield


class Executed(Observer):
    """Moments of what the engine does while it observes."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self._model, self._optimizer = model, optimizer
        self._units = iteration_of(model).units
        self._number = numbers_of(self._units)
        self._open: list[tuple[Kind, int]] = []
        # Full gradients that the engine has in its hands, which a report does not see, or sends.
        self._taken: list[weakref.ref[torch.UntypedStorage]] = []
        self.moments: list[Moment] = []
        self.collectives: list[tuple[str, int]] = []  # as ranks name them, with their bytes

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the model's engine."""
        tensors_of = memory._tensors_of

        def noting(take: Callable[[Any], list[Tensor | None]]) -> Any:
            def taking(owner: Any) -> list[Tensor | None]:
                grads = take(owner)
                self._taken += [weakref.ref(g.untyped_storage()) for g in grads if g is not None]
                return grads

            return taking

        def with_taken(unit: Unit) -> Iterator[tuple[Any, Tensor]]:
            yield from tensors_of(unit)
            grads = (holder.local_grad for each in self._units for holder in each.holders)
            handed_over = {grad.data_ptr() for grad in grads if grad is not None}
            for storage in (reference() for reference in self._taken):
                if storage is not None and storage.data_ptr() not in handed_over:
                    yield memory.MemoryCategory.FULL_GRADIENTS, torch.tensor([]).set_(storage)
            # A report says of memory for the next sums, and for the next gathers, that it is kept.
            for spare in unit.gradients.unreduced.sums.spare.tensors:
                yield memory.MemoryCategory.FULL_GRADIENTS, spare
            for resting in [] if unit.runtime.rotation is None else unit.runtime.rotation.resting:
                yield memory.MemoryCategory.UNSHARDED, resting

        iteration = iteration_of(self._model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(memory, "_tensors_of", with_taken))
            for owner, name in ((Unit, "take_gradients"), (UnitGradients, "take_unreduced")):
                taking = noting(getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, taking))
            smaller = dict.fromkeys(unit._post_forward for unit in self._units)
            for comm in (*comms_of(self._units), *smaller):
                if isinstance(comm, process_group.ProcessGroupComm):
                    entering = functools.partial(self._enter, comm.enter)
                    stack.enter_context(mock.patch.object(comm, "enter", entering))
            iteration.observe(self)
            yield
            iteration.observe(None)

    def _enter(self, enter: Callable[[str, int], None], label: str, nbytes: int = 0) -> None:
        enter(label, nbytes)
        if ": " not in label:
            return  # such as a few bytes by which ranks agree on what was written to
        # Where several models of a group have units of one name.
        self.collectives.append((re.sub(r" of model \d+", "", label), nbytes))

    def begin(self, kind: Kind, of: Any = None) -> None:
        self._open.append((kind, self._number.get(of, -1)))

    def end(self) -> None:
        kind, unit = self._open.pop()
        # With streams, to finish is to queue what is left at once; the wait comes at the release.
        is_queued = self._units[0].runtime.has_streams and kind is Kind.WAIT_REDUCE_SCATTER
        if is_queued and self.moments[-1][:2] == (Kind.REDUCE_SCATTER.value, unit):
            return
        if kind is not Kind.FENCE or any(each.comm.reads_in_place for each in self._units):
            self.note(kind.value, unit)
        if kind is Kind.REDUCE_SCATTER or (
            kind is Kind.WAIT_REDUCE_SCATTER and self._units[0].runtime.has_streams
        ):
            # It is put into the queue, or taken out, next: there a report sees what it holds, and it lets go of that.
            self.moments[-1] = self.moments[-1]._replace(nbytes={})

    def changed(self, unit: Any) -> None:
        self.note("reshard", self._number[unit])

    def note(self, what: str, unit: int = -1) -> None:
        """Add a moment."""
        if self._units[0].comm.overlaps:
            time.sleep(0.002)  # Gloo's thread has told that it is done, and drops what it has sent
        self.moments.append(Moment(what, unit, self._memory()))

    def _memory(self) -> dict[Holding, int]:
        found = reported(self._model, self._optimizer)
        if self._units[0].config.offload_to_cpu:  # a plan counts the device's memory
            found |= dict.fromkeys(_AT_HOME, 0)
        return found


def reported(model: nn.Module, optimizer: Any) -> dict[Holding, int]:
    """Return the bytes of each use that a report of this rank has."""
    report, names = fullshard.memory_report(model, optimizer), fullshard.MemoryCategory
    return {h: sum(report.total(names[n]) for n in uses) for h, uses in _USES.items()}


def iteration_of(model: nn.Module) -> Iteration:
    state = state_of(model)
    assert state is not None
    return state.iteration_or_initialise()


def numbers_of(units: Sequence[Unit]) -> dict[Unit, int]:
    """Return the numbers of units in a workload, whose first unit is the root's, with parameters or without."""
    return {unit: number for number, unit in enumerate(units, start=int(units[0].name != ""))}


def observe(
    model: nn.Module,
    run: Callable[[], Any],
    *,
    checkpointed: Sequence[str] = (),
    stepped: Container[Any] | None = None,
) -> Workload:
    """Return a workload of what a step does, with the gradients that it leaves and nothing else of kernels.

    run: a forward and a backward. checkpointed: names of the units that are computed again in backward. stepped: the
        parameters that get gradients. None takes those that have one after the run, if it reduces.
    """
    iteration = iteration_of(model)
    watcher = _Events(iteration)
    before = iteration.observer
    iteration.observe(watcher)
    handles = []
    numbers = numbers_of(iteration.units)
    for module in model.modules():
        state = state_of(module)
        units = [] if state is None else state.units
        for number in {numbers[unit] for unit in units} | ({0} if module is model else set()):
            handles += [
                module.register_forward_pre_hook(
                    watcher.entering(number, [module] if state is None else state.modules),
                    with_kwargs=True,
                ),
                module.register_forward_hook(watcher.leaving(number)),
            ]
    run()
    for handle in handles:
        handle.remove()
    iteration.observe(before)
    root = [] if 0 in numbers.values() else [WorkloadUnit("", ())]
    others = [
        WorkloadUnit(unit.name, specs_of(unit, stepped), recomputes=unit.name in checkpointed)
        for unit, number in numbers.items()
    ]
    return watcher.workload((*root, *others))


def specs_of(unit: Unit, stepped: Container[Any] | None = None) -> tuple[Any, ...]:
    return tuple(
        dataclasses.replace(
            spec,
            trainable=p.requires_grad,
            is_used=p.sharded.grad is not None if stepped is None else p.sharded in stepped,
        )
        for spec, p in zip(unit.params.specs(unit.config.mp_policy), unit.params, strict=True)
    )


class _Events(Observer):
    """The events of one forward, and which gradients were there when its backward came to each."""

    def __init__(self, iteration: Iteration) -> None:
        self._number = numbers_of(iteration.units)
        self._in_backward = False
        self._output: Any = None  # of the module that was left last
        self.events: list[Event] = []
        self._stack: list[int] = []
        self._to_run: dict[
            int, set[nn.Module]
        ] = {}  # modules of a unit, from its first to its last
        self._come: list[dict[int, int]] = []  # gradients, by unit, since the moment before
        self._before: dict[int, int] = {}

    def entering(self, unit: int, modules: Sequence[nn.Module]) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._in_backward:
                self._run()
                if not self._to_run.get(unit):
                    self._to_run[unit] = {*modules}
                    inputs = [*args, *kwargs.values()]
                    self.events.append(Enter(unit, any(map(_requires_grad, inputs))))
                self._stack.append(unit)

        return hook

    def leaving(self, unit: int) -> Callable[..., None]:
        def hook(module: nn.Module, _args: Any, output: Any) -> None:
            if not self._in_backward:
                if not (self._output is output and isinstance(self.events[-1], Leave)):
                    self._run()
                self._output = output
                self._to_run[unit].discard(module)
                if not self._to_run[unit]:
                    self.events.append(Leave(unit, _requires_grad(output)))
                self._stack.pop()

        return hook

    def _run(self) -> None:
        if self._stack:
            self.events.append(Run(len(self.events), self._stack[-1]))

    def enter(self, kind: Kind, units: Sequence[Any]) -> None:
        if kind is Kind.BACKWARD:
            self._in_backward = True
            self._note()

    def leave(self, kind: Kind, units: Sequence[Any]) -> None:
        if kind is Kind.BACKWARD:
            self._note()
            for unit in units:  # its gradients are taken next
                self._before[self._number[unit]] = 0

    def _note(self) -> None:
        come = {}
        for unit, number in self._number.items():
            grads = (own_gradient(p.unsharded) for p in unit.managed if p.unsharded is not None)
            nbytes = sum(grad.nbytes for grad in grads if grad is not None)
            come[number] = nbytes - self._before.get(number, 0)
            self._before[number] = nbytes
        self._come.append(come)

    def workload(self, units: tuple[WorkloadUnit, ...]) -> Workload:
        """Return what was seen."""
        # Stretches between two moments at which gradients were counted, in the order of backward.
        between: list[list[Run]] = [[]]
        for event in reversed(self.events):
            if isinstance(event, Run):
                between[-1].append(event)
            elif event.is_differentiable:
                between.append([])
        made: dict[int, int] = {}
        for runs, come in zip(between, self._come, strict=False):
            for unit, nbytes in come.items():
                if nbytes:
                    run = next((run for run in runs if run.unit == unit), None)
                    assert run is not None, f"a gradient of {units[unit].name} came elsewhere"
                    made[run.stretch] = made.get(run.stretch, 0) + nbytes
        numbers = [event.stretch for event in self.events if isinstance(event, Run)]
        stretches = {
            n: Stretch((), (), recomputed_nbytes=1, gradient_nbytes=made.get(n, 0)) for n in numbers
        }
        order = {number: place for place, number in enumerate(stretches)}
        events = [
            event._replace(stretch=order[event.stretch]) if isinstance(event, Run) else event
            for event in self.events
        ]
        return Workload(units, tuple(events), tuple(stretches.values()))


def _requires_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def joined(found: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Join what follows on something of the same name: ranks name the buckets of a unit alike."""
    groups = itertools.groupby(found, key=lambda each: each[0])
    return [(name, sum(nbytes for _, nbytes in group)) for name, group in groups]


def collectives(step: PlannedStep, workload: Workload) -> list[tuple[str, int]]:
    """Return the collectives of a planned step as ranks name them, with their bytes."""
    kinds = (ActionKind.ALL_GATHER, ActionKind.REDUCE_SCATTER, ActionKind.ALL_REDUCE)
    names = [unit.name or "root" for unit in workload.units]
    return [
        (f"{names[action.unit]}: {action.kind.value}", action.nbytes)
        for action in step.actions
        if action.kind in kinds
    ]


def told(step: PlannedStep) -> list[Moment]:
    """Return the moments of a planned step that an observer would be told of."""
    level = dict.fromkeys(Holding, 0)
    for change in step.resident:
        level[change.holding] += change.nbytes
    moments: list[Moment] = []
    has_streams = not all(a.host_waits for a in step.actions if a.lane is Lane.COMPUTE)
    for action in step.actions:
        for change in action.changes:
            level[change.holding] += change.nbytes
        nbytes = {holding: level[holding] for holding in _USES}
        if (
            action.kind is ActionKind.ALL_REDUCE
        ):  # within the wait for the reduce-scatter, or queued at once
            moments[-1] = moments[-1]._replace(nbytes=nbytes if action.host_waits else {})
        elif action.kind is ActionKind.WAIT:
            awaited = step.actions[action.after[0]]
            what = "all-gather" if awaited.kind is ActionKind.ALL_GATHER else "reduce-scatter"
            is_released = what == "reduce-scatter" and has_streams
            moments.append(Moment(f"wait for {what}", action.unit, {} if is_released else nbytes))
        elif action.kind is ActionKind.REDUCE_SCATTER:
            moments.append(Moment(action.kind.value, action.unit, {}))
        elif action.kind in _TOLD:
            moments.append(Moment(action.kind.value, action.unit, nbytes))
    return moments


_TOLD = frozenset((ActionKind.ALL_GATHER, ActionKind.RESHARD, ActionKind.FENCE))
