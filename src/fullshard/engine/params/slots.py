"""Where a parameter is registered, and how another one takes its place there."""

import weakref

import torch
from torch import nn


class Slot:
    """A place where a parameter is registered: ``module.name``. A tied parameter has several.

    registry: the module's ``_parameters``. The module itself is referred to weakly: a strong
        reference would close a cycle, and ``del model`` would free memory only at the next garbage
        collection.
    by_setattr: whether registering has to go through the module's own ``__setattr__``.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.name = name
        self.module = weakref.ref(module)
        self.registry = module._parameters
        # nn.LSTM and its like do: they keep `_flat_weights`, a list of the registered weights.
        self.by_setattr = type(module).__setattr__ is not nn.Module.__setattr__

    @property
    def current(self) -> nn.Parameter | None:
        return self.registry.get(self.name)

    def is_same(self, other: "Slot") -> bool:
        return self.registry is other.registry and self.name == other.name

    def register(self, parameter: nn.Parameter) -> None:
        """Register a parameter in place of the one that is there."""
        # Nearly always an entry of a dictionary is all: `nn.Module.__setattr__` costs several times
        # as much, and this happens to every parameter four times a step.
        module = self.module() if self.by_setattr else None
        if module is None:
            self.registry[self.name] = parameter
        else:
            setattr(module, self.name, parameter)

    def remove(self) -> None:
        """Register nothing under this name."""
        self.registry.pop(self.name, None)

    def put_aside(self, tensor: torch.Tensor) -> None:
        """Make a tensor the module's attribute without registering it as a parameter."""
        module = self.module()
        if module is None:
            return
        self.registry.pop(self.name, None)
        if self.by_setattr:
            # For the module's own bookkeeping. It may register the tensor, if that is a parameter.
            setattr(module, self.name, tensor)
            self.registry.pop(self.name, None)
        module.__dict__[self.name] = tensor

    def shadow(self, tensor: torch.Tensor) -> None:
        """Let ``module.name`` return a tensor, without changing what is registered."""
        module = self.module()
        if module is not None:
            # Python looks here first; parameters are found by `nn.Module.__getattr__`, after it.
            module.__dict__[self.name] = tensor

    def take_back(self, parameter: nn.Parameter) -> None:
        """Register a parameter again where `put_aside` had put a tensor."""
        self.drop_shadow()
        self.register(parameter)

    def drop_shadow(self) -> None:
        """Let ``module.name`` return the registered parameter again."""
        module = self.module()
        if module is not None:
            module.__dict__.pop(self.name, None)
