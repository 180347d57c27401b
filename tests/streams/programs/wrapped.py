"""Programs with `FullyShardedDataParallel`: flat parameters, and pieces of them."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

import fullshard
from fullshard import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from tests.streams.lab import Lab
from tests.streams.programs.common import NUM_STEPS, data_of, problem_of, program, train, wrap

BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
ONE_BY_ONE = False  # optimizers of torch 2.11 refuse gradients of another dtype otherwise
OFFLOAD = CPUOffload(offload_params=True)


def _wrapped(
    lab: Lab, name: str, *, clips: bool = False, foreach: bool | None = None, **options: Any
) -> None:
    problem = problem_of(name)
    model = wrap(problem, **options)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=foreach)

    def clip() -> None:
        if clips:
            model.clip_grad_norm_(0.1)

    train(lab, problem, model, after_backward=clip, optimizer=optimizer)


def _not_sharded(lab: Lab, name: str, **options: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the strategy is deprecated
        _wrapped(lab, name, sharding_strategy=ShardingStrategy.NO_SHARD, **options)


def _without_sync(lab: Lab, name: str, **options: Any) -> None:
    """Accumulate by `no_sync`: sums are shown as gradients, of which there may be reduced ones."""
    problem = problem_of(name)
    model = wrap(problem, **options)
    optimizer = SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = data_of(problem, lab)
    for _ in range(NUM_STEPS):
        with lab.step():
            problem.loss(model(inputs), targets).backward()
            with model.no_sync():
                problem.loss(model(inputs), targets).backward()
            problem.loss(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()


def _by_hook(lab: Lab, name: str, **options: Any) -> None:
    """Reduce by the user's hook."""
    problem = problem_of(name)
    model = wrap(problem, **options)

    def reduce(state: object, grads: Tensor, shard: Tensor) -> None:
        shard.copy_(grads[: shard.numel()] / 4)

    model.register_comm_hook(None, reduce)
    train(lab, problem, model)


for _style, _originals in (("flat", False), ("pieces", True)):
    _same = partial(_wrapped, use_orig_params=_originals)
    program(f"{_style}")(_same)
    program(f"{_style}-async", is_nccl=False)(_same)
    program(f"{_style}-clip")(partial(_same, clips=True))
    program(f"{_style}-bf16")(partial(_same, mixed_precision=BF16))
    program(f"{_style}-low-precision-gradients")(
        partial(_same, mixed_precision=LOW, foreach=ONE_BY_ONE)
    )
    program(f"{_style}-prefetch")(partial(_same, forward_prefetch=True))
    program(f"{_style}-prefetch-post")(
        partial(_same, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    )
    program(f"{_style}-grad-op")(partial(_same, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))
    program(f"{_style}-no-shard")(partial(_not_sharded, use_orig_params=_originals))
    program(f"{_style}-offload", host_waits=1)(partial(_same, cpu_offload=OFFLOAD))
    program(
        f"{_style}-offload-low-precision-gradients",
        host_waits=None,
        may_stall="low-precision gradients go to the host by a copy that waits",
    )(partial(_same, cpu_offload=OFFLOAD, mixed_precision=LOW, foreach=ONE_BY_ONE))
    program(f"{_style}-no-sync")(partial(_without_sync, use_orig_params=_originals))
    program(f"{_style}-hook")(partial(_by_hook, use_orig_params=_originals))


def _whole_between(lab: Lab, name: str, **options: Any) -> None:
    """Look at whole parameters and gradients between steps, which gathers them on compute."""
    problem = problem_of(name)
    model = wrap(problem, **options)
    inputs, targets = data_of(problem, lab)
    whole = fullshard.FullyShardedDataParallel.summon_full_params
    for _ in range(2):
        train(lab, problem, model, num_steps=1)
        problem.loss(model(inputs), targets).backward()
        with whole(model, with_grads=options["use_orig_params"]):
            for parameter in model.parameters():
                parameter.data.mul_(0.99)
                if parameter.grad is not None:
                    parameter.grad.mul_(0.99)
        model.zero_grad()


def _unsharded_first(lab: Lab, name: str, **options: Any) -> None:
    """Let the program gather every instance before it is called."""
    problem = problem_of(name)
    model = wrap(problem, **options)

    def before(micro: int) -> None:
        for instance in fullshard.FullyShardedDataParallel.fsdp_modules(model):
            instance._unshard()
        for module in problem.model.modules():
            if isinstance(module, nn.Linear):
                assert module.weight.shape == (module.out_features, module.in_features)
                module.weight.detach().sum()

    train(lab, problem, model, before=before)


for _style, _originals in (("flat", False), ("pieces", True)):
    program(f"{_style}-whole-between")(partial(_whole_between, use_orig_params=_originals))
    program(f"{_style}-whole-between-async", is_nccl=False)(
        partial(_whole_between, use_orig_params=_originals)
    )
    program(f"{_style}-unsharded-first")(partial(_unsharded_first, use_orig_params=_originals))
