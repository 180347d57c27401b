"""A warning for low-bit optimizers whose precision follows from how a parameter is divided.

Optimizers such as torchao's AdamW8bit keep state in few bits where a tensor has enough elements, in whole
blocks, and in float32 elsewhere. They ask that of a rank's part: the same parameter has other state on
another number of ranks, and other updates.
"""

import math
import warnings
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard.engine.params.managed import ManagedParameter, owner_of

_FEWEST = 4096  # elements, below which torchao keeps state as it is

_seen: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def check_state_precision(optimizer: Optimizer, _: Any, __: Any) -> None:
    """Warn, after an optimizer's first step, of state that is wide here and would be low-bit when whole."""
    block = getattr(optimizer, "block_size", None)
    if not isinstance(block, int) or block < 1 or optimizer in _seen:
        return
    _seen.add(optimizer)
    for parameter, state in optimizer.state.items():
        owner = owner_of(parameter)  # type: ignore[arg-type]
        if owner is None or not _is_low_bit_when_whole(owner, block):
            continue
        moments = [value for value in state.values() if _has_size_of(value, parameter)]
        if moments and not any(map(_is_low_bit, moments)):
            warnings.warn(
                f"{type(optimizer).__name__} keeps the state of {owner.name} in {moments[0].dtype}, as this "
                f"rank's part has {owner.local.numel()} of {math.prod(owner.shape)} elements; of the whole parameter it would "
                "be low-bit. So the state's precision, and the training, depend on the number of ranks. Choose a "
                "mesh that leaves parts of the optimizer's block size, or exclude such parameters on any mesh.",
                stacklevel=2,
            )
            return


def _is_low_bit_when_whole(owner: ManagedParameter, block: int) -> bool:
    numel = math.prod(owner.shape)
    return numel >= _FEWEST and numel % block == 0 and owner.local.numel() < numel


def _has_size_of(value: object, parameter: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim > 0


def _is_low_bit(value: torch.Tensor) -> bool:
    local = value._local_tensor if isinstance(value, DTensor) else value
    return type(local) not in (torch.Tensor, torch.nn.Parameter) or local.dtype.itemsize == 1
