"""Five steps under every combination of options against one process that trains the whole batch.

The reference, `_train_alone`, has no engine: it computes each rank's micro-batches in turn on casts
of its float32 parameters, adds the gradients in the order that `docs/design.md` states, and divides
by the number of ranks. So ours has to equal it bit by bit, and ranks that all equal it agree with
each other. That the reference is itself plain training is a test of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.func import functional_call
from torch.optim import SGD

from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.models import Problem, make_problem
from tests.selection import repeats
from tests.training import full_gradients, full_parameters, local, local_gradients, part_of

STEPS = 5

# param_dtype, reduce_dtype
DTYPES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float32),  # with a GradScaler
}
# The first is quick and has what decides how a unit is laid out; the others add kernels, a tied
# parameter, experts without tokens, and micro-batches of unequal size.
MLP, *OTHERS = ("normed_mlp", "tied_transformer", "conv", "moe")


@dataclass(frozen=True)
class Cell:
    """One combination of options. A mesh of two axes is (replicate, shard)."""

    problem: str
    mesh: tuple[int, ...]
    reshard_after_forward: bool | int
    dtype: str
    num_microbatches: int

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh)) if len(self.mesh) > 1 else "flat"
        words = [self.problem, self.dtype, mesh, f"reshard_{self.reshard_after_forward}"]
        words += [f"{self.num_microbatches}microbatches"] if self.num_microbatches > 1 else []
        return "-".join(words)


@dataclass
class Reference:
    """What one process saw: per step each rank's loss, the unscaled gradients of the whole batch
    and the loss scale that follows; then the parameters."""

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def _cells(problems: list[str], *meshes: tuple[int, ...]) -> Any:
    """Parametrise a test with every combination that these meshes allow."""
    cells = [
        Cell(problem, mesh, reshard, dtype, num_microbatches)
        for problem in problems
        for mesh in meshes
        # Other group sizes mean True or False.
        for reshard in (True, False, *(n for n in range(2, mesh[-1]) if mesh[-1] % n == 0))
        for dtype in DTYPES
        for num_microbatches in (1, 2)
    ]
    return pytest.mark.parametrize("cell", cells, ids=str)


@pytest.mark.long  # beside two ranks, nothing is left to be wrong
@_cells([MLP], (1,))
@on_ranks(1)
def test_one_rank_trains_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@_cells([MLP], (2,), (2, 1))
@on_ranks(2)
def test_two_ranks_train_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@repeats(lambda s: s["cell"].num_microbatches == 1)
@_cells([MLP], (3,))
@on_ranks(3)
def test_three_ranks_train_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@_cells([MLP], (2, 2))
@on_ranks(4)
def test_four_ranks_on_two_axes_train_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@pytest.mark.long
@_cells([MLP], (4,))
@on_ranks(4)
def test_four_ranks_train_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@pytest.mark.long
@_cells(OTHERS, (1,))
@on_ranks(1)
def test_one_rank_trains_every_problem_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@pytest.mark.long
@_cells(OTHERS, (2,), (2, 1))
@on_ranks(2)
def test_two_ranks_train_every_problem_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@pytest.mark.long
@_cells(OTHERS, (3,))
@on_ranks(3)
def test_three_ranks_train_every_problem_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@pytest.mark.long
@_cells(OTHERS, (4,), (2, 2))
@on_ranks(4)
def test_four_ranks_train_every_problem_as_one_process(api: Api, cell: Cell) -> None:
    _assert_trains_as_one_process(api, cell)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mesh", [(1,), (2, 1), (3,), (2, 2)], ids=str)
def test_the_reference_is_plain_training(mesh: tuple[int, ...], dtype: str) -> None:
    reference = _train_alone(MLP, mesh, dtype, 2)
    problem = _make_problem(MLP)
    optimizer = _make_optimizer(problem.model)
    # Rounding to 8, 11 and 24 bits, carried on over five steps; in a mean, errors cancel.
    relative, absolute = {"bf16": (5e-3, 5e-3), "fp16": (5e-4, 5e-4), "fp32": (1e-6, 1e-6)}[dtype]
    for step in range(STEPS):
        [[(inputs, targets)]] = _parts(problem, step, 1, 1)
        loss = problem.loss(problem.model(inputs), targets)
        loss.backward()
        mean = sum(reference.losses[step]) / len(reference.losses[step])
        assert mean == pytest.approx(loss.item(), rel=relative), f"loss of step {step}"
        gradients, expected = reference.gradients[step], full_gradients(problem.model)
        if dtype == "fp16" and step == 0:  # the scale is too large
            assert not any(gradient.isfinite().all() for gradient in gradients.values())
        else:
            _assert_close(gradients, expected, absolute, f"gradients of step {step}")
            optimizer.step()
        optimizer.zero_grad()
    _assert_close(reference.parameters, full_parameters(problem.model), absolute, "parameters")
    scales = [2.0**8, 2.0**8, 2.0**9, 2.0**9, 2.0**10] if dtype == "fp16" else [1.0] * STEPS
    assert reference.scales == scales


@on_ranks(2, 3, 4)
def test_overflow_in_the_shard_of_one_rank_skips_the_step_on_every_rank(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    for mesh in [(world_size(),), (2, 2)][: 2 if world_size() == 4 else 1]:
        model = nn.Linear(3, 4, bias=False)
        before = model.weight.detach().clone()
        api.fully_shard(model, mesh=mesh_of(*mesh), mp_policy=policy)
        optimizer = SGD(model.parameters(), lr=0.5)
        scaler = GradScaler("cpu", init_scale=4.0)
        # On rank 0 alone, 4 * 60000 is above float16's largest number, in row 3 alone.
        for row3, scale in ((60000.0 if rank() == 0 else 1.0, 4.0), (1.0, 2.0)):
            assert scaler.get_scale() == scale, f"mesh {mesh}"
            weights = torch.tensor([1.0, 1.0, 1.0, row3])
            scaler.scale((model(torch.ones(1, 3)).float() * weights).sum()).backward()
            if scale == 4.0:
                rows = part_of(torch.arange(4.0).expand(3, 4).T, model.weight)
                gradient = local(model.weight.grad)
                assert torch.equal(gradient.isinf(), rows == 3.0), f"mesh {mesh}"
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            expected = before if scale == 4.0 else before - 0.5  # a mean of ones times 0.5
            own = {"weight": local(model.weight).detach()}
            _assert_close(own, {"weight": part_of(expected, model.weight)}, 0.0, f"mesh {mesh}")


def _assert_trains_as_one_process(api: Api, cell: Cell) -> None:
    alone = _train_alone(cell.problem, cell.mesh, cell.dtype, cell.num_microbatches)
    problem = _make_problem(cell.problem)
    model = _shard(api, cell, problem)
    optimizer, scaler = _make_optimizer(model), _make_scaler(cell.dtype)
    like = dict(model.named_parameters())
    tolerance = _tolerance(api, cell)
    where = f"{api.name}-{cell}-{world_size()}ranks, rank {rank()}"

    def assert_parts(actual: Mapping[str, Tensor], whole: Mapping[str, Tensor], what: str) -> None:
        parts = {name: part_of(value, like[name]) for name, value in whole.items()}
        _assert_close(actual, parts, tolerance, f"{where}, {what}")

    for step in range(STEPS):
        total = 0.0
        microbatches = _parts(problem, step, world_size(), cell.num_microbatches)[rank()]
        for index, (inputs, targets) in enumerate(microbatches):
            model.set_requires_gradient_sync(index == len(microbatches) - 1)
            loss = problem.loss(model(inputs), targets) / len(microbatches)
            scaler.scale(loss).backward()
            total += loss.item()
        expected = pytest.approx(alone.losses[step][rank()], rel=tolerance, abs=0.0)
        assert total == expected, f"{where}, loss of step {step}"
        scaler.unscale_(optimizer)
        assert_parts(local_gradients(model), alone.gradients[step], f"gradients of step {step}")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == alone.scales[step], f"{where}, loss scale after step {step}"
        optimizer.zero_grad()
    own = {name: local(parameter).detach() for name, parameter in model.named_parameters()}
    assert_parts(own, alone.parameters, "parameters")


def _tolerance(api: Api, cell: Cell) -> float:
    if api.is_torch and max(cell.mesh) > 2:
        # Gloo's ring adds in another order on each rank; 24 bits, five steps.
        return 1e-5
    # The same additions in the same order; two terms have one sum in any order.
    return 0.0


@functools.cache  # several cells compare with the same run
def _train_alone(name: str, mesh: tuple[int, ...], dtype: str, num_microbatches: int) -> Reference:
    problem = _make_problem(name)
    model = problem.model
    optimizer, scaler = _make_optimizer(model), _make_scaler(dtype)
    shard_size, num_ranks = mesh[-1], math.prod(mesh)
    reference = Reference()
    for step in range(STEPS):
        losses: list[float] = []
        terms: list[dict[str, Tensor]] = []
        for microbatches in _parts(problem, step, num_ranks, num_microbatches):
            loss, gradients = _compute_one_rank(problem, microbatches, dtype, scaler)
            losses.append(loss)
            terms.append(gradients)
        # In rank order over the shard axis, then over the replicate axis.
        replicas = [_add(terms[n : n + shard_size]) for n in range(0, num_ranks, shard_size)]
        for key, gradient in _add(replicas).items():
            model.get_parameter(key).grad = gradient / num_ranks
        scaler.unscale_(optimizer)
        reference.losses.append(losses)
        reference.gradients.append(full_gradients(model))
        scaler.step(optimizer)
        scaler.update()
        reference.scales.append(scaler.get_scale())
    reference.parameters = full_parameters(model)
    return reference


def _compute_one_rank(
    problem: Problem, microbatches: list[tuple[Tensor, Tensor]], dtype: str, scaler: GradScaler
) -> tuple[float, dict[str, Tensor]]:
    """Return a rank's loss and gradients: computed in the low dtype, added in float32."""
    low = DTYPES[dtype][0] or torch.float32
    total = 0.0
    terms: list[dict[str, Tensor]] = []
    for inputs, targets in microbatches:
        casts = {
            name: parameter.detach().to(low, copy=True).requires_grad_()
            for name, parameter in problem.model.named_parameters()
        }
        outputs = functional_call(
            problem.model, casts, inputs.to(low) if inputs.is_floating_point() else inputs
        )
        loss = problem.loss(outputs, targets) / len(microbatches)
        scaler.scale(loss).backward()
        total += loss.item()
        terms.append({name: cast.grad.float() for name, cast in casts.items()})
    return total, _add(terms)


