"""`memory_report(model)` tells what this rank's memory is used for at the moment.

Every owner of memory lists the tensors that it holds (`Unit`, `UnitBuffers`, `UnitGradients`,
`Comm`, `Scratch`); this file only puts them into categories and counts them. It allocates, gathers
and waits for nothing, so a report may be made at any moment, also from a hook in the middle of
backward.

[Note: Counting once] A byte that several categories claim counts for the first of them, in the
order of `MemoryCategory`. That happens because one storage may lie within another (a shard has a
storage of its own within its unit's buffer), and because a gradient may be listed by the unit and
by its parameter. Of memory that the ranks of a host share, a rank counts its own part: its shards,
and what it stages. The whole of that memory is reported apart, as ``mapped_nbytes``.
"""

import bisect
import collections
import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.engine.module_state import named_states, names_of_units
from fullshard.engine.params.shown import own_gradient
from fullshard.engine.runtime import Runtime
from fullshard.engine.unit import Unit, comms_of
from fullshard.errors import StateError
from fullshard.optim.shard_step import state_memory
from fullshard.watch.describe import format_nbytes


class MemoryCategory(enum.Enum):
    """Uses of memory. Bytes that two of them claim count for the one that comes first here."""

    SHARDS = "sharded parameters"
    UNSHARDED = "unsharded parameters"
    FULL_GRADIENTS = "full gradients"  # autograd's, those not reduced yet, sums not all-reduced
    GRADIENT_SHARDS = "gradient shards"  # the memory of ``.grad``
    KEPT = "kept for gradients"  # free memory of gradients, kept for the next step
    COMMUNICATION = "communication"  # staging, inputs of collectives under way, and scratch
    OPTIMIZER = "optimizer state"
    UNMANAGED = "not sharded"  # ignored parameters with their gradients, and buffers
    OTHER = "activations and other"  # known where the device's allocator can be asked


