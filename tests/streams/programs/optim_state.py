"""Programs whose optimizer state comes and goes (`stream_state`)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

import fullshard
from tests.streams.lab import Lab
from tests.streams.programs.common import BF16, problem_of, program, shard, train, wrap
from tests.training import local

HOST = fullshard.PlacementPolicy(optimizer="host")


def _adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, lr=1e-3)


def _streamed(
    lab: Lab,
    name: str,
    *,
    make: Callable[[Any], Optimizer] = _adamw,
    policy: fullshard.PlacementPolicy = HOST,
    num_microbatches: int = 1,
    between: Callable[[Any], Any] = lambda optimizer: None,
    max_norm: float | None = None,
    times_data: int = 1,
    wraps: bool = False,
    **options: Any,
) -> None:
    problem = problem_of(name)
    inputs, targets = (
        each.repeat(times_data, *[1] * (each.dim() - 1))
        for each in (problem.inputs, problem.targets)
    )
    problem = problem._replace(inputs=inputs, targets=targets)
    model = (wrap if wraps else shard)(problem, **options)
    optimizer = fullshard.stream_state(make(model.parameters()), policy)

    def before(micro: int) -> None:
        if not wraps:
            model.set_requires_gradient_sync(micro == 0)

    def after_backward() -> None:
        between(optimizer)
        if max_norm is not None:
            fullshard.clip_grad_norm_(model.parameters(), max_norm)

    train(
        lab,
        problem,
        model,
        num_microbatches=num_microbatches,
        before=before,
        after_backward=after_backward,
        optimizer=optimizer,
    )


for _name, _options in {
    "state-on-host": {},
    "state-on-host-momentum": {"make": partial(SGD, lr=1e-3, momentum=0.9)},
    "state-on-host-bf16": {"mp_policy": BF16},
    "state-on-host-hsdp": {"mesh": (2, 2)},
    "state-on-host-accumulate": {"num_microbatches": 3},
    "state-on-host-clip": {"max_norm": 0.1},
    # Backward frees so many activations that all states come early.
    "state-on-host-early": {"times_data": 512},
    "state-on-host-early-accumulate": {"times_data": 512, "num_microbatches": 2},
    "state-on-host-pieces": {"wraps": True, "use_orig_params": True},
    "state-on-host-flat": {"wraps": True, "use_orig_params": False},
}.items():
    program(_name)(partial(_streamed, **_options))


def _tensors(optimizer: Any) -> list[torch.Tensor]:
    found = (value for own in optimizer.state.values() for value in own.values())
    return [local(each) for each in found if isinstance(each, torch.Tensor) and each.dim()]


def _write(optimizer: Any) -> None:
    """Write to the state when some of it has come early."""
    for each in _tensors(optimizer):
        each.mul_(0.5)


def _load(optimizer: Any) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _read_after_steps(optimizer: Any) -> Any:
    optimizer.register_step_post_hook(
        lambda *_: [each.detach().clone() for each in _tensors(optimizer)]
    )
    return optimizer


@program("state-on-host-of-late-gradients", host_waits=None)
def _late_gradients(lab: Lab, name: str) -> None:
    """Let units get more state in the second step, when the rest of it is on the device."""
    steps = 0

    def without_some(optimizer: Any) -> None:
        nonlocal steps
        steps += 1
        if steps == 1:
            for parameter in optimizer.param_groups[0]["params"][::2]:
                parameter.grad = None

    _streamed(lab, name, between=without_some)


for _name, _options in {
    "read": {"make": lambda parameters: _read_after_steps(_adamw(parameters))},
    "written": {"between": _write, "times_data": 512},
    "loaded": {"between": _load, "times_data": 512},
}.items():
    program(f"state-on-host-{_name}", host_waits=None, may_stall="the program reads the state")(
        partial(_streamed, **_options)
    )


@program("state-on-disk", host_waits=None)
def _on_disk(lab: Lab, name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _streamed(lab, name, policy=fullshard.PlacementPolicy(optimizer="disk", folder=folder))
