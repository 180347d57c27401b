"""Whether gradients were dropped together: on all ranks, and of all parameters."""

from collections.abc import Sequence
from typing import Any

import torch

from fullshard.errors import StateError


class HostCopy:
    """A copy of a tensor in host memory, which the host waits for when it reads it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        self._values = tensor
        if tensor.device.type != "cpu":
            self._values = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record()

    def tolist(self) -> list[Any]:
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._values.tolist()
        return values


def refuse_differing(names: Sequence[str], differing: HostCopy) -> None:
    """Raise StateError, on all ranks, if some have dropped gradients that others have kept."""
    found = [name for name, is_found in zip(names, differing.tolist(), strict=True) if is_found]
    if found:
        raise StateError(
            f"weighted_loss: since the last weighted loss some ranks have dropped the gradient of {found[0]} "
            f"({len(found)} parameters), and others have not. Drop gradients on all ranks, or on none."
        )


def refuse_mixed(names: Sequence[str], kept: Sequence[float], gone: Sequence[float]) -> None:
    """Raise StateError if the gradients of some parameters were dropped and those of others were not."""
    dropped = [n for n, k, g in zip(names, kept, gone, strict=True) if g and not k]
    stayed = [n for n, k in zip(names, kept, strict=True) if k]
    if dropped and stayed:
        raise StateError(
            f"weighted_loss: since the last weighted loss the gradient of {dropped[0]} was dropped, and that of "
            f"{stayed[0]} was not ({len(dropped)} and {len(stayed)} parameters). Weights are counted for the whole "
            "model, so drop all gradients together, or shard the parts as models of their own."
        )
