"""Tensors whose memory is freed or stale: using one is an error that names it.

Such a tensor changes its class until the memory is back. Python sees that and autograd does not: it
goes on to save it, and gives it back once it may be used again.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from fullshard.errors import StateError

_KEPT = "_fullshard_kept"  # on such a tensor: what it is, in words
# What reads no memory.
_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim")
_LAYOUT = ("layout", "is_cuda", "is_cpu", "is_meta", "is_sparse", "nbytes", "itemsize")
_METHODS = ("size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous")
_PLACES = ("untyped_storage", "storage_offset", "data_ptr", "_version", "_backward_hooks", "_base")
_OTHERS = ("is_floating_point", "is_complex", "requires_grad_", "__hash__", "__len__", "_is_view")
_OF_DTENSORS = ("to_local", "full_tensor", "redistribute")  # which are called like any method
_HARMLESS = {*_PROPERTIES, *_LAYOUT, *_METHODS, *_PLACES, *_OTHERS}


class Named(Protocol):
    """Somebody who knows the name of a parameter."""

    @property
    def name(self) -> str: ...


def forbid_use(tensor: torch.Tensor, name: str | Callable[[], Named | None]) -> None:
    """Make the use of a tensor an error.

    name: how the message begins; or who knows it, of what has no memory at all.
    """
    if not is_forbidden(tensor):
        setattr(tensor, _KEPT, name)
        tensor.__class__ = _resharded(type(tensor))


def allow_use(tensor: torch.Tensor) -> None:
    """Let it be used again."""
    if is_forbidden(tensor):
        tensor.__class__ = type(tensor).__base__  # type: ignore[assignment]
        delattr(tensor, _KEPT)


def is_forbidden(tensor: torch.Tensor) -> bool:
    return "__fullshard_resharded__" in vars(type(tensor))


@functools.cache
def _resharded(cls: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return a subclass of the same layout, so that a tensor may change to it and back."""

    def check(
        own: type[torch.Tensor],
        func: Callable[..., Any],
        types: Sequence[type],  # noqa: ARG001
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _check(own, func, args, kwargs or {})

    body: dict[str, Any] = {
        "__slots__": (),
        "__module__": __name__,
        "__fullshard_resharded__": True,
        "__torch_function__": classmethod(check),
        "__deepcopy__": _same,
    }
    for name in _OF_DTENSORS if issubclass(cls, DTensor) else ():
        body[name] = _refusing(name)
    metaclass: Any = type(cls)
    made: type[torch.Tensor] = metaclass(f"Resharded{cls.__name__}", (cls,), body)
    return made


def _same(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:  # noqa: ARG001
    """Let copies of a module share a placeholder, which nobody changes."""
    if not self.is_meta:
        raise _error(self, "__deepcopy__")
    return self


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise _error(self, name)

    return refuse


def _check(
    cls: type[torch.Tensor],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call what reads no memory, and refuse everything else."""
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    if name in _HARMLESS or (name == "data" and args[0].is_meta):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    kept = next((each for each in args if isinstance(each, cls)), None)
    raise _error(kept, name)


def _error(kept: torch.Tensor | None, name: str) -> StateError:
    what = "A parameter, or a view of one," if kept is None else getattr(kept, _KEPT)
    if callable(what):
        manager = what()
        return StateError(
            f"{'A parameter' if manager is None else manager.name} is used ({name}) while its unit "
            "is sharded and nobody has all of it: modules show a placeholder then. Use it inside "
            "its own module's forward, wrap what shares it in one unit, or take summon_full_params."
        )
    return StateError(
        f"{what} was kept while its module was resharded, and used after ({name}): its memory is "
        "freed or stale. Use it inside the module's forward, or between unshard() and reshard(), "
        "or keep weight.detach().clone()."
    )
