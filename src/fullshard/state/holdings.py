"""What each rank holds of a model: tensors by name, and which box of each lies in which memory.

This is the form in which checkpoints, exports and imports see any model: `fully_shard`, the wrapper
with either form of flat parameters, `replicate`, tensor parallel and plain modules, in any mix. The
memory is the model's own, so what is read into it is loaded, and nothing is gathered.

    rank 1 of 2, w (5, 4) sharded by rows       box (3, 0) (2, 4)
    the same, flat                              boxes (2, 2) (1, 2) and (3, 0) (2, 4)

Several ranks may hold the same box: replicas, and every rank of what is not sharded. They are
numbered, so that each can write its share of it.
"""

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fullshard.engine.access import settle_to_read, settle_to_write
from fullshard.engine.module_state import states_in
from fullshard.errors import MisuseError, StateError, UnsupportedError
from fullshard.plan.boxes import whole_box
from fullshard.plan.layout import Shape
from fullshard.state.sharded_tensors import place_on, placement_of
from fullshard.state.structure import Structure, structure_of
from fullshard.state.unit_parts import HeldBox, UnitParts, parts_of
from fullshard.torch_private import local_part

_TORCH_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"

# Placements of what every rank has: kept alike by the optimizer, and not kept alike by anything.
REPLICATED = "replicated"
BUFFER = "buffer"

# Modules that show other values than their own for a while, and the call that has put them there.
lent: "weakref.WeakKeyDictionary[nn.Module, str]" = weakref.WeakKeyDictionary()

# The number of a copy of which this rank hands on nothing.
ELSEWHERE = -1


class Holding(NamedTuple):
    """What this rank holds of one tensor.

    names: the first is its own; the others are those of parameters that are tied to it.
    shape, dtype: of the whole tensor. boxes: none where this rank has no elements.
    placement: how the ranks divide it, for readers.
    copy, copies: this rank is number ``copy`` of the ``copies`` ranks that hold these boxes. 0 copies:
        not known yet (see `copies.numbered`). Copy `ELSEWHERE`: another rank hands on all of it.
    after_loading: is called once new values are in the views; None if that is all.
    is_buffer: whether it is a module's buffer.
    """

    names: tuple[str, ...]
    shape: Shape
    dtype: torch.dtype
    boxes: tuple[HeldBox, ...]
    placement: str
    copy: int = 0
    copies: int = 0
    after_loading: Callable[[], object] | None = None
    is_buffer: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    def over(self, copy_of: Callable[[torch.Tensor], torch.Tensor]) -> "Holding":
        """Return the same boxes over copies of their memory."""
        return self._replace(boxes=tuple(HeldBox(box, copy_of(view)) for box, view in self.boxes))


class HeldTensor:
    """A tensor of a state dict of which this rank holds some boxes, in any division.

    For states that follow a model's parameters, such as averages: a checkpoint writes and reads it as it
    does the model's own tensors. holding: its boxes; the name is the state dict's.
    """

    def __init__(self, holding: Holding) -> None:
        self.holding = holding

    def __repr__(self) -> str:
        shapes = ", ".join(str(held.box.shape) for held in self.holding.boxes)
        return f"HeldTensor({self.holding.name}, shape {self.holding.shape}, boxes [{shapes}])"


@torch.no_grad()
def holdings_of(model: nn.Module, *, writes: str = "") -> list[Holding]:
    """List what this rank holds of a model's parameters and persistent buffers.

    Every rank has to call it: outside of forward and backward, gathers under way are ended and sharded
    parameters shown. Names are those before sharding, wrapping, checkpointing and compiling.

    writes: the name of the call that is going to write to what is held; "" if nothing will.

    Raises StateError on the meta device or where whole parameters are shown, UnsupportedError for a
    tensor subclass that is kept in parts, MisuseError for a writer while a pass uses the parameters.
    """
    return holdings_in(structure_of(without_ddp(model)), writes=writes)


@torch.no_grad()
def holdings_in(structure: Structure, *, writes: str) -> list[Holding]:
    """List what `holdings_of` lists of a model of this structure."""
    refuse_others(structure.modules)
    for _, module in structure.modules if writes else ():
        call = lent.get(module, writes)
        if call != writes:
            raise MisuseError(
                f"{writes} is called inside {call}, at whose end the model gets its own values back, so what "
                "is loaded would be lost. Call it before or after."
            )
    for unit, _ in structure.units:
        if writes:
            settle_to_write(unit, writes)
        else:
            settle_to_read(unit)
    found: list[Holding] = []
    for unit, every_name in structure.units:
        parts = parts_of(unit)
        for index, names in enumerate(every_name):
            if names:  # else its module was taken out of the model
                local = plain_memory(parts.local(index).detach(), names[0])
                found.append(unit_holding(parts, index, tuple(names), local))
    found += _of_no_unit(structure)
    for holding in found:
        if any(held.view.is_meta for held in holding.boxes):
            raise StateError(
                f"{holding.name} is on the meta device and has no memory. Call "
                "model.to_empty(device=...) first."
            )
    order = {prefix: position for position, (prefix, _) in enumerate(structure.modules)}
    return sorted(found, key=lambda each: order[each.name[: each.name.rfind(".") + 1]])


def without_ddp(model: Any) -> Any:
    """Return what DistributedDataParallel wraps; anything else as it is. Names are those inside."""
    return model.module if is_ddp(model) else model


def is_ddp(model: Any) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)


