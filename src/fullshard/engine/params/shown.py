"""The form of a unit's parameters that modules show, and the gradients that autograd leaves on it.

form        when                                  registered   ``module.weight``
sharded     between steps                         sharded      sharded
unsharded   in forward and backward               unsharded    unsharded
between     from forward to backward, for flat    sharded      unsharded
            units that stay unsharded
gradients   after a backward, for other units     unsharded, whose ``.grad`` is that of the
            that stay unsharded                   sharded ones

[Note: Stand-ins] Units that stay unsharded have whole parameters registered, where clipping would find no
gradient to clip: gradients are on the sharded ones. So outside of forward and backward such a parameter gets
another class, whose ``grad`` is that of the sharded one: it can be read, scaled in place and set to None.
Autograd, in C++, goes on to accumulate into its own. Why they stay registered: docs/design.md, "Flat units".
"""

import collections
import copy
import itertools
import operator
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.guard.uses import Uses, num_switched
from fullshard.engine.nodes import is_captured
from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.params.managed import ManagedParameter, manager_of
from fullshard.errors import StateError

_own: Any = torch.Tensor.grad  # the property of every tensor

# Return what autograd has accumulated into a parameter, also while its class shows another gradient.
own_gradient: Callable[[torch.Tensor], torch.Tensor | None] = _own.__get__
_set_own_gradient: Callable[[torch.Tensor, torch.Tensor | None], None] = _own.__set__


