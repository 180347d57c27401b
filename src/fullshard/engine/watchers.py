"""What the engine tells of the passes of every model, to whoever wants to check or record them.

A watcher is in `watchers` as long as it listens; it may join and leave at any time, and hears of what comes
after. What its methods raise ends the pass.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


class PassWatcher:
    """Is told of passes; a subclass overrides what it wants to know.

    state: the `ModuleState` of the root. iteration: its `Iteration`. unit: a `Unit`.
    """

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take the inputs of a root, before anything of its forward has been done."""

    def forward_ends(self, iteration: Any, output: Any) -> None:
        """Take what a root's forward returns."""

    def backward_begins(self, iteration: Any) -> None:
        """Note that a backward begins, before anything of the model's is computed in it."""

    def gradients_complete(self, unit: Any, grads: Sequence[torch.Tensor | None]) -> None:
        """Take a unit's full gradients, one per parameter or None, before they are reduced."""

    def backward_ends(self, iteration: Any) -> None:
        """Note that a backward is over, with its gradients reduced."""


watchers: list[PassWatcher] = []
