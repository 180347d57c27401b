"""Views of unsharded parameters that somebody keeps after their reshard.

A view (``self.kept = self.weight.t()``) reads the memory of the parameter, which is freed or stale
once that is resharded. PyTorch's FSDP crashes there. So a view may not be used until its unit is
unsharded again (see `resharded`). Where peers' shards are read in place, its values would still be
right at times. It is an error all the same, so that a program does not depend on how ranks
communicate.

[Note: Counting uses] torch counts the tensors over a storage ("uses") but does not list them. Each
reshard compares the count with those that were found harmless: the unit's own tensors plus what
autograd saves, which in most models is the same in each pass. Only a count that is new is looked
into, by searching the objects that the garbage collector tracks for tensors over the storage: the
two young generations, where a view made since the unshard has to be (0.1 to 0.5 ms), or all objects
if a collection may have moved it on (50 ms). So a model that does the same in each pass pays nothing
after the first passes, and one that makes and keeps a view in each pass pays the smaller search.

Threads of a process group may hold what they have gathered for a moment after the gather is over. So
where nothing is saved, a count that is too high is looked at again a few times (`_MOMENTS`). If no
view explains it, it is noted; if it comes a second time, it is taken for harmless.

In the backward of its own unit a view may be used: the unit is unsharded then. A view that only
autograd refers to is left alone.

Not noticed: NumPy arrays over a parameter; views that no Python object refers to; a view with which
a count happens to equal another one that was found harmless. An example of the last: autograd saves
one tensor less than before, and the program keeps one view more. Such a view is noticed at the end of
backward, when nothing is saved any more.
"""

import collections
import functools
import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from fullshard.engine.params.buffers import UnitBuffers
from fullshard.engine.params.managed import ManagedParameter
from fullshard.engine.params.resharded import allow_use, forbid_use
from fullshard.engine.references import python_uses, storage_uses, tensor_uses
from fullshard.engine.runtime import out_of_context
from fullshard.torch_private import WithoutSubclasses

_MOMENTS = (0.0, 1e-4, 1e-3, 3e-3, 6e-3)  # seconds between looks at a count that may fall
# By address of a storage: who looks after it.
_owners: weakref.WeakValueDictionary[int, "KeptViews"] = weakref.WeakValueDictionary()


class _Mark:
    """An object that shows which others are younger.

    Garbage collections move objects on to older generations in the order of their age. So whatever
    was made after a mark is in the mark's generation or in a younger one.
    """


class KeptViews:
    """Finds the views of one unit's unsharded parameters that somebody keeps."""

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        buffers: UnitBuffers,
        former: "KeptViews | None" = None,
    ) -> None:
        """Take today's uses for the unit's own: nobody else may have tensors over private memory.

        former: what looked after the same parameters in other memory; its harmless counts hold on.
        """
        self._params, self._buffers = params, buffers
        self._is_in_place = buffers.in_place
        self._storages = {each._cdata: each for each in buffers.unsharded_storages()}
        self._addresses = list(self._storages)
        self._own = buffers.own_uses(self._storages)
        self._landing_uses = 0  # of `_own`: views that gathers have made since
        self._kept: list[weakref.ref[torch.Tensor]] = []  # views; weak, so as not to keep them
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

    def retire(self, *, after_forward: bool) -> None:
        """Forbid the use of views that somebody keeps. Called after each reshard.

        after_forward: whether a backward may follow, for which autograd saves tensors.
        """
        self._is_resharded = True
        uses = sum(map(storage_uses, self._addresses)) - self._own
        is_saving = after_forward and torch.is_grad_enabled()
        if self._kept or uses not in self._harmless[is_saving]:
            self._look(is_saving=is_saving)

    def restore(self) -> None:
        """Allow the use of all views. Called before parameters are shown unsharded."""
        self._is_resharded = False
        self._mark = _Mark()
        for reference in self._kept:
            if (view := reference()) is not None:
                allow_use(view)

    def release(self) -> None:
        """Allow the use of views for good, if their memory stays valid.

        Called when the unit leaves this memory for other. Shards that are read in place, this rank's
        and its peers', are never freed; private memory is.
        """
        if self._is_in_place:
            self.restore()

    def _look(self, *, is_saving: bool) -> None:
        """Forbid the use of known views, and search for others if they do not explain the count."""
        # Gathers keep the views that they write to from step to step: they are the unit's own.
        landing_uses = self._buffers.landing_uses
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
        for reference in list(self._kept):
            if (view := reference()) is None:
                self._kept.remove(reference)
                continue
            alive.add(id(_local(view)))
            if self._is_resharded:
                forbid_use(view, self._name(view))
        return sum(map(storage_uses, self._addresses)) - self._own - len(alive)

    def adopt(self, view: torch.Tensor) -> None:
        """Take note of a view that somebody keeps, unless it is known."""
        if all(view is not each() for each in self._kept):
            self._kept.append(weakref.ref(view))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor over the unit's memory is one of the unit's own."""
        own = [*self._buffers.own_views(), *(param.unsharded for param in self._params)]
        return any(tensor is each for each in own)

    def _name(self, view: torch.Tensor) -> str:
        """Say in words which parameter a view is of: the one in whose memory it begins."""
        local = _local(view)
        address, start = local.untyped_storage()._cdata, local.storage_offset() * local.itemsize
        for index, param in enumerate(self._params):
            whole = self._buffers.unsharded(index)
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
    keepers: list[KeptViews] = []
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage object, 0 for none."""
    try:
        return int(_local(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse, or not made yet
        return 0


def _unkept_references(tensor: torch.Tensor) -> int:
    """Return how many references a tensor in one list has if nothing else in Python refers to it.

    One more if autograd saves it: see [Note: Counting references] in `kept`.
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
