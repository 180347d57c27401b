"""Record one step of training, for `fullshard.replay`.

A step is all forwards with gradients of one sharded model, and their backwards, until an optimizer that
has its parameters steps. Before the first of them the model is saved. Every rank writes what its forwards
are called with and depend on, which gradients reach their outputs, and what all modules return and
all gradients are, as digests.
"""

import contextlib
import functools
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard.checkpoint.save import save_checkpoint
from fullshard.compare.record import Inputs, ReplayRecord
from fullshard.compare.surroundings import device_of, surroundings
from fullshard.compare.tape import BACKWARD, FORWARD, Event, Tape
from fullshard.compare.values import local_of
from fullshard.engine.module_state import ModuleState
from fullshard.engine.observer import PassWatcher, watchers
from fullshard.engine.precision import map_tensors
from fullshard.process_hooks import AFTER_STEP, BEFORE_STEP, at_exit
from fullshard.state.structure import units_of


class Recording(PassWatcher):
    """Waits for a model to run, and records its step from then on.

    folder: see `record`. All ranks make it at the same moment. It takes the place of one that still runs.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        for other in [each for each in watchers if isinstance(each, Recording)]:
            other.end("another recording")
        _install()
        self._record = ReplayRecord(folder)
        self._tape: _RecordingTape | None = None
        self._contents: list[str] = []  # of the parameters before the step
        watchers.append(self)

    def forward_begins(self, state: ModuleState, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._tape is None:
            root = state.root_module or module
            if torch.is_grad_enabled() and any(p.requires_grad for p in root.parameters()):
                tape = self._begin(root)
                tape.forward_begins(state, module, args, kwargs)  # it did not listen yet
                self._write_inputs(tape, state, module, args, kwargs)
        elif self._tape.has_backward and _contents(self._tape.model) != self._contents:
            self.end()  # the program has taken its step, in whatever way
        else:
            self._write_inputs(self._tape, state, module, args, kwargs)

    def _begin(self, root: nn.Module) -> "_RecordingTape":
        """Save the model. A forward of the program's is about to begin, and all ranks are here."""
        rank = dist.get_rank()
        if rank == 0:
            self._record.clear()
        save_checkpoint(self._record.model, root, rng=False, overwrite=True)
        if rank == 0:
            self._record.write_facts(
                ranks=dist.get_world_size(),
                model=type(root).__name__,
                device=device_of(root).type,
                precision=_precision(root),
            )
        self._contents = _contents(root)
        self._tape = _RecordingTape(root, self._record, rank)
        self._tape.begin()
        return self._tape

    def _write_inputs(
        self, tape: "_RecordingTape", state: ModuleState, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        try:
            tape.write_inputs(state, module, args, kwargs)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            warnings.warn(
                f"{self._record.folder}: the recording is given up on rank {dist.get_rank()}, as an argument of "
                f"{type(module).__name__}.{state.hooks().called} cannot be pickled: {error}. Pass tensors and plain values in "
                "the step that is to be replayed.",
                stacklevel=2,
            )
            self.end()

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """End with the step of an optimizer that has the model's parameters."""
        if self._tape is None or not self._tape.has_backward:
            return
        own = {id(parameter) for parameter in self._tape.model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            if self._tape.is_in_backward:
                self._tape.when_ended = self.end  # the optimizer steps in a hook of the backward
            else:
                self.end()

    def close(self, error: BaseException | None = None) -> None:
        """End the recording where the program is. error: the exception with which it leaves the block."""
        if self not in watchers:
            return
        if self._tape is None and error is None:
            warnings.warn(
                f"{self._record.folder}: nothing was recorded. No sharded model that is trained ran forward "
                "with gradients.",
                stacklevel=3,
            )
        self.end(f"{type(error).__name__}: {error}" if error is not None else "an exception")

    def end(self, error: str = "an exception") -> None:
        """Stop listening. error: what has ended a pass that has begun and not ended."""
        watchers.remove(self)
        if self._tape is not None:
            self._tape.close_event(error)
            self._tape.end()


@functools.cache
def _install() -> None:
    """Hear of steps of optimizers, and of the end of the program. Once in a process."""
    why = "a step ends what is recorded for replay"
    BEFORE_STEP.add(_steps, why)
    AFTER_STEP.add(_steps, why)  # of one whose closure computes gradients
    at_exit(_end, why="a recording for replay ends")


def _steps(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    for each in tuple(watchers):
        if isinstance(each, Recording):
            each.steps(optimizer)


def _end() -> None:
    for each in tuple(watchers):
        if isinstance(each, Recording):
            with contextlib.suppress(Exception):  # the process ends anyway
                each.end("what has ended the program")


class _RecordingTape(Tape):
    """Writes each event as soon as it is over, and inputs before their forward."""

    def __init__(self, model: nn.Module, record: ReplayRecord, rank: int) -> None:
        super().__init__(model)
        self._record, self._rank = record, rank
        self.when_ended: Callable[[], object] | None = (
            None  # is called when the next event has ended
        )

    @property
    def is_in_backward(self) -> bool:
        return self._is_in(BACKWARD)

    @property
    def has_backward(self) -> bool:
        return self.is_in_backward or any(event.kind == BACKWARD for event in self.events)

    def write_inputs(self, state: ModuleState, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Write what a forward of the model begins with, if it is one. Raises what pickling raises."""
        path = self._paths.get(id(module))
        if path is None or not torch.is_grad_enabled():
            return
        args, kwargs = map_tensors(_plain, (args, kwargs))
        inputs = Inputs(path, state.hooks().called, args, kwargs, surroundings(self.model))
        self._record.write_inputs(self._rank, len(self.outputs), inputs)

    def event_ended(self, event: Event) -> None:
        if event.kind == FORWARD:
            self.outputs[-1:] = [[]]  # only their number is of use here
        self._record.write_event(self._rank, len(self.events) - 1, event)
        if self.when_ended is not None:
            self.when_ended()


def _precision(model: nn.Module) -> list[str]:
    dtypes = {str(unit.config.mp_policy.param_dtype) for unit in units_of(model)}
    return sorted(each.removeprefix("torch.") for each in dtypes - {"None"})


def _contents(model: nn.Module) -> list[str]:
    """Return numbers that tell whether somebody has changed a parameter."""
    parts = (local_of(parameter).double() for parameter in model.parameters())
    sums = (number for part in parts for number in (part.sum(), part.square().sum()))
    return [float(number).hex() for number in sums]  # in which NaN equals NaN


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the graph that it comes from."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
