"""Noticing what became of accumulated gradients between two backwards: kept, or dropped or zeroed.

Programs drop gradients in many ways: through an optimizer, a module, or the parameter; by None or by zeros.
None of them tells the engine. So each gradient is remembered after a backward, and looked at before the next
one. Object and version counters say at once that nobody touched it. Of one that was touched (zeroed, but
perhaps clipped), the values tell: zeros on all ranks are a dropped gradient.
"""

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor


class Comparison(NamedTuple):
    """What one rank sees of some gradients: of each 1.0 or 0.0, as two 1-D float64 tensors.

    kept: it was there, and is there and not zero. gone: it was there, and was dropped or written to.
    untouched: it was there, and nobody wrote to it; of those with elements.
    may_be_mixed: whether some may be kept while others are not.
    """

    kept: torch.Tensor
    gone: torch.Tensor
    untouched: torch.Tensor
    may_be_mixed: bool


class GradientMarks:
    """The gradients of some parameters, as they were when this was made."""

    def __init__(self, trained: Sequence[torch.Tensor]) -> None:
        self._trained = list(trained)  # kept, so that no other gets the id of one
        self._seen = {
            id(tensor): (weakref.ref(tensor.grad), _version(tensor.grad))
            for tensor in trained
            if tensor.grad is not None
        }

    def __len__(self) -> int:
        return len(self._trained)

    def compare(self, trained: Sequence[torch.Tensor], device: torch.device) -> Comparison:
        """Say what became of the gradients since. trained: some of them. device: of the result."""
        kept, gone, untouched = ([0.0] * len(trained) for _ in range(3))
        touched: list[tuple[int, torch.Tensor]] = []
        for index, tensor in enumerate(trained):
            if id(tensor) not in self._seen:
                continue
            grad, (known, version) = tensor.grad, self._seen[id(tensor)]
            if grad is not None and grad is known() and _version(grad) == version:
                kept[index] = 1.0
                untouched[index] = float(_local(grad).numel() > 0)
                continue
            gone[index] = 1.0
            if grad is not None:
                touched.append((index, _local(grad)))
        flags = torch.tensor(kept, dtype=torch.float64, device=device)
        for index, local in touched:
            flags[index] = local.count_nonzero().to(device) > 0
        return Comparison(
            flags,
            torch.tensor(gone, dtype=torch.float64, device=device),
            torch.tensor(untouched, dtype=torch.float64, device=device),
            may_be_mixed=any(gone) and (any(kept) or bool(touched)),
        )


def _local(grad: torch.Tensor) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _version(grad: torch.Tensor) -> int:
    """Return how often a gradient was written to, as a whole and through this rank's part."""
    return grad._version + (grad._local_tensor._version if isinstance(grad, DTensor) else 0)
