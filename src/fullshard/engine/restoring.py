"""Putting modules back as they were, if sharding them fails half-way.

Sharding replaces parameters, classes and hooks while it allocates memory, which may be lacking. So
what it changes is noted before, by reference: nothing is copied, but whole parameters live until
their shards have memory.

Rejected: to allocate everything first. It takes as much memory at its peak, and needs a plan that a
wrap policy, which looks while it wraps, does not have.
"""

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from fullshard.errors import AllocationError, FullshardError

_LACKS = {errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOSPC}
_OF_FILES = os.strerror(errno.EMFILE)
# Parts of the messages of torch's host allocators and of Gloo, which raise a plain RuntimeError.
_PHRASES = (
    _OF_FILES.lower(),
    "allocate memory",
    "not enough memory",
    "out of memory",
    "unable to mmap",
)


class _Module:
    """A note of one module: its class, its attributes, and the contents of its dicts and lists."""

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
        """Put back the class, the attributes and the contents."""
        # The same dicts and lists get their contents back: slots and hooks' handles refer to them.
        for value, content in self._contents:
            value.clear()
            (value.update if isinstance(value, dict) else value.extend)(content)
        # Through `__dict__`, past the `__setattr__` of the module and of the class it has now.
        self._module.__dict__.clear()
        self._module.__dict__.update(self._attributes)
        self._module.__class__ = self._class


class _Tensor:
    """A note of one parameter or buffer: its memory, attributes and hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._attributes = dict(tensor.__dict__)
        self._hooks = tensor._backward_hooks
        # `data` is an alias, so it keeps the memory alive that sharding lets go of.
        data = None if is_lazy(tensor) or tensor.layout is not torch.strided else tensor.data
        self._data = data if type(data) is torch.Tensor else None  # others keep their memory

    def restore(self) -> None:
        """Put back attributes, hooks and, unless the tensor has it still, memory."""
        tensor, data = self._tensor, self._data
        tensor.__dict__.clear()
        tensor.__dict__.update(self._attributes)
        if tensor._backward_hooks is not self._hooks:
            tensor._backward_hooks = self._hooks
        if data is not None and not _is_over(tensor, data):
            tensor.data = data


def _is_over(tensor: torch.Tensor, data: torch.Tensor) -> bool:
    """Return whether a tensor has the memory, shape and strides of ``data``."""
    return (
        tensor.untyped_storage()._cdata == data.untyped_storage()._cdata
        and tensor.shape == data.shape
        and tensor.stride() == data.stride()
        and tensor.storage_offset() == data.storage_offset()
    )


@contextlib.contextmanager
def restoring(modules: Iterable[nn.Module], what: str) -> Iterator[None]:
    """Put modules, parameters and buffers back as they are now if the body raises.

    Values that the body writes in place, such as those sent by the first rank, stay written.
    what: what the body does, for messages. Raises AllocationError where memory is lacking.
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
    except BaseException:  # KeyboardInterrupt as well
        for each in noted:
            each.restore()
        raise


@contextlib.contextmanager
def naming_lack(what: str, then: str) -> Iterator[None]:
    """Raise AllocationError if the body raises for lack of memory or of open files.

    what: what the body does; then: a sentence on the state of the module. Both are for the message.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if isinstance(error, AllocationError) or not is_lack(error):  # ours say it already
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        lacks, remedy = (
            "ran out of memory",
            "Free memory, or shard smaller modules one after the other",
        )
        if _OF_FILES in str(error):
            lacks, remedy = "may open no more files", "Raise the limit (ulimit -n)"
        raise AllocationError(
            f"{what} (rank {dist.get_rank()}) {lacks}: {reason}. {then} {remedy}, and repeat the call on every rank. "
            "Ranks that had enough did not raise."
        ) from error


def is_lack(error: BaseException) -> bool:
    """Return whether an exception says that memory or open files are lacking, in this process.

    Other errors of ours, and what a program raises from one, may quote what another rank ended with.
    """
    if isinstance(error, OSError):
        return error.errno in _LACKS
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    cause: BaseException | None = error
    while cause is not None and _says_lack(error):
        if isinstance(cause, FullshardError) and _says_lack(cause):
            return isinstance(cause, AllocationError)
        cause = cause.__cause__ or cause.__context__
    return _says_lack(error)


def _says_lack(error: BaseException) -> bool:
    text = str(error).lower()
    return any(phrase in text for phrase in _PHRASES)
