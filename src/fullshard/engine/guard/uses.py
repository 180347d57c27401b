"""Who still refers to the memory of unsharded parameters, and the error for who uses it.

Their memory is freed at a reshard, or has the values of before the next optimizer step, or is the
shards' own. Using it then would crash, or give results that depend on how ranks communicate. So each
reshard counts references; what somebody keeps is forbidden (see `forbidden`) until the unit is
unsharded again, and in the backward of its own unit.

what somebody keeps         noticed by                        cost at each reshard     not noticed
a parameter                 Python references to it           one sum of counts        held by C++ alone, as
(``self.w = l.weight``)                                                                autograd does: harmless
a view of one               tensors over the storage; where   one sum of counts; a     NumPy arrays; views that
(``self.v = l.weight.t()``) their number is new, a search     search 0.1 to 0.5 ms,    no Python object refers
                            of the garbage collector's lists  50 ms where a            to; a number that equals
                                                              collection came between  a harmless one

An example of the last: autograd saves one tensor less than before, and the program keeps one view more.
Such a view is noticed at the end of backward, when nothing is saved any more.

[Note: Counting references] The sum of all reference counts is compared with a baseline, taken when
nobody but the unit had the parameters; single ones are looked at only if the sum differs. Tensors that
autograd saves must not count. torch keeps one Python reference to a tensor's object while C++ refers to
the tensor, be it once or often, so a graph would raise the count by one. An autograd node that never
runs (`_Hold`) therefore saves every parameter for good: this one reference is always there, in the
baseline as well as later.

[Note: Counting uses] torch counts the tensors over a storage ("uses") but does not list them. The count
is compared with those that were found harmless: the unit's own tensors plus what autograd saves, which
in most models is the same in each pass. Only a number that is new is looked into, by searching the
objects that the garbage collector tracks for tensors over the storage: the two young generations, where
a view made since the unshard has to be, or all objects if a collection may have moved it on. So a model
that does the same in each pass pays nothing after the first passes.

Threads of a process group may hold what they have gathered for a moment after the gather is over. So
where nothing is saved, a number that is too high is looked at again a few times (`_MOMENTS`). If no
view explains it, it is noted; if it comes a second time, it is taken for harmless.
"""

import collections
import functools
import gc
import operator
import sys
import time
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.guard.forbidden import allow_use, forbid_use
from fullshard.engine.runtime import out_of_context
from fullshard.torch_private import WithoutSubclasses, local_part, storage_uses, tensor_uses

# Return the number of references from Python to an object: variables, containers, attributes, and
# (up to Python 3.13) the call itself.
python_uses = sys.getrefcount

# The exact types of unsharded forms: a plain parameter, a parameter that is a DTensor.
_COUNTED = (nn.Parameter, DTensor)
_MOMENTS = (0.0, 1e-4, 1e-3, 3e-3, 6e-3)  # seconds between looks at a number that may fall
# By address of a storage: who looks after it.
_owners: weakref.WeakValueDictionary[int, "Uses"] = weakref.WeakValueDictionary()


class Whole(Protocol):
    """A parameter as `Uses` knows it: `params.managed.ManagedParameter`."""

    unsharded: nn.Parameter | None
    slots: Any

    @property
    def name(self) -> str: ...


class Memory(Protocol):
    """The memory of the parameters: `params.buffers.UnitBuffers`."""

    in_place: bool

    @property
    def landing_uses(self) -> int: ...
    def unsharded_storages(self) -> list[torch.UntypedStorage]: ...
    def own_uses(self, storages: dict[int, torch.UntypedStorage]) -> int: ...
    def own_views(self) -> list[torch.Tensor]: ...
    def unsharded(self, index: int) -> torch.Tensor: ...


class _Hold(torch.autograd.Function):
    """A node that saves tensors and never runs. See [Note: Counting references]."""

    @staticmethod
    def forward(ctx: Any, one: torch.Tensor, held: Sequence[torch.Tensor]) -> torch.Tensor:
        ctx.save_for_backward(*held)
        return one.view_as(one)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


def _hold(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the output of a node that saves tensors: they are saved as long as it lives.

    Not the node itself: before torch 2.13 it drops what it saved as soon as its output is gone.

    Call it out of context: a user's hooks on saved tensors (`save_on_cpu`) would read their memory,
    which may be freed, and count them.
    """
    one = torch.zeros((), requires_grad=True, device="cpu")
    output: torch.Tensor = _Hold.apply(one, tensors)  # type: ignore[no-untyped-call]
    return output


class _References:
    """The baseline of Python references to unsharded parameters that are plain tensors or DTensors.

    params, tensors: what is counted. own: the references of each that are the unit's.
    """

    def __init__(self, params: Sequence[Whole]) -> None:
        """Take today's references for the baseline: nobody but the unit may have any."""
        self.params = [param for param in params if type(param.unsharded) in _COUNTED]
        self.tensors = [param.unsharded for param in self.params if param.unsharded is not None]
        # The baseline comes after the node, and after `tensors`, which has a reference to each too.
        self._holder = out_of_context(lambda: _hold(self.tensors))
        self.own = list(map(python_uses, self.tensors))
        self.total = sum(self.own)

    def are_of(self, params: Sequence[Whole]) -> bool:
        """Return whether these are the tensors that were counted: only their memory may be another."""
        tensors = [param.unsharded for param in params if type(param.unsharded) in _COUNTED]
        return len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, self.tensors))


