"""Rows of units, each of which is given what the one before has returned: which ones need no trace.

Units of a row are of one kind if they have the same classes, shapes and options, and are given the same beside what
they hand on. The first of a kind may differ from others: in backward it is the last one that uses what they share. A
later one repeats the second of its kind that came after the same kind. Its outputs are then its inputs, which have the
same shapes, and the trace goes on behind it as if it were not there.

    kinds    a a a a b a a a a b a a a
    traced   a a     b a       b
"""

import dataclasses
import functools
import types
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fullshard.planning.recorder import Recorder
from fullshard.torch_private import pytree, saved_tensor_hooks


class Caller:
    """A unit whose forward is called."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path = path
        self._module = module
        last = path.rpartition(".")[2]
        self._place = int(last) if last.isdecimal() else None

    @functools.cached_property
    def _traits(self) -> list[tuple[str, Any]]:
        """Classes, tensors and options of all modules inside, by name."""
        traits: list[tuple[str, Any]] = []
        for path, module in self._module.named_modules():
            tensors = (*module._parameters.items(), *module._buffers.items())
            traits.append((path, type(module)))
            traits += [(name, _form(each)) for name, each in tensors if each is not None]
            traits += [(n, _comparable(v)) for n, v in vars(module).items() if n not in _ASIDE]
        return traits

    def is_like(self, other: "Caller") -> bool:
        """Whether both compute the same. Their places in a list may be among their numbers: a layer's index."""
        places = (int, self._place), (int, other._place)
        return len(self._traits) == len(other._traits) and all(
            name == its_name and (trait == its_trait or (trait, its_trait) == places)
            for (name, trait), (its_name, its_trait) in zip(
                self._traits, other._traits, strict=True
            )
        )


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
    """A unit that needs no trace. path, events: of the one that it repeats."""

    path: str
    events: list[Any]
    outputs: Any


@dataclasses.dataclass
class _Seen:
    """A call of a unit. Tensors are known by weak references, so that they live as long as they would.

    chained: by place among the inputs, the place among the outputs of the call before.
    kind, previous: its own, and that of the call before. is_steady: whether it is not the first of its kind.
    hooks: what changes the tensors that autograd saves.
    """

    caller: Caller
    inputs: "_Leaves"
    hooks: Any
    chained: dict[int, int] = dataclasses.field(default_factory=dict)
    kind: int = 0
    previous: int = -1
    is_steady: bool = False
    events: list[Any] = dataclasses.field(default_factory=list)

    def is_like(self, other: "_Seen") -> bool:
        mine, its = self.inputs, other.inputs
        return (
            (
                not other.chained or self.chained == other.chained
            )  # the first of a row is given its input otherwise
            and mine.spec == its.spec
            and mine.forms == its.forms
            # The gradient of something shared is summed up in another way by the last call than by others.
            and all(
                place in self.chained
                or (_same(leaf, before) and not (place in mine.forms and mine.forms[place][-1]))
                for place, (leaf, before) in enumerate(zip(mine.leaves, its.leaves, strict=True))
            )
            and self.caller.is_like(other.caller)
        )


def _same(leaf: Any, other: Any) -> bool:
    is_tensor = isinstance(leaf, weakref.ref) and isinstance(other, weakref.ref)
    return leaf() is other() if is_tensor else bool(leaf == other)


class _Leaves:
    """What a unit is given or returns."""

    def __init__(self, tree: Any) -> None:
        leaves, self.spec = pytree.tree_flatten(tree)
        self.leaves = [
            weakref.ref(leaf) if isinstance(leaf, Tensor) else _comparable(leaf) for leaf in leaves
        ]
        self.forms = {n: _form(leaf) for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        # Objects are not kept: they may have tensors.
        others = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        self._others = others if all(isinstance(leaf, _PLAIN) for leaf in others) else None

    def filled(self, tensors: dict[int, Tensor]) -> Any:
        """Return what it was made of, with other tensors."""
        others = iter(self._others or ())
        leaves = [tensors[n] if n in self.forms else next(others) for n in range(len(self.leaves))]
        return pytree.tree_unflatten(leaves, self.spec)

    @property
    def is_plain(self) -> bool:
        return self._others is not None

    def places(self) -> dict[int, int]:
        """Return where each tensor is, by its identity."""
        return {id(self.leaves[place]()): place for place in self.forms}


class Repeats:
    """Calls of units in the order in which they end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._open: list[_Seen] = []
        self._row: list[_Seen] = []
        # Of the call that ended last.
        self._last: _Seen | None = None
        self._outputs = _Leaves(())
        self._num_recorded = 0
        self.num_skipped = 0

    def look_up(self, caller: Caller, args: Any, kwargs: Any) -> Repeated | None:
        """Return what a call would be if it repeats an earlier one; else None, and `note` has to follow."""
        seen = _Seen(caller, _Leaves((args, kwargs)), saved_tensor_hooks(True))
        if not self._goes_on(seen):
            self._row = []
        alike = next((each for each in self._row if seen.is_like(each)), None)
        seen.is_steady = alike is not None
        seen.kind = len(self._row) if alike is None else alike.kind
        model = next(
            (
                each
                for each in self._row
                if each.is_steady and (each.kind, each.previous) == (seen.kind, seen.previous)
            ),
            None,
        )
        wanted = {output: place for place, output in seen.chained.items()}
        if (
            model is None
            or not self._outputs.is_plain
            or wanted.keys() != self._outputs.forms.keys()
        ):
            self._open.append(seen)
            return None
        leaves = pytree.tree_leaves((args, kwargs))
        outputs = self._outputs.filled({n: leaves[place] for n, place in wanted.items()})
        self._last, self._outputs = seen, _Leaves(outputs)
        self.num_skipped += 1
        return Repeated(model.caller.path, model.events, outputs)

    def _goes_on(self, seen: _Seen) -> bool:
        """Whether a call is given what the last one has returned, and nothing was computed since."""
        last = self._last
        if (
            last is None
            or not torch.is_grad_enabled()  # else it may be one of several within a checkpoint
            or self._recorder.num_recorded != self._num_recorded
            or (seen.hooks is not None and seen.hooks == last.hooks)
        ):
            return False
        places = self._outputs.places()
        for place in seen.inputs.forms:
            if (output := places.get(id(seen.inputs.leaves[place]()))) is not None:
                seen.chained[place] = output
        seen.previous = last.kind
        return bool(seen.chained)

    def note(self, outputs: Any, events: list[Any]) -> None:
        """Remember a call that is over. events: from its beginning to its end."""
        seen = self._open.pop()
        seen.events = events
        self._row.append(seen)
        self._last, self._outputs = seen, _Leaves(outputs)
        self._num_recorded = self._recorder.num_recorded
