"""What the engine tells whoever watches it: of a unit's work, and of the passes of every model.

An `Iteration` and its units have an observer, None unless somebody watches (`watch.trace`, or a
running profiler). They call it at a handful of places:

    begin, end      around work, or a wait, during which this rank computes nothing; properly nested
    enter, leave    around forward or backward of a module's units; these may interleave
    changed         a unit's memory has changed
    forget          an exception ended the iteration: what has begun or entered will not end

A `PassWatcher` is in `watchers` as long as it listens; it may join and leave at any time, and hears of what
comes after. What its methods raise ends the pass.

Who watches all models of the process puts a function into `on_root`, which is called with the state of
each module that becomes a root.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import profiler

from fullshard.plan.trace import Kind

on_root: list[Callable[[Any], None]] = []


class Observer:
    """Gets the calls of the engine that are listed above; a subclass may leave some out.

    units: `Unit` objects. of: the unit concerned, if it is one alone.
    """

    def begin(self, kind: Kind, of: Any = None) -> None: ...
    def end(self) -> None: ...
    def enter(self, kind: Kind, units: Sequence[Any]) -> None: ...
    def leave(self, kind: Kind, units: Sequence[Any]) -> None: ...
    def changed(self, unit: Any) -> None: ...
    def forget(self) -> None: ...


_LABELS = {
    Kind.ALL_GATHER: "FSDP::all_gather",
    Kind.WAIT_ALL_GATHER: "FSDP::all_gather_wait",
    Kind.REDUCE_SCATTER: "FSDP::reduce_scatter",
    Kind.WAIT_REDUCE_SCATTER: "FSDP::reduce_scatter_wait",
    Kind.FENCE: "FSDP::barrier",
    Kind.OPTIMIZER: "FSDP::optimizer",
}


class ProfilerLabels(Observer):
    """Shows ``FSDP::all_gather (layers.0)`` and the like in a running ``torch.profiler``.

    Not what is entered and left: a profiler's labels have to nest, and forwards of units may interleave.
    """

    def __init__(self) -> None:
        self._open: list[profiler.record_function | None] = []

    def begin(self, kind: Kind, of: Any = None) -> None:
        if not profiler._is_profiler_enabled:
            self._open.append(None)  # for the `end` that follows, as calls nest
            return
        name = "" if of is None else f" ({of.path})"
        label = profiler.record_function(f"{_LABELS[kind]}{name}")
        self._open.append(label)
        label.__enter__()

    def end(self) -> None:
        if self._open and (label := self._open.pop()) is not None:
            label.__exit__(None, None, None)

    def forget(self) -> None:
        while self._open:
            self.end()


class PassWatcher:
    """Is told of passes; a subclass overrides what it wants to know.

    state: the `ModuleState` of the root. iteration: its `Iteration`. unit: a `Unit`.
    reads_values: what it is called in messages if the host reads values in it, and so waits for a device.
    """

    reads_values = ""

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Take the inputs of a root, before anything of its forward has been done."""

    def units_begin(self, units: Sequence[Any]) -> None:
        """Note that a module's forward begins, with its units usable; not in a recomputation."""

    def forward_ends(self, iteration: Any, output: Any) -> None:
        """Take what a root's forward returns."""

    def backward_begins(self, iteration: Any) -> None:
        """Note that a backward begins, before anything of the model's is computed in it."""

    def gradients_complete(self, unit: Any, grads: Sequence[torch.Tensor | None]) -> None:
        """Take a unit's full gradients, one per parameter or None, before they are reduced."""

    def backward_ends(self, iteration: Any) -> None:
        """Note that a backward is over, with its gradients reduced."""


watchers: list[PassWatcher] = []
