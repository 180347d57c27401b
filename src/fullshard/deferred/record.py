"""What a construction computes: operations between memories, and what the values are needed for.

Tensors are views of memories, each of which has a number. So an operation reads and writes memories, and taking a
view is no operation at all: only sizes, strides and an offset.

    w = empty(4, 4); w.uniform_(-1, 1); b = zeros(4); w.normal_()

    creates w     overwrites w     creates b     overwrites w      after uniform_ nobody needs w
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a memory, by number; strides and offset in elements."""

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def covers(self, nbytes: int) -> bool:
        """Whether it has every element of a memory of so many bytes, each once."""
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
    outputs: tuple[View, ...]
    reads: frozenset[int]
    overwrites: frozenset[int]
    creates: frozenset[int]
    writes: frozenset[int]
    is_random: bool

    @property
    def touched(self) -> frozenset[int]:
        return self.reads | self.overwrites | self.creates


@dataclasses.dataclass(slots=True)
class Record:
    """All that a construction computes.

    operations: in order. constants: memories that had values from the start. nbytes: of each memory.
    random_state: of the CPU's generator when it began.
    """

    random_state: torch.Tensor
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
