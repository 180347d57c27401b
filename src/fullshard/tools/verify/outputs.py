"""Records what each module of a model returns while it computes, by forward hooks.

Paths are those of the plain model on both sides.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.compare.values import local_of, sample_of
from fullshard.tools.verify.record import Output
from fullshard.tools.verify.values import tensors_in

SAMPLE_NUMEL = 2048


class Seen(NamedTuple):
    """An output, and a sample of its values: always the same places of tensors of one size.

    Of each tensor the sample ends with the root of its mean square, in which every value has a part.
    """

    output: Output
    sample: torch.Tensor


class OutputRecorder:
    """Notes what modules return while it is on, in the order in which they end.

    paths: of the modules that it knows, by their ids. All others are passed over.
    """

    def __init__(self, device: torch.device) -> None:
        self.paths: dict[int, str] = {}
        self.is_on = False
        self._kinds: dict[int, str] = {}
        self._device = device
        self._seen: list[Seen] = []
        self._calls: dict[str, int] = {}
        self._begun: list[tuple[nn.Module, list[torch.Tensor]]] = []

    def know(self, paths: Mapping[nn.Module, str]) -> None:
        """Record modules from now on, under these paths."""
        for module, path in paths.items():
            self.paths[id(module)] = path
            self._kinds[id(module)] = type(module).__name__

    def begin_step(self) -> None:
        """Forget what was recorded, and count calls from 0."""
        self._seen, self._calls, self._begun = [], {}, []

    def take(self) -> list[Seen]:
        """Return what was recorded since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def before(self, module: nn.Module, _: Any) -> None:
        """Take part in a module's forward before it; a forward pre-hook."""
        if self.is_on and id(module) in self.paths:
            self._begun.append((module, self._random_state()))

    def after(self, module: nn.Module, _: Any, output: Any) -> None:
        """Take part in a module's forward after it; a forward hook."""
        if not self.is_on or not any(each is module for each, _ in self._begun):
            return
        while True:  # a forward that has raised is still there
            begun, before = self._begun.pop()
            if begun is module:
                break
        path = self.paths[id(module)]
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        tensors = [local_of(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()]
        if not tensors:
            return
        has_drawn = not all(map(torch.equal, before, self._random_state()))
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


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    norm = torch.linalg.vector_norm(tensor.reshape(-1), dtype=torch.float64)
    mean = norm / max(1, tensor.numel()) ** 0.5
    return torch.cat([sample_of(tensor, SAMPLE_NUMEL), mean.reshape(1).cpu()])
