"""The two sides of `fullshard compare`: an unchanged script on fullshard, and on PyTorch's own engine.

Each is recorded once, and timed several times with nothing recorded: then only steps of optimizers are seen.
"""

import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fullshard
from fullshard.compare.values import local_of
from fullshard.tools.progress import Reporter
from fullshard.tools.verify.models import Models, Root
from fullshard.tools.verify.options import VerifyOptions
from fullshard.tools.verify.record import keyed, rank_folder, whole_folder
from fullshard.tools.verify.sides import Side, Tensors, whole_gradients
from fullshard.tools.verify.values import fingerprints
from fullshard.tools.verify.watching import (
    NothingToCompareError,
    Watching,
    of_process,
    sample_with_norm,
)

ENGINES = ("torch", "fullshard")
WARM_UP = 4  # steps that set things up: memory of gradients, the optimizer's state, a compiler
_MEMORY_STEPS = 2  # the last of these
_LOOK_S = 0.004
_OWN = ("smaps_rollup", "Pss")  # with the process's part of what it shares with others
_SUMMON = "summon_full_params"
_SHARDED = ("FSDPModule", "FullyShardedDataParallel", "ReplicateModule")  # of either engine


@dataclasses.dataclass(frozen=True)
class CompareOptions(VerifyOptions):
    """A script, or a module, to run under both engines. rounds: how often each is timed."""

    MAX_RANKS = 1024
    rounds: int = 3

    @property
    def script(self) -> str:
        return self.model

    @property
    def words(self) -> str:
        """What starts it, as python would be given it."""
        return " ".join((*(["-m"] if self.is_module else []), self.model, *self.arguments))


class Run(NamedTuple):
    """One run of the script: on which engine, and in which round it is timed; 0 is recorded."""

    engine: str
    round: int = 0

    @property
    def label(self) -> str:
        return f"{self.engine}-{self.round}" if self.round else self.engine

    def folder(self, records: Path, rank: int) -> Path:
        """Return where a rank writes: recorded runs are a verification's two sides."""
        if self.round:
            return records / f"{self.label}-{rank}"
        of_side = rank_folder if self.engine == "fullshard" else whole_folder
        return of_side(records, rank)


class OnEngine(Side):
    """An unchanged script on one engine. Each rank records its own shards, which are cut alike on both.

    Of a gradient it keeps a fingerprint of all bits, and a sample that says how far two of them are apart.
    """

    gradient_kinds = ("final-gradient",)

    def __init__(self, options: CompareOptions, rank: int, records: Path, run: Run) -> None:
        super().__init__(options, rank, records, run.folder(records, rank))
        self.label = run.label
        self.is_compiled = bool(run.round)
        self.models = _SeenModels()
        self._engine = run.engine
        self._stepping: set[int] = set()  # the ids of the parameters of the optimizer that steps
        self._bits: dict[str, str] = {}  # of this step's gradients

    def install(self) -> None:
        """Have either engine's modules imported now, so that no side's memory counts them."""
        super().install()
        if self._engine == "torch":
            fullshard.uninstall()

    def start(self, root: Root) -> None:
        named = root.parameters().items()
        self._note_start(root, {name: local_of(parameter) for name, parameter in named})

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().before_step(optimizer)
        self._stepping = {id(p) for group in optimizer.param_groups for p in group["params"]}

    def gradients(self, root: Root) -> Tensors:
        """Return samples of this rank's gradients, and note their bits. Collective.

        What is wrapped is gathered if the optimizer that steps has its parameters: gathering writes to these, and
        another model may be between its forward and its backward.
        """
        wrapped = _wrapped(root)
        gathered = {id(p) for each in wrapped for p in each.module.parameters()}
        named = {
            name: local_of(parameter.grad)
            for name, parameter in root.parameters().items()
            if id(parameter) not in gathered and parameter.grad is not None
        }
        for each in wrapped:
            if not self._stepping.isdisjoint(map(id, each.module.parameters())):
                named |= whole_gradients(each, gather=_summoned)  # flat ones may be cut elsewhere
        labelled = keyed(str(self.rank), named)
        self._bits |= fingerprints(labelled.items())
        return {label: sample_with_norm(grad) for label, grad in labelled.items()}

    def parameters(self, root: Root) -> Tensors:
        """Return nothing: the next gradients depend on them."""
        return {}

    def buffers(self, root: Root) -> Tensors:
        return {}

    def after_step(self, step: int) -> None:
        self.diary.run.bits.append(self._bits)
        self._bits = {}

    def _values(self) -> dict[str, str]:
        return {}