@dataclasses.dataclass(frozen=True, slots=True)
class HeldMemory:
    """Bytes of one category, unit and device.

    unit: the unit's name, "" for the root's, None for memory that belongs to no unit.
    """

    category: MemoryCategory
    unit: str | None
    device: str
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryReport:
    """This rank's memory at one moment; ``str()`` prints it, ``to_dict()`` is for JSON.

    shared_nbytes: this rank's part of the memory that the ranks of this host share; counted in
        ``holdings`` too.
    mapped_nbytes: the whole of that shared memory.
    """

    rank: int
    units: tuple[str, ...]
    holdings: tuple[HeldMemory, ...]
    shared_nbytes: int
    mapped_nbytes: int

    def total(
        self,
        category: MemoryCategory | None = None,
        *,
        unit: str | None = None,
        device: str | None = None,
    ) -> int:
        """Return the sum of the bytes of matching holdings; None matches everything."""
        return sum(
            holding.nbytes
            for holding in self.holdings
            if category in (None, holding.category)
            and unit in (None, holding.unit)
            and device in (None, holding.device)
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report as dicts, lists, strings and integers, with totals."""
        values = dataclasses.asdict(self)
        for holding in values["holdings"]:
            holding["category"] = holding["category"].value
        totals = {each.value: self.total(each) for each in MemoryCategory}
        return values | {"total_nbytes": self.total(), "categories": totals}

    def __str__(self) -> str:
        head = f"rank {self.rank} holds {format_nbytes(self.total())}"
        if self.mapped_nbytes:
            head += (
                f", {format_nbytes(self.shared_nbytes)} of it as its part of the "
                f"{format_nbytes(self.mapped_nbytes)} that ranks of this host share"
            )
        devices = list(dict.fromkeys(holding.device for holding in self.holdings))
        used = [category for category in MemoryCategory if self.total(category)]
        of_units = [c for c in used if any(self.total(c, unit=unit) for unit in self.units)]
        categories = _table(
            ["category", *devices],
            [[c.value, *(self.total(c, device=device) for device in devices)] for c in used],
        )
        units = _table(
            ["unit", *(category.value for category in of_units)],
            [
                [unit or "(root)", *(self.total(category, unit=unit) for category in of_units)]
                for unit in self.units
            ],
        )
        return "\n".join([head, "", *categories, "", *units])


def memory_report(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
) -> MemoryReport:
    """Return what this rank's memory is used for at the moment, by category, unit and device.

    model: sharded, or with sharded modules in it. It need not have run yet.
    optimizer: one or several, whose state is counted as well.

    Communicates nothing and does not wait for the device. Raises StateError if nothing in the model
    is sharded.
    """
    named = named_states(model)
    if not named:
        raise StateError(
            f"{type(model).__name__} is not sharded, nor is any module in it. Pass the module given "
            "to fully_shard last, or the outermost wrapper."
        )
    states, paths = dict.fromkeys(named.values()), names_of_units(named)
    names = {  # the root's, or, before a forward, paths
        unit: paths[unit] if state.known_iteration is None else unit.name
        for state in states
        for unit in state.all_units
    }
    units = [unit for state in states for unit in state.units]
    comms, devices = comms_of(units), dict.fromkeys(unit.device for unit in units)
    uses = [_Use(kind, names[unit], tensor) for unit in units for kind, tensor in _tensors_of(unit)]
    for iteration in dict.fromkeys(state.known_iteration for state in states):
        for reduction in () if iteration is None else iteration.reductions.under_way:
            name = names.get(cast(Unit, reduction.unit))
            uses += [_Use(MemoryCategory.GRADIENT_SHARDS, name, t) for t in reduction.results]
            uses += [_Use(MemoryCategory.COMMUNICATION, name, t) for t in reduction.temporaries]
    free = (Runtime.of(device).scratch.free for device in devices)
    staged = itertools.chain(*free, *(comm.staging for comm in comms))
    uses += [_Use(MemoryCategory.COMMUNICATION, None, tensor) for tensor in staged]
    rotations = (Runtime.of(device).rotation for device in devices)
    resting = itertools.chain.from_iterable(each.resting for each in rotations if each is not None)
    uses += [_Use(MemoryCategory.KEPT, None, tensor) for tensor in resting]
    trained = {id(own.sharded): names[unit] for unit in units for own in unit.holders}
    for each in [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer or ():
        uses += [
            _Use(MemoryCategory.OPTIMIZER, trained.get(id(parameter)), memory)
            for parameter, memory in state_memory(each)
        ]
    uses += [_Use(MemoryCategory.UNMANAGED, None, tensor) for tensor in _unmanaged(model, units)]
    sharing = [unit for unit in units if unit.mapped_nbytes]
    shards = sum(tensor.nbytes for unit in sharing for tensor in unit.shard_memory)
    return MemoryReport(
        rank=dist.get_rank(),
        units=tuple(dict.fromkeys(names[unit] for unit in units)),
        holdings=_counted_once(uses, units),
        shared_nbytes=shards
        + sum(own.nbytes for comm in comms if comm.mapped_nbytes for own in comm.staging),
        mapped_nbytes=sum(unit.mapped_nbytes for unit in units)
        + sum(comm.mapped_nbytes for comm in comms),
    )


class _Use(NamedTuple):
    category: MemoryCategory
    unit: str | None
    tensor: torch.Tensor


def _tensors_of(unit: Unit) -> Iterator[tuple[MemoryCategory, torch.Tensor]]:
    """Yield what a unit holds, apart from reductions under way."""
    for tensor in unit.shard_memory:
        yield MemoryCategory.SHARDS, tensor
    for tensor in unit.unsharded_memory:
        yield MemoryCategory.UNSHARDED, tensor
    for tensor in (*unit.gradients.unreduced.sums.memory, *unit.gradients.partial_sums):
        yield MemoryCategory.FULL_GRADIENTS, tensor
    for tensor in unit.gradients.unreduced.sums.spare.tensors:
        yield MemoryCategory.KEPT, tensor
    for tensor in unit.gathering:
        yield MemoryCategory.COMMUNICATION, tensor
    for param in unit.managed:
        yield MemoryCategory.SHARDS, param.local
        if param.unsharded is not None and (grad := own_gradient(param.unsharded)) is not None:
            yield MemoryCategory.FULL_GRADIENTS, grad
    for pooled in unit.gradients.pooled:
        is_kept = pooled.is_unused()
        yield MemoryCategory.KEPT if is_kept else MemoryCategory.GRADIENT_SHARDS, pooled.flat
    for holder in unit.holders:
        if holder.sharded.grad is not None:
            yield MemoryCategory.GRADIENT_SHARDS, holder.sharded.grad


def _unmanaged(model: nn.Module, units: Sequence[Unit]) -> Iterator[torch.Tensor]:
    """Yield ignored parameters, their gradients, and buffers."""
    managed = {id(form) for unit in units for form in unit.forms}
    for parameter in model.parameters():
        if id(parameter) not in managed:
            yield parameter
            if parameter.grad is not None:
                yield parameter.grad
    yield from model.buffers()


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors whose memory a DTensor, subclass or sparse tensor is made of."""
    if isinstance(tensor, DTensor):
        yield from _plain_tensors(tensor._local_tensor)
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _plain_tensors(getattr(tensor, name))
    elif tensor.is_sparse:
        yield tensor._indices()
        yield tensor._values()
    elif not tensor.is_meta:
        yield tensor


class _Ranges:
    """A set of addresses, as sorted ranges [start, stop) that do not touch each other."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def add(self, start: int, stop: int) -> int:
        """Add a range; return how many of its bytes are new to the set."""
        first = bisect.bisect_left(self._stops, start)
        last = bisect.bisect_right(self._starts, stop)
        met = [*zip(self._starts[first:last], self._stops[first:last], strict=True)]
        known = sum(max(min(stop, b) - max(start, a), 0) for a, b in met)
        self._starts[first:last] = [min([start, *(a for a, _ in met)])]
        self._stops[first:last] = [max([stop, *(b for _, b in met)])]
        return stop - start - known


def _counted_once(uses: Iterable[_Use], units: Sequence[Unit]) -> tuple[HeldMemory, ...]:
    """Count every byte once. See [Note: Counting once].

    Where a device's allocator tells how much is in use, what is left over counts as OTHER.
    """
    on_device = collections.Counter[str]()
    totals: dict[tuple[MemoryCategory, str | None, str], int] = {}
    seen: dict[str, _Ranges] = collections.defaultdict(_Ranges)
    order = [*MemoryCategory]
    for category, unit, tensor in sorted(uses, key=lambda use: order.index(use.category)):
        for part in _plain_tensors(tensor):
            storage = part.untyped_storage()
            if storage.nbytes() == 0:
                continue
            device, start = str(storage.device), storage.data_ptr()
            new = seen[device].add(start, start + storage.nbytes())
            on_device[device] += new
            key = category, unit, device
            totals[key] = totals.get(key, 0) + new
    for where in dict.fromkeys(unit.device for unit in units):
        if (allocated := Runtime.of(where).allocated_nbytes) is not None:
            rest = allocated - on_device[str(where)]
            totals[MemoryCategory.OTHER, None, str(where)] = max(rest, 0)
    return tuple(HeldMemory(*key, nbytes) for key, nbytes in totals.items() if nbytes)


def _table(head: Sequence[str], rows: Sequence[Sequence[str | int]]) -> list[str]:
    """Return the lines of a table. Each row is a name and sizes, which are aligned to the right."""
    texts = [[str(row[0]), *(_size(value) for value in row[1:])] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(head, *texts, strict=True)]
    return [
        "  ".join(
            text.rjust(width) if position else text.ljust(width)
            for position, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *texts)
    ]


def _size(value: str | int) -> str:
    return value if isinstance(value, str) else format_nbytes(value) if value else "-"
