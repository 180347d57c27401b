"""Ranks: how many, and how they are arranged."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.differential.autograd import sgd
from tests.differential.modules import Gpt, Residual, mlp, next_token_loss, square
from tests.differential.program import ALL_FACES, FSDP2, ORIG, program
from tests.differential.run import Run


@program(faces=ALL_FACES, ranks=3)
def three_ranks(run: Run) -> None:
    """A model whose sizes three does not divide."""
    model = run.shard(Gpt(), "blocks.*")
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1)


@program(
    faces=ALL_FACES,
    ranks=4,
)
def four_ranks(run: Run) -> None:
    """Some hold nothing of a small parameter."""
    model = run.shard(mlp(5, 3, 2, 5), "0", "2")
    run.train(model, lambda m: square(m(run.batch(4, 5))), clip=0.1)


@program(faces=ALL_FACES, ranks=1)
def one_rank(run: Run) -> None:
    """Nothing to share."""
    model = run.shard(Gpt(), "blocks.*")
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1)


@program(faces=ALL_FACES, ranks=4, cases={"freed": {"reshard": True}, "kept": {"reshard": False}})
def hybrid(run: Run, reshard: bool) -> None:
    """Sharded over two ranks, replicated over two."""
    model = run.shard(Gpt(), "blocks.*", mesh=(2, 2), reshard=reshard)
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1)


@program(ranks=4)
def hybrid_accumulation(run: Run) -> None:
    """Micro-batches unreduced on a hybrid mesh."""
    model = run.shard(Gpt(), "blocks.*", mesh=(2, 2))
    optimizer = sgd(model)
    for _ in range(2):
        with run.no_sync(model):
            next_token_loss(run, model, 11).backward()
        next_token_loss(run, model, 11).backward()
        run.step(optimizer)


@program(faces=(FSDP2,), ranks=4)
def hybrid_without_all_reduce(run: Run) -> None:
    """Sums stay within shard groups until the last micro-batch."""
    model = run.shard(Gpt(), "blocks.*", mesh=(2, 2))
    optimizer = sgd(model)
    for _ in range(2):
        for number in range(3):
            run.tell(model, "set_requires_all_reduce", number == 2)
            next_token_loss(run, model, 11).backward()
        run.step(optimizer)


@program(faces=(FSDP2,), cases={"replicated": {"shape": (2, 1)}, "sharded": {"shape": (1, 2)}})
def hybrid_with_an_axis_of_one(run: Run, shape: tuple[int, int]) -> None:
    """An axis over which there is nothing to do."""
    model = run.shard(Gpt(), "blocks.*", mesh=shape)
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1)


@program(faces=(FSDP2,))
def replicated(run: Run) -> None:
    """`replicate`: the engine without sharding."""
    model = Gpt()
    if not run.is_alone:
        if run.is_ours:
            make: Any = run.api.replicate
        else:
            from torch.distributed._composable.replicate_with_fsdp import replicate as make
        for block in model.blocks:
            make(block, mesh=run.mesh(2))
        make(model, mesh=run.mesh(2))
    run.models.append(model)
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1)


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")


@program(faces=(ORIG, "flat"), cases={name.lower(): {"strategy": name} for name in STRATEGIES})
def strategy(run: Run, strategy: str) -> None:
    """Every strategy of the wrapper on one axis."""
    options = {"sharding_strategy": run.api.ShardingStrategy[strategy]}
    model = run.shard(Gpt(), "blocks.*", fsdp1=options)
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1)


def tensor_parallel(run: Run, model: nn.Module, plan: dict[str, Any]) -> Any:
    """Divide layers over pairs of ranks; return the mesh of the data-parallel axis."""
    if run.is_alone:
        return None
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], plan)
    return mesh["dp"]


NORMS = "gradient norms with tensor parallel"


@program(
    faces=(FSDP2, ORIG),
    ranks=4,
    parts=2,
    tolerance=1e-5,
    reason="tensor parallelism adds parts of products in another order",
    cases={
        "plain": {"clip": None},
        "clipped": {
            "clip": 0.05,
            "differs": {
                "orig/torch": "each rank's norm is of its own part of the weights",
                "fsdp2/torch": "PyTorch refuses gradients on two meshes",
            },
        },
    },
)
def tensor_and_data_parallel(run: Run, clip: float | None) -> None:
    """Two by two ranks; layers are divided before they are sharded."""
    model = nn.Sequential(*(Residual(4) for _ in range(2)), nn.Linear(4, 2))
    plan = {
        f"{n}.{name}": style
        for n in range(2)
        for name, style in (("wide", ColwiseParallel()), ("narrow", RowwiseParallel()))
    }
    mesh = tensor_parallel(run, model, plan)
    model = run.shard(model, "0", "1", fsdp2={"mesh": mesh}, fsdp1={"device_mesh": mesh})
    run.train(model, lambda m: square(m(run.batch(4, 4))), clip=clip)


@program(faces=(FSDP2,), ranks=4, parts=2)
def mesh_of_some_ranks(run: Run) -> None:
    """Two groups of two that do not know of each other, each with the data of one part."""
    mesh = None
    if not run.is_alone:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "shard"))["other"]
    model = run.shard(Gpt(), "blocks.*", fsdp2={"mesh": mesh})
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1)


@program(faces=(FSDP2,), ranks=4)
def reshard_over_pairs(run: Run) -> None:
    """`reshard_after_forward=2` of four ranks."""
    model = run.shard(Gpt(), "blocks.*", reshard=2)
    run.train(model, lambda m: next_token_loss(run, m, 11), clip=0.1, steps=3)


@program(ranks=4, parts=4)
def experts_on_four_ranks(run: Run) -> None:
    """Every rank has another batch size."""
    model = run.shard(mlp(4, 6, 2), "0", "2")
    run.train(model, lambda m: square(m(run.batch(1 + run.part, 4))))


@program(faces=(FSDP2,), cases={"one": {"dim": 1}, "last": {"dim": -1}})
def sharded_along_other_dims(run: Run, dim: int) -> None:
    """`shard_placement_fn` for matrices."""
    from torch.distributed.tensor import Shard

    def placement(parameter: nn.Parameter) -> Any:
        return Shard(dim % parameter.ndim) if parameter.ndim > 1 else None

    model = run.shard(mlp(4, 6, 2), "0", fsdp2={"shard_placement_fn": placement})
    run.train(model, lambda m: square(m(run.batch(4, 4))), clip=0.1)
    torch.manual_seed(0)