def _wrapped(root: Root) -> list[Root]:
    """Return the outermost wrappers of FSDP1 in a model, each as a model."""
    found: list[Root] = []
    covered: set[nn.Module] = set()
    for path, module in root.module.named_modules():
        if hasattr(type(module), _SUMMON) and module not in covered:
            covered |= set(module.modules())
            name = root.name(path)
            found.append(Root(module, f"{name}." if name else ""))
    return found


def _summoned(root: Root) -> Tensors:
    """Return the whole parameters of a wrapper; on rank 0 alone. Collective."""
    on_cpu = next(root.module.parameters()).device.type == "cpu"
    whole = getattr(type(root.module), _SUMMON)
    with whole(root.module, writeback=False, rank0_only=True, offload_to_cpu=not on_cpu):
        if dist.get_rank():
            return {}
        return {name: each.detach().clone() for name, each in root.parameters().items()}


class _SeenModels(Models):
    """Models found by the classes that either engine gives their modules, at the first call."""

    def new_root(self, called: nn.Module) -> Root | None:
        if called not in self._covered:
            self.noted += [
                each
                for each in called.modules()
                if each not in self.noted
                and any(
                    kind.__name__ in _SHARDED
                    and kind.__module__.startswith(("torch.distributed", "fullshard"))
                    for kind in type(each).__mro__
                )
            ]
        return super().new_root(called)


class StepClock(Watching):
    """Times the steps of the first optimizer that steps, after some to warm up; memory of a process is looked at in these."""

    def __init__(self, side: Side, report: Reporter, on_over: Callable[[], object]) -> None:
        super().__init__(side, report, on_over)
        self._device = None if side.options.device == "cpu" else side.options.device
        self._optimizer: torch.optim.Optimizer | None = None
        self._num_steps = 0
        self._moments: list[Any] = []  # of the clock, or events of the device
        self._held = of_process(*_OWN)
        self._peak: int | None = None
        self._has_looked = threading.Event()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        handle = register_optimizer_step_post_hook(self._after_step)
        try:
            yield
        finally:
            handle.remove()
            self._has_looked.set()

    def check(self) -> None:
        """Note what there is of a script that has ended before its last step to be timed."""
        if len(self._moments) < 2:
            raise NothingToCompareError(
                f"the script ended after {self._num_steps} optimizer steps, and times need {WARM_UP + 1} or more: the "
                f"first {WARM_UP} set things up"
            )
        self._note()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._optimizer = self._optimizer or optimizer
        if optimizer is not self._optimizer or self.is_over:
            return
        self._num_steps += 1
        timed = self._num_steps - WARM_UP
        if timed == -_MEMORY_STEPS:
            if self._device:
                torch.accelerator.reset_peak_memory_stats()
            elif self._look_once():  # steps may be over before a thread looks
                threading.Thread(target=self._look, daemon=True).start()
        if timed >= 0:
            self._has_looked.set()
            moment = torch.Event(self._device, enable_timing=True) if self._device else None
            if moment is not None:
                moment.record()
            self._moments.append(moment or time.perf_counter())
        if timed == self._side.options.steps:
            self._note()
            self._end()

    def _note(self) -> None:
        if self._device:
            torch.accelerator.synchronize()
            self._peak = torch.accelerator.max_memory_allocated()
        run = self._side.diary.run
        run.seconds = [
            float(start.elapsed_time(end) / 1e3 if self._device else end - start)
            for start, end in itertools.pairwise(self._moments)
        ]
        run.peak_nbytes = self._peak
        self._side.diary.write()

    def _look(self) -> None:
        """Look at this process's memory again and again: it is highest somewhere within a step."""
        while self._look_once() and not self._has_looked.wait(_LOOK_S):
            pass

    def _look_once(self) -> bool:
        now = of_process(*_OWN)
        if now is None or self._held is None:
            return False
        self._peak = max(self._peak or 0, now - self._held)
        return True
