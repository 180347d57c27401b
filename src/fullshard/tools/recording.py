"""Which steps of a run are traced, and tracing them."""

import contextlib
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

import fullshard
from fullshard.tools.config import TrainConfig


class StepRecorder:
    """Traces a few steps in the middle of a run, which then changes nothing but their time.

    Every rank goes through the same calls: `begin_step` and `end_step` around each step.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, steps: range
    ) -> None:
        self._model, self._optimizer = model, optimizer
        self._folder = folder
        self._steps = steps
        self._stack = contextlib.ExitStack()
        self._tracing: fullshard.Tracing | None = None

    def __enter__(self) -> "StepRecorder":
        self._stack.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def begin_step(self, step: int) -> None:
        if step in self._steps and self._tracing is None:
            tracing = fullshard.trace(
                self._model, self._folder, optimizer=self._optimizer, first_step=step + 1
            )
            self._tracing = self._stack.enter_context(tracing)
        if self._tracing is not None:
            self._tracing.skip()  # checkpoints and progress between steps

    def end_step(self, step: int) -> None:
        if self._tracing is None:
            return
        self._tracing.step()
        if step + 1 not in self._steps:
            self._tracing = None
            self._stack.close()


def steps_to_trace(config: TrainConfig, *, done: int) -> range:
    """Choose steps in the middle of what is left, but the first two only if there are no others.

    The first steps allocate and are not typical. Of 30 steps, three: the 15th, 16th and 17th.
    """
    left = config.steps - done
    count = min(config.trace_steps, max(1, left - 2))
    first = done + (left - count + 1) // 2
    return range(first, first + count)
