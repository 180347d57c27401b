"""Programs with `fully_shard`: its options, and the ways to go through a step."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.engine.checks import writes
from tests.models import Problem
from tests.streams.lab import Lab
from tests.streams.programs.common import (
    ALL_BF16,
    BF16,
    NUM_STEPS,
    OFFLOAD,
    UNPINNED,
    data_of,
    problem_of,
    program,
    shard,
    train,
)

# Options of fully_shard


def _sharded(lab: Lab, name: str, **options: Any) -> None:
    problem = problem_of(name)
    train(lab, problem, shard(problem, **options))


for _name, _options in {
    "plain": {},
    "keep-after-forward": {"reshard_after_forward": False},
    "reshard-over-two": {"reshard_after_forward": 2},
    "one-rank": {"mesh": (1,)},
    "replicas": {"mesh": (4, 1)},
    "hsdp": {"mesh": (2, 2)},
    "hsdp-bf16": {"mesh": (2, 2), "mp_policy": BF16},
    "hsdp-bf16-all": {"mesh": (2, 2), "mp_policy": ALL_BF16},
    "bf16": {"mp_policy": BF16},
    "bf16-all": {"mp_policy": ALL_BF16},
    "reshard-over-two-bf16": {"reshard_after_forward": 2, "mp_policy": BF16},
    "one-rank-bf16": {"mesh": (1,), "mp_policy": BF16},
}.items():
    program(_name)(partial(_sharded, **_options))
    if _name in ("plain", "hsdp", "reshard-over-two", "bf16"):
        program(f"{_name}-async", is_nccl=False)(partial(_sharded, **_options))

for _name, _options in {
    "offload": {"offload_policy": OFFLOAD},
    "offload-bf16": {"offload_policy": OFFLOAD, "mp_policy": BF16},
    "offload-hsdp": {"offload_policy": OFFLOAD, "mesh": (2, 2)},
    "offload-keep": {"offload_policy": OFFLOAD, "reshard_after_forward": False},
    "offload-one-rank": {"offload_policy": OFFLOAD, "mesh": (1,)},
}.items():
    program(_name, host_waits=1)(partial(_sharded, **_options))
program("offload-unpinned", host_waits=1, may_stall="its memory is not pinned, by choice")(
    partial(_sharded, offload_policy=UNPINNED)
)


# Accumulation, clipping, and other ways to go through a step


def _accumulated(
    lab: Lab,
    name: str,
    *,
    syncs: str,
    after: Callable[[Any], Any] = lambda model: None,
    **options: Any,
) -> None:
    problem = problem_of(name)
    model = shard(problem, **options)

    def before(micro: int) -> None:
        if syncs == "last":
            model.set_requires_gradient_sync(micro == 0)
        elif syncs == "all-reduce-last":
            model.set_requires_all_reduce(micro == 0)

    train(
        lab, problem, model, num_microbatches=3, before=before, after_backward=lambda: after(model)
    )


@program("kept-between-micro-batches")
def _kept_between(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    model.set_reshard_after_backward(False)
    train(lab, problem, model, num_microbatches=3)


def _clip(model: Any) -> None:
    fullshard.clip_grad_norm_(model.parameters(), 0.1)


program("accumulate")(partial(_accumulated, syncs="last"))
program("accumulate-each")(partial(_accumulated, syncs="each"))
program("accumulate-bf16")(partial(_accumulated, syncs="last", mp_policy=BF16))
program("accumulate-hsdp")(partial(_accumulated, syncs="all-reduce-last", mesh=(2, 2)))
program("accumulate-clip")(partial(_accumulated, syncs="last", after=_clip))
program("offload-accumulate", host_waits=1)(
    partial(_accumulated, syncs="last", offload_policy=OFFLOAD)
)


@program("offload-accumulate-each", host_waits=None)
def _offload_accumulate_each(lab: Lab, name: str) -> None:
    """The host adds to gradients of earlier micro-batches: it waits for each bucket's copy."""
    _accumulated(lab, name, syncs="each", offload_policy=OFFLOAD)


