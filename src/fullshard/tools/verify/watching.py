"""Sees what a program does, process-wide, by hooks on all modules and optimizers, and writes it down."""

import abc
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks

from fullshard import FullyShardedDataParallel
from fullshard.compare.values import local_of, sample_of
from fullshard.errors import UnsupportedError
from fullshard.tools.progress import Reporter
from fullshard.tools.verify.models import Root
from fullshard.tools.verify.record import Output, Part, keyed
from fullshard.tools.verify.sides import Side, Tensors
from fullshard.tools.verify.values import fingerprint, tensors_in

SAMPLE_NUMEL = 2048


class EnoughError(BaseException):
    """Ends a script after its last step that is compared: no Exception, so that few scripts catch it."""


class NothingToCompareError(Exception):
    """A script that does not shard, or takes no optimizer step."""


class Watching(abc.ABC):
    """What sees a program run, until it has seen enough: `EnoughError` ends it then.

    on_over: called after the last step, when all is recorded, before the program is ended.
    """

    def __init__(self, side: Side, report: Reporter, on_over: Callable[[], object]) -> None:
        self._side, self._report, self._on_over = side, report, on_over
        self.is_over = False

    @abc.abstractmethod
    def watching(self) -> contextlib.AbstractContextManager[None]:
        """See what runs inside the block."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raise NothingToCompareError if the program has ended without anything to compare."""

    def _end(self) -> NoReturn:
        self.is_over = True
        self._side.wait()  # until all have read what they need of each other
        self._on_over()
        raise EnoughError


