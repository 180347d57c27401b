"""What a parameter becomes when it is sharded, and the places where it is registered."""

import dataclasses
import weakref

import torch
from torch import nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


class Slot:
    """A place where a parameter is registered: ``module.name``.

    Keeps the module's dictionary of parameters, not the module, so that there is no cycle and
    deleting a model frees its memory at once.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self.registry = module._parameters
        # Such as nn.LSTM, which keeps lists of its weights up to date.
        self.by_setattr = type(module).__setattr__ is not nn.Module.__setattr__

    @property
    def current(self) -> nn.Parameter | None:
        return self.registry.get(self.name)

    def register(self, parameter: nn.Parameter) -> None:
        module = self.module() if self.by_setattr else None
        if module is None:
            self.registry[self.name] = parameter
        else:
            setattr(module, self.name, parameter)

    def remove(self) -> None:
        """Register nothing."""
        self.registry.pop(self.name, None)

    def put_aside(self, tensor: torch.Tensor) -> None:
        """Make a tensor the module's attribute without registering it as a parameter."""
        module = self.module()
        if module is None:
            return
        self.registry.pop(self.name, None)
        if self.by_setattr:
            setattr(module, self.name, tensor)
            self.registry.pop(self.name, None)
        module.__dict__[self.name] = tensor

    def shadow(self, tensor: torch.Tensor) -> None:
        """Let ``module.name`` be a tensor, whatever is registered under that name."""
        module = self.module()
        if module is not None:
            module.__dict__[self.name] = tensor  # which Python looks at before `__getattr__`

    def take_back(self, parameter: nn.Parameter) -> None:
        """Register a parameter where a tensor was put aside."""
        self.drop_shadow()
        self.register(parameter)

    def drop_shadow(self) -> None:
        """Let ``module.name`` be what is registered."""
        module = self.module()
        if module is not None:
            module.__dict__.pop(self.name, None)


@dataclasses.dataclass(frozen=True, slots=True)
class ParamForm:
    """What a parameter becomes.

    spec: the sharded parameter as a DTensor; None if it is a piece of a flat buffer.
    shard_dim: the dim along which this rank's tensor is cut over the shard axis.
    unsharded: the DTensor that it is while unsharded; None for a plain tensor.
    reduced_axes: axes of ``unsharded``'s mesh that are data parallel: gradients may be partial sums
        over them, which the unit's own reduction completes.
    """

    spec: DTensorSpec | None = None
    shard_dim: int = 0
    unsharded: DTensorSpec | None = None
    reduced_axes: frozenset[int] = frozenset()


def with_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Return the same description of a tensor of another dtype."""
    if spec.tensor_meta is not None and spec.tensor_meta.dtype == dtype:
        return spec
    meta = TensorMeta(spec.shape, spec.stride, dtype)
    return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
