"""Refusing memory that was never written: what ``to_empty()`` has left as it was.

A model on the meta device gets memory by ``to_empty()``, and values by a load or by initialisation. What
both forget (mostly non-persistent buffers, which no checkpoint has) is whatever the memory held: often zeros on
rank 0 and something else elsewhere. So what is new is filled with a mark, and what still has nothing else
at the first forward is refused by its path:

    floating point, complex    NaN, which nobody initialises with
    others, bool too           bytes of 0xA5. Somebody may mean that, so what was written to counts as set, as
                               far as version counters tell: writes through ``.data`` do not count
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.errors import StateError
from fullshard.plan.units import clean_name

Place = tuple[nn.Module, str]

_NAMES_SHOWN = 5
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


@torch.no_grad()
def mark_unwritten(places: Sequence[Place]) -> None:
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
        places = places_on_meta(module, recurse=recurse)
        result = to_empty(device=device, recurse=recurse)
        mark_unwritten(places)
        return result

    module.__dict__["to_empty"] = marking
    try:
        yield
    finally:
        del module.__dict__["to_empty"]


def refuse_unwritten(root: nn.Module) -> None:
    """Raise StateError if something that was marked has kept nothing but its mark."""
    if not _marked:
        return
    found = list(_unwritten(root))
    if found:
        more = f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
        rank = dist.get_rank() if dist.is_initialized() else 0
        raise StateError(
            f"{', '.join(found[:_NAMES_SHOWN])}{more} (rank {rank}): to_empty() has given it memory, and nothing "
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
    tensor = module._parameters.get(name, module._buffers.get(name))
    if tensor is None or tensor.is_meta:
        return None
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach() if type(local) in (torch.Tensor, nn.Parameter) and local.numel() else None


def _version(module: nn.Module, name: str) -> int:
    tensor = module._parameters.get(name, module._buffers.get(name))
    return -1 if tensor is None else tensor._version


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
