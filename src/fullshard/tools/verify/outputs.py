"""Records what each module of a model returns while it computes, by forward hooks.

The hooks are set before the model is sharded: paths are those of the plain model then, on both sides.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard.tools.verify.facts import Output
from fullshard.tools.verify.program import tensors_in

SAMPLE_NUMEL = 2048


class Seen(NamedTuple):
    """An output, and a sample of its values: always the same places of tensors of one size.

    Of each tensor the sample ends with the root of its mean square, in which every value has a part.
    """

    output: Output
    sample: torch.Tensor


class OutputRecorder:
    """Hooks on every module of a model; it records inside `recording` alone."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.paths = {id(module): path for path, module in model.named_modules()}
        self._kinds = {id(module): type(module).__name__ for module in model.modules()}
        self._device = device
        self._seen: list[Seen] | None = None
        self._calls: dict[str, int] = {}
        self._states: list[list[torch.Tensor]] = []
        for module in model.modules():
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Seen]]:
        """Record what modules return, in the order in which they end."""
        self._seen, self._calls, self._states = [], {}, []
        try:
            yield self._seen
        finally:
            self._seen = None

    def _before(self, module: nn.Module, _: Any) -> None:
        if self._seen is not None:
            self._states.append(self._random_state())

    def _after(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._seen is None:
            return
        before, now = self._states.pop(), self._random_state()
        path = self.paths[id(module)]
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        tensors = [_local(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()]
        if not tensors:
            return
        has_drawn = not all(map(torch.equal, before, now))
        is_random = has_drawn or any(isinstance(v, torch.Generator) for v in vars(module).values())
        self._seen.append(
            Seen(
                Output(
                    path=path,
                    call=call,
                    kind=self._kinds[id(module)],
                    dtype=str(tensors[0].dtype),
                    shape=tuple(tensors[0].shape),
                    is_random=is_random,
                ),
                torch.cat([_sample(tensor) for tensor in tensors]),
            )
        )

    def _random_state(self) -> list[torch.Tensor]:
        states, device = [torch.get_rng_state()], self._device
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return states


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.reshape(-1)
    norm = torch.linalg.vector_norm(flat, dtype=torch.float64) / max(1, flat.numel()) ** 0.5
    every = max(1, -(-flat.numel() // SAMPLE_NUMEL))
    return torch.cat([flat[::every].double(), norm.reshape(1)]).cpu()
