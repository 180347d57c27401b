"""Full gradients that wait for a later reduction (`set_requires_gradient_sync(False)`, `no_sync`).

Flat units keep one buffer per bucket and show it as ``.grad``: dropping or zeroing that
(``optimizer.zero_grad()``) drops what is accumulated, as it would in training on one process.
Reduced gradients of earlier backwards are covered meanwhile; later the sum is reduced and added to
them. Other units keep their sums hidden, one per parameter.

[Note: Lent sums] During backward the sums are lent: they become ``.grad`` of the unsharded
parameters, so that autograd adds to them in place while what it adds is in cache. After backward
there are four cases for each parameter, which `add` tells apart:

    ``.grad`` is what was lent     autograd has added to it, or had nothing to add
    ``.grad`` is another tensor    autograd made it of the sum (``create_graph=True``): it has all
    ``.grad`` is None              somebody dropped it in backward; the sum counts all the same
    nothing was lent               ``.grad`` is this backward's alone, and is added here
"""

import enum
import functools
import math
from collections.abc import Callable, Sequence

import torch

from fullshard.comm.interface import tensor_over
from fullshard.engine.guard.uses import python_uses
from fullshard.engine.params.buffers import whole_views
from fullshard.engine.params.flat import show_gradient
from fullshard.engine.params.managed import ManagedParameter, ShardHolder
from fullshard.engine.runtime import outside_transforms
from fullshard.plan.layout import BucketLayout, UnitLayout
from fullshard.torch_private import storage_uses