class ShownForm:
    """Registers one unit's parameters in one form or another, and looks after the unsharded form.

    may_switch: the unit knows of nothing that forbids a `Switch`. The parameters are asked as well.
    uses: who refers to the unsharded form; None while there is none. After each reshard `Uses.retire`
        makes the use of what somebody keeps an error: after `show_sharded`, as modules that have the
        unsharded parameters registered would count too.
    num_switched: references of the switch to the parameters that ``uses`` counts.
    has_frozen: some parameter was frozen when the unsharded form was shown last.
    """

    def __init__(self) -> None:
        self._params: list[ManagedParameter] = []
        self.may_switch = False
        self.has_frozen = True
        self._switch: Switch | None = None  # made when a form is shown, dropped on any change
        self.num_switched = 0
        self._has_shadows = False  # `between`: attributes are not what is registered
        self._stand_ins: list[nn.Parameter] | None = None  # `gradients`: see [Note: Stand-ins]
        self.uses: Uses | None = None
        self._former: Uses | None = None  # what `uses` goes on from

    def take(self, params: list[ManagedParameter]) -> None:
        """Show these parameters from now on, sharded."""
        self._params = params
        self.drop_switch()
        for param in params:
            param.show_sharded()

    # When the unsharded form is made anew

    def begin_anew(self, *, may_switch: bool) -> None:
        """Forget what was learnt about views: the unit's parameters become others."""
        self.may_switch, self._former = may_switch, None

    def release(self) -> None:
        """Allow the use of what users keep. Called before the unsharded form gets other memory.

        What they keep is then either moved to the new memory and looked after again, or no longer
        the unit's.
        """
        self.drop_switch()
        self.hide_gradients()
        if self.uses is not None:
            self.uses.release()

    def look_after(self, plain: Sequence[ManagedParameter], buffers: UnitBuffers) -> None:
        """Look after the new unsharded form. Called before anybody but the unit refers to it."""
        self.uses = self._former = Uses(plain, buffers, self._former)
        # What somebody keeps was allowed by `release`, and has no memory until the next unshard.
        self.uses.retire(self.num_switched)

    # Showing a form

    def show_sharded(self) -> None:
        """Register the sharded parameters."""
        if self._stand_ins is not None:
            self.hide_gradients()
        if self._has_shadows:
            self._drop_shadows()
        switch = self._switch
        if switch is not None and switch.show(switch.sharded):
            return
        # Users had the unsharded parameters in sight and may have frozen some of them. Later it could
        # not be told from what they do to the sharded ones.
        self.drop_switch()
        for param in self._params:
            if param.unsharded is not None:
                param.current_unsharded()
            param.show_sharded()

    def show_unsharded(self) -> None:
        """Register the unsharded parameters, which have their memory again."""
        # First of all: what follows reads the parameters.
        if self.uses is not None:
            self.uses.restore()
        if self._stand_ins is not None:
            self.hide_gradients()
        if self._has_shadows:
            self._drop_shadows()
        switch = self._switch
        if switch is not None and switch.show(switch.unsharded):
            return
        # Users had the sharded parameters in sight, and may have frozen some of them or unfrozen them since.
        self.drop_switch()
        for param in self._params:
            param.show_unsharded()
        self.has_frozen = not all(param.requires_grad for param in self._params)
        # From now on by a `Switch`, if setting dictionary entries is enough.
        if self.may_switch and all(param.is_only_registered for param in self._params):
            self._switch = Switch(self._params)
            # It is younger than the baseline of `uses`, so its references have to be told apart.
            if self.uses is not None:
                self.num_switched = sum(map(num_switched, self.uses.counted))

    def show_between(self) -> None:
        """Register the sharded parameters, and set modules' attributes to the unsharded ones.

        From forward to backward, ``model.parameters()`` then yields what is trained, and
        ``module.weight`` is whole for code that computes with it.
        """
        self.show_sharded()
        self._has_shadows = True
        for param in self._params:
            unsharded = param.current_unsharded()
            for slot in param.slots:
                slot.shadow(unsharded)

    def show_gradients(self) -> None:
        """Let registered unsharded parameters show the gradients of the sharded ones."""
        if self._stand_ins is not None:
            return
        self._stand_ins = []
        for param in self._params:
            tensor = param.unsharded
            # By exact type: users' subclasses have no stand-in.
            if tensor is not None and (other := _KINDS.get(type(tensor))) is not None:
                tensor.__class__ = other
                self._stand_ins.append(tensor)

    def hide_gradients(self) -> None:
        """Let unsharded parameters have gradients of their own again, as autograd leaves them."""
        if self._stand_ins is not None:
            for tensor in self._stand_ins:
                tensor.__class__ = type(tensor)._kind  # type: ignore[attr-defined]
            self._stand_ins = None

    def _drop_shadows(self) -> None:
        self._has_shadows = False
        for param in self._params:
            for slot in param.slots:
                slot.drop_shadow()

    def drop_switch(self) -> None:
        """Forget the switch; the next form that is shown makes another one."""
        self._switch, self.num_switched = None, 0

    # Gradients that autograd leaves on the unsharded form

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Return and clear what autograd has accumulated: per parameter, its full gradient or None.

        May be collective and raises StateError: see `ManagedParameter.take_gradient`.
        """
        if self._stand_ins is not None:
            self.hide_gradients()  # else `.grad` would be that of the sharded parameter
        if self._switch is not None and self._switch.is_plain:
            return self._switch.take_gradients()
        return [param.take_gradient() for param in self._params]

    @property
    def has_gradients(self) -> bool:
        """True if autograd has accumulated a gradient that was not taken yet."""
        if self._switch is not None:
            return self._switch.has_gradients
        return any(
            param.unsharded is not None and own_gradient(param.unsharded) is not None
            for param in self._params
        )

    def drop_gradients(self) -> None:
        """Drop what autograd has accumulated."""
        self.hide_gradients()
        for param in self._params:
            if param.unsharded is not None:
                param.unsharded.grad = None

    def warn_of_captured(self, label: str) -> None:
        """Warn of parameters whose gradient `torch.autograd.grad` returns: nothing reduces it.

        Call it inside the backward: what is captured is known only then. label: the unit's.
        """
        names = [
            param.name
            for param in self._params
            if param.unsharded is not None
            and param.unsharded.requires_grad  # not the sharded one: it may be frozen since forward
            and is_captured(param.unsharded)
        ]
        if names:
            warnings.warn(
                f"torch.autograd.grad returns the gradient of {', '.join(names)} in {label} as "
                "this rank has it: nothing reduces it. Average it over the data-parallel ranks, or "
                "call backward() and read the parameter's .grad.",
                UserWarning,
                stacklevel=2,
            )


_is_trained = operator.attrgetter("requires_grad")
_layout = operator.attrgetter("layout")
_NONES, _STRIDED = itertools.repeat(None), itertools.repeat(torch.strided)
_run: Callable[[Iterable[Any]], None] = collections.deque(maxlen=0).extend  # a map, for its effects

# What puts parameters into one module's registry, and these parameters by name.
Registration = tuple[Callable[[dict[str, nn.Parameter]], None], dict[str, nn.Parameter]]


class Switch:
    """Shows all parameters of a unit in one form or the other, by one call per module.

    sharded, unsharded: both forms, for `show`: the parameters of the other one, and what registers this one.

    Does what `ManagedParameter.show_sharded` and `show_unsharded` do at a fraction of the cost: this
    happens four times a step. Users freeze and train the form that they have in sight, so that one is
    asked, all its parameters in one go; what they do to one that they have kept is noticed when that form
    is shown again, before the unit's backward. The switch is dropped when a parameter gets a slot. How often it
    refers to an unsharded parameter: `num_switched`.
    """

    def __init__(self, params: Sequence[ManagedParameter]) -> None:
        self._params = params
        self._unsharded = [param.current_unsharded() for param in params]
        sharded = [param.sharded for param in params]
        self._trained = list(map(_is_trained, sharded))
        self.sharded = self._unsharded, _by_registry(params, sharded)
        self.unsharded = sharded, _by_registry(params, self._unsharded)
        self.is_plain = all(param.form.leaves_plain_gradients for param in params)

    def show(self, form: tuple[list[nn.Parameter], list[Registration]]) -> bool:
        """Register parameters, ``sharded`` or ``unsharded``.

        Returns False, with nothing done, if one of the form in sight was frozen or made trainable since.
        """
        in_sight, registrations = form
        if list(map(_is_trained, in_sight)) != self._trained:
            return False
        for register, parameters in registrations:
            register(parameters)
        return True

    @property
    def has_gradients(self) -> bool:
        """True if autograd has accumulated a gradient that was not taken yet."""
        return not all(map(operator.is_, map(own_gradient, self._unsharded), _NONES))

    def take_gradients(self) -> list[torch.Tensor | None]:
        """Do what `ManagedParameter.take_gradient` does, if ``is_plain``: no gradient is a DTensor."""
        grads = list(map(own_gradient, self._unsharded))
        try:
            are_dense = all(map(operator.is_, map(_layout, grads), _STRIDED))
        except AttributeError:  # None has no layout
            are_dense = all(grad is None or grad.layout is torch.strided for grad in grads)
        if not are_dense:
            return [param.take_gradient() for param in self._params]  # raises, with the reason
        _run(map(_set_own_gradient, self._unsharded, _NONES))
        return grads


def _by_registry(
    params: Sequence[ManagedParameter], form: Sequence[nn.Parameter]
) -> list[Registration]:
    """Return what registers the parameters of a form, one per manager, in all their slots."""
    registrations: dict[int, Registration] = {}
    for param, parameter in zip(params, form, strict=True):
        for slot in param.slots:
            registry = slot.registry
            if id(registry) not in registrations:
                registrations[id(registry)] = registry.update, {}
            registrations[id(registry)][1][slot.name] = parameter
    return list(registrations.values())


def _get(self: Any) -> Any:
    """Return the parameter's own gradient if there is one, else that of the sharded parameter."""
    # Autograd may have left one meanwhile. Nothing has reduced it yet, and it must not be hidden.
    own, trained = _own.__get__(self), _trained(self)
    return own if own is not None or trained is None else trained.grad