class Watch(Watching):
    """One process of one side, while its program runs. Recording is no part of the time that it takes, but that of outputs."""

    def __init__(self, side: Side, report: Reporter, on_over: Callable[[], object]) -> None:
        super().__init__(side, report, on_over)
        self._diary = side.diary
        self._num_steps = side.options.steps
        self._is_script = bool(side.options.script)
        device = torch.device(side.options.device)
        self._recorder = OutputRecorder(device)
        self._meter = Meter(device)
        self._clock = contextlib.ExitStack()
        self._step = 0
        self._num_backwards = 0
        self._num_unseen = 0  # steps of optimizers before anything was sharded
        # Whether the outermost module that runs is of a model that is sharded.
        self._is_known = False
        self._inputs: list[str] = []
        self._batch = ""  # the fingerprint that takes the place of those of inputs
        self._tensors: Tensors = {}
        self._in_backward = self._in_step = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
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

    # Of a program that says what it does

    def know(self, paths: Mapping[nn.Module, str]) -> None:
        """Record what modules return, under these paths."""
        self._recorder.know(paths)
        self._diary.paths = self._recorder.paths

    def add_model(self, model: nn.Module) -> None:
        """Watch a model whose modules are known already. Collective, and to be called while `paused`."""
        self._start(self._side.models.add(model))

    def begin_part(self, rank: int, batch: str) -> None:
        """See that the part of a rank begins. batch: the fingerprint of what it is computed from."""
        self._side.begin_part(rank)
        self._recorder.begin_step()
        self._num_backwards, self._batch = 0, batch

    # Of any

    def check(self) -> None:
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
        is_outermost = not self._recorder.running
        if is_outermost:
            self._recorder.is_on = torch.is_grad_enabled() or not self._is_script
            self._begin_forward(module)
        self._recorder.before(module, inputs)
        if is_outermost and self._sees_inputs:
            self._inputs.append(fingerprint(*tensors_in(inputs)))

    @property
    def _sees_inputs(self) -> bool:
        return self._recorder.is_on and self._is_known and not self._batch

    def _begin_forward(self, module: nn.Module) -> None:
        root = self._side.models.new_root(module)
        with self.paused():
            if root is not None:
                self._recorder.know(self._side.models.paths())
                self._start(root)
            own = module.module if isinstance(module, FullyShardedDataParallel) else module
            self._is_known = id(own) in self._recorder.paths  # a wrapper has none
            if self._is_known and torch.is_grad_enabled():
                self._side.before_forward()
                self._diary.phase, self._diary.step = "forward", self._step + 1

    def _start(self, root: Root) -> None:
        self._diary.phase = "gathering parameters"
        self._side.start(root)

    def _after_module(self, module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        if not any(each is module for each, _ in self._recorder.running):
            return
        self._recorder.after(module, inputs, output)
        if not self._recorder.running and self._sees_inputs:
            # Numbers of floating point may have been cast since; those in ``inputs`` were seen before.
            whole = [each for each in tensors_in(kwargs) if not each.is_floating_point()]
            self._inputs.append(fingerprint(*whole))

    # Backward

    def _run_backward(self, backward: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        self._end_if_over()
        if self._in_backward or not self._side.models.roots:
            backward(tensors, *args, **kwargs)
            return
        with self.paused():
            self._note_part(tensors)
        self._diary.phase, self._in_backward = "backward", True
        try:
            backward(tensors, *args, **kwargs)
        finally:
            self._in_backward = False
        with self.paused():
            self._side.after_backward()
            self._note_gradients("gradient")
        self._diary.phase = "after a backward"

    def _note_part(self, tensors: Any) -> None:
        rank = self._side.rank
        written = self._side.before_backward()
        losses = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        seen = self._recorder.take()
        loss = sum(each.detach().double().sum().item() for each in losses)
        part = Part(
            self._step + 1,
            rank,
            loss,
            self._batch or " ".join(self._inputs),
            tuple(output for output, _ in seen),
            written,
            self._num_backwards,
        )
        self._diary.run.parts.append(part)
        self._tensors |= {f"output/{rank}/{output.name}": sample for output, sample in seen}
        self._recorder.running, self._inputs = [], []
        self._num_backwards += 1

    # Step

    def _before_step(self, optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
        self._side.before_step(optimizer)
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
            is_enough = self._is_script and self._num_unseen >= self._num_steps
            if is_enough and not self._side.models.noted:
                self.check()
            return
        with self.paused():
            if self._is_script:
                self._note_gradients("final-gradient")
            for root in self._side.models.roots:
                buffers = self._side.buffers(root)
                self._tensors |= {key: buffer.clone() for key, buffer in buffers.items()}
        self._diary.phase = "optimizer step"

    def _note_gradients(self, kind: str) -> None:
        """Note gradients; those of an earlier backward of this step are in them."""
        if kind not in self._side.gradient_kinds:
            return
        self._diary.phase = "gathering gradients"
        for root in self._side.models.roots:
            gradients = keyed(kind, self._side.gradients(root))
            self._tensors |= {key: gradient.clone() for key, gradient in gradients.items()}

    def _after_step(self, *_: Any) -> None:
        if not self._in_step or self._in_backward:
            return
        self._in_step = False
        with self.paused():
            self._diary.phase = "gathering parameters"
            for root in self._side.models.roots:
                self._tensors |= keyed("parameter", self._side.parameters(root))
            self._end_step()

    def _end_step(self) -> None:
        tensors = {key: each.detach().cpu().clone() for key, each in self._tensors.items()}
        self._diary.write_tensors(f"step-{self._step + 1}", tensors)
        self._side.after_step(self._step + 1)
        run = self._diary.run
        run.seconds.append(self._meter.seconds)
        run.peak_nbytes = self._meter.peak_nbytes
        self._tensors, self._num_backwards, self._meter.seconds = {}, 0, 0.0
        self._recorder.begin_step()
        self._step += 1
        self._diary.phase = "after the optimizer step"
        if self._is_script:
            self._report.note(f"{self._side.label}: step {self._step} of {self._num_steps}")
        else:
            losses = [part.loss for part in run.parts[-len(self._side.parts) :]]
            self._report.step(self._step, {"loss": f"{sum(losses) / len(losses):.4f}"})
        if self._step == self._num_steps:
            self._end()

    def _end_if_over(self) -> None:
        """End a script that has caught what ends it, and goes on."""
        if self.is_over:
            raise EnoughError

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the block's time and memory out."""
        self._clock.close()
        try:
            yield
        finally:
            if not self.is_over:
                self._clock.enter_context(self._meter.running())


class Seen(NamedTuple):
    """An output, and a sample of its values: always the same places of tensors of one size.

    Of each tensor the sample ends with the root of its mean square, in which every value has a part.
    """

    output: Output
    sample: torch.Tensor


class OutputRecorder:
    """Notes what modules return while it is on, in the order in which they end.

    paths: of the modules that it knows, by their ids. Outputs of others are passed over.
    running: the modules that run now, outermost first, with the state of random generators before those that it notes.
    """

    def __init__(self, device: torch.device) -> None:
        self.paths: dict[int, str] = {}
        self.is_on = False
        self._kinds: dict[int, str] = {}
        self._device = device
        self._seen: list[Seen] = []
        self._calls: dict[str, int] = {}
        self.running: list[tuple[nn.Module, list[torch.Tensor] | None]] = []

    def know(self, paths: Mapping[nn.Module, str]) -> None:
        """Record modules from now on, under these paths."""
        for module, path in paths.items():
            self.paths[id(module)] = path
            self._kinds[id(module)] = type(module).__name__

    def begin_step(self) -> None:
        """Forget what was recorded, and count calls from 0."""
        self._seen, self._calls, self.running = [], {}, []

    def take(self) -> list[Seen]:
        """Return what was recorded since the last call."""
        seen, self._seen = self._seen, []
        return seen

    def before(self, module: nn.Module, _: Any) -> None:
        """Take part in a module's forward before it; a forward pre-hook."""
        is_noted = self.is_on and id(module) in self.paths
        self.running.append((module, self._random_state() if is_noted else None))

    def after(self, module: nn.Module, _: Any, output: Any) -> None:
        """Take part in the forward of a module that runs after it; a forward hook."""
        begun = None
        while begun is not module:  # a forward that has raised is still there
            begun, before = self.running.pop()
        if before is None:
            return
        path = self.paths[id(module)]
        call = self._calls.get(path, 0)
        self._calls[path] = call + 1
        tensors = [local_of(tensor) for tensor in tensors_in(output) if tensor.is_floating_point()]
        if not tensors:
            return
        has_drawn = not all(map(torch.equal, before, self._random_state()))
        is_random = has_drawn or any(isinstance(v, torch.Generator) for v in vars(module).values())
        self._seen.append(
            Seen(
                Output(
                    path=path,
                    call=call,
                    kind=self._kinds[id(module)],
                    dtype=str(tensors[0].dtype),
                    shape=tuple(tensors[0].shape),
                    is_random=is_random,
                ),
                torch.cat([sample_with_norm(tensor) for tensor in tensors]),
            )
        )

    def _random_state(self) -> list[torch.Tensor]:
        states, device = [torch.get_rng_state()], self._device
        if device.type != "cpu":
            states.append(torch.get_device_module(device).get_rng_state(device))
        return states


def sample_with_norm(tensor: torch.Tensor) -> torch.Tensor:
    """Return some of a tensor's values, always the same, and the root of the mean of all their squares."""
    norm = torch.linalg.vector_norm(tensor.reshape(-1), dtype=torch.float64)
    mean = norm / max(1, tensor.numel()) ** 0.5
    return torch.cat([sample_of(tensor, SAMPLE_NUMEL), mean.reshape(1).cpu()])


class Meter:
    """Time and memory of what runs inside `running`: the computing, and not the recording around it.

    peak_nbytes: above what was held when it was made. On a CPU the process's, of which only Linux tells.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._base = self._held("VmRSS", torch.accelerator.memory_allocated)
        self.seconds = 0.0
        self.peak_nbytes: int | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Add the block's time to `seconds`, and raise `peak_nbytes` if it held more."""
        if self._device is not None:
            torch.accelerator.reset_peak_memory_stats(self._device)
        else:
            # Where it is refused, the peak since the start counts.
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
        began = time.perf_counter()
        yield
        if self._device is not None:
            torch.accelerator.synchronize()
        self.seconds += time.perf_counter() - began
        peak = self._held("VmHWM", torch.accelerator.max_memory_allocated)
        if peak is not None and self._base is not None:
            self.peak_nbytes = max(peak - self._base, self.peak_nbytes or 0)

    def _held(self, field: str, of_device: Callable[[torch.device], int]) -> int | None:
        return of_process("status", field) if self._device is None else of_device(self._device)


def of_process(file: str, field: str) -> int | None:
    """Return a size of this process, in bytes, from a file of Linux's /proc/self; None where it does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self", file).read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return None
