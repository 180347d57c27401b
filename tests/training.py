"""Train a problem of `tests.models` in a stated way, and compare what came out.

A `Recipe` says how; a `Trace` is what happened on this rank. Two traces of one recipe on different
implementations must agree step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD, AdamW, Optimizer

from tests.api import Api
from tests.harness import mesh_of, rank, world_size
from tests.models import Problem, make_problem

STEPS = 10

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    # With the usual eps of 1e-8, AdamW turns the rounding of a gradient near zero into a full step.
    "adamw": lambda params: AdamW(params, lr=1e-2, eps=1e-5),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
}

# param_dtype, reduce_dtype
DTYPES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
    "bf16_reduce": (torch.bfloat16, None),
}


@dataclass(frozen=True)
class Recipe:
    """How to train: the problem, and every choice that `fully_shard` and its methods offer."""

    problem: str
    optimizer: str = "adamw"
    dtype: str = "fp32"
    mesh: tuple[int, ...] = ()
    reshard_after_forward: bool | int | None = None
    num_microbatches: int = 1
    sync_every_microbatch: bool = True

    def __str__(self) -> str:
        words = [self.problem, self.optimizer, self.dtype]
        words += ["x".join(map(str, self.mesh))] if self.mesh else []
        if self.reshard_after_forward is not None:
            words.append(f"reshard_{self.reshard_after_forward}")
        if self.num_microbatches > 1:
            often = "every" if self.sync_every_microbatch else "last"
            words.append(f"{self.num_microbatches}microbatches_sync_{often}")
        return "-".join(words)


@dataclass
class Trace:
    """What one rank saw: per step the loss and its part of each gradient, then the parameters."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train_sharded(api: Api, recipe: Recipe) -> Trace:
    """Train on this rank's part of the batch with an implementation of `fully_shard`."""
    problem = make_problem(recipe.problem)
    mesh = mesh_of(*(recipe.mesh or (world_size(),)))
    param_dtype, reduce_dtype = DTYPES[recipe.dtype]
    options = {
        "mesh": mesh,
        "reshard_after_forward": recipe.reshard_after_forward,
        "mp_policy": api.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    for unit in problem.units:
        api.fully_shard(unit, **options)
    api.fully_shard(problem.model, **options)
    return _train(problem, recipe, part=rank(), num_parts=world_size())


def train_alone(recipe: Recipe) -> Trace:
    """Train the unwrapped model on the whole batch; parameters and gradients are whole."""
    return _train(make_problem(recipe.problem), recipe, part=0, num_parts=1)


def _train(problem: Problem, recipe: Recipe, *, part: int, num_parts: int) -> Trace:
    model = problem.model
    optimizer = OPTIMIZERS[recipe.optimizer](model.parameters())
    trace = Trace()
    for step in range(STEPS):
        # Another order each step gives each rank other samples.
        inputs = problem.inputs.roll(5 * step, 0).chunk(num_parts)[part]
        targets = problem.targets.roll(5 * step, 0).chunk(num_parts)[part]
        trace.losses.append(0.0)
        num = recipe.num_microbatches
        for index, (x, y) in enumerate(zip(inputs.chunk(num), targets.chunk(num), strict=True)):
            if num_parts > 1 and not recipe.sync_every_microbatch:
                model.set_requires_gradient_sync(index == num - 1)
                model.set_is_last_backward(index == num - 1)
            loss = problem.loss(model(x), y) / num
            loss.backward()
            trace.losses[-1] += loss.item()
        trace.gradients.append(local_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    trace.parameters = full_parameters(model)
    return trace


def mean_over_ranks(values: list[float]) -> list[float]:
    """Average over the ranks, in float64."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / world_size()).tolist()


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, or all of a plain one."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy this rank's part of every gradient there is."""
    return {
        name: local(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gather every gradient there is."""
    return {
        name: full(parameter.grad).clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Gather every parameter."""
    return {name: full(parameter).detach().clone() for name, parameter in model.named_parameters()}


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Cut the part of a whole tensor that this rank must hold, as `torch.chunk` defines it.

    A (5, 3) tensor on `Shard(0)` of 4 ranks: rows 0-1, 2-3, 4, none.
    """
    if not isinstance(like, DTensor):
        return whole
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            chunks = whole.chunk(like.device_mesh.size(axis), placement.dim)
            number = like.device_mesh.get_local_rank(axis)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = chunks[number] if number < len(chunks) else empty
    return whole


def assert_equal(
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
) -> None:
    """Assert that two sets of named tensors agree: bit by bit unless tolerances are given."""
    assert list(actual) == list(expected)
    for name, value in actual.items():
        torch.testing.assert_close(
            value, expected[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def mean_square(outputs: Tensor) -> Tensor:
    """Return a loss whose mean over equal parts of a batch is that of the batch."""
    return outputs.float().square().mean()


def make_batch(*features: int, size: int = 12, seed: int = 7) -> Tensor:
    """Make the same random batch on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, *features, generator=generator)


def my_part(batch: Tensor) -> Tensor:
    """Cut this rank's part of a batch."""
    return batch.chunk(world_size())[rank()]


def gradients_alone(model: nn.Module, batch: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the unwrapped model on the whole batch, and clear them."""
    mean_square(model(batch)).backward()
    gradients = full_gradients(model)
    model.zero_grad()
    return gradients


def assert_gradients_are_parts_of(
    model: nn.Module,
    whole: Mapping[str, Tensor],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Assert that each gradient is this rank's part of the whole one, up to the order of sums."""
    like = dict(model.named_parameters())
    parts = {name: part_of(value, like[name]) for name, value in whole.items()}
    assert_equal(local_gradients(model), parts, rtol=rtol, atol=atol)


def assert_parameters_are_parts_of(model: nn.Module, whole: Mapping[str, Tensor]) -> None:
    """Assert that each parameter is exactly this rank's part of the whole one."""
    own = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    like = dict(model.named_parameters())
    assert_equal(own, {name: part_of(value, like[name]) for name, value in whole.items()})
