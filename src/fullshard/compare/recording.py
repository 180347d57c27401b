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

    reads_values = "fullshard.debug(replay=...)"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        for other in [each for each in watchers if isinstance(each, Recording)]:
            other.end("another recording")
        _install()
        self._record = ReplayRecord(folder)
        self._tape: Tape | None = None
        self._rank = 0
        self._contents: list[str] = []  # of the parameters before the step
        self._ends_with_event = False
        watchers.append(self)

    def forward_begins(self, state: ModuleState, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._tape is None:
            root = state.root_module or module
            if not torch.is_grad_enabled() or not any(p.requires_grad for p in root.parameters()):
                return
            self._tape = self._begin(root)
            self._tape.forward_begins(state, module, args, kwargs)  # it did not listen yet
        elif self._has_backward(self._tape) and _contents(self._tape.model) != self._contents:
            self.end()  # the program has taken its step, in whatever way
            return
        self._write_inputs(self._tape, state, module, args, kwargs)

    def _begin(self, root: nn.Module) -> Tape:
        """Save the model. A forward of the program's is about to begin, and all ranks are here."""
        self._rank = dist.get_rank()
        if self._rank == 0:
            self._record.clear()
        save_checkpoint(self._record.model, root, rng=False, overwrite=True)
        if self._rank == 0:
            self._record.write_facts(
                ranks=dist.get_world_size(),
                model=type(root).__name__,
                device=device_of(root).type,
                precision=_precision(root),
            )
        self._contents = _contents(root)
        tape = Tape(root, self._event_ended)
        tape.begin()
        return tape

    def _write_inputs(
        self, tape: Tape, state: ModuleState, module: nn.Module, args: Any, kwargs: Any
    ) -> None:
        """Write what a forward of the model begins with, if it is one."""
        path = tape.paths.get(id(module))
        if path is None or not torch.is_grad_enabled():
            return
        try:
            args, kwargs = map_tensors(_plain, (args, kwargs))
            inputs = Inputs(path, state.hooks().called, args, kwargs, surroundings(tape.model))
            self._record.write_inputs(self._rank, len(tape.outputs), inputs)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            warnings.warn(
                f"{self._record.folder}: the recording is given up on rank {self._rank}, as an argument of "
                f"{type(module).__name__}.{state.hooks().called} cannot be pickled: {error}. Pass tensors and plain values in "
                "the step that is to be replayed.",
                stacklevel=2,
            )
            self.end()

    def steps(self, optimizer: torch.optim.Optimizer) -> None:
        """End with the step of an optimizer that has the model's parameters."""
        if self._tape is None or not self._has_backward(self._tape):
            return
        own = {id(parameter) for parameter in self._tape.model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            if self._tape.is_in(BACKWARD):
                self._ends_with_event = True  # the optimizer steps in a hook of the backward
            else:
                self.end()

    @staticmethod
    def _has_backward(tape: Tape) -> bool:
        return tape.is_in(BACKWARD) or any(event.kind == BACKWARD for event in tape.events)

    def _event_ended(self, event: Event) -> None:
        """Write an event as soon as it is over."""
        assert self._tape is not None
        if event.kind == FORWARD:
            self._tape.outputs[-1:] = [[]]  # only their number is of use here
        self._record.write_event(self._rank, len(self._tape.events) - 1, event)
        if self._ends_with_event:
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
        self._ends_with_event = False
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
