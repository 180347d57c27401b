"""Programs that do not go straight through a step: exceptions, several roots, pipelines."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import fullshard
from tests.streams.lab import Lab
from tests.streams.programs.common import (
    NUM_STEPS,
    OFFLOAD,
    data_of,
    problem_of,
    program,
    shard,
    train,
)


class Interruption(Exception):  # noqa: N818  (what programs raise, and catch themselves)
    """Raised in the middle of a step."""


class _Raises(torch.autograd.Function):
    """An identity whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Interruption


def _interrupted(lab: Lab, name: str, *, in_backward: bool, **options: Any) -> None:
    """Let an exception end every second pass in its middle, and go on training."""
    problem = problem_of(name)
    model = shard(problem, **options)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = data_of(problem, lab)
    # When it comes, later units have been gathered early, or earlier ones are being reduced.
    middle = problem.units[0]
    for _ in range(NUM_STEPS):
        with lab.step():
            handle = middle.register_forward_hook(_raising_backward if in_backward else _raising)
            with contextlib.suppress(Interruption):
                problem.loss(model(inputs), targets).backward()
            handle.remove()
        with lab.step():
            problem.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


@program("exception-in-a-hook")
def _interrupted_by_a_hook(lab: Lab, name: str) -> None:
    _interrupted_in_reduction(lab, name)


@program("exception-in-a-hook-async", is_nccl=False)
def _interrupted_by_a_hook_async(lab: Lab, name: str) -> None:
    _interrupted_in_reduction(lab, name)


@program("exception-in-a-hook-hsdp")
def _interrupted_by_a_hook_of_replicas(lab: Lab, name: str) -> None:
    _interrupted_in_reduction(lab, name, mesh=(2, 2))


def _interrupted_in_reduction(lab: Lab, name: str, **options: Any) -> None:
    """Let the user's hook raise while a reduction of several buckets is being finished."""
    problem = problem_of(name)
    model = shard(problem, **options)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = data_of(problem, lab)
    unit: Any = problem.units[0] if problem.units else model
    for _ in range(NUM_STEPS):
        with lab.step():
            unit.set_all_reduce_hook(_raising)
            with contextlib.suppress(Interruption):
                problem.loss(model(inputs), targets).backward()
        with lab.step():
            unit.set_all_reduce_hook(lambda total: None)
            problem.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def _raising(*_: Any) -> None:
    raise Interruption


def _raising_backward(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return _Raises.apply(output)


for _where in ("forward", "backward"):
    _in_backward = _where == "backward"
    program(f"exception-in-{_where}")(partial(_interrupted, in_backward=_in_backward))
    program(f"exception-in-{_where}-async", is_nccl=False)(
        partial(_interrupted, in_backward=_in_backward)
    )
    program(f"exception-in-{_where}-hsdp")(
        partial(_interrupted, in_backward=_in_backward, mesh=(2, 2))
    )
    program(f"exception-in-{_where}-offload", host_waits=None)(
        partial(_interrupted, in_backward=_in_backward, offload_policy=OFFLOAD)
    )


def _two_roots(lab: Lab, name: str, *, share: bool) -> None:
    """Train two models by turns, one on the other's output."""
    problems = [problem_of(name), problem_of(name)]
    models = [shard(problem) for problem in problems]
    if share:
        fullshard.share_comm_ctx(models)
    optimizers = [SGD(model.parameters(), lr=1e-3) for model in models]
    inputs, targets = data_of(problems[0], lab)
    for _ in range(NUM_STEPS):
        with lab.step():
            first = models[0](inputs)
            loss = problems[1].loss(models[1](inputs) * first.detach(), targets)
            (loss + problems[0].loss(first, targets)).backward()
            problems[0].loss(models[1](inputs) + models[0](inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


program("two-roots")(partial(_two_roots, share=False))
program("two-roots-shared")(partial(_two_roots, share=True))


class _Stage:
    """A stage of a pipeline as schedules drive it: no reduction before the last micro-batch."""

    def __init__(self, problem: Any, *, reshards: bool, **options: Any) -> None:
        self.problem = problem
        self.model = shard(problem, **options)
        self.model.set_reshard_after_backward(reshards)
        if not reshards:
            self.model.set_reshard_after_forward(False)

    def begin_backward(self, *, is_last: bool) -> None:
        """Say what schedules say before a backward."""
        self.model.set_is_last_backward(is_last)
        self.model.set_requires_gradient_sync(is_last)
        if is_last:
            self.model.set_reshard_after_backward(True)


def _pipeline(lab: Lab, name: str, *, reshards: bool, num_ahead: int, **options: Any) -> None:
    """Run forwards of micro-batches ahead of their backwards, as 1F1B (1) and GPipe (3) do."""
    stage = _Stage(problem_of(name), reshards=reshards, **options)
    problem, model = stage.problem, stage.model
    optimizer = SGD(model.parameters(), lr=1e-3)
    inputs, targets = data_of(problem, lab)
    num_microbatches = 3
    for _ in range(NUM_STEPS):
        with lab.step():
            model.set_reshard_after_backward(reshards)
            losses: list[Tensor] = []
            done = 0
            for micro in range(num_microbatches + num_ahead):
                if micro < num_microbatches:
                    losses.append(problem.loss(model(inputs), targets))
                if micro >= num_ahead:
                    stage.begin_backward(is_last=done == num_microbatches - 1)
                    losses.pop(0).backward()
                    done += 1
            optimizer.step()
            optimizer.zero_grad()


program("pipeline-gpipe")(partial(_pipeline, reshards=False, num_ahead=3))
program("pipeline-1f1b")(partial(_pipeline, reshards=False, num_ahead=1))
program("pipeline-1f1b-resharding")(partial(_pipeline, reshards=True, num_ahead=1))
program("pipeline-hsdp")(partial(_pipeline, reshards=False, num_ahead=2, mesh=(2, 2)))


def _finalized(lab: Lab, name: str, *, async_op: bool, **options: Any) -> None:
    """Run backwards that reduce nothing, and let the program end them all at once."""
    problem = problem_of(name)
    model = shard(problem, **options)
    model.set_manual_backward_finalization(True)

    def finalize() -> None:
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=async_op)
        if handle is not None:
            handle.wait()
        model.set_requires_gradient_sync(False)

    model.set_requires_gradient_sync(False)
    train(lab, problem, model, num_microbatches=2, after_backward=finalize)


if hasattr(fullshard.FSDPModule, "finalize_backward"):
    program("finalized")(partial(_finalized, async_op=False))
    program("finalized-later")(partial(_finalized, async_op=True))
    program("finalized-async", is_nccl=False)(partial(_finalized, async_op=True))
    program("finalized-hsdp")(partial(_finalized, async_op=True, mesh=(2, 2)))
    program("finalized-offload", host_waits=1)(
        partial(_finalized, async_op=True, offload_policy=OFFLOAD)
    )
