"""Tensors whose memory is freed or stale: using one is an error that names it.

Such a tensor gets another class until the memory is back. The class refuses every operation from
Python that reads memory. Autograd, in C++, does not look at the class: graphs that have saved the
tensor stay valid and find it as it was when backward runs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from fullshard.errors import StateError
from fullshard.torch_private import WithoutSubclasses, is_compiled_backward

_KEPT = "_fullshard_kept"  # on such a tensor: how the message begins, or who knows the name

# What is allowed, since it reads no memory. The engine itself uses some of it on such tensors.
_PROPERTIES = ("shape", "dtype", "device", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim")
_LAYOUT = (
    "layout",
    "grad_dtype",
    "is_cuda",
    "is_cpu",
    "is_meta",
    "is_sparse",
    "nbytes",
    "itemsize",
)
_METHODS = ("size", "dim", "numel", "nelement", "stride", "element_size", "is_contiguous")
_PLACES = ("untyped_storage", "storage_offset", "data_ptr", "_version", "_backward_hooks", "_base")
_OTHERS = ("is_floating_point", "is_complex", "requires_grad_", "__hash__", "__len__", "_is_view")
# Plain Python methods of DTensor, which do not go through `__torch_function__`.
_OF_DTENSORS = ("to_local", "full_tensor", "redistribute")
_HARMLESS = {*_PROPERTIES, *_LAYOUT, *_METHODS, *_PLACES, *_OTHERS}


class Named(Protocol):
    """An object that knows the name of a parameter."""

    @property
    def name(self) -> str: ...
    @property
    def requires_grad(self) -> bool: ...


def forbid_use(tensor: torch.Tensor, name: str | Callable[[], Named | None]) -> None:
    """Make the use of a tensor raise StateError, until `allow_use`. Does nothing the second time.

    name: how the message begins. Or, for a placeholder on the meta device, a function that returns
        the parameter's manager, or None if that is gone: such a parameter may be named later.
    """
    if not is_forbidden(tensor):
        setattr(tensor, _KEPT, name)
        tensor.__class__ = _resharded(type(tensor))


def allow_use(tensor: torch.Tensor) -> None:
    """Give a tensor its own class back, if its use is forbidden."""
    if is_forbidden(tensor):
        tensor.__class__ = type(tensor).__base__  # type: ignore[assignment]
        delattr(tensor, _KEPT)


def is_forbidden(tensor: torch.Tensor) -> bool:
    return "__fullshard_resharded__" in vars(type(tensor))


def manager_of_placeholder(tensor: torch.Tensor) -> Named | None:
    """Return the manager of the parameter that a placeholder stands for; None for any other tensor."""
    name = getattr(tensor, _KEPT, None) if is_forbidden(tensor) else None
    return name() if callable(name) else None


@functools.cache
def _resharded(cls: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return a subclass that refuses use.

    It adds no slots: Python lets an object change its class only between classes that lie alike in
    memory.
    """

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
    """Let copies of a module share a placeholder on meta; refuse to copy anything else."""
    if not self.is_meta:
        raise _error(self, "__deepcopy__")
    return self


def _refusing(name: str) -> Callable[..., Any]:
    """Return a method that raises StateError."""

    def refuse(self: torch.Tensor, *_: Any, **__: Any) -> Any:
        raise _error(self, name)

    return refuse


def _check(
    cls: type[torch.Tensor],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Call what reads no memory, and raise StateError for everything else."""
    # Reading or setting a property arrives as `__get__` or `__set__` of its descriptor.
    name = how = getattr(func, "__name__", "")
    if name in ("__get__", "__set__"):
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    kept = next((each for each in (*args, *kwargs.values()) if isinstance(each, cls)), None)
    stands_for = None if kept is None else getattr(kept, _KEPT)
    if callable(stands_for):  # a placeholder, where what is set would be lost
        if name == "requires_grad" and how == "__get__":
            manager = stands_for()
            return manager is not None and manager.requires_grad
        if how == "__set__" or name == "requires_grad_":
            raise _error(kept, name, is_set=True)
    # `data` of a placeholder has no memory either, and is one, too.
    if name in _HARMLESS or (name == "data" and args[0].is_meta):
        with WithoutSubclasses():
            result = func(*args, **kwargs)
        if name == "data" and how == "__get__":
            forbid_use(result, stands_for)  # type: ignore[arg-type]
        return result
    raise _error(kept, name)


def refuse_compiled_backward() -> None:
    """Raise StateError if compiled autograd runs this backward.

    It reads what a graph has saved before it calls the hooks that gather it, and never calls the function
    that ends a backward.
    """
    if is_compiled_backward():
        raise StateError(
            "compiled autograd runs the backward of a sharded model: it reads parameters before they are "
            "gathered, and gradients would be wrong. Leave it out (torch._dynamo.config.compiled_autograd); "
            "torch.compile compiles the backward of modules without it."
        )


def _error(kept: torch.Tensor | None, name: str, *, is_set: bool = False) -> StateError:
    refuse_compiled_backward()  # whose tracing meets what is freed before the first hook
    what = "A parameter, or a view of one," if kept is None else getattr(kept, _KEPT)
    if callable(what):
        manager = what()
        subject = "A parameter" if manager is None else manager.name
        if is_set:
            remedy = (
                "The parameters of a flat unit are trained and frozen together: freeze some before wrapping, in a "
                "unit of their own, or pass use_orig_params=True."
                if name.startswith("requires_grad")
                else "Write inside summon_full_params, or pass use_orig_params=True."
            )
            return StateError(
                f"{subject}: {name} is set while its unit is sharded, on a placeholder, where it would be lost. {remedy}"
            )
        return StateError(
            f"{subject} is used ({name}) while its unit "
            "is sharded: this rank does not have all of it, and modules show a placeholder. Use it "
            "inside its own module's forward, wrap all modules that use it in one unit, take "
            "fullshard.gathered(weight), or use summon_full_params."
        )
    return StateError(
        f"{what} was kept while its module was resharded, and used afterwards ({name}): its memory is "
        "freed or stale. Use it inside the module's forward, or between unshard() and reshard(), "
        "or keep weight.detach().clone()."
    )
