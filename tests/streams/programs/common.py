"""What programs are made of, and the list of them.

A program builds a model and trains it for `NUM_STEPS` steps on the virtual device: the first
pass of a model is watched (`engine/checks/writes.py`) and gathers nothing early, the others do.
Each says how often the host waits for an event in a step; other waits are errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import SGD

import fullshard
from tests.models import PartlyFrozen, Problem, make_problem
from tests.streams.lab import Lab
from tests.streams.recording import DEVICE

NUM_STEPS = 3
SMALL = "wide"
BF16 = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ALL_BF16 = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
OFFLOAD = fullshard.CPUOffloadPolicy()
UNPINNED = fullshard.CPUOffloadPolicy(pin_memory=False)

Body = Callable[[Lab, str], None]


@dataclass(frozen=True)
class Program:
    """A program and what it is allowed.

    is_nccl: whether collectives run on the lane that calls them; else on their group's lane.
    host_waits: how many events the host waits for in a step; None where that follows from the
        model: see the program.
    may_stall: whether the host waits for the device in other ways too, and why.
    """

    run: Body
    is_nccl: bool = True
    host_waits: int | None = 0
    may_stall: str = ""


PROGRAMS: dict[str, Program] = {}


def program(name: str, **how: Any) -> Callable[[Body], Body]:
    """Add a program under a name; ``how`` are the fields of `Program`."""

    def add(run: Body) -> Body:
        assert name not in PROGRAMS
        PROGRAMS[name] = Program(run, **how)
        return run

    return add


def run_program(name: str, problem: str, *, num_more: int = 0, captures: bool = False) -> Lab:
    """Run a program on a model, and return the laboratory with what it found.

    num_more, captures: see `Lab`; for programs that `train` once.
    """
    chosen = PROGRAMS[name]
    with Lab(
        is_nccl=chosen.is_nccl,
        host_waits=chosen.host_waits,
        may_stall=chosen.may_stall,
        num_more=num_more,
        captures=captures,
    ) as lab:
        torch.manual_seed(0)
        chosen.run(lab, problem)
    return lab


# What programs are made of


class TwoDtypes(nn.Module):
    """Two layers of different dtypes, which a unit gathers and reduces apart. (n, 16) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(16, 1024)
        self.back = nn.Linear(1024, 16, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Go to the other dtype and back, unless one dtype is computed in."""
        hidden = self.wide(x.to(self.wide.weight.dtype)).tanh()
        return self.back(hidden.to(self.back.weight.dtype))


def problem_of(name: str) -> Problem:
    """Return a model and its data: one of `tests.models`, or one of those here.

    wide has parameters that travel alone, being large, and others that are packed, even and uneven.
    """
    if name == "wide":
        net = nn.Sequential(
            nn.Linear(16, 32768), nn.Tanh(), nn.Linear(32768, 16), nn.Tanh(), nn.Linear(16, 5)
        )
        return Problem(net, torch.randn(12, 16), torch.randn(12, 5), [net[0], net[2]])
    if name == "deep":
        layers = [nn.Linear(16, 16) for _ in range(6)]
        return Problem(nn.Sequential(*layers), torch.randn(12, 16), torch.randn(12, 16), layers)
    if name == "two_dtypes":
        pair = nn.Sequential(TwoDtypes(), TwoDtypes())
        return Problem(pair, torch.randn(12, 16), torch.randn(12, 16), [*pair])
    if name == "partly_frozen":
        frozen = PartlyFrozen()
        units = [frozen.frozen, frozen.mixed]
        return Problem(frozen, torch.randn(12, 8), torch.randn(12, 8), units)
    return make_problem(name)


def mesh_of(*shape: int) -> DeviceMesh:
    """Return a mesh of virtual devices: flat, or (replicate, shard)."""
    return init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def shard(problem: Problem, mesh: Sequence[int] = (4,), **options: Any) -> Any:
    """Shard the problem's units and its model with `fully_shard`."""
    place = mesh_of(*mesh)
    for unit in problem.units:
        fullshard.fully_shard(unit, mesh=place, **options)
    return fullshard.fully_shard(problem.model, mesh=place, **options)


def wrap(problem: Problem, **options: Any) -> Any:
    """Wrap the problem's units and its model with `FullyShardedDataParallel`."""
    units = set(problem.units)
    policy = fullshard.CustomPolicy(lambda module: module in units)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*requires_grad=True and False")  # on purpose
        return fullshard.FullyShardedDataParallel(
            problem.model, auto_wrap_policy=policy, device_id=DEVICE, **options
        )


def data_of(problem: Problem, lab: Lab) -> tuple[Tensor, Tensor]:
    """Return the problem's inputs and targets, on the device."""
    return problem.inputs.to(DEVICE), problem.targets.to(DEVICE)


def train(
    lab: Lab,
    problem: Problem,
    model: Any,
    *,
    num_steps: int = NUM_STEPS,
    num_microbatches: int = 1,
    before: Callable[[int], Any] = lambda micro: None,
    after_backward: Callable[[], Any] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> None:
    """Train a model. before: called before each micro-batch, with its number from the end."""
    optimizer = optimizer or SGD(model.parameters(), lr=1e-3, momentum=0.9)
    inputs, targets = data_of(problem, lab)

    def step() -> Tensor:
        for micro in reversed(range(num_microbatches)):
            before(micro)
            loss = problem.loss(model(inputs), targets)
            loss.backward()
        after_backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    lab.run(step, num_steps)
    lab.trained.append((model, optimizer))
