"""Rows of units, each of which is given what the one before has returned: which ones need no trace.

Calls are of one kind if their units have the same classes, shapes and options, and they are given the same beside what
is handed on. The first of a kind may differ from others: in backward it is the last one that uses what they share. A
later one repeats the second of its kind that came after the same kind. Its outputs are then its inputs, so these have
to have the same shapes, and the trace goes on behind it as if it were not there.

    kinds    a a a a b a a a a b a a a
    traced   a a     b a       b

Tensors are known by weak references, so that they live as long as they would.
"""

import dataclasses
import functools
import types
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from fullshard.planning.recorder import Recorder
from fullshard.torch_private import pytree, saved_tensor_hooks


def _kinds_of(units: Mapping[str, nn.Module]) -> list[int]:
    """Number units: those that compute the same, with units in the same places inside, have the number of the first.

    Their places in a list may be among their options: a layer's index.
    """
    seen: list[tuple[Any, list[tuple[str, Any]]]] = []
    modules = {*units.values()}
    for path, module in units.items():
        last = path.rpartition(".")[2]
        seen.append((int(last) if last.isdecimal() else None, _traits(module, modules)))

    def is_like(one: int, other: int) -> bool:
        (place, traits), (its_place, its_traits) = seen[one], seen[other]
        places = (int, place), (int, its_place)
        return len(traits) == len(its_traits) and all(
            name == its_name and (trait == its_trait or (trait, its_trait) == places)
            for (name, trait), (its_name, its_trait) in zip(traits, its_traits, strict=True)
        )

    kinds: list[int] = []
    for number in range(len(seen)):
        firsts = sorted(set(kinds))
        kinds.append(next((first for first in firsts if is_like(number, first)), number))
    return kinds


def _traits(unit: nn.Module, units: Collection[nn.Module]) -> list[tuple[str, Any]]:
    """Return classes, tensors and options of all modules inside, and which of them are units, by name."""
    traits: list[tuple[str, Any]] = []
    for path, module in unit.named_modules():
        tensors = (*module._parameters.items(), *module._buffers.items())
        traits.append((path, (type(module), module in units)))
        traits += [(name, _form(each)) for name, each in tensors if each is not None]
        traits += [(n, _comparable(v)) for n, v in vars(module).items() if n not in _ASIDE]
    return traits


# What `_traits` has already, and the forward that says when it is called.
_ASIDE = frozenset(("_parameters", "_buffers", "_modules", "forward"))


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad


_PLAIN = (bool, int, float, str, bytes, torch.dtype, torch.device, type(None))


def _comparable(value: Any) -> Any:
    """Return something that is equal for equal options: objects that may change are equal to themselves alone."""
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, (list, tuple, set, frozenset)):
        return type(value), tuple(map(_comparable, value))
    if isinstance(value, dict):
        return type(value), tuple((key, _comparable(each)) for key, each in value.items())
    if isinstance(value, functools.partial):
        return value.func, _comparable(value.args), _comparable(value.keywords)
    if isinstance(value, types.MethodType):  # of a module inside, whose options are compared
        return value.__func__
    return id(value)


class Repeated(NamedTuple):
    """A call that needs no trace. unit, events: of the one that it repeats."""

    unit: int
    events: Sequence[Any]
    outputs: Any


class _Traced(NamedTuple):
    """A call that later ones may repeat. returned: the forms of what it returned."""

    unit: int
    events: Sequence[Any]
    returned: Any


@dataclasses.dataclass
class _Row:
    """Calls of units, none inside another, each of which is given what the one before has returned.

    kinds: what tells each kind from others; a kind is its place here. traced: the second calls of their kinds, by
        that and by what is handed on.
    kind, hooks, num_recorded, outputs, spec, returned: of the last call: what changes the tensors that autograd saves
        in it, what was recorded until it ended, and what it returned, in whole and in form.
    """

    kinds: list[Any] = dataclasses.field(default_factory=list)
    traced: dict[Any, _Traced] = dataclasses.field(default_factory=dict)
    kind: int = -1
    hooks: Any = None
    num_recorded: int = -1
    outputs: list[Any] = dataclasses.field(default_factory=list)
    spec: Any = None
    returned: Any = None


