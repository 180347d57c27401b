"""What each rank of a lab runs: a training job whose result one process can compute, or one with a planted fault."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import SGD

import fullshard
from tests.faults import job as faults
from tests.faults.job import Plan
from tests.models import Problem, make_problem

# Ranks of a host of two are neighbours: rows of the first mesh are hosts, and of the second one hold a rank of each.
MESHES = {"hosts_replicate": [[0, 1], [2, 3]], "hosts_shard": [[0, 2], [1, 3]]}


@dataclass(frozen=True)
class Recipe:
    """How to train. mesh: "flat", or one of `MESHES`, (replicate, shard).

    folder: of a checkpoint after half of the steps, from which the same job goes on if it is there. late_at: the step before
    which the last rank is late by late_s, and all do what they have not done before. pause_s: after each step. timeout_s: of the group.
    """

    face: str = "fully_shard"
    mesh: str = "flat"
    offload: bool = False
    num_microbatches: int = 1
    steps: int = 6
    folder: str = ""
    late_at: int = 0
    late_s: float = 0.0
    pause_s: float = 0.0
    timeout_s: float = 60.0

    def __str__(self) -> str:
        words = [self.face, self.mesh]
        words += ["offload"] if self.offload else []
        words += [f"{self.num_microbatches}microbatches"] if self.num_microbatches > 1 else []
        return "-".join(words)


def _shard(recipe: Recipe, problem: Problem) -> nn.Module:
    size = dist.get_world_size()
    mesh = (
        init_device_mesh("cpu", (size,))
        if recipe.mesh == "flat"
        else DeviceMesh("cpu", MESHES[recipe.mesh], mesh_dim_names=("replicate", "shard"))
    )
    if recipe.face == "fully_shard":
        policy = {"offload_policy": fullshard.CPUOffloadPolicy()} if recipe.offload else {}
        for unit in problem.units:
            fullshard.fully_shard(unit, mesh=mesh, **policy)  # type: ignore[arg-type]
        return fullshard.fully_shard(problem.model, mesh=mesh, **policy)  # type: ignore[arg-type]
    hybrid, full = fullshard.ShardingStrategy.HYBRID_SHARD, fullshard.ShardingStrategy.FULL_SHARD
    return fullshard.FullyShardedDataParallel(
        problem.model,
        device_mesh=mesh,
        sharding_strategy=full if recipe.mesh == "flat" else hybrid,
        auto_wrap_policy=fullshard.ModuleWrapPolicy({type(unit) for unit in problem.units}),
        cpu_offload=fullshard.CPUOffload(offload_params=recipe.offload),
        use_orig_params=True,
    )


def _without_sync(model: Any, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
    if isinstance(model, fullshard.FullyShardedDataParallel):
        return contextlib.nullcontext() if is_last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
    return contextlib.nullcontext()


def _step(recipe: Recipe, problem: Problem, model: nn.Module, step: int, part: slice) -> float:
    """Compute gradients of a step's samples, of which this rank has a part; return its mean loss."""
    total, num = 0.0, recipe.num_microbatches
    inputs, targets = (each.roll(5 * step, 0)[part] for each in (problem.inputs, problem.targets))
    pairs = zip(inputs.tensor_split(num), targets.tensor_split(num), strict=True)
    for index, (x, y) in enumerate(pairs):
        with _without_sync(model, is_last=index == num - 1):
            loss = problem.loss(model(x), y) * (len(x) / len(inputs))
            loss.backward()
        total += float(loss.detach())
    return total


def alone(recipe: Recipe) -> dict[str, Tensor]:
    """Train in one process as all ranks do together; return the parameters."""
    problem = make_problem("transformer")
    optimizer = SGD(problem.model.parameters(), lr=0.1, momentum=0.9)
    for step in range(recipe.steps):
        _step(recipe, problem, problem.model, step, slice(None))
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in problem.model.named_parameters()}


def train(recipe: Recipe, results: Path) -> None:
    """Train on this rank; rank 0 writes the whole parameters."""
    problem = make_problem("transformer")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = _shard(recipe, problem)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    each = len(problem.inputs) // size
    part = slice(rank * each, (rank + 1) * each)
    first = 0
    if recipe.folder and Path(recipe.folder).exists():
        fullshard.load_checkpoint(recipe.folder, model, optimizer)
        first = recipe.steps // 2
    for step in range(first, recipe.steps):
        if recipe.late_at and step == recipe.late_at:
            time.sleep(recipe.late_s * (rank == size - 1))
            list(fullshard.iter_full_state(model))
        _step(recipe, problem, model, step, part)
        optimizer.step()
        optimizer.zero_grad()
        print("step", step, flush=True)
        time.sleep(recipe.pause_s)
        if recipe.folder and first == 0 and step + 1 == recipe.steps // 2:
            fullshard.save_checkpoint(recipe.folder, model, optimizer)
            return
    whole = dict(fullshard.iter_full_state(model))
    if rank == 0:
        torch.save(whole, results)


def note(**noted: Any) -> None:
    """Tell the lab."""
    if "parameters" not in noted:
        print(f"\nnoted {json.dumps(noted)}", flush=True)


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", type=json.loads)
    parser.add_argument("--plan", type=json.loads)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING)
    if options.plan is not None:
        faults.main(Plan(**options.plan), int(os.environ["RANK"]), options.folder, note)
        return
    recipe = Recipe(**options.recipe)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=recipe.timeout_s))
    began = time.monotonic()
    try:
        train(recipe, options.folder / "parameters")
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        note(kinds=kinds, text=str(error), seconds=time.monotonic() - began)
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
