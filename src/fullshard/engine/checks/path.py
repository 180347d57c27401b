"""A rank's path through a model: what it tells the other ranks of it, and how they compare.

Each unit that runs is noted in the flight record; ranks may run different ones. Where a program asks for it, ranks compare at
once, for an exchange per unit: with `fullshard.debug(steps=True)` at every unit, with ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` in the
first iteration alone; later, each rank compares its order with that of its first iteration. Where orders differ, collectives of
different units are matched, which gives wrong numbers or a hang.
"""

import warnings
from collections.abc import Sequence

import torch
import torch.distributed as dist

from fullshard.comm.outside_steps import gather_objects
from fullshard.engine.checks.alike import FreezeWatch, check_alike
from fullshard.engine.unit import Unit, comms_of
from fullshard.errors import DivergenceError, StateError
from fullshard.peers.paths import Moment, StepPhase, said


class Path:
    """The path of one model. Building it is collective: ranks compare what they have built.

    kind: the model's class. units: of the model. kinds: the classes of its modules.
    """

    def __init__(self, kind: str, units: Sequence[Unit], kinds: Sequence[type]) -> None:
        self._step = 0
        self._called: set[int | None] = set()  # in this step, before its backward
        self._phase = StepPhase.BETWEEN
        named = [(unit.path, [param.name for param in unit.params]) for unit in units]
        named.append(("root", []))  # which need not be a unit
        records = dict.fromkeys(comm.record for comm in comms_of(units))
        # The model's number in the flight record of each of its groups.
        self._records = {each: each.add_model(kind, named) for each in records if each is not None}
        self._notes = [each.note for each in self._records]
        for unit in units:
            if (record := unit.comm.record or unit.replicate_comm.record) is not None:
                unit.set_name(unit.name, model=self._records[record])
        check_alike(units, kinds, self._records)
        self._freezing = FreezeWatch(units)
        self._units = units
        # Numbers of units in the order of their forwards: of the first iteration, once that is over, and
        # of this one so far. Empty unless `_checks_order`.
        self._checks_order = False
        self._first_order: list[int] = []
        self._order: list[int] = []
        self._has_warned = False

    def begin_forward(self, called: Unit) -> None:
        """Begin a forward, and tell of parameters that are frozen or trained since the last.

        called: the unit of the module that the program calls, which may have no parameters.
        """
        number = called.number if called.params else None if called.name else len(self._units)
        is_step = torch.is_grad_enabled()
        if is_step and (not self._called or number in self._called):
            self._step += 1
            self._called.clear()
        if is_step:
            self._called.add(number)
        self.begin(StepPhase.FORWARD if is_step else StepPhase.EVALUATION)
        if number is not None:
            for note in self._notes:
                note(number, is_call=True)
        if is_step:
            self._freezing.enter_changes(self._records)
        self._checks_order = dist.get_debug_level() == dist.DebugLevel.DETAIL

    def begin(self, phase: StepPhase) -> None:
        """Say which part of the step this rank is in."""
        self._phase = phase
        if phase is StepPhase.BACKWARD:
            self._called.clear()
        for record, model in self._records.items():
            record.begin(model, self._step, phase)

    def enter(self, units: Sequence[Unit], *, is_training: bool) -> None:
        """Tell of units whose forward begins. Call it before any gather of theirs.

        Ranks that differ would match each other's gathers. Raises as `_check_order` and `_check_step`,
        where these are asked for.
        """
        if not (self._notes or self._checks_order or StepChecks.are_on):
            return
        for unit in units:
            number = unit.number
            if self._checks_order and is_training:
                self._check_order(number)
            if StepChecks.are_on:
                _check_step(unit, Moment(self._step, self._phase))
            for note in self._notes:
                note(number)

    def leave(self, unit: Unit) -> None:
        """Tell of a unit whose backward is over. Call it before its reduction."""
        if StepChecks.are_on:
            _check_step(unit, Moment(self._step, self._phase))
        for note in self._notes:
            note(unit.number)

    def lack_gradients(self, unit: Unit) -> None:
        """Tell of a unit of which no parameter got a gradient, so that this rank reduces nothing."""
        if self._notes and any(param.sharded.requires_grad for param in unit.params):
            for note in self._notes:
                note(unit.number, is_empty=True)

    def agree_on(self, what: str) -> None:
        """Tell what this rank does now, the same words on every rank."""
        for record in self._records:
            record.enter(what)

    def end_iteration(self) -> None:
        """Note that the last backward of an iteration is over."""
        self._first_order = self._first_order or self._order
        self._order = []

    def forget(self) -> None:
        """Forget an iteration that an exception ended."""
        self._order = []

    def _check_order(self, number: int) -> None:
        """Check the unit whose forward begins, by its number. Every rank has to call it.

        In the first iteration, raises StateError on all ranks if they run different units. Later, warns
        once if this rank's order has changed.
        """
        position = len(self._order)
        self._order.append(number)
        if not self._first_order:
            mesh = self._units[number].mesh
            group = mesh.shard_group or mesh.replicate_group
            numbers = gather_objects(number, group, "comparing the order of units")
            if len(set(numbers)) > 1:
                seen = ", ".join(f"rank {r}: {self._name(n)}" for r, n in enumerate(numbers))
                raise StateError(
                    "Forward order differs across ranks: at the same place, they run different units "
                    f"({seen}). Let every rank run the same modules in the same order."
                )
        elif self._first_order[position : position + 1] != [number] and not self._has_warned:
            self._has_warned = True
            expected = map(self._name, self._first_order[position : position + 1])
            warnings.warn(
                "Forward order differs from that of the first iteration on rank "
                f"{dist.get_rank()}. Collectives are unchecked and may give incorrect results or "
                f"hang. This iteration runs {self._name(number)} at place {position}, the first "
                f"ran {next(expected, 'nothing')}.",
                stacklevel=2,
            )

    def _name(self, number: int) -> str:
        return repr(self._units[number].name or "root")


class StepChecks:
    """The switch of `fullshard.debug(steps=True)`."""

    are_on = False


def _check_step(unit: Unit, moment: Moment) -> None:
    """Raise DivergenceError on every rank of the unit's groups unless all are at this unit."""
    mine = f"{unit.path} ({moment})"
    for group in unit.mesh.groups:
        if group.size() == 1:
            continue
        everyones = gather_objects(mine, group, f"{unit.path}: debug() compares ranks")
        if len(set(everyones)) > 1:
            raise DivergenceError(
                "Ranks are at different units, by their numbers in the group: "
                f"{said(dict(enumerate(everyones)))}. Let every rank run the same units in the same order."
            )