def refuse_others(modules: Sequence[tuple[str, nn.Module]]) -> None:
    """Raise UnsupportedError if PyTorch's FullyShardedDataParallel wraps one of these modules."""
    others = {
        kind
        for kind in {type(module) for _, module in modules}
        if any(each.__module__.startswith(_TORCH_FSDP1) for each in kind.__mro__)
    }
    for path, module in modules:
        if type(module) in others:
            raise UnsupportedError(
                f"{path.removesuffix('.') or 'The model'} is wrapped by PyTorch's "
                "FullyShardedDataParallel, whose parts of parameters only it can tell. Wrap it with "
                "fullshard's, or call fullshard.install() first."
            )


def tensor_holding(name: str, tensor: torch.Tensor | HeldTensor) -> Holding:
    """Return the holding of a tensor of a state: a held one, a DTensor or a plain one."""
    if isinstance(tensor, HeldTensor):
        return tensor.holding._replace(names=(name,))
    if is_lazy(tensor):
        raise StateError(
            f"{name} has no shape yet, as its module is lazy. Run a forward before saving or loading."
        )
    tensor = plain_memory(tensor.detach(), name)
    shape = tuple(tensor.shape)
    if isinstance(tensor, DTensor):
        box, local = place_on(tensor._spec).box, tensor._local_tensor
        if tuple(local.shape) != box.shape:
            raise StateError(
                f"This rank's part of a DTensor has shape {tuple(local.shape)}, but its mesh and "
                f"placements give it {box.shape}. Make it with distribute_tensor, which divides "
                "evenly, or say its shape to DTensor.from_local."
            )
        held = (HeldBox(box, local.detach()),) if local.numel() else ()
        return Holding((name,), shape, tensor.dtype, held, placement_of(tensor._spec))
    loaded, copied = None, tensor
    if tensor.is_conj() or tensor.is_neg():  # its memory has other values than it shows
        copied = tensor.resolve_conj().resolve_neg()
        loaded = functools.partial(tensor.copy_, copied)
    boxes = (HeldBox(whole_box(shape), copied),) if tensor.numel() else ()
    return Holding((name,), shape, tensor.dtype, boxes, REPLICATED, after_loading=loaded)


def unit_holding(
    parts: UnitParts, index: int, names: tuple[str, ...], local: torch.Tensor
) -> Holding:
    """Return the holding of a unit's parameter, or of state of its size.

    local: this rank's part, as `UnitParts.boxes` takes it.
    """
    shape, placement, copy, copies = parts.placed(index)
    return Holding(names, shape, local.dtype, parts.boxes(index, local), placement, copy, copies)


def plain_memory(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a tensor's memory as a plain tensor or a DTensor of plain ones.

    A subclass that only wraps one tensor of its own shape and dtype, as those for float8 training do,
    is that tensor. Raises UnsupportedError for others, such as quantised weights.
    """
    local = local_part(tensor)
    if type(local) in (torch.Tensor, nn.Parameter):
        return tensor
    inner = _wrapped(local)
    if inner is None:
        raise UnsupportedError(
            f"{name} is a {type(local).__name__}, which keeps its values in several tensors or in "
            "another dtype. Convert it to a plain tensor before saving or loading."
        )
    if not isinstance(tensor, DTensor):
        return inner
    return DTensor(inner, tensor._spec, requires_grad=False)


@torch.no_grad()
def tell_loaded(holdings: Sequence[Holding]) -> None:
    """Say that new values were written into the memory of holdings, past autograd."""
    for holding in holdings:
        if holding.after_loading is not None:
            holding.after_loading()
        for _, view in holding.boxes:
            # Version counters tell others that values are new.
            first = view.reshape(-1)[:1]
            first.copy_(first.clone())


class _Named(NamedTuple):
    tensor: torch.Tensor
    dtype: torch.dtype  # for whoever saves it
    names: list[str]


def _of_no_unit(structure: Structure) -> Iterator[Holding]:
    """Yield plain parameters, and persistent buffers in the dtype before mixed precision cast them."""
    managed = {id(param) for unit, _ in structure.units for param in unit.forms}
    before_casts = {
        (id(module), name): dtype
        for state in states_in(module for _, module in structure.modules)
        for module, dtypes in state.buffer_dtypes.items()
        for name, dtype in dtypes.items()
    }
    # By id: a tied parameter, or a buffer in several places, has several names.
    parameters: dict[int, _Named] = {}
    buffers: dict[int, _Named] = {}
    for prefix, module in structure.modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in managed:
                own = parameters.setdefault(id(parameter), _Named(parameter, parameter.dtype, []))
                own.names.append(prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                dtype = before_casts.get((id(module), name), buffer.dtype)
                own = buffers.setdefault(id(buffer), _Named(buffer, dtype, []))
                own.names.append(prefix + name)
    for found in (parameters, buffers):
        for tensor, dtype, every_name in found.values():
            names = tuple(dict.fromkeys(every_name))
            widened = tensor if dtype == tensor.dtype else tensor.detach().to(dtype)
            holding = tensor_holding(names[0], widened)._replace(names=names)
            if widened is not tensor:
                copy_back = functools.partial(tensor.detach().copy_, widened)
                holding = holding._replace(after_loading=copy_back, placement=REPLICATED)
            if found is buffers:
                placement = BUFFER if holding.placement == REPLICATED else holding.placement
                holding = holding._replace(placement=placement, is_buffer=True)
            yield holding


def _wrapped(local: torch.Tensor) -> torch.Tensor | None:
    flatten = getattr(local, "__tensor_flatten__", None)
    if flatten is None:
        return None
    inner = [getattr(local, name) for name in flatten()[0]]
    if len(inner) == 1 and inner[0].shape == local.shape and inner[0].dtype == local.dtype:
        tensor: torch.Tensor = inner[0]
        return tensor if type(tensor) is torch.Tensor else _wrapped(tensor)
    return None
