"""Refusing memory that was never written: what ``to_empty()`` has left as it was.

A model on the meta device gets memory by ``to_empty()``, and values by a load or by initialisation. What
both forget (mostly non-persistent buffers, which no checkpoint has) is whatever the memory held: often zeros on
rank 0 and something else elsewhere. So what is new is filled with a mark, NaN if it can be, and what still
has nothing else at the first forward is refused by its path.
"""

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

# By module, the names of parameters and buffers that were marked.
_marked: "weakref.WeakKeyDictionary[nn.Module, set[str]]" = weakref.WeakKeyDictionary()


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
        if tensor is not None and (mark := _mark_of(tensor)) is not None:
            tensor.fill_(mark)
            _marked.setdefault(module, set()).add(name)


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
            "non-persistent buffers are in no state dict."
        )


def _unwritten(root: nn.Module) -> Iterator[str]:
    for path, module in root.named_modules():
        for name in sorted(_marked.pop(module, ())):
            tensor = _own_part(module, name)
            if tensor is not None and _has_only_mark(tensor):
                _marked.setdefault(module, set()).add(name)  # refused again, if nothing changes
                yield f"{clean_name(path)}.{name}".lstrip(".")


def _own_part(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return this rank's part of a tensor, if it has any elements."""
    tensor = module._parameters.get(name, module._buffers.get(name))
    if tensor is None or tensor.is_meta:
        return None
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach() if type(local) in (torch.Tensor, nn.Parameter) and local.numel() else None


def _mark_of(tensor: torch.Tensor) -> float | int | None:
    """Return a value that nobody initialises with; None where every value may be meant."""
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan") if dtype.itemsize > 1 else None
    if dtype in (torch.int32, torch.int64):
        return torch.iinfo(dtype).min
    return None


def _has_only_mark(tensor: torch.Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        # The first element tells of nearly all, without reading the rest.
        first = tensor[(0,) * tensor.ndim]
        return bool(first.isnan()) and bool(tensor.isnan().all())
    return bool((tensor == torch.iinfo(tensor.dtype).min).all())