def _add(terms: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add named float32 tensors, first to last."""
    return {name: functools.reduce(torch.add, (term[name] for term in terms)) for name in terms[0]}


def _make_problem(name: str) -> Problem:
    """Build a problem, the same on every rank.

    Of `MLP`, nothing divides by 2, 3 or 4 but the 24 samples: into 4 ranks' two micro-batches.
    """
    if name != MLP:
        return make_problem(name)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Linear(7, 13), nn.LayerNorm(13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    return Problem(model, torch.randn(24, 7), torch.randn(24, 3), [model[0], model[3]])


def _shard(api: Api, cell: Cell, problem: Problem) -> Any:
    param_dtype, reduce_dtype = DTYPES[cell.dtype]
    options = {
        "mesh": mesh_of(*cell.mesh),
        "reshard_after_forward": cell.reshard_after_forward,
        "mp_policy": api.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
    }
    for unit in problem.units:
        api.fully_shard(unit, **options)
    return api.fully_shard(problem.model, **options)


def _make_optimizer(model: nn.Module) -> SGD:
    """Make an optimizer that a constant factor in the gradients does not escape."""
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def _make_scaler(dtype: str) -> GradScaler:
    """Make a scaler whose first step overflows and whose scale grows after every two more."""
    return GradScaler(
        "cpu",
        init_scale=2.0**40,
        backoff_factor=2.0**-32,
        growth_interval=2,
        enabled=dtype == "fp16",
    )


def _parts(
    problem: Problem, step: int, num_ranks: int, num_microbatches: int
) -> list[list[tuple[Tensor, Tensor]]]:
    """Cut a step's batch into each rank's micro-batches of inputs and targets."""
    # Another order each step gives each rank other samples.
    inputs = problem.inputs.roll(5 * step, 0).chunk(num_ranks)
    targets = problem.targets.roll(5 * step, 0).chunk(num_ranks)
    return [
        list(zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True))
        for x, y in zip(inputs, targets, strict=True)
    ]


def _assert_close(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float, what: str
) -> None:
    assert list(actual) == list(expected), what
    for name, value in actual.items():
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,  # in a step that overflows
            msg=lambda text, n=name: f"{what}, {n}: {text}",
        )
