"""Which form of a unit's parameters the modules see, and what autograd leaves on it.

sharded      between steps: what an optimizer updates
unsharded    in forward and backward: what modules compute with
between      from forward to backward, where users train the originals: the sharded parameters
             are registered, while ``module.weight`` is the unsharded one
gradients    after a backward, of parameters that stay unsharded: whole ones are registered,
             and their ``grad`` is the sharded gradient (see `stand_ins`)
"""

import itertools
import operator
import warnings
from collections.abc import Sequence

import torch

from fullshard.engine.nodes import is_captured
from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.params.kept import KeptParameters
from fullshard.engine.params.kept_views import KeptViews
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.params.stand_ins import StandIns, own_gradient


class ShownForm:
    """The form in which one unit's parameters are registered, and the one that changes it.

    may_switch: whether registering is all there is to do, for parameters that are simple.
    """

    def __init__(self) -> None:
        self._params: list[ManagedParameter] = []
        self.may_switch = False
        self._switch: Switch | None = None
        self._num_switched = 0  # references of the switch to what `_kept` looks after
        self._has_shadows = False  # attributes differ from what is registered
        self._stand_ins: StandIns | None = None  # while whole parameters show gradients
        self._kept: KeptParameters | None = None
        self._kept_views: KeptViews | None = None

    def take(self, params: list[ManagedParameter]) -> None:
        """Show these parameters from now on, the sharded form first."""
        self._params = params
        self.drop_switch()
        for param in params:
            param.show_sharded()

    # The unsharded form is made anew

    def forget_views(self) -> None:
        """Look no more after views of unsharded parameters, which become other ones."""
        self._kept_views = None

    def release(self) -> None:
        """Before the unsharded form is made of other memory: let what users keep be used."""
        self.drop_switch()
        self.hide_gradients()
        if self._kept is not None:
            self._kept.restore()
        if self._kept_views is not None:
            self._kept_views.release()

    def look_after(self, plain: Sequence[ManagedParameter], buffers: UnitBuffers) -> None:
        """Look after the new unsharded form: nobody but the unit refers to it yet."""
        # Parameters that only moved may be kept by somebody now: their references were counted.
        if self._kept is None or not self._kept.looks_after(plain):
            self._kept = KeptParameters(plain)
        self._kept_views = KeptViews(plain, buffers, self._kept_views)
        self.retire()

    def retire(self, *, after_forward: bool = False) -> None:
        """After a reshard: make the use of unsharded parameters that somebody keeps an error."""
        if self._kept is not None and self._kept_views is not None:
            self._kept.retire(self._num_switched)
            self._kept_views.retire(after_forward=after_forward)

    # Showing a form

    def show_sharded(self) -> None:
        """Register the sharded parameters."""
        self.hide_gradients()
        if self._has_shadows:
            self._drop_shadows()
        for each in (self._switch,) if self._switch is not None else self._registrars():
            each.show_sharded()

    def show_unsharded(self) -> None:
        """Register the unsharded parameters, as modules compute with them."""
        if self._kept is not None and self._kept_views is not None:
            self._kept.restore()
            self._kept_views.restore()
        self.hide_gradients()
        if self._has_shadows:
            self._drop_shadows()
            self.follow_switch()  # what is trained was in sight, and may have been frozen
        for each in (self._switch,) if self._switch is not None else self._registrars():
            each.show_unsharded()

    def show_between(self) -> None:
        """Register the sharded parameters, and let attributes be the unsharded ones.

        Between forward and backward: who asks for parameters gets those that are trained, and who
        computes with ``module.weight`` gets the whole one.
        """
        self.show_sharded()
        self._has_shadows = True
        for param in self._params:
            unsharded = param.current_unsharded()
            for slot in param.slots:
                slot.shadow(unsharded)

    def show_gradients(self) -> None:
        """Let whole parameters that stay in sight show the gradients of the sharded ones."""
        if self._stand_ins is None:
            self._stand_ins = StandIns()
            self._stand_ins.show(self._params)

    def hide_gradients(self) -> None:
        """Let whole parameters have gradients of their own again."""
        if self._stand_ins is not None:
            self._stand_ins.hide()
            self._stand_ins = None

    def _drop_shadows(self) -> None:
        self._has_shadows = False
        for param in self._params:
            for slot in param.slots:
                slot.drop_shadow()

    def follow_switch(self) -> None:
        """Notice parameters that were frozen, made trainable or registered in one more place."""
        if self._switch is not None and not self._switch.is_current:
            self.drop_switch()

    def drop_switch(self) -> None:
        """Register one by one until all is known again."""
        self._switch, self._num_switched = None, 0

    def _registrars(self) -> Sequence["Switch | ManagedParameter"]:
        """Return who registers a form: one `Switch` if setting dict entries is enough.

        Else each parameter, which may have more to do.
        """
        if not self.may_switch or not all(param.is_only_registered for param in self._params):
            return self._params
        self._switch = Switch(self._params)
        if self._kept is not None:
            self._num_switched = sum(len(param.slots) for param in self._kept.params)
        return (self._switch,)

    # Gradients that autograd leaves on the unsharded form

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Take what autograd has accumulated: one full gradient per parameter, or None."""
        self.hide_gradients()
        if self._switch is not None and self._switch.is_plain:
            return self._switch.take_gradients()
        return [param.take_gradient() for param in self._params]

    @property
    def has_gradients(self) -> bool:
        """Whether autograd has accumulated something that nobody took."""
        if self._switch is not None:
            return self._switch.has_gradients
        tensors = [param.unsharded for param in self._params if param.unsharded is not None]
        return any(own_gradient(tensor) is not None for tensor in tensors)

    def drop_gradients(self) -> None:
        """Forget what autograd has accumulated."""
        self.hide_gradients()
        for param in self._params:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def warn_of_captured(self, label: str) -> None:
        """Warn of parameters whose gradient `torch.autograd.grad` returns."""
        names = [
            param.name
            for param in self._params
            if param.unsharded is not None and param.requires_grad and is_captured(param.unsharded)
        ]
        if names:
            warnings.warn(
                f"torch.autograd.grad returns the gradient of {', '.join(names)} in {label} as "
                "this rank has it: nothing reduces it. Average it over the data-parallel ranks, or "
                "call backward() and read the parameter's .grad.",
                UserWarning,
                stacklevel=2,
            )


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
