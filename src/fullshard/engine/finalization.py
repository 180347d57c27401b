"""Who ends the reductions of a backward: the backward itself, or the program, with a call.

Pipeline schedules reduce once for many backwards, at a moment of their own choice. With manual
finalization the end of a backward neither reduces what its units still owe nor waits for reductions;
`Iteration.finalize` does, by the settings that hold then. An optimizer that steps before that is
refused, by a hook of the whole process: it would use gradients of one rank, or none.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.errors import StateError
from fullshard.process_hooks import BEFORE_STEP


class Finalization:
    """Who ends the backwards of one model.

    units: the model's.
    is_manual: what the user has set.
    is_under_way: whether the program has begun to finalize, and has yet to wait for the reductions.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.is_manual = False
        self._mode: bool | None = None  # of the backwards since the last end; None before the first
        self._token: object | None = None

    def begin_backward(self) -> None:
        """Note that a backward begins: the mode stays until it is ended."""
        if self._mode is None:
            self._mode = self.is_manual
        if self._mode:
            _left.discard(self)  # optimizers may step in hooks of this backward

    def end_backward(self) -> None:
        """Note that a backward is over, and has left its end to the program."""
        _left.add(self)

    @property
    def waits(self) -> bool:
        return self._mode is True

    @property
    def is_under_way(self) -> bool:
        return self._token is not None

    def set_manual(self, *, enabled: bool, in_backward: bool) -> None:
        """Choose who ends backwards from now on. Raises StateError after one has begun."""
        if enabled != self.is_manual and in_backward:
            raise StateError(
                "set_manual_backward_finalization cannot change mode during backward. Call it "
                "before forward."
            )
        if self._mode is not None and enabled != self._mode:
            raise StateError(
                "set_manual_backward_finalization cannot change mode after backward starts. Call "
                "finalize_backward() first, or reset_iter_state()."
            )
        self.is_manual = enabled
        if enabled:
            BEFORE_STEP.add(
                _refuse_early_step, "gradients are there before the program has ended a backward"
            )

    def begin(self, *, in_backward: bool) -> None:
        """Note that the program begins to end the backwards. Raises StateError if it may not now.

        in_backward: whether a backward has begun and not come to its end.
        """
        self.check_ended("finalizing backward again")
        if not (self.is_manual if self._mode is None else self._mode):
            raise StateError(
                "finalize_backward requires manual backward finalization. Call "
                "set_manual_backward_finalization(True) before forward."
            )
        if in_backward:
            raise StateError(
                "finalize_backward must be called after backward completes. After an exception in "
                "backward, call reset_iter_state()."
            )
        for unit in self._units:
            _check_unit(unit)
        _left.discard(self)  # as in a backward

    def check_ended(self, what: str) -> None:
        """Raise StateError if reductions were begun and not waited for. what: may not begin yet."""
        if self.is_under_way:
            raise StateError(
                f"The previous gradient reduction must be waited on before {what}: call wait() of "
                "the handle that finalize_backward(async_op=True) returned."
            )

    def begin_wait(self) -> object:
        """Return a token for the reductions that were begun, by which `end_wait` knows them."""
        self._token = object()
        _left.add(self)
        return self._token

    def end_wait(self, token: object) -> None:
        """Note that the program waits for reductions. Raises StateError if they were forgotten."""
        if token is not self._token:
            raise StateError(
                "This gradient reduction handle was invalidated: reset_iter_state() was called, or "
                "the model ran again after an exception. Its gradients are lost."
            )
        _left.discard(self)

    def end(self) -> None:
        """Note that the backwards were ended, or forgotten."""
        if self._mode:
            _left.discard(self)
        self._mode = self._token = None

    @property
    def label(self) -> str:
        """The model's first unit, for messages."""
        return self._units[0].label

    def trains(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer updates parameters of this model."""
        own = {id(holder.sharded) for unit in self._units for holder in unit.params.holders}
        return any(id(each) in own for group in optimizer.param_groups for each in group["params"])


# Those whose last backward the program has yet to end, or to wait for.
_left: weakref.WeakSet[Finalization] = weakref.WeakSet()


@eager
def _refuse_early_step(optimizer: Optimizer, _: Any, __: Any) -> None:
    """Raise StateError if the program has yet to reduce what an optimizer is about to use."""
    left = next((each for each in list(_left) if each.trains(optimizer)), None)
    if left is not None:
        raise StateError(
            f"{type(optimizer).__name__}.step() (rank {dist.get_rank()}) comes before the gradients of "
            f"{left.label} are reduced: with "
            "set_manual_backward_finalization(True), call finalize_backward() after the last "
            "backward, and wait() of the handle if it was asynchronous; or reset_iter_state() to "
            "give the iteration up."
        )


def _check_unit(unit: Unit) -> None:
    """Raise StateError for sums that wait for an all-reduce, or would have to."""
    if unit.gradients.has_partial:
        raise StateError(
            f"{unit.label}: manual backward finalization does not support partial gradient "
            "reductions (set_requires_all_reduce(False)). Let backward end by itself, or keep "
            "gradients with set_requires_gradient_sync(False)."
        )
    config = unit.config
    has_replicas = unit.mesh.plan.replicate_size > 1
    if has_replicas and config.reduce_grads and not config.all_reduce_grads:
        raise StateError(
            f"{unit.label}: manual backward finalization requires all-reduce. Call "
            "set_requires_all_reduce(True) before finalization."
        )
