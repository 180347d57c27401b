"""A rank's path through a model: what it tells the other ranks of it, and how they compare."""

from collections.abc import Sequence

import torch

from fullshard.engine.checks.alike import FreezeWatch, check_alike
from fullshard.engine.checks.debugging import StepChecks, check_step
from fullshard.engine.checks.order import ForwardOrder
from fullshard.engine.unit import Unit
from fullshard.engine.unit_setup import comms_of
from fullshard.peers.paths import Moment, Phase


class Path:
    """The path of one model. Building it is collective: ranks compare what they have built.

    kind: the model's class. units: of the model. kinds: the classes of its modules.
    """

    def __init__(self, kind: str, units: Sequence[Unit], kinds: Sequence[type]) -> None:
        self._number = {id(unit): number for number, unit in enumerate(units)}
        self._step = 0  # forwards with gradients so far
        self._moment = Moment(0, Phase.BETWEEN)
        named = [(unit.path, [param.name for param in unit.params]) for unit in units]
        records = dict.fromkeys(comm.record for comm in comms_of(units))
        # The model's number in the flight record of each of its groups.
        self._records = {each: each.add_model(kind, named) for each in records if each is not None}
        self._notes = [each.note for each in self._records]
        for unit in units:
            if (record := unit.comm.record or unit.replicate_comm.record) is not None:
                unit.set_model(self._records[record])
        check_alike(units, kinds, self._records)
        self._freezing = FreezeWatch(units)
        self._order = ForwardOrder(units)
        self._checks_order = False

    def begin_forward(self) -> None:
        """Begin the root's forward, and tell of parameters that are frozen or trained since the last."""
        is_step = torch.is_grad_enabled()
        self._step += is_step
        self.begin(Phase.FORWARD if is_step else Phase.EVALUATION)
        if is_step:
            self._freezing.enter_changes(self._records)
        self._checks_order = self._order.is_checked

    def begin(self, phase: Phase) -> None:
        """Say which part of the step this rank is in."""
        self._moment = Moment(self._step, phase)
        for record, model in self._records.items():
            record.begin(model, self._step, phase)

    def enter(self, units: Sequence[Unit], *, is_training: bool) -> None:
        """Tell of units whose forward begins. Call it before any gather of theirs.

        Ranks that differ would match each other's gathers. Raises as `ForwardOrder.check` and
        `check_step`, where these are asked for.
        """
        if not (self._notes or self._checks_order or StepChecks.are_on):
            return
        for unit in units:
            number = self._number[id(unit)]
            if self._checks_order and is_training:
                self._order.check(number)
            if StepChecks.are_on:
                check_step(unit, self._moment)
            for note in self._notes:
                note(number)

    def leave(self, unit: Unit) -> None:
        """Tell of a unit whose backward is over. Call it before its reduction."""
        if StepChecks.are_on:
            check_step(unit, self._moment)
        for note in self._notes:
            note(self._number[id(unit)])

    def lack_gradients(self, unit: Unit) -> None:
        """Tell of a unit of which no parameter got a gradient, so that this rank reduces nothing."""
        if self._notes and any(param.sharded.requires_grad for param in unit.params):
            for note in self._notes:
                note(self._number[id(unit)], is_empty=True)

    def end_iteration(self) -> None:
        """Note that the last backward of an iteration is over."""
        self._order.end_iteration()

    def forget(self) -> None:
        """Forget an iteration that an exception ended."""
        self._order.forget()
