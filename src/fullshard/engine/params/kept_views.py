"""Views of unsharded parameters that somebody keeps after their reshard.

``self.kept = self.weight.t()``: a view reads the memory of the parameter, which is freed or stale
once that is resharded. PyTorch's FSDP crashes there. So it may not be used until its unit is
unsharded again (see `resharded`); what reads peers' shards in place would still be right at times,
and is treated alike, so that a program does not depend on the path.

[Note: Counting uses] Who uses a storage is counted, not listed. Each reshard compares the count with
those that were found harmless: the unit's own, and what autograd saves, which is the same in each
pass of most models. Only a count that is new is looked into, among the objects that the garbage
collector tracks: those of its two young generations, where a view made since the unshard must be
(0.1 to 0.5 ms), or all if a collection may have aged it (50 ms). So a static model pays nothing after
its first passes, and one that makes and keeps a view in each pays the former.

Threads of a process group may refer to what they have gathered for a moment after it is there. So a
count is harmless only when it was looked into twice without finding a view, and one that is above
what is expected gets `_MOMENTS` to fall.

A view that a unit's own backward uses may be used: the unit is unsharded then. What only autograd
refers to is left alone.

Not noticed: NumPy arrays over a parameter, and views that no Python object refers to; where counts
change from pass to pass, a view by which one comes to what was found harmless; and so, until the end
of backward, when nothing is saved any more, a view that autograd saves as well and that the same
forward did not keep before.
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

_MOMENTS = (0.0, 1e-4, 1e-3, 3e-3, 6e-3)  # seconds
_owners: weakref.WeakValueDictionary[int, "KeptViews"] = weakref.WeakValueDictionary()


class _Mark:
    """Something that ages in the garbage collector as what is made after it does, or sooner."""


class KeptViews:
    """Tells which views of a unit's unsharded parameters somebody keeps."""

    def __init__(
        self,
        params: Sequence[ManagedParameter],
        buffers: UnitBuffers,
        former: "KeptViews | None" = None,
    ) -> None:
        """Takes note of today's uses: nobody else may use private memory.

        former: what looked after them in other memory, if they are the same parameters.
        """
        self._params, self._buffers = params, buffers
        self._is_in_place = buffers.in_place
        self._storages = {each._cdata: each for each in buffers.unsharded_storages()}
        self._addresses = list(self._storages)
        self._own = buffers.own_uses(self._storages)
        self._landing_uses = 0
        self._kept: list[weakref.ref[torch.Tensor]] = []
        self._is_resharded = False
        # Uses beyond the unit's own that are autograd's, after a forward with gradients and else.
        self._harmless: tuple[set[int], set[int]] = (
            ({0}, {0}) if former is None else former._harmless
        )
        self._unexplained: tuple[set[int], set[int]] = (  # once: the second time they are harmless
            (set(), set()) if former is None else former._unexplained
        )
        self._mark = _Mark()  # the last unshard
        _owners.update(dict.fromkeys(self._addresses, self))

    def retire(self, *, after_forward: bool) -> None:
        """After a reshard: forbid the use of views that somebody keeps."""
        self._is_resharded = True
        uses = sum(map(storage_uses, self._addresses)) - self._own
        is_saving = after_forward and torch.is_grad_enabled()
        if self._kept or uses not in self._harmless[is_saving]:
            self._look(is_saving=is_saving)

    def restore(self) -> None:
        """Before parameters are unsharded: let all views be used again."""
        self._is_resharded = False
        self._mark = _Mark()
        for reference in self._kept:
            if (view := reference()) is not None:
                allow_use(view)

    def release(self) -> None:
        """Its memory is read no more: views of what nobody frees are right for good."""
        if self._is_in_place:
            self.restore()

    def _look(self, *, is_saving: bool) -> None:
        """Forbid the use of views that are known, and look for others if the count is new."""
        landing_uses = self._buffers.landing_uses
        self._own += landing_uses - self._landing_uses
        self._landing_uses = landing_uses
        harmless = self._harmless[is_saving]
        if self._num_others() in harmless:
            return
        # While autograd saves, others are to be expected: only what was made since the unshard is
        # looked for. Else nobody is, so it may be older.
        marks = (self._mark if is_saving else _last_look, _last_look)
        for generation in (0, 1):
            objects = gc.get_objects(generation)
            is_enough = any(each in marks for each in objects if type(each) is _Mark)
            _adopt_views(objects)
            if self._num_others() in harmless:
                return
            if is_enough:
                break
        else:
            _look_at_all()
        for moment in () if is_saving else _MOMENTS:
            if self._num_others() in harmless:
                return
            time.sleep(moment)
        others = self._num_others()
        (harmless if others in self._unexplained[is_saving] else self._unexplained[is_saving]).add(
            others
        )

    def _num_others(self) -> int:
        """Count uses that are neither the unit's own nor those of kept views; forbid the latter."""
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
        """Take note of a view that somebody keeps, unless it is the unit's own."""
        if all(view is not each() for each in self._kept):
            self._kept.append(weakref.ref(view))

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the unit's own."""
        own = [*self._buffers.own_views(), *(param.unsharded for param in self._params)]
        return any(tensor is each for each in own)

    def _name(self, view: torch.Tensor) -> str:
        local = _local(view)
        address, start = local.untyped_storage()._cdata, local.storage_offset() * local.itemsize
        for index, param in enumerate(self._params):
            whole = self._buffers.unsharded(index)
            first = whole.storage_offset() * whole.itemsize
            is_there = whole.untyped_storage()._cdata == address
            if is_there and first <= start < first + max(whole.nbytes, 1):
                return f"A view of {param.name}"
        return f"A view of {', '.join(param.name for param in self._params)}"


_last_look = _Mark()  # at all objects


def _look_at_all() -> None:
    """Look for kept views of all units, so that none needs that again soon."""
    global _last_look  # noqa: PLW0603
    _adopt_views(gc.get_objects())
    _last_look = _Mark()


def _adopt_views(objects: list[Any]) -> None:
    """Let units take note of tensors that view their memory and that Python refers to.

    Looks at types alone, since attributes of some modules' objects warn when they are read.
    """
    types = {each for each in set(map(type, objects)) if issubclass(each, torch.Tensor)}
    views: list[torch.Tensor] = []
    keepers: list[KeptViews] = []
    with torch._C.DisableTorchFunctionSubclass():
        for each in objects:
            if type(each) in types and (keeper := _owners.get(_address(each))) is not None:
                views.append(each)
                keepers.append(keeper)
    each = None
    objects.clear()
    # A DTensor that only autograd saves refers to its local tensor all the same.
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
    """Return which storage a tensor views, 0 for none."""
    try:
        return int(_local(tensor).untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse, or not made yet
        return 0


def _unkept_references(tensor: torch.Tensor) -> int:
    """Count references to a tensor in a list that Python refers to nowhere else."""
    own, saved = _references_in_list()
    return saved if tensor_uses is not None and tensor_uses(tensor) > 1 else own


@functools.cache
def _references_in_list() -> tuple[int, int]:
    """Return how many references a tensor has that is in one list, and if autograd saves it too."""
    with torch.inference_mode(False), torch.enable_grad():
        own = [torch.zeros(1)]
        saved = [torch.zeros(1)]
        graph = torch.ones(1, requires_grad=True) * saved[0]
        counts = [*map(python_uses, own), *map(python_uses, saved)]
    del graph
    return counts[0], counts[1]
