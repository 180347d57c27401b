"""Showing all parameters of a unit in one form or the other at once."""

import itertools
import operator
from collections.abc import Sequence

import torch

from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.params.stand_ins import own_gradient

_unsharded = operator.itemgetter(3)  # of an entry


class Switch:
    """Shows many parameters in one form or the other, where nothing but registering is to be done.

    Refers to each unsharded parameter once a place: `kept` counts that.

    What `ManagedParameter.show_sharded` and `show_unsharded` do, for all parameters of a unit at a
    fraction of the cost: it happens four times in a step.
    """

    def __init__(self, params: Sequence[ManagedParameter]) -> None:
        self._entries = [
            (slot.registry, slot.name, param.sharded, param.current_unsharded())
            for param in params
            for slot in param.slots
        ]
        self._params = params
        self._slots = [param.slots for param in params]
        self.is_plain = all(param.form.unsharded is None for param in params)

    @property
    def is_current(self) -> bool:
        """Whether no parameter was frozen, made trainable or registered in one more place."""
        for _, _, sharded, unsharded in self._entries:
            if sharded.requires_grad is not unsharded.requires_grad:
                return False
        return sum(map(len, self._slots)) == len(self._entries)

    @property
    def has_gradients(self) -> bool:
        """Whether autograd has accumulated something that nobody took."""
        gradients = map(own_gradient, map(_unsharded, self._entries))
        return not all(map(operator.is_, gradients, itertools.repeat(None)))

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Do what `ManagedParameter.take_gradient` does, for parameters that are plain tensors."""
        grads: list[torch.Tensor | None] = []
        for param in self._params:
            unsharded = param.unsharded
            assert unsharded is not None
            grad = unsharded.grad
            if grad is not None:
                if grad.layout is not torch.strided:
                    grad = param.take_gradient()  # says what is wrong
                unsharded.grad = None
            grads.append(grad)
        return grads

    def show_sharded(self) -> None:
        for registry, name, sharded, _ in self._entries:
            registry[name] = sharded

    def show_unsharded(self) -> None:
        for registry, name, _, unsharded in self._entries:
            registry[name] = unsharded