def _set(self: Any, value: torch.Tensor | None) -> None:
    """Set the gradient of the sharded parameter; None clears both.

    Raises StateError for a value that is not sharded as the parameter is.
    """
    trained = _trained(self)
    if trained is None:
        _own.__set__(self, value)
    elif value is None:
        _own.__set__(self, None)
        trained.grad = None
    elif isinstance(value, DTensor) and value._spec.placements == trained._spec.placements:  # type: ignore[attr-defined]
        trained.grad = value
    else:
        manager = manager_of(self)
        raise StateError(
            f"{'A parameter' if manager is None else manager.name} stays unsharded, and its .grad was "
            "set to a tensor that is not sharded like the parameter that is trained: the optimizer "
            "would not see it. Call model.reshard() first, and set .grad of the sharded parameter to "
            "a DTensor."
        )


def _trained(self: Any) -> nn.Parameter | None:
    """Return the sharded parameter, or None for a copy of an unsharded one.

    A copy has the attributes of what it was copied from, so it is told by identity.
    """
    manager = manager_of(self)
    return manager.sharded if manager is not None and manager.unsharded is self else None


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """Copy the parameter as what it is without the exchanged class."""
    kind = type(self)
    self.__class__ = kind._kind
    try:
        return copy.deepcopy(self, memo)
    finally:
        self.__class__ = kind


def _reduce(self: Any, protocol: Any) -> Any:
    """Pickle the parameter as what it is: the stand-in class has no name to be found by."""
    kind = type(self)
    self.__class__ = kind._kind
    try:
        return self.__reduce_ex__(protocol)
    finally:
        self.__class__ = kind


def _stand_in(kind: type) -> type:
    """Return a subclass with another ``grad``, of the same name.

    It adds no slots: see `guard.forbidden`.
    """
    namespace = {
        "__slots__": (),
        "__doc__": "A whole parameter whose gradient is that of the sharded one.",
        "__module__": __name__,
        "__deepcopy__": _deepcopy,
        "__reduce_ex__": _reduce,
        "_kind": kind,
        "grad": property(_get, _set, lambda self: _set(self, None)),
    }
    return type(kind)(kind.__name__, (kind,), namespace)


_KINDS: dict[type, Any] = {kind: _stand_in(kind) for kind in (nn.Parameter, DTensor)}
