"""Classes of sharded modules.

Sharding a module changes its class: ``Linear`` becomes ``FSDPLinear``, a subclass of `FSDPModule`
and ``Linear``. There is one such class per kind (`FSDPModule`, `ReplicateModule`) and original
class.
"""

import collections
import contextlib
import contextvars
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from fullshard.engine.copying import copy_sharded

# By kind, then by original class. `install` hands out the inner dictionaries under PyTorch's names.
sharded_classes: dict[type, dict[type, type]] = collections.defaultdict(dict)

_as_is = contextvars.ContextVar("_as_is", default=False)


def sharded_class(original: type, kind: Any) -> type:
    """Return the subclass of ``kind`` and ``original``, the same one every time.

    kind: `FSDPModule`, or a subclass of it.
    """
    classes = sharded_classes[kind]
    if original not in classes:
        namespace = {"__deepcopy__": _deepcopy, "__module__": original.__module__}
        classes[original] = type(f"{kind._prefix}{original.__name__}", (kind, original), namespace)
    return classes[original]


@contextlib.contextmanager
def constructing_as_is() -> Iterator[None]:
    """Let the constructors of sharded classes make instances of these classes, inside the block.

    Elsewhere they make instances of the original class: see `FSDPModule.__new__`.
    """
    token = _as_is.set(True)
    try:
        yield
    finally:
        _as_is.reset(token)


def is_constructing_as_is() -> bool:
    """Return whether the caller is inside a `constructing_as_is` block."""
    return _as_is.get()


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a sharded module that has not run yet. Every rank has to call it."""
    return copy_sharded(module, lambda plain: copy.deepcopy(plain, memo), memo)
