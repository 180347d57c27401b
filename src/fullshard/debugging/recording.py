"""Recording one step of training, for `fullshard.replay`.

A step is all forwards with gradients of one sharded model, and their backwards, until an optimizer that
has its parameters steps. Before the first of them the model is saved. Every rank writes what its forwards
are called with and depend on, which gradients reach their outputs, and what all modules return and
all gradients are, as digests.
"""

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.checkpoint.saving import save_checkpoint
from fullshard.debugging.record import Inputs, Record
from fullshard.debugging.surroundings import device_of, surroundings
from fullshard.debugging.tape import BACKWARD, FORWARD, Event, Tape, local_of
from fullshard.engine.module_state import ModuleState
from fullshard.engine.precision import map_tensors
from fullshard.engine.watchers import PassWatcher, watchers
from fullshard.state.structure import units_of


class Recording(PassWatcher):
    """Waits for a model to run, and records its step from then on.

    folder: see `record`. All ranks make it at the same moment.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._record = Record(folder)
        self._tape: _RecordingTape | None = None
        watchers.append(self)
        self._steps = register_optimizer_step_pre_hook(self._before_step)

    def forward_begins(self, state: ModuleState, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self._tape is not None:
            return
        rank = dist.get_rank()
        if rank == 0:
            self._record.clear()
        # A forward of the user's is about to begin, and all ranks are here. They meet in this.
        root = state.root_module or module
        save_checkpoint(self._record.model, root, rng=False, overwrite=True)
        if rank == 0:
            self._record.write_facts(
                ranks=dist.get_world_size(),
                model=type(root).__name__,
                device=device_of(root).type,
                precision=_precision(root),
            )
        self._tape = _RecordingTape(root, self._record, rank)
        self._tape.begin()  # the loop over watchers that has come here comes to it next

    def _before_step(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        if (tape := self._tape) is None or not tape.has_backward:
            return
        own = {id(parameter) for parameter in tape.model.parameters()}
        if any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            self._end()

    def close(self, error: BaseException | None = None) -> None:
        """End the recording where the program is. error: the exception with which it leaves the block."""
        if self not in watchers:
            return
        if self._tape is None and error is None:
            warnings.warn(
                f"{self._record.folder}: nothing was recorded. No sharded model ran forward with gradients.",
                stacklevel=3,
            )
        self._end(f"{type(error).__name__}: {error}" if error is not None else "an exception")

    def _end(self, error: str = "") -> None:
        """Stop listening. error: what has ended a pass that has begun and not ended."""
        watchers.remove(self)
        self._steps.remove()
        if self._tape is not None:
            self._tape.close_event(error)
            self._tape.end()


class _RecordingTape(Tape):
    """Writes each event as soon as it is over, and inputs before their forward."""

    def __init__(self, model: nn.Module, record: Record, rank: int) -> None:
        super().__init__(model)
        self._record, self._rank = record, rank

    @property
    def has_backward(self) -> bool:
        return any(event.kind == BACKWARD for event in self.events)

    def forward_begins(self, state: Any, module: nn.Module, args: Any, kwargs: Any) -> None:
        super().forward_begins(state, module, args, kwargs)
        if self._is_in(FORWARD):
            args, kwargs = map_tensors(_plain, (args, kwargs))
            inputs = Inputs(
                module=self._paths[id(module)],
                method=state.called,
                args=args,
                kwargs=kwargs,
                surroundings=surroundings(self.model),
                has_gradients=_has_gradients(self.model),
            )
            self._record.write_inputs(self._rank, len(self.outputs), inputs)

    def event_ended(self, event: Event) -> None:
        if event.kind == FORWARD:
            self.outputs[-1:] = [[]]  # only their number is of use here
        self._record.write_event(self._rank, len(self.events) - 1, event)


def _precision(model: nn.Module) -> list[str]:
    dtypes = {str(unit.config.mp_policy.param_dtype) for unit in units_of(model)}
    return sorted(each.removeprefix("torch.") for each in dtypes - {"None"})


def _has_gradients(model: nn.Module) -> bool:
    """Return whether earlier backwards have left gradients that are not zero, or sums that wait."""
    if any(unit.gradients.has_hidden for unit in units_of(model)):
        return True
    grads = (p.grad for p in model.parameters() if p.grad is not None)
    return any(bool(local_of(grad).count_nonzero()) for grad in grads)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without the graph that it comes from."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
