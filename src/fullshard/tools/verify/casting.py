"""Mixed precision of modules that stay whole: they compute in the dtypes in which sharded ones would.

While a module's forward runs, its names lead to copies of its parameters in the compute dtype, linked to the parameters
by autograd. So gradients are rounded as those of a sharded model are, and come back in the parameters' dtype. The
same holds during a backward, in which checkpointed modules run again.
"""

import contextlib
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.tools.verify.values import mapped, tensors_in

_PRECISION = "_verify_precision"  # an attribute of each module with a policy: copies of the module have it as well


class Precision(NamedTuple):
    """What a module that shards computes in. Modules inside it that have a policy of their own are left to that.

    param_dtype, output_dtype, buffer_dtype: None leaves them.
    casts_inputs, casts_root_inputs: whether inputs are cast, inside of another's forward and by themselves.
    ignored: parameters that are not cast.
    """

    param_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    casts_inputs: bool = True
    casts_root_inputs: bool = True
    ignored: frozenset[nn.Parameter] = frozenset()


class Casting:
    """The modules that have a precision of their own, and those that compute now."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._running: Counter[nn.Module] = Counter()
        self._num_forwards = 0  # of them all, one inside the other
        self._replaced: dict[nn.Module, list[tuple[nn.Module, str, nn.Parameter]]] = {}
        self._is_in_backward = False

    def add(self, module: nn.Module, precision: Precision) -> None:
        setattr(module, _PRECISION, precision)
        self._modules.append(module)

        # A bound method would be copied with the module.
        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return self._enter_forward(module, args, kwargs)

        module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        # It gets no output of a forward that has raised; so outputs are cast by a hook of their own.
        module.register_forward_hook(lambda module, _, __: self._leave(module), always_call=True)
        module.register_forward_hook(lambda module, _, output: _cast_output(module, output))

    def add_float32(self, module: nn.Module) -> None:
        """Let a module inside another one's forward compute in float32, and return what it was given."""
        setattr(module, _PRECISION, Precision())
        given: list[torch.dtype] = []

        def before(_: nn.Module, args: Any) -> Any:
            given[:] = [each.dtype for each in tensors_in(args) if each.is_floating_point()][:1]
            return _cast(torch.float32, args)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(
            lambda _, __, output: _cast(given[0], output) if given else output
        )

    def register_method(self, module: nn.Module, name: str) -> None:
        """Let a method of a module compute as its forward does."""
        if not hasattr(module, _PRECISION):
            return
        method = getattr(module, name)

        def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._enter_forward(module, args, kwargs)
            try:
                return _cast_output(module, method(*args, **kwargs))
            finally:
                self._leave(module)

        setattr(module, name, types.MethodType(run, module))

    def before_backward(self) -> None:
        """Let all compute in their precision, since modules may run again."""
        self.after_backward()
        self._is_in_backward = True
        for module in self._modules:
            self._enter(module)

    def after_backward(self) -> None:
        if self._is_in_backward:
            self._is_in_backward = False
            for module in self._modules:
                self._exit(module)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Give parameters back inside the block; what runs goes on with copies of the values that they have then."""
        running = list(self._replaced)
        for module in running:
            self._restore(module)
        yield
        for module in running:
            self._replace(module)

    def _enter_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        precision: Precision = getattr(module, _PRECISION)
        casts = precision.casts_inputs if self._num_forwards else precision.casts_root_inputs
        self._num_forwards += 1
        self._enter(module)
        return _cast(precision.param_dtype if casts else None, (args, kwargs))

    def _leave(self, module: nn.Module) -> None:
        self._num_forwards -= 1
        self._exit(module)

    def _enter(self, module: nn.Module) -> None:
        self._running[module] += 1
        if self._running[module] == 1:
            self._replace(module)

    def _exit(self, module: nn.Module) -> None:
        self._running[module] -= 1
        if not self._running[module]:
            self._restore(module)

    def _replace(self, module: nn.Module) -> None:
        precision: Precision = getattr(module, _PRECISION)
        copies: dict[nn.Parameter, torch.Tensor] = {}
        replaced = self._replaced[module] = []
        for owner in _own_modules(module):
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = _cast(precision.buffer_dtype, buffer)
            for name, parameter in owner._parameters.items():
                if parameter is None or parameter in precision.ignored:
                    continue
                if parameter not in copies:
                    copies[parameter] = _cast(precision.param_dtype, parameter)
                if copies[parameter] is not parameter:
                    replaced.append((owner, name, parameter))
                    owner._parameters[name] = copies[parameter]  # type: ignore[assignment]

    def _restore(self, module: nn.Module) -> None:
        for owner, name, parameter in self._replaced.pop(module):
            copy = owner._parameters[name]
            # The forward may have written to it, and a whole model would keep that.
            if copy is not None and copy._version:
                parameter.data.copy_(copy.detach())
            owner._parameters[name] = parameter


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and those in it, without those that have a precision of their own."""
    seen = {module}
    todo = [module]
    while todo:
        current = todo.pop()
        yield current
        for child in current.children():
            if child not in seen and not hasattr(child, _PRECISION):
                seen.add(child)
                todo.append(child)


def _cast_output(module: nn.Module, output: Any) -> Any:
    precision: Precision = getattr(module, _PRECISION)
    return _cast(precision.output_dtype, output)


def _cast(dtype: torch.dtype | None, value: Any) -> Any:
    """Return nested containers with their floating-point tensors cast; they themselves if dtype is None."""
    if dtype is None:
        return value
    return mapped(lambda each: each.to(dtype) if each.is_floating_point() else each, value)