def num_switched(param: Whole) -> int:
    """Return how often a `params.shown.Switch` refers to an unsharded parameter: in a list, and per slot."""
    return 1 + len(param.slots)


class _Mark:
    """An object that shows which others are younger.

    Garbage collections move objects on to older generations in the order of their age. So whatever
    was made after a mark is in the mark's generation or in a younger one.
    """


class Uses:
    """Finds the unsharded parameters of one unit, and the views of them, that somebody keeps."""

    def __init__(
        self, params: Sequence[Whole], memory: Memory, former: "Uses | None" = None
    ) -> None:
        """Take today's references and uses for the unit's own: nobody else may have tensors here.

        former: what looked after the same parameters in other memory. Its harmless numbers hold on,
            and its baseline of references if the tensors are the same: somebody may keep one, and a
            new baseline would count that as the unit's.
        """
        self._params, self._memory = params, memory
        self._references: _References = (
            former._references
            if former is not None and former._references.are_of(params)
            else _References(params)
        )
        self.counted = self._references.params
        self._forbidden: list[nn.Parameter] = []
        self._is_in_place = memory.in_place
        self._storages = {each._cdata: each for each in memory.unsharded_storages()}
        self._addresses = list(self._storages)
        self._own = memory.own_uses(self._storages)
        self._landing_uses = 0  # of `_own`: views that gathers have made since
        self._views: list[weakref.ref[torch.Tensor]] = []  # that somebody keeps; weak, so we do not
        self._is_resharded = False
        # Numbers of uses beyond the unit's own that were found harmless: first where nothing is
        # saved for backward, second after a forward that saves. Index: `is_saving`.
        self._harmless: tuple[set[int], set[int]] = (
            ({0}, {0}) if former is None else former._harmless
        )
        # Numbers that were looked into once without finding a view; at the second time, harmless.
        self._unexplained: tuple[set[int], set[int]] = (
            (set(), set()) if former is None else former._unexplained
        )
        self._mark = _Mark()  # as old as the last unshard
        _owners.update(dict.fromkeys(self._addresses, self))

    def retire(self, num_switched: int, after_forward: bool = False) -> None:
        """Forbid the use of what somebody keeps. Called after each reshard.

        num_switched: how many references the unit's `Switch` has to the parameters, 0 without one: it is
            made after the baseline was taken. after_forward: a backward may follow, for
            which autograd saves tensors.
        """
        self._is_resharded = True
        references = self._references
        if sum(map(python_uses, references.tensors)) != references.total + num_switched:
            self._forbid_parameters(is_switched=num_switched > 0)
        uses = sum(map(storage_uses, self._addresses)) - self._own
        is_saving = after_forward and torch.is_grad_enabled()
        if self._views or uses not in self._harmless[is_saving]:
            self._look(is_saving=is_saving)

    def restore(self) -> None:
        """Allow the use of everything. Called before parameters are shown unsharded."""
        self._is_resharded = False
        self._mark = _Mark()
        if self._forbidden:
            self._allow_parameters()
        for reference in self._views:
            if (view := reference()) is not None:
                allow_use(view)

    def release(self) -> None:
        """Allow the use of what users keep where its memory stays valid, when the unit leaves it.

        The parameters move to the unit's new memory. Views stay: shards that are read in place, this
        rank's and its peers', are never freed; private memory is.
        """
        self._allow_parameters()
        if self._is_in_place:
            self.restore()

    def _forbid_parameters(self, *, is_switched: bool) -> None:
        references = self._references
        counts = list(map(python_uses, references.tensors))
        for param, count, own in zip(references.params, counts, references.own, strict=True):
            tensor = param.unsharded
            assert tensor is not None
            if count > own + is_switched * num_switched(param):
                forbid_use(tensor, param.name)
                self._forbidden.append(tensor)

    def _allow_parameters(self) -> None:
        for tensor in self._forbidden:
            allow_use(tensor)
        self._forbidden.clear()

    def _look(self, *, is_saving: bool) -> None:
        """Forbid the use of known views, and search for others if they do not explain the count."""
        # Gathers keep the views that they write to from step to step: they are the unit's own.
        landing_uses = self._memory.landing_uses
        self._own += landing_uses - self._landing_uses
        self._landing_uses = landing_uses
        harmless = self._harmless[is_saving]
        if self._num_others() in harmless:
            return
        # While autograd saves, counts that are new are common, so the search is short: objects made
        # since the unshard. Where nothing is saved, there should be no uses but the unit's own, and
        # a view that was missed before may be the reason: objects made since all were searched.
        marks = (self._mark if is_saving else _last_look, _last_look)
        for generation in (0, 1):
            objects = gc.get_objects(generation)
            # Before `_adopt_views`, which empties the list. With a mark in this generation, older
            # generations have nothing that is newer than the mark.
            is_enough = any(each in marks for each in objects if type(each) is _Mark)
            _adopt_views(objects)
            if self._num_others() in harmless:
                return
            if is_enough:
                break
        else:
            _look_at_all()
        # What a process group's thread holds is gone in milliseconds. Not while autograd saves: its
        # uses do not fall, and each forward would wait for them.
        for moment in () if is_saving else _MOMENTS:
            if self._num_others() in harmless:
                return
            time.sleep(moment)
        others = self._num_others()
        (harmless if others in self._unexplained[is_saving] else self._unexplained[is_saving]).add(
            others
        )

    def _num_others(self) -> int:
        """Forbid the use of known views, and return how many uses are neither theirs nor the unit's."""
        alive = set()
        for reference in list(self._views):
            if (view := reference()) is None or self.owns(view):  # found while a gather made it
                self._views.remove(reference)
                continue
            alive.add(id(local_part(view)))
            if self._is_resharded:
                forbid_use(view, self._name(view))
        return sum(map(storage_uses, self._addresses)) - self._own - len(alive)

    def adopt(self, view: torch.Tensor) -> None:
        """Take note of a view that somebody keeps, unless it is known."""
        if all(view is not each() for each in self._views):
            self._views.append(weakref.ref(view))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor over the unit's memory is one of the unit's own."""
        own = [*self._memory.own_views(), *(param.unsharded for param in self._params)]
        return any(tensor is each for each in own)

    def _name(self, view: torch.Tensor) -> str:
        """Say in words which parameter a view is of: the one in whose memory it begins."""
        local = local_part(view)
        address, start = local.untyped_storage()._cdata, local.storage_offset() * local.itemsize
        for index, param in enumerate(self._params):
            whole = self._memory.unsharded(index)
            first = whole.storage_offset() * whole.itemsize
            is_there = whole.untyped_storage()._cdata == address
            if is_there and first <= start < first + max(whole.nbytes, 1):
                return f"A view of {param.name}"
        return f"A view of {', '.join(param.name for param in self._params)}"


_last_look = _Mark()  # as old as the last search through all objects, for any unit


def _look_at_all() -> None:
    """Search all objects for kept views, for all units at once: it costs the same (50 ms)."""
    global _last_look  # noqa: PLW0603
    _adopt_views(gc.get_objects())
    _last_look = _Mark()


def _adopt_views(objects: list[Any]) -> None:
    """Let units take note of the tensors over their memory that Python code refers to.

    objects: emptied, since its references would count as well.

    Finds tensors by ``type()``: ``isinstance`` reads ``__class__``, and some modules' objects warn
    when any attribute is read.
    """
    types = {each for each in set(map(type, objects)) if issubclass(each, torch.Tensor)}
    views: list[torch.Tensor] = []
    keepers: list[Uses] = []
    with WithoutSubclasses():
        for each in objects:
            if type(each) in types and (keeper := _owners.get(_address(each))) is not None:
                views.append(each)
                keepers.append(keeper)
    # From here on only `views` refers to what was found, as `_unkept_references` expects.
    each = None
    objects.clear()
    # Each DTensor has a reference to its local tensor. It says nothing of who keeps that one, so it
    # is not counted: the DTensor itself is in `views`, and is judged by its own references.
    shells = collections.Counter(
        id(view._local_tensor) for view in views if isinstance(view, DTensor)
    )
    counts = list(map(python_uses, views))
    for view, keeper, count in zip(views, keepers, counts, strict=True):
        if count > _unkept_references(view) + shells[id(view)] and not keeper.owns(view):
            keeper.adopt(view)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage object, 0 for none."""
    try:
        return int(local_part(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse, or not made yet
        return 0


def _unkept_references(tensor: torch.Tensor) -> int:
    """Return how many references a tensor in one list has if nothing else in Python refers to it.

    One more if autograd saves it: see [Note: Counting references].
    """
    own, saved = _references_in_list()
    return saved if tensor_uses is not None and tensor_uses(tensor) > 1 else own


@functools.cache
def _references_in_list() -> tuple[int, int]:
    """Measure the references to a tensor that is in one list: (nothing else, saved by autograd).

    Measured, since torch and Python versions differ in what they count.
    """
    # Out of context: a user's hooks on saved tensors (a checkpoint's, which counts them) would run.
    return out_of_context(_measure_references)


def _measure_references() -> tuple[int, int]:
    own = [torch.zeros(1, device="cpu")]
    saved = [torch.zeros(1, device="cpu")]
    graph = torch.ones(1, requires_grad=True, device="cpu") * saved[0]
    counts = [*map(python_uses, own), *map(python_uses, saved)]
    del graph
    return counts[0], counts[1]
