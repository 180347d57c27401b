"""Read what a forward depends on beside its inputs and the sharded parameters, and put it back.

    random generators    Python's, NumPy's, torch's, and those that modules keep as attributes
    what a rank has      buffers, and parameters that are not sharded
    modes                which modules train, autocast, and what torch is told of kernels and precision

What a module keeps otherwise (a Python counter, say) is not among it.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from fullshard.checkpoint.values import random_states as random_states  # noqa: PLC0414 -- verify has it from here
from fullshard.checkpoint.values import set_random_states as set_random_states  # noqa: PLC0414
from fullshard.compare.tape import modules_by_path
from fullshard.compare.values import path_of
from fullshard.engine.params.managed import manager_of
from fullshard.errors import StateError

_Get = Callable[[], Any]
_Set = Callable[[Any], Any]


def surroundings(model: nn.Module) -> dict[str, Any]:
    """Return what a forward of this model would depend on now. Tensors are the model's own."""
    device = device_of(model)
    return {
        "random": random_states(),
        "generators": {key: get() for key, (get, _) in _generators(model).items()},
        "tensors": own_tensors(model),
        "training": {path: module.training for path, module in modules_by_path(model).items()},
        "autocast": {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", device.type))
        },
        "settings": {name: read() for name, (read, _) in _SETTINGS.items()},
    }


def restore(model: nn.Module, kept: dict[str, Any]) -> None:
    """Put back generators, tensors and which modules train. Raises StateError for another model."""
    tensors = own_tensors(model)
    with torch.no_grad():
        for name, value in kept["tensors"].items():
            if name in tensors:  # else it is sharded here, and its value comes with the checkpoint
                if tensors[name].shape != value.shape:
                    raise StateError(
                        f"{name} is of shape {tuple(tensors[name].shape)}, and was {tuple(value.shape)} when the step "
                        "was recorded. Build the model as it was then."
                    )
                if not torch.equal(tensors[name], value):  # else autograd may still need it
                    tensors[name].copy_(value)
    modules = modules_by_path(model)
    for path, trains in kept["training"].items():
        if path in modules:
            modules[path].training = trains
    generators = _generators(model)
    for key, state in kept["generators"].items():
        if key in generators:
            generators[key][1](state)
    set_random_states(kept["random"])


@contextlib.contextmanager
def autocast_as(kept: dict[str, Any]) -> Iterator[None]:
    """Run the body under the autocast of then."""
    with contextlib.ExitStack() as stack:
        for kind, (is_on, dtype) in kept["autocast"].items():
            stack.enter_context(torch.autocast(kind, dtype, enabled=is_on))
        yield


@contextlib.contextmanager
def settings_as(kept: dict[str, Any]) -> Iterator[None]:
    """Run the body with what torch was told of threads, kernels and precision."""
    before = {name: read() for name, (read, _) in _SETTINGS.items()}
    try:
        for name, value in kept["settings"].items():
            if name in _SETTINGS:
                _SETTINGS[name][1](value)
        yield
    finally:
        for name, value in before.items():
            _SETTINGS[name][1](value)


def own_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return buffers, and parameters that no unit shards, by their names as before sharding."""
    parameters = {
        name: p for name, p in model.named_parameters() if manager_of(p) is None and not p.is_meta
    }
    named = {**dict(model.named_buffers()), **parameters}
    return {path_of(name): each.detach() for name, each in named.items()}


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter; the CPU if it has none."""
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _generators(model: nn.Module) -> dict[str, tuple[_Get, _Set]]:
    """Return how the generators that modules have as attributes are read and set, by their paths."""
    return {
        f"{path}.{name}".lstrip("."): accessors
        for path, module in modules_by_path(model).items()
        for name, value in vars(module).items()
        if (accessors := _accessors(value)) is not None
    }


def _accessors(value: Any) -> tuple[_Get, _Set] | None:
    """Return how the state of a generator is read and set; None of what is no generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    bits = getattr(value, "bit_generator", None)  # of NumPy's, which may not be installed
    if bits is not None and hasattr(bits, "state"):
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return None


_cudnn = torch.backends.cudnn

# By name, how a setting is read and set. All of them can change bits.
_SETTINGS: dict[str, tuple[_Get, _Set]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1]),
    ),
    "matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "cudnn_benchmark": (lambda: _cudnn.benchmark, lambda on: setattr(_cudnn, "benchmark", on)),
    "cudnn_deterministic": (
        lambda: _cudnn.deterministic,
        lambda on: setattr(_cudnn, "deterministic", on),
    ),
}
