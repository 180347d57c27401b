"""Full gradients that wait for a later reduction.

Flat units keep one buffer per bucket and show it as ``.grad``: dropping or zeroing that
(``optimizer.zero_grad()``) drops what is accumulated, as it would in training on one process.
Reduced gradients of earlier backwards are put aside meanwhile, and the sum is added to them. Other
units keep their sums out of sight.

During backward the sums are lent to the unsharded parameters, so that autograd adds to them in
place while what it adds is in cache.
"""

import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from fullshard.comm.interface import tensor_over
from fullshard.engine.params.buffers import whole_views
from fullshard.engine.params.managed import ManagedParameter, ShardHolder
from fullshard.engine.references import python_uses, storage_uses
from fullshard.plan.layout import BucketLayout, UnitLayout


class SpareMemory:
    """Host memory that is kept from step to step, and used again if nobody else refers to it.

    New memory costs a page fault for every page, several times the addition it is used for. Of
    other devices nothing is kept: they have caching allocators.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """What is kept, as bytes."""
        storages = self._storages.values()
        return [tensor_over(each, 0, (each.nbytes(),), torch.uint8) for each in storages]

    def keep(self, key: int, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory; it may be in use for a while yet."""
        if type(tensor) is not torch.Tensor or not (tensor.is_cpu and tensor.is_contiguous()):
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.nbytes and not storage.is_shared():
            self._storages[key] = storage

    def take(self, key: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor over the memory kept under this key, of any values; None if it cannot."""
        storage = self._storages.pop(key, None)
        if storage is None or storage.nbytes() != math.prod(shape) * dtype.itemsize:
            return None
        if storage_uses(storage._cdata) > 1 or python_uses(storage) > _references_to_own():
            return None
        return tensor_over(storage, 0, shape, dtype)


@functools.cache
def _references_to_own() -> int:
    """Count the references to a storage that a local variable alone refers to.

    It is 2 up to Python 3.13, of which the call is one, and less where calls borrow.
    """
    own = torch.UntypedStorage(0)
    return python_uses(own)


class Phase(enum.Enum):
    """What `Unreduced` has, and may do next.

    EMPTY    no memory                                    add -> HOLDING
    HOLDING  sums                                         add; take -> TAKEN; replace -> OUTDATED
    OUTDATED sums, in memory that no longer fits          add; take -> EMPTY
    TAKEN    memory, whose sums were reduced              add -> HOLDING; begin -> SPARE
    SPARE    memory, whose sums an earlier step reduced   add -> HOLDING; let go -> EMPTY

    Memory that holds nothing goes where it no longer fits (replace), too.
    """

    EMPTY = enum.auto()
    HOLDING = enum.auto()
    OUTDATED = enum.auto()
    TAKEN = enum.auto()
    SPARE = enum.auto()


class Unreduced:
    """The gradients of one unit that wait for a later reduction, and memory for the next ones.

    Every rank of a unit is in the same phase: it follows from what programs call, not from which
    gradients exist.
    """

    def __init__(self) -> None:
        self._phase = Phase.EMPTY
        self._accumulation: Accumulation | None = None  # None in EMPTY alone

    @property
    def is_holding(self) -> bool:
        """Whether there are sums."""
        return self._phase is Phase.HOLDING or self._phase is Phase.OUTDATED

    @property
    def memory(self) -> list[torch.Tensor]:
        """The sums, except for those that are lent."""
        if self._accumulation is None or not self.is_holding:
            return []
        return self._accumulation.memory

    @property
    def spare_memory(self) -> list[torch.Tensor]:
        """What is kept for the sums of the next step, as bytes."""
        return [] if self._accumulation is None else self._accumulation.spare.tensors

    def add(self, grads: Sequence[torch.Tensor | None], make: Callable[[], "Accumulation"]) -> None:
        """Add full gradients, one per parameter. ``make`` says where they go if there is no memory."""
        if self._accumulation is None:
            self._accumulation = make()
        if self._phase is not Phase.OUTDATED:
            self._phase = Phase.HOLDING
        self._accumulation.add(grads)

    def lend(self) -> None:
        """Before backward: let autograd add to the sums, in place."""
        if self.is_holding:
            assert self._accumulation is not None
            self._accumulation.lend()

    def take(self, *, keep_memory: bool) -> list[torch.Tensor | None]:
        """Return the sums, one per parameter, and forget them. Empty if there are none."""
        if not self.is_holding:
            return []
        accumulation = self._accumulation
        assert accumulation is not None
        if self._phase is Phase.OUTDATED or not keep_memory:
            self._let_go()
        else:
            self._phase = Phase.TAKEN
        return accumulation.take()

    def begin(self) -> None:
        """A forward of the model begins."""
        if self._phase is Phase.TAKEN:
            self._phase = Phase.SPARE

    def note_reduced(self) -> None:
        """A step reduces at once: what earlier steps added up in is not needed any more."""
        if self._phase is Phase.SPARE:
            self._let_go()

    def replace(self) -> None:
        """Use other memory, and add in another way: parameters, layout or dtype may have changed."""
        if self.is_holding:
            self._phase = Phase.OUTDATED  # until these sums are reduced
        else:
            self._let_go()

    def _let_go(self) -> None:
        self._accumulation, self._phase = None, Phase.EMPTY


class Accumulation(Protocol):
    """Where and how the unreduced gradients of one unit are added up."""

    @property
    def memory(self) -> list[torch.Tensor]:
        """The sums, except for those that are lent."""
        ...

    @property
    def spare(self) -> SpareMemory:
        """What it keeps for the next time."""
        ...

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add full gradients, one per parameter."""
        ...

    def lend(self) -> None:
        """Put the sums where autograd adds to them in place. `add` gets them back."""
        ...

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums, one per parameter, and forget them."""
        ...


class RowsAccumulation:
    """Adds up the gradients of parameters that are sharded one by one, hidden from users."""

    def __init__(self, params: Sequence[ManagedParameter], dtype: torch.dtype | None) -> None:
        """dtype: as what gradients are accumulated; None is their own."""
        self._params = params
        self._dtype = dtype
        self._lent: dict[int, torch.Tensor] = {}
        self.spare = SpareMemory()

    @property
    def memory(self) -> list[torch.Tensor]:
        return [p.accumulated_grad for p in self._params if p.accumulated_grad is not None]

    @torch.no_grad()
    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        for index, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            if grad is None:
                if index in self._lent:  # somebody has dropped it in backward
                    param.accumulated_grad = self._lent[index]
                continue
            if param.accumulated_grad is not None:
                param.accumulated_grad.add_(grad)
            else:
                param.accumulated_grad = self._begin_sum(index, grad)
        self._lent.clear()

    def _begin_sum(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return where a parameter's gradients are added from now on, holding this one."""
        if grad is self._lent.get(index):
            return grad  # autograd has added to it
        dtype = self._dtype or grad.dtype
        memory = self.spare.take(index, grad.shape, dtype)
        if memory is not None:
            return memory.copy_(grad)
        return (grad.detach() if grad.requires_grad else grad).to(dtype)

    def lend(self) -> None:
        for index, param in enumerate(self._params):
            grad = param.accumulated_grad
            if grad is not None and _can_be_lent(param, grad):
                assert param.unsharded is not None
                param.unsharded.grad = self._lent[index] = grad
                param.accumulated_grad = None

    def take(self) -> list[torch.Tensor | None]:
        grads = [param.accumulated_grad for param in self._params]
        for index, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            if grad is not None:
                self.spare.keep(index, grad)
                param.accumulated_grad = None
        self._lent.clear()
        return grads


class FlatAccumulation:
    """Adds up the gradients of flat buffers, visible as ``.grad``."""

    def __init__(
        self,
        layout: UnitLayout,
        params: Sequence[ManagedParameter],
        device: torch.device,
    ) -> None:
        """device: where gradients are accumulated, in the compute dtype, as autograd would."""
        self._layout = layout
        self._params = params
        self._device = device
        self._flats: dict[int, torch.Tensor] = {}  # of each parameter, by index
        self._views: dict[int, torch.Tensor] = {}
        self._present: set[int] = set()
        self._lent: dict[int, torch.Tensor] = {}
        self._shown: dict[ShardHolder, torch.Tensor] = {}
        self._aside: dict[ShardHolder, torch.Tensor | None] = {}
        self.spare = SpareMemory()

    @property
    def memory(self) -> list[torch.Tensor]:
        """The buffers of full gradients, one per bucket, lent or not."""
        return list({id(flat): flat for flat in self._flats.values()}.values())

    @torch.no_grad()
    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add full gradients, one per parameter, and show the sums."""
        self._forget_dropped()
        for number, bucket in enumerate(self._layout.buckets):
            has_gradient = [grads[param.index] is not None for param in bucket.params]
            if any(has_gradient) and bucket.params[0].index not in self._flats:
                self._allocate(number, bucket, covers=all(has_gradient))
        for index, grad in enumerate(grads):
            if grad is None:
                continue
            lent = self._lent.get(index)
            if grad is not lent:  # to which autograd has added
                if index in self._present and lent is None:
                    self._views[index].add_(grad)
                else:
                    self._views[index].copy_(grad)  # reading zeros costs a page fault as well
            self._present.add(index)
        self._lent.clear()
        for index in self._present:
            holder = self._params[index].holder
            if holder in self._shown:
                continue
            self._aside[holder] = holder.sharded.grad
            is_one = isinstance(holder, ManagedParameter)
            self._shown[holder] = self._views[index] if is_one else self._flats[index]
            show_gradient(holder.sharded, self._shown[holder])

    def _allocate(self, number: int, bucket: BucketLayout, *, covers: bool) -> None:
        """Make a bucket's buffer. ``covers``: every parameter's part of it is about to be set."""
        shape, dtype = (bucket.unsharded_numel,), bucket.compute_dtype
        flat = self.spare.take(number, shape, dtype)
        if flat is None:
            flat = torch.zeros(shape, dtype=dtype, device=self._device)
        elif not covers:
            flat.zero_()
        self._views.update(whole_views(bucket, flat))
        self._flats.update({param.index: flat for param in bucket.params})

    def lend(self) -> None:
        self._forget_dropped()
        for index in self._present:
            param, view = self._params[index], self._views[index]
            if _can_be_lent(param, view):
                assert param.unsharded is not None
                param.unsharded.grad = self._lent[index] = view

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums, one per parameter, and show what was put aside again."""
        self._forget_dropped()
        for holder, grad in self._aside.items():
            show_gradient(holder.sharded, grad)
        sums = [
            self._views[index] if index in self._present else None
            for index in range(len(self._params))
        ]
        for number, bucket in enumerate(self._layout.buckets):
            if bucket.params[0].index in self._flats:
                self.spare.keep(number, self._flats[bucket.params[0].index])
        for each in (self._shown, self._aside, self._flats, self._views, self._lent):
            each.clear()
        self._present.clear()
        return sums

    def _forget_dropped(self) -> None:
        """Forget what users have dropped since."""
        dropped = {h for h, shown in self._shown.items() if h.sharded.grad is not shown}
        for holder in dropped:
            del self._shown[holder]
            self._aside[holder] = None  # the user means it all
        for index in [i for i in self._present if self._params[i].holder in dropped]:
            self._views[index].zero_()
            self._present.remove(index)


def _can_be_lent(param: ManagedParameter, grad: torch.Tensor) -> bool:
    """Whether autograd may add to a sum in place: it is a gradient of the unsharded parameter."""
    unsharded = param.unsharded
    return (
        unsharded is not None
        and param.form.unsharded is None
        and unsharded.grad is None
        and unsharded.dtype == grad.dtype
        and unsharded.requires_grad
    )


def show_gradient(parameter: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set a parameter's gradient, of whatever shape and dtype."""
    parameter.grad = None
    if grad is None:
        return
    data = parameter.data
    parameter.data = grad  # which autograd compares the gradient with
    parameter.grad = grad
    parameter.data = data
