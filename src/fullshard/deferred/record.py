"""A record of what a construction computes, as operations between memories; and computing it again.

Tensors are views of memories, each of which has a number. So an operation reads and writes memories, and taking a
view is no operation at all: only sizes, strides and an offset.

    w = empty(4, 4); w.uniform_(-1, 1); b = zeros(4); w.normal_()

    creates w     overwrites w     creates b     overwrites w      after uniform_ nobody needs w
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fullshard.torch_private import pytree

Storages = dict[int, torch.UntypedStorage]


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryView:
    """A tensor as a view of a memory, by number; strides and offset in elements."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def covers(self, nbytes: int) -> bool:
        """Tell whether the view has every element of a memory of so many bytes, each once."""
        if math.prod(self.shape) * self.dtype.itemsize != nbytes:
            return False
        expected = 1
        for stride, size in sorted(zip(self.strides, self.shape, strict=True)):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator.

    args, kwargs: its arguments, with views in place of tensors. outputs: one per tensor that it returns.
    reads: memories whose contents it needs. overwrites: those that it fills without reading them. creates:
    those of its outputs that there were not before. writes: all that are others after it. is_random:
    whether it draws random numbers.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[MemoryView, ...]
    reads: frozenset[int]
    overwrites: frozenset[int]
    creates: frozenset[int]
    writes: frozenset[int]
    is_random: bool

    @property
    def touched(self) -> frozenset[int]:
        return self.reads | self.overwrites | self.creates


@dataclasses.dataclass(slots=True)
class ConstructionRecord:
    """All that a construction computes.

    operations: in order. constants: memories that had values from the start. nbytes: of each memory.
    random_state: of the CPU's generator when it began. random_state_after: when it ended; None until then.
    """

    random_state: torch.Tensor
    random_state_after: torch.Tensor | None = None
    operations: list[Operation] = dataclasses.field(default_factory=list)
    constants: dict[int, torch.UntypedStorage] = dataclasses.field(default_factory=dict)
    nbytes: dict[int, int] = dataclasses.field(default_factory=dict)

    def written(self) -> set[int]:
        """Return the memories that something has written to, and not only made."""
        found = set(self.constants)
        for operation in self.operations:
            if "empty" not in str(operation.function):
                found |= operation.writes
        return found


def last_uses(operations: Sequence[Operation]) -> list[frozenset[int]]:
    """Return, for each operation, the memories whose contents no later one needs."""
    needed: set[int] = set()
    found: list[frozenset[int]] = []
    for operation in reversed(operations):
        found.append(operation.touched - needed)
        needed -= operation.overwrites | operation.creates
        needed |= operation.reads
    return found[::-1]


def needed_for(operations: Sequence[Operation], memories: frozenset[int]) -> list[Operation]:
    """Return the operations that the contents of some memories follow from, in order."""
    wanted = set(memories)
    found: list[Operation] = []
    for operation in reversed(operations):
        if operation.writes.isdisjoint(wanted):
            continue
        found.append(operation)
        wanted -= operation.overwrites | operation.creates
        wanted |= operation.reads
    return found[::-1]


# Computing it again: the same operators on the same values, one memory at a time


def tensor_of(view: MemoryView, storages: Mapping[int, torch.UntypedStorage]) -> torch.Tensor:
    """Return a tensor over the storage of its memory."""
    storage = storages[view.memory]
    tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
    return tensor.set_(storage, view.offset, view.shape, view.strides)


@torch.no_grad()
def replay(
    record: ConstructionRecord,
    operations: Sequence[Operation],
    done_with: Callable[[int, torch.UntypedStorage], object],
) -> None:
    """Compute operations of a record in order.

    done_with: is called with each memory and its storage after the last operation that touches it. Memory
        is dropped then, and wherever its contents are not needed until they are overwritten.
    """
    storages: Storages = {}
    last = {memory: n for n, operation in enumerate(operations) for memory in operation.touched}
    for number, (operation, ended) in enumerate(
        zip(operations, last_uses(operations), strict=True)
    ):
        for memory in operation.touched - operation.creates:
            if memory in storages:
                continue
            constant = record.constants.get(memory)
            storages[memory] = (
                torch.UntypedStorage(record.nbytes[memory])  # about to be overwritten
                if constant is None
                else constant.clone()  # operations may write to it
            )
        _compute(operation, storages)
        for memory in ended:
            storage = storages.pop(memory)
            if last[memory] == number:
                done_with(memory, storage)


def _compute(operation: Operation, storages: Storages) -> None:
    args, kwargs = pytree.tree_map_only(
        MemoryView, lambda view: tensor_of(view, storages), (operation.args, operation.kwargs)
    )
    result = operation.function(*args, **kwargs)
    if not operation.creates:
        return
    for view, tensor in zip(operation.outputs, tensors_in(result), strict=True):
        if view.memory not in operation.creates or view.memory in storages:
            continue
        if tuple(tensor.stride()) != view.strides or tensor.storage_offset() != view.offset:
            arranged = torch.empty_strided(
                view.shape, view.strides, dtype=view.dtype, device=tensor.device
            )
            storages[view.memory] = arranged.copy_(tensor).untyped_storage()
        else:
            storages[view.memory] = tensor.untyped_storage()


def tensors_in(values: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
