"""From the meta device to values: is there enough memory, and was all of it written?

A model on the meta device gets memory by ``to_empty()``, and values by a load or by initialisation. What
both forget (mostly non-persistent buffers, which no checkpoint has) is whatever the memory held: often zeros on
rank 0 and something else elsewhere. So what is new is filled with a mark, and what still has nothing else
at the first forward is refused by its path:

    floating point, complex    NaN, which nobody initialises with
    others, bool too           bytes of 0xA5. Somebody may mean that, so what was written to counts as set, as
                               far as version counters tell: writes through ``.data`` do not count
"""

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fullshard.engine.checks.model import Model
from fullshard.engine.unit import Unit
from fullshard.errors import AllocationError
from fullshard.host import memory_pools
from fullshard.peers.groups import place_in_job
from fullshard.plan.units import clean_name, first_names
from fullshard.torch_private import local_part

Place = tuple[nn.Module, str]

_BYTE = 0xA5

# By module, the names of parameters and buffers that were marked, with their versions then.
_marked: "weakref.WeakKeyDictionary[nn.Module, dict[str, int]]" = weakref.WeakKeyDictionary()


def places_on_meta(module: nn.Module, *, recurse: bool) -> list[Place]:
    """Return where parameters and buffers on the meta device are registered."""
    return [
        (each, name)
        for each in (module.modules() if recurse else (module,))
        for name, tensor in (*each._parameters.items(), *each._buffers.items())
        if tensor is not None and tensor.is_meta
    ]


@contextlib.contextmanager
def keeping_ties(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Register one parameter, after the body, wherever modules shared one on the meta device before.

    ``to_empty()`` leaves each place a parameter of its own. Nothing says so, and they are trained apart.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                places.setdefault(id(parameter), []).append((module, name))
    tied = [each for each in places.values() if len(each) > 1]
    yield
    for (first, its_name), *others in tied:
        for module, name in others:
            module._parameters[name] = first._parameters[its_name]


@contextlib.contextmanager
def giving_memory(module: nn.Module, *, recurse: bool) -> Iterator[None]:
    """Mark what the body takes from the meta device, and keep ties of it."""
    places = places_on_meta(module, recurse=recurse)
    with keeping_ties(module.modules() if recurse else ()):
        yield
    _mark_unwritten(places)


@torch.no_grad()
def _mark_unwritten(places: Sequence[Place]) -> None:
    """Mark what was on the meta device, and has memory now."""
    for module, name in places:
        tensor = _own_part(module, name)
        if tensor is not None:
            if _can_be_nan(tensor):
                tensor.fill_(float("nan"))
            else:
                _bytes(tensor).fill_(_BYTE)
            _marked.setdefault(module, {})[name] = _version(module, name)


@contextlib.contextmanager
def marking_to_empty(module: nn.Module) -> Iterator[None]:
    """Mark what the body gives memory by the module's ``to_empty()``."""
    to_empty = module.to_empty

    def marking(*, device: torch.device | str | int | None, recurse: bool = True) -> nn.Module:
        with giving_memory(module, recurse=recurse):
            return to_empty(device=device, recurse=recurse)

    module.__dict__["to_empty"] = marking
    try:
        yield
    finally:
        del module.__dict__["to_empty"]


def find_unwritten(model: Model) -> str | None:
    """Say what was marked and has kept nothing but its mark."""
    if not _marked or not (found := [*_unwritten(model.root)]):
        return None
    rank = place_in_job().rank
    return (
        f"{first_names(found)} (rank {rank}): to_empty() has given it memory, and nothing "
        "has been written there since. Load values for it, or compute them as the module's __init__ does; "
        "non-persistent buffers are in no state dict. If forward writes to it before it reads it, fill it."
    )


def _unwritten(root: nn.Module) -> Iterator[str]:
    for path, module in root.named_modules():
        for name, version in sorted(_marked.pop(module, {}).items()):
            tensor = _own_part(module, name)
            if tensor is None or not _has_only_mark(tensor):
                continue
            # Of parameters, adopting their memory has written the mark once more.
            if name in module._parameters or _version(module, name) == version:
                _marked.setdefault(module, {})[name] = version  # refused again, if nothing changes
                yield f"{clean_name(path)}.{name}".lstrip(".")


def _own_part(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return this rank's part of a tensor, if it has any elements."""
    tensor = _registered(module, name)
    if tensor is None or tensor.is_meta:
        return None
    local = local_part(tensor)
    return local.detach() if type(local) in (torch.Tensor, nn.Parameter) and local.numel() else None


def _version(module: nn.Module, name: str) -> int:
    tensor = _registered(module, name)
    return -1 if tensor is None else tensor._version


def _registered(module: nn.Module, name: str) -> torch.Tensor | None:
    return module._parameters.get(name, module._buffers.get(name))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor, which has it alone, as 1-D bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _can_be_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype.itemsize > 1)


def _has_only_mark(tensor: torch.Tensor) -> bool:
    if _can_be_nan(tensor):
        # The first element tells of nearly all, without reading the rest.
        first = tensor[(0,) * tensor.ndim]
        return bool(first.isnan()) and bool(tensor.isnan().all())
    return bool((_bytes(tensor) == _BYTE).all())


def find_meta_buffers(model: Model) -> str | None:
    """Say which buffers are on the meta device still when a model first runs.

    Parameters on the meta device are refused when a unit takes memory. No unit has buffers, so nothing would
    notice that ``to_empty`` or a load left some out (those that are not persistent are in no checkpoint),
    and torch computes with some of them as if they had values.
    """
    own = {id(module) for module in model.modules}
    names = [
        clean_name(f"{path}.{name}")
        for path, module in model.root.named_modules()
        if id(module) in own
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    ]
    if not names:
        return None
    return (
        "FSDP buffers should be materialized from meta device before training, but the following were "
        f"still on meta device: {first_names(names)} (rank {dist.get_rank()}). Call "
        f"model.to_empty(device={str(model.device)!r}) and compute their values. Those with persistent=False "
        "are in no checkpoint."
    )


def refuse_lack_of_memory(call: str, units: Sequence[Unit], others: Iterable[torch.Tensor]) -> None:
    """Raise AllocationError if the host, or a container's limit, cannot hold what is on the meta device.

    Linux gives out memory that it does not have, and kills a process when it is written to. Only what is certain
    is refused: what this rank makes; where ranks share memory, what all of them make, as they are on one host.
    others: what is not sharded, such as buffers. call: what makes it, for the message.
    """
    nbytes = sum(
        param.local.nbytes * (unit.comm.size if unit.comm.reads_in_place else 1)
        for unit in units
        if unit.device.type == "cpu"
        for param in unit.params
        if param.local.is_meta
    )
    nbytes += sum({id(each): each.nbytes for each in others if each.is_meta}.values())
    for pool in memory_pools().values() if nbytes else ():
        can_get = pool.free_nbytes + pool.swap_nbytes
        if nbytes > can_get:
            rank = place_in_job().rank
            raise AllocationError(
                f"{call} (rank {rank}): parameters and buffers need {_mib(nbytes)} of memory, and on "
                f"{pool.name} {_mib(can_get)} can be had, caches and swap included: the system would kill a process. "
                "Nothing was changed. Use more hosts, or let devices hold the model."
            )


def _mib(nbytes: int) -> str:
    return f"{math.ceil(nbytes / 2**20):,} MiB"