@program("clip")
def _clipped(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    train(lab, problem, model, after_backward=lambda: _clip(model))


@program("offload-clip", host_waits=1)
def _offload_clipped(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem, offload_policy=OFFLOAD)
    train(lab, problem, model, after_backward=lambda: _clip(model))


@program("several-inputs-held")
def _inputs_held(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    model.set_reduce_scatter_max_input_buffers(3)
    train(lab, problem, model)


@program("unused-parameters-reduced")
def _unused_reduced(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    model.set_reduce_scatter_unused_params(True)
    train(lab, problem, model)


@program("explicit-prefetch")
def _explicit_prefetch(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    units: list[Any] = problem.units
    model.set_modules_to_forward_prefetch(units)
    units[0].set_modules_to_forward_prefetch(units[1:])
    units[-1].set_modules_to_backward_prefetch(units[:-1])
    train(lab, problem, model)


@program("unshard-early")
def _unshard_early(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)

    def before(micro: int) -> None:
        handles = [unit.unshard(async_op=True) for unit in problem.units]  # type: ignore[operator]
        model.unshard()
        for handle in handles:
            handle.wait()

    train(lab, problem, model, before=before)


@program("unshard-and-read")
def _unshard_and_read(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)

    def read(micro: int) -> None:
        for module in (model, *problem.units):
            module.unshard()
            for parameter in module.parameters(recurse=module is not model):
                assert not isinstance(parameter, DTensor)
                parameter.detach().sum()

    train(lab, problem, model, before=read)


def _gathered(lab: Lab, name: str) -> None:
    """Read whole parameters one by one between steps, which gathers them on compute."""
    problem = problem_of(name)
    model = shard(problem)

    for _ in range(2):
        train(lab, problem, model, num_steps=1)
        for parameter in model.parameters():
            fullshard.gathered(parameter).detach().sum()


program("gathered")(_gathered)
program("gathered-async", is_nccl=False)(_gathered)


def _loaded(lab: Lab, name: str, **options: Any) -> None:
    """Load shards while they are being gathered: what was gathered is of no use."""
    problem = problem_of(name)
    model = shard(problem, **options)

    def load() -> None:
        for unit in (*problem.units, model):
            unit.unshard(async_op=True)  # type: ignore[operator]
        model.load_state_dict({key: value * 0.99 for key, value in model.state_dict().items()})

    train(lab, problem, model, after_backward=load)


program("load")(_loaded)
program("offload-load", host_waits=None)(partial(_loaded, offload_policy=OFFLOAD))


@program("unshard-and-leave")
def _unshard_and_leave(lab: Lab, name: str) -> None:
    """Gather early, write to shards, and gather again."""
    problem = problem_of(name)
    model = shard(problem)

    def write() -> None:
        model.unshard(async_op=True)
        model.reshard()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter._local_tensor.mul_(0.99)

    train(lab, problem, model, after_backward=write)


def _writes_in_forward(
    lab: Lab, name: str, *, from_step: int, leaves_no_trace: bool, may_be_skipped: bool = False
) -> None:
    """Write to the shards of later units while an earlier one computes."""
    problem = problem_of(name)
    model = shard(problem)
    model.set_reduce_scatter_unused_params(may_be_skipped)
    first, *later = problem.units
    step = 0

    def write(*_: Any) -> None:
        with torch.no_grad():
            for parameter in (p for unit in later for p in unit.parameters() if step >= from_step):
                local = parameter._local_tensor
                (local.data if leaves_no_trace else local).mul_(0.99)

    def count(_: int) -> None:
        nonlocal step
        step += 1

    first.register_forward_hook(write)
    train(lab, problem, model, before=count, num_steps=NUM_STEPS + 1)


program("writes-in-forward")(partial(_writes_in_forward, from_step=1, leaves_no_trace=True))
program("writes-in-forward-unwatched")(  # what ranks may skip is not watched
    partial(_writes_in_forward, from_step=1, leaves_no_trace=True, may_be_skipped=True)
)
program("writes-in-forward-later")(partial(_writes_in_forward, from_step=3, leaves_no_trace=False))


@program("optimizer-on-its-own-stream")
def _own_stream(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    stream, (inputs, targets) = lab.stream(), data_of(problem, lab)
    # As many passes are watched as usually: the second one reads what the optimizer wrote.
    with mock.patch.object(writes, "_WATCHED", frozenset({0, 1})):
        for _ in range(NUM_STEPS + 1):
            with lab.step():
                problem.loss(model(inputs), targets).backward()
                is_ready = lab.event()
                with stream:
                    lab.lanes.wait(is_ready)
                    optimizer.step()
                    model.set_post_optim_event(lab.event())


@program("evaluation-between")
def _evaluation(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    inputs, _ = data_of(problem, lab)

    def evaluate() -> None:
        with torch.no_grad():
            model(inputs)

    train(lab, problem, model, after_backward=evaluate)


@program("recomputation")
def _recomputation(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    for unit in problem.units:
        forward = unit.forward

        def recomputed(*args: Any, _forward: Any = forward) -> Any:
            # Saved tensors are looked at where the mode does not answer for their device.
            return checkpoint(_forward, *args, use_reentrant=False, determinism_check="none")

        unit.forward = recomputed  # type: ignore[method-assign]
    train(lab, problem, shard(problem))


@program("module-called-twice")
def _called_twice(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    inputs, targets = data_of(problem, lab)
    optimizer = SGD(model.parameters(), lr=1e-3)
    for _ in range(NUM_STEPS):
        with lab.step():
            loss = problem.loss(model(inputs), targets)
            (loss + problem.loss(model(inputs), targets)).backward()
            optimizer.step()
            optimizer.zero_grad()


@program("frozen-by-turns")
def _frozen_by_turns(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem, mesh=(2, 2))
    weights = [p for p in problem.units[0].parameters() if p.dim() > 1]

    def before(micro: int) -> None:
        model.set_requires_all_reduce(micro == 0)
        for weight in weights:
            weight.requires_grad_(micro != 1)

    train(lab, problem, model, num_microbatches=3, before=before)


@program("gradients-kept-by-the-user")
def _gradients_kept(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    kept: list[list[Tensor]] = []

    def keep() -> None:
        kept.append([p.grad * 1.0 for p in model.parameters() if p.grad is not None])
        kept.append([p.grad for p in model.parameters() if p.grad is not None])
        del kept[:-3]

    train(lab, problem, model, after_backward=keep)


# Hooks


@program("all-reduce-hook")
def _hook(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model = shard(problem)
    for unit in (*problem.units, model):
        unit.set_all_reduce_hook(_change)  # type: ignore[operator]
    train(lab, problem, model)


def _hook_on_a_stream(lab: Lab, name: str) -> None:
    problem = problem_of(name)
    model, stream = shard(problem), lab.stream()
    for unit in (*problem.units, model):
        unit.set_all_reduce_hook(_change, stream=stream)  # type: ignore[operator]
    train(lab, problem, model)


program("all-reduce-hook-on-a-stream")(_hook_on_a_stream)


def _change(total: Tensor) -> None:
    total.mul_(0.5).add_(torch.ones_like(total))


def _with_gradient_hooks(
    lab: Lab, name: str, *, before: bool = True, after: bool = True, **options: Any
) -> None:
    """Change gradients by hooks, before they are set, after that, or both."""
    problem = problem_of(name)
    model = shard(problem, **options)
    for parameter in filter(operator.attrgetter("requires_grad"), model.parameters()):
        if before:
            parameter.register_hook(lambda grad: grad * 0.5)
        if after:
            parameter.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(2.0))
    train(lab, problem, model)


program("hooks-on-gradients")(_with_gradient_hooks)
# The host runs hooks on gradients in its own memory: it waits for each.
program("offload-hooks-before", host_waits=None)(
    partial(_with_gradient_hooks, after=False, offload_policy=OFFLOAD)
)
program("offload-hooks-after", host_waits=None)(
    partial(_with_gradient_hooks, before=False, offload_policy=OFFLOAD)
)


class _Late(nn.Module):
    """A layer that uses its weight by a view which is older than the forward: its gradient comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.bias = nn.Parameter(torch.randn(16))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        self.kept = self.kept or [self.weight.t()]
        return x @ self.kept[0] + self.bias


@program("reduced-twice-hsdp")
def _reduced_twice(lab: Lab, name: str) -> None:
    """A hook uses each gradient and drops it, so that the next reduction takes its memory."""
    late = _Late()
    net = nn.Sequential(nn.Linear(16, 16), late)
    problem = Problem(net, torch.randn(12, 16), torch.randn(12, 16), [late])
    model = shard(problem, mesh=(2, 2))

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.square_()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(take)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*got no gradient")  # in the first reduction
        train(lab, problem, model)


@program("whole-after-a-step")
def _whole_after_a_step(lab: Lab, name: str) -> None:
    """Gather what the optimizer has just been told to write."""
    problem = problem_of(name)
    model = shard(problem)

    def before(_: int) -> None:
        with fullshard.full_parameters(model, writeback=False):
            pass

    train(lab, problem, model, before=before)


@program("whole-beside-unshard")
def _whole_beside_unshard(lab: Lab, name: str) -> None:
    """A unit is gathered whole while the gather of another one of its size may still run."""
    pair = problem_of("two_dtypes")
    model = shard(pair)
    train(lab, pair, model, num_steps=1)
    with lab.step():
        model[1].unshard(async_op=True)
        with fullshard.full_parameters(model[0], writeback=False):
            pass
