"""Traces a script that knows nothing of it: some steps of each sharded model, found by its optimizer's steps."""

import contextlib
import shlex
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from fullshard.engine.observer import PassWatcher, watchers
from fullshard.errors import StateError
from fullshard.process_hooks import AFTER_STEP
from fullshard.watch.trace import trace


class Wanted(NamedTuple):
    """Where traces go, and the first and the last step of a model's optimizer that are in them, from 1."""

    folder: Path
    first: int
    last: int


class Traces(PassWatcher):
    """Records steps of every root model: the first in the folder itself, then, when that is done, the next in model1.

    A step ends where the model's optimizer has stepped, whatever ran before: several forwards, micro-batches. Ranks
    begin a recording together, so they have to step as often. Of several optimizers of one model, one is timed.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._seen: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._left: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # to be recorded
        self._num_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int]
        self._num_steps = weakref.WeakKeyDictionary()
        self._most_steps = 0
        self._open = contextlib.ExitStack()  # the recording under way
        self._of: torch.optim.Optimizer | None = None  # whose steps it has
        self._steps_left = 0
        self._said: list[str] = []
        watchers.append(self)
        AFTER_STEP.add(self._after_step, "fullshard run --trace records steps")

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note a root at its first forward."""
        if module not in self._seen:
            self._seen.add(module)
            self._left.add(module)

    def said(self) -> list[str]:
        """Return what was recorded, with the command that shows it, or why nothing was; for the end of the program."""
        if self._said:
            return self._said
        if not self._seen:
            why = "no sharded model ran"
        elif not self._most_steps:
            why = "no torch.optim.Optimizer that has parameters of a sharded model stepped"
        else:
            why = (
                f"it would have been steps {self.wanted.first} to {self.wanted.last}, and the optimizer stepped "
                f"{self._most_steps} times. Name others: --trace-steps A-B"
            )
        return [f"--trace: nothing was recorded: {why}."]

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._of is optimizer:
            self._most_steps += 1
            self._steps_left -= 1
            if not self._steps_left:
                self._of = None
                self._open.close()
        elif self._left and (root := self._root_of(optimizer)) is not None:
            done = self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
            self._most_steps = max(self._most_steps, done)
            if self._of is None and done >= self.wanted.first - 1:
                self._begin(root, optimizer, done + 1)

    def _root_of(self, optimizer: torch.optim.Optimizer) -> nn.Module | None:
        """Return the model that an optimizer trains, of those that are to be recorded."""
        its = {id(each) for group in optimizer.param_groups for each in group["params"]}
        found = (r for r in self._left if any(id(each) in its for each in r.parameters()))
        return next(found, None)

    def _begin(self, root: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self._left.discard(root)
        number = len(self._seen) - len(self._left) - 1
        folder = self.wanted.folder / f"model{number}" if number else self.wanted.folder
        self._steps_left = self.wanted.last - self.wanted.first + 1
        said = (
            f"steps {step} to {step + self._steps_left - 1} are recorded in {folder}. See where their time went: "
            f"fullshard report {shlex.quote(str(folder))}"
        )
        self._open.callback(self._said.append, said)  # once they are written
        try:
            self._open.enter_context(trace(root, folder, optimizer=optimizer, first_step=step))
        except StateError as error:
            self._open.pop_all()
            self._said.append(f"--trace: {error}")
        else:
            self._of = optimizer
