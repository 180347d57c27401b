"""Modules as they were, if changing them fails half-way.

Sharding replaces parameters, classes and hooks while it allocates memory, which may not be there.
So what is changed is noted before, by reference: nothing is copied, but whole parameters live until
their shards have memory.
"""

import contextlib
import errno
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from fullshard.errors import AllocationError

_LACKS = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOSPC}
# How torch's allocators for the host say it, as a plain RuntimeError.
_PHRASES = ("allocate memory", "not enough memory", "out of memory", "unable to mmap")


class _Module:
    """What one module was: its class, its attributes, and what its tables and lists contained."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._class = type(module)
        self._attributes = dict(module.__dict__)
        self._contents: list[tuple[Any, Any]] = [
            (value, dict(value) if isinstance(value, dict) else list(value))
            for value in self._attributes.values()
            if isinstance(value, (dict, list))
        ]

    def restore(self) -> None:
        for value, content in self._contents:
            value.clear()
            (value.update if isinstance(value, dict) else value.extend)(content)
        self._module.__dict__.clear()
        self._module.__dict__.update(self._attributes)
        self._module.__class__ = self._class


class _Tensor:
    """What one parameter or buffer was: its memory, attributes and hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._attributes = dict(tensor.__dict__)
        self._hooks = tensor._backward_hooks
        data = None if is_lazy(tensor) or tensor.layout is not torch.strided else tensor.data
        self._data = data if type(data) is torch.Tensor else None  # others are never given memory

    def restore(self) -> None:
        tensor, data = self._tensor, self._data
        tensor.__dict__.clear()
        tensor.__dict__.update(self._attributes)
        if tensor._backward_hooks is not self._hooks:
            tensor._backward_hooks = self._hooks
        if data is not None and not _is_over(tensor, data):
            tensor.data = data


def _is_over(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Whether a tensor has this memory."""
    return (
        tensor.untyped_storage()._cdata == data.untyped_storage()._cdata
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.storage_offset() == data.storage_offset()
    )


@contextlib.contextmanager
def restoring(modules: Iterable[nn.Module], what: str) -> Iterator[None]:
    """Make the modules, their parameters and buffers what they are now if the body raises.

    Values that the body writes in place, such as those of the first rank, stay written. ``what`` is
    done, for messages: raises AllocationError where memory is lacking.
    """
    noted: list[_Module | _Tensor] = []
    tensors: dict[int, torch.Tensor] = {}
    for module in modules:
        noted.append(_Module(module))
        own = (*module._parameters.values(), *module._buffers.values())
        tensors.update((id(tensor), tensor) for tensor in own if tensor is not None)
    noted += [_Tensor(tensor) for tensor in tensors.values()]
    del tensors
    try:
        with naming_lack(what, "The module is as it was before."):
            yield
    except BaseException:
        for each in noted:
            each.restore()
        raise


@contextlib.contextmanager
def naming_lack(what: str, then: str) -> Iterator[None]:
    """Raise AllocationError where the body lacks memory. ``then``: what has become of the module."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, AllocationError) or not _is_lack(error):
            raise
        reason = str(error).splitlines()
        raise AllocationError(
            f"{what} (rank {dist.get_rank()}) ran out of memory: "
            f"{reason[0] if reason else type(error).__name__}. {then} Free memory, or shard smaller "
            "modules one after the other, and do it again on every rank; ranks that had enough have "
            "gone on."
        ) from error


def _is_lack(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _LACKS
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    text = str(error).lower()
    return any(phrase in text for phrase in _PHRASES)