class SpareMemory:
    """Host memory that is kept from step to step, and used again if nobody else refers to it.

    New memory costs a page fault for every page: several times the addition that it is used for.
    Memory of other devices is not kept, since they have caching allocators.
    """

    def __init__(self) -> None:
        self._storages: dict[int, torch.UntypedStorage] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The memory that is kept, as 1-D tensors of bytes."""
        storages = self._storages.values()
        return [tensor_over(each, 0, (each.nbytes(),), torch.uint8) for each in storages]

    def keep(self, key: int, tensor: torch.Tensor) -> None:
        """Keep a tensor's memory under a key. Others may still use it: `take` looks."""
        # Only memory that belongs to this tensor alone, and to this process.
        if type(tensor) is not torch.Tensor or not (tensor.is_cpu and tensor.is_contiguous()):
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() == tensor.nbytes and not storage.is_shared():
            self._storages[key] = storage

    def take(self, key: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return an uninitialised tensor over the memory that is kept under a key.

        None if there is none of that size, or if somebody still refers to it: then it is forgotten,
        and belongs to whoever has it.
        """
        storage = self._storages.pop(key, None)
        if storage is None or storage.nbytes() != math.prod(shape) * dtype.itemsize:
            return None
        if storage_uses(storage._cdata) > 1 or python_uses(storage) > _references_to_own():
            return None
        return tensor_over(storage, 0, shape, dtype)


@functools.cache
def _references_to_own() -> int:
    """Return the reference count of a storage that one local variable alone refers to.

    Measured, since it differs: 2 up to Python 3.13 (the variable and the argument of the call), less
    where calls borrow references (3.14).
    """
    own = torch.UntypedStorage(0)
    return python_uses(own)


class Sums:
    """Adds up the gradients of parameters that are sharded one by one, hidden from users.

    Each sum is its parameter's ``accumulated_grad``. spare: the memory for the next ones.
    """

    def __init__(
        self, params: Sequence[ManagedParameter], dtypes: Sequence[torch.dtype | None]
    ) -> None:
        """Begin without sums. dtypes: of each parameter's; None for that of its gradients."""
        self._params = params
        self._dtypes = dtypes
        self._lent: dict[int, torch.Tensor] = {}
        self.spare = SpareMemory()

    @property
    def memory(self) -> list[torch.Tensor]:
        """The memory of the sums, lent or not."""
        return [p.accumulated_grad for p in self._params if p.accumulated_grad is not None]

    @property
    def covered(self) -> list[torch.Tensor]:
        """Reduced gradients in whose place sums are shown."""
        return []

    def shows(self, holder: ShardHolder) -> bool:
        """Return whether ``.grad`` of what an optimizer updates is a sum that waits."""
        return False

    @torch.no_grad()
    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add full gradients, one per parameter or None. Ends what `lend` began."""
        for index, (param, grad) in enumerate(zip(self._params, grads, strict=True)):
            # The cases of [Note: Lent sums].
            lent = self._lent.get(index)
            if grad is None:
                continue
            if grad is lent:
                param.accumulated_grad = grad
            elif lent is None and param.accumulated_grad is not None:
                param.accumulated_grad.add_(grad)
            else:
                param.accumulated_grad = self._begin_sum(index, grad)
        self._lent.clear()

    def _begin_sum(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the tensor in which a parameter's gradients are summed from now on: first, this.

        Often that is the gradient itself, which autograd will not touch any more.
        """
        dtype = self._dtypes[index] or grad.dtype
        memory = self.spare.take(index, grad.shape, dtype)
        if memory is not None:
            return memory.copy_(grad)
        return (grad.detach() if grad.requires_grad else grad).to(dtype)

    @outside_transforms  # sums are plain tensors, and so of no level of `torch.func`
    def lend(self) -> None:
        """Put the sums where the backward that begins adds to them in place. See [Note: Lent sums]."""
        for index, param in enumerate(self._params):
            grad = param.accumulated_grad
            if grad is not None and _can_be_lent(param, grad):
                assert param.unsharded is not None
                param.unsharded.grad = self._lent[index] = grad

    def take(self) -> list[torch.Tensor | None]:
        """Return the sums, one per parameter or None, and forget them."""
        sums = [param.accumulated_grad for param in self._params]
        for param in self._params:
            param.accumulated_grad = None
        self._lent.clear()
        self._keep_memory(sums)
        return sums

    def _keep_memory(self, sums: Sequence[torch.Tensor | None]) -> None:
        # The reduction reads it yet. `take` of spare memory finds that out by counting.
        for index, each in enumerate(sums):
            if each is not None:
                self.spare.keep(index, each)


class FlatSums(Sums):
    """Adds up the gradients of flat buffers, visible as ``.grad``.

    They have the compute dtype, as autograd would leave them.
    """

    def __init__(
        self, params: Sequence[ManagedParameter], layout: UnitLayout, device: torch.device
    ) -> None:
        """Begin without sums. device: where they are formed."""
        super().__init__(params, ())
        self._layout = layout
        self._device = device
        self._flats: dict[int, torch.Tensor] = {}  # the buffers, by number of their bucket
        self._views: dict[int, torch.Tensor] = {}  # their parts, by index of the parameter
        # What users find as `.grad` meanwhile, and the reduced gradient that was there before.
        self._shown: dict[ShardHolder, torch.Tensor] = {}
        self._covered: dict[ShardHolder, torch.Tensor | None] = {}

    @property
    def memory(self) -> list[torch.Tensor]:
        return list(self._flats.values())

    @property
    def covered(self) -> list[torch.Tensor]:
        self._forget_dropped()
        return [grad for grad in self._covered.values() if grad is not None]

    def shows(self, holder: ShardHolder) -> bool:
        return holder in self._shown

    @torch.no_grad()
    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        # First: what users have dropped since must not come back with the sum.
        self._forget_dropped()
        for number, bucket in enumerate(self._layout.buckets):
            has_gradient = [grads[param.index] is not None for param in bucket.params]
            if any(has_gradient) and number not in self._flats:
                self._allocate(number, bucket, covers=all(has_gradient))
        super().add(grads)
        for number, bucket in enumerate(self._layout.buckets):
            for index in (each.index for each in bucket.params):
                holder = self._params[index].holder
                if self._params[index].accumulated_grad is None or holder in self._shown:
                    continue
                self._covered[holder] = holder.sharded.grad
                # A piece shows its whole gradient, the flat parameter that of the whole buffer.
                is_one = isinstance(holder, ManagedParameter)
                self._shown[holder] = self._views[index] if is_one else self._flats[number]
                show_gradient(holder.sharded, self._shown[holder])

    def _begin_sum(self, index: int, grad: torch.Tensor) -> torch.Tensor:
        # Not added to the zeros of a new buffer: reading them costs a page fault too.
        return self._views[index].copy_(grad)

    def _allocate(self, number: int, bucket: BucketLayout, *, covers: bool) -> None:
        """Make a bucket's buffer.

        number: of the bucket in the layout.
        covers: whether every parameter's part is about to be set, so that nothing need be zeroed.
        """
        shape, dtype = (bucket.unsharded_numel,), bucket.compute_dtype
        flat = self.spare.take(number, shape, dtype)
        # Parameters without a gradient show zeros, and so does padding: both are part of what users
        # see. Padding of spare memory is zero since it was new.
        if flat is None:
            flat = torch.zeros(shape, dtype=dtype, device=self._device)
        elif not covers:
            flat.zero_()
        self._flats[number] = flat
        self._views.update(whole_views(bucket, flat))

    @outside_transforms
    def lend(self) -> None:
        self._forget_dropped()
        super().lend()

    def take(self) -> list[torch.Tensor | None]:
        self._forget_dropped()
        for holder, grad in self._covered.items():
            show_gradient(holder.sharded, grad)
        self._shown.clear()
        self._covered.clear()
        return super().take()

    def _keep_memory(self, sums: Sequence[torch.Tensor | None]) -> None:
        # The sums are views of these buffers; spare memory is used again when they are gone.
        for number, flat in self._flats.items():
            self.spare.keep(number, flat)
        self._flats.clear()
        self._views.clear()

    def _forget_dropped(self) -> None:
        """Forget sums that users have dropped: their ``.grad`` is no longer the one shown."""
        dropped = {h for h, shown in self._shown.items() if h.sharded.grad is not shown}
        for holder in dropped:
            del self._shown[holder]
            # Who sets `.grad` to None means all of it, the covered gradient as well.
            self._covered[holder] = None
        for param in self._params if dropped else ():
            if param.accumulated_grad is not None and param.holder in dropped:
                param.accumulated_grad.zero_()
                param.accumulated_grad = None


def _can_be_lent(param: ManagedParameter, grad: torch.Tensor) -> bool:
    """Return whether a sum fits as ``.grad`` of the unsharded parameter, for autograd to add to it.

    Not if the parameter is a DTensor, has a gradient that was not taken, is frozen, or takes
    gradients of another dtype than the sum. Nor if what autograd would add has yet to be summed over
    other ranks, as the sum has been.
    """
    unsharded = param.unsharded
    return (
        unsharded is not None
        and param.form.leaves_plain_gradients
        and unsharded.grad is None
        and unsharded.grad_dtype in (None, grad.dtype)
        and unsharded.requires_grad
    )


class UnreducedPhase(enum.Enum):
    """What `Unreduced` has, and which call leads to which phase.

    EMPTY    no memory                                    add -> HOLDING
    HOLDING  sums                                         add; take -> REDUCED; replace -> OUTDATED
    OUTDATED sums, in memory that no longer fits          add; take -> EMPTY
    REDUCED  memory; its sums were reduced in this step   add -> HOLDING; begin -> SPARE
    SPARE    memory; its sums an earlier step reduced     add -> HOLDING; note_reduced -> EMPTY

    `take` that keeps no memory leads to EMPTY, and so does `replace` without sums.
    """

    EMPTY = enum.auto()
    HOLDING = enum.auto()
    OUTDATED = enum.auto()
    REDUCED = enum.auto()
    SPARE = enum.auto()


class Unreduced:
    """The gradients of one unit that wait for a later reduction, and memory for the next ones.

    sums: of parameters; of none in EMPTY, where the next `add` is given new ones.
    is_holding: sums wait for a reduction. is_empty: there is not even memory.

    All ranks are in the same phase, so they agree on whether there is something to reduce: the phase
    follows from what programs call, not from which gradients exist on a rank.
    """

    def __init__(self) -> None:
        self._let_go()

    def _to(self, phase: UnreducedPhase) -> None:
        """Change the phase; nothing else assigns it."""
        self._phase = phase
        # Attributes, not properties: every unit is asked for them several times in a step.
        self.is_empty = phase is UnreducedPhase.EMPTY
        self.is_holding = phase is UnreducedPhase.HOLDING or phase is UnreducedPhase.OUTDATED

    def add(self, grads: Sequence[torch.Tensor | None], make: Callable[[], Sums]) -> None:
        """Add full gradients: one per parameter, or None. make: makes sums in EMPTY."""
        if self.is_empty:
            self.sums = make()
        if self._phase is not UnreducedPhase.OUTDATED:
            self._to(UnreducedPhase.HOLDING)
        self.sums.add(grads)

    def take(self, *, keep_memory: bool) -> list[torch.Tensor | None]:
        """Return the sums, one per parameter or None, and forget them. Call it while there are any.

        keep_memory: the memory may be used again, once the reduction has read the sums.
        """
        sums = self.sums
        if self._phase is UnreducedPhase.OUTDATED or not keep_memory:
            self._let_go()
        else:
            self._to(UnreducedPhase.REDUCED)
        return sums.take()

    def begin(self) -> None:
        """Take note that a forward of the model begins."""
        if self._phase is UnreducedPhase.REDUCED:
            self._to(UnreducedPhase.SPARE)

    def note_reduced(self) -> None:
        """Take note of a reduction without sums: the program no longer accumulates.

        A reduction in the same step as the last sums says nothing: a module may run twice.
        """
        if self._phase is UnreducedPhase.SPARE:
            self._let_go()

    def replace(self) -> None:
        """Let the next sums be made anew: parameters, layout or dtype may have changed."""
        if self.is_holding:
            # Sums that wait are of the old parameters; they are completed and reduced as they are.
            self._to(UnreducedPhase.OUTDATED)
        else:
            self._let_go()

    def _let_go(self) -> None:
        self.sums = Sums((), ())
        self._to(UnreducedPhase.EMPTY)