class Repeats:
    """Calls of units while they are traced. Inside each, a row of its own begins.

    calls_again: a unit was called a second time, whose gradients autograd adds up: it is like no other one.
    """

    def __init__(self, units: Mapping[str, nn.Module], recorder: Recorder) -> None:
        self._units = _kinds_of(units)
        self._recorder = recorder
        self._rows = [_Row()]
        self._open: list[tuple[int, Any]] = []
        self.num_skipped = 0
        self.calls_again = False
        self._called: set[int] = set()

    def look_up(self, unit: int, args: Any, kwargs: Any) -> Repeated | None:
        """Return what a call would be if it repeats an earlier one; else None, and `note` has to follow."""
        self.calls_again |= unit in self._called
        self._called.add(unit)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        hooks = saved_tensor_hooks(True)
        handed_on = self._handed_on(leaves, hooks)
        if not handed_on:
            self._rows[-1] = _Row()
        row = self._rows[-1]
        given = [_given(leaf, place in handed_on) for place, leaf in enumerate(leaves)]
        key = (self._units[unit], hooks is None, spec, given)
        is_first = key not in row.kinds
        if is_first:
            row.kinds.append(key)
        previous, row.kind, row.hooks = row.kind, row.kinds.index(key), hooks
        call = (row.kind, previous, tuple(handed_on.items()))
        model = row.traced.get(call)
        if model is None or model.returned != row.returned:
            self._open.append((unit, None if is_first else call))
            self._rows.append(_Row())
            return None
        self.num_skipped += 1
        outputs = [each() if isinstance(each, weakref.ref) else each for each in row.outputs]
        return Repeated(model.unit, model.events, pytree.tree_unflatten(outputs, row.spec))

    def _handed_on(self, leaves: Sequence[Any], hooks: Any) -> dict[int, int]:
        """Return which inputs the last call has returned, and where, by place; nothing if none may be left out."""
        row = self._rows[-1]
        if (
            not torch.is_grad_enabled()  # else it may be one of several within a checkpoint
            or self._recorder.num_recorded != row.num_recorded
            or (hooks is not None and hooks == row.hooks)
        ):
            return {}
        places = {
            id(each()): place
            for place, each in enumerate(row.outputs)
            if isinstance(each, weakref.ref)
        }
        tensors = {n: leaf for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        found = {n: places[id(leaf)] for n, leaf in tensors.items() if id(leaf) in places}
        # The gradient of something shared is summed up in another way by the last call than by others.
        are_summed = any(leaf.requires_grad for n, leaf in tensors.items() if n not in found)
        return {} if are_summed or {*found.values()} != {*places.values()} else found

    def note(self, outputs: Any, events: Sequence[Any]) -> None:
        """Remember a call that is over. events: from its beginning to its end."""
        self._rows.pop()
        row, (unit, call) = self._rows[-1], self._open.pop()
        leaves, row.spec = pytree.tree_flatten(outputs)
        row.returned = row.spec, [_given(each, True) for each in leaves]
        row.outputs = [weakref.ref(e) if isinstance(e, Tensor) else e for e in leaves]
        row.num_recorded = self._recorder.num_recorded
        if not all(isinstance(each, (Tensor, *_PLAIN)) for each in leaves):
            self._rows[-1] = _Row()  # other objects are not kept: they may have tensors
        elif call is not None:
            row.traced.setdefault(call, _Traced(unit, events, row.returned))


def _given(leaf: Any, is_handed_on: bool) -> Any:
    """Return what tells one input from another. With a gradient, the first of a row is what later ones are handed."""
    if not isinstance(leaf, Tensor):
        return _comparable(leaf)
    if is_handed_on or leaf.requires_grad:
        return _form(leaf), False, None
    return _form(leaf), True, WeakIdRef(leaf)  # which compares itself with nothing but its kind
