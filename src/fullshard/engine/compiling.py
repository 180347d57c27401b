"""Show the compiler that gathered parameters do not share memory.

The parameters of a gathered unit lie in one buffer, over one storage. The compiler takes tensors of one
storage for aliases of each other, and `torch.cond`, `scan`, `map` and `nested_compile_region` refuse those. They
never overlap, so while the compiler looks at a function, each has a storage of its own over the same memory.

Not for good: who frees the buffer's storage (see `params.buffers`, Note: Freed under its tensors) would leave
those others without memory. Nothing is freed while a function is compiled, since nothing runs.
"""

import threading
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from fullshard.comm.interface import tensor_over
from fullshard.engine.runtime import eager
from fullshard.engine.unit import Unit
from fullshard.torch_private import around_compilations

# Inductor asks of a tensor's offset whether it begins at a multiple of this many bytes, and copies it at each
# call if it does not though it seemed to.
_ALIGNMENT = 16

# The units of each model that computes, by what its `Iteration` is, and the thread that it computes in:
# ranks may be threads, of which another frees its memory meanwhile.
_models: "weakref.WeakKeyDictionary[Any, tuple[Iterable[Unit], int]]" = weakref.WeakKeyDictionary()

_moved: list[tuple[torch.Tensor, torch.Tensor]] = []  # and what each was over before


def note_computing(model: Any, units: Iterable[Unit]) -> None:
    """Take note that a model's units are computed with in this thread, from now on."""
    _models[model] = units, threading.get_ident()
    around_compilations(_separate, _restore)


@eager  # called while a compilation begins, which must not wait for that of this function
def _separate(_: object) -> None:
    """Give each gathered parameter of this thread a storage of its own."""
    here = threading.get_ident()
    with torch.inference_mode(False):
        for units, thread in list(_models.values()):
            if thread != here:
                continue
            for unit in units:
                for whole in unit.params.unsharded_locals if unit.is_unsharded else ():
                    before = whole.data
                    whole.data = _alone(before)
                    _moved.append((whole, before))


@eager
def _restore(_: object) -> None:
    with torch.inference_mode(False):
        for whole, before in _moved:
            whole.data = before
    _moved.clear()


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor over the same memory, with a storage that has nothing before or behind it."""
    begin = tensor.storage_offset() * tensor.itemsize
    start = begin // _ALIGNMENT * _ALIGNMENT
    storage = tensor.untyped_storage()[start : begin + tensor.nbytes]
    return tensor_over(storage, (begin - start) // tensor.itemsize, tensor.shape, tensor.dtype)
