"""Sees what a script does, process-wide, by hooks on all modules and optimizers, and writes it down."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from fullshard import FullyShardedDataParallel
from fullshard.errors import UnsupportedError
from fullshard.tools.progress import Reporter
from fullshard.tools.verify.facts import Part
from fullshard.tools.verify.gathering import buffers_of
from fullshard.tools.verify.measures import Meter, fingerprint
from fullshard.tools.verify.outputs import OutputRecorder
from fullshard.tools.verify.program import tensors_in
from fullshard.tools.verify.script.sides import Side, Tensors
from fullshard.tools.verify.training import keyed, output_key


class EnoughError(BaseException):
    """Ends a script after its last step that is compared: no Exception, so that few scripts catch it."""


class NothingToCompareError(Exception):
    """A script that does not shard, or takes no optimizer step."""


class Watch:
    """One rank of one side, while the script runs. Recording is no part of the time that it takes, but that of outputs."""

    def __init__(
        self,
        side: Side,
        num_steps: int,
        device: torch.device,
        report: Reporter,
        on_over: Callable[[], object],
    ) -> None:
        self._on_over = on_over
        self._side, self._diary, self._report = side, side.diary, report
        self._num_steps = num_steps
        self._recorder = OutputRecorder(device)
        self._meter = Meter(device)
        self._clock = contextlib.ExitStack()
        self._step = 0
        self._num_backwards = 0
        self._num_unseen = 0  # steps of optimizers before anything was sharded
        self._called: list[nn.Module] = []  # the modules that run now
        self._is_known = False  # whether the outermost of them is of a model that is sharded
        self._inputs: list[str] = []
        self._tensors: Tensors = {}
        self._in_backward = self._in_step = False
        self.is_over = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch inside the block."""
        backward = torch.autograd.backward

        def run(tensors: Any, *args: Any, **kwargs: Any) -> None:
            self._run_backward(backward, tensors, *args, **kwargs)

        handles = [
            module_hooks.register_module_forward_pre_hook(self._before_module),
            module_hooks.register_module_forward_hook(self._after_module, with_kwargs=True),
            optimizer_hooks.register_optimizer_step_pre_hook(self._before_step),
            optimizer_hooks.register_optimizer_step_post_hook(self._after_step),
        ]
        torch.autograd.backward = run
        try:
            with self._clock:
                self._clock.enter_context(self._meter.running())
                yield
        finally:
            torch.autograd.backward = backward
            for handle in handles:
                handle.remove()

    def check(self) -> None:
        """Raise NothingToCompareError if the script has ended without anything to compare."""
        if not self._side.models.noted:
            raise NothingToCompareError(
                "the script has sharded nothing: no call of fully_shard, replicate or FullyShardedDataParallel"
            )
        if not self._step:
            raise NothingToCompareError(
                "the script has ended without a step of a torch.optim.Optimizer after a forward of what it shards"
            )

    # Forward

    def _before_module(self, module: nn.Module, inputs: Any) -> None:
        self._end_if_over()
        if self._in_backward:
            return
        if not self._called:
            self._recorder.is_on = torch.is_grad_enabled()
            self._begin_forward(module)
        self._called.append(module)
        self._recorder.before(module, inputs)
        if len(self._called) == 1 and self._recorder.is_on and self._is_known:
            self._inputs.append(fingerprint(*tensors_in(inputs)))

    def _begin_forward(self, module: nn.Module) -> None:
        root = self._side.models.new_root(module)
        with self._paused():
            if root is not None:
                self._diary.phase = "gathering parameters"
                self._recorder.know(self._side.models.paths())
                self._side.start(root)
            own = module.module if isinstance(module, FullyShardedDataParallel) else module
            self._is_known = id(own) in self._recorder.paths  # a wrapper has none
            if self._is_known and torch.is_grad_enabled():
                self._side.before_forward()
                self._diary.phase, self._diary.step = "forward", self._step

    def _after_module(self, module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        if not any(each is module for each in self._called):
            return
        while self._called.pop() is not module:  # a forward that has raised is still there
            pass
        self._recorder.after(module, inputs, output)
        if not self._called and self._recorder.is_on and self._is_known:
            # Numbers of floating point may have been cast since; those in ``inputs`` were seen before.
            whole = [each for each in tensors_in(kwargs) if not each.is_floating_point()]
            self._inputs.append(fingerprint(*whole))

    # Backward

    def _run_backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._end_if_over()
        if self._in_backward or not self._side.models.roots:
            backward(tensors, *args, **kwargs)
            return
        with self._paused():
            self._note_part(tensors)
        self._diary.phase, self._in_backward = "backward", True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
        with self._paused():
            self._side.after_backward()
            self._note_gradients("gradient")
        self._diary.phase = "after a backward"

    def _note_part(self, tensors: Any) -> None:
        rank = dist.get_rank()
        written = self._side.before_backward()
        losses = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        seen = self._recorder.take()
        loss = sum(each.detach().double().sum().item() for each in losses)
        part = Part(
            self._step,
            rank,
            loss,
            " ".join(self._inputs),
            tuple(output for output, _ in seen),
            written,
            self._num_backwards,
        )
        self._diary.note_part(part)
        self._tensors |= {output_key(rank, o.path, o.call): sample for o, sample in seen}
        self._called, self._inputs = [], []
        self._num_backwards += 1

    # Step

    def _before_step(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        self._side.optimizers.add(optimizer)
        self._end_if_over()
        if self._in_backward and self._side.models.roots:
            raise UnsupportedError(
                "an optimizer steps inside the backward, before gradients are there on all ranks. "
                "`fullshard verify` compares steps that come after it."
            )
        if self._in_step:
            return
        self._in_step = bool(self._side.models.roots)
        if not self._in_step:
            self._num_unseen += 1
            if self._num_unseen >= self._num_steps and not self._side.models.noted:
                self.check()
            return
        with self._paused():
            self._note_gradients("final-gradient")
            for root in self._side.models.roots:
                named = {root.name(name): b.clone() for name, b in buffers_of(root.module).items()}
                self._tensors |= keyed(f"buffer/{dist.get_rank()}", named)
        self._diary.phase = "optimizer step"

    def _note_gradients(self, kind: str) -> None:
        """Note gradients; those of an earlier backward of this step are in them."""
        self._diary.phase = "gathering gradients"
        for root in self._side.models.roots:
            gradients = keyed(kind, self._side.gradients(root))
            self._tensors |= {key: gradient.clone() for key, gradient in gradients.items()}

    def _after_step(self, *_: Any) -> None:
        if not self._in_step or self._in_backward:
            return
        self._in_step = False
        with self._paused():
            self._diary.phase = "gathering parameters"
            for root in self._side.models.roots:
                self._tensors |= keyed("parameter", self._side.parameters(root))
            self._end_step()

    def _end_step(self) -> None:
        self._diary.write_step(self._step, self._tensors)
        self._side.after_step(self._step)
        seconds = (*self._diary.run.seconds, self._meter.take_seconds())
        self._diary.note(seconds=seconds, peak_nbytes=self._meter.peak_nbytes)
        self._tensors, self._num_backwards = {}, 0
        self._recorder.begin_step()
        self._step += 1
        self._diary.phase = "after the optimizer step"
        self._report.note(f"{self._side.label}: step {self._step} of {self._num_steps}")
        if self._step == self._num_steps:
            self.is_over = True
            dist.barrier()  # until all have read what they need of each other
            self._on_over()
            raise EnoughError

    def _end_if_over(self) -> None:
        """End a script that has caught what ends it, and goes on."""
        if self.is_over:
            raise EnoughError

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Leave the block's time and memory out."""
        self._clock.close()
        try:
            yield
        finally:
            if not self.is_over:
                self._clock.enter_context(self._meter.running())
