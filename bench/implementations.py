"""Who trains the model: plain local compute, PyTorch's data parallelism, DeepSpeed, and fullshard.

Each implementation wraps the same model the way its documentation recommends: one unit per block
and one for the rest (DeepSpeed finds its own). Ours with `fully_shard` also calls `step_on_shards`;
`fullshard-unmodified` does not: it is FSDP2's program on our engine.
"""

from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fullshard

from . import zero3
from .model import GPT, BatchSize, Block, Shape, batches, build_model
from .ranks import Rank

Precision = Literal["fp32", "bf16"]
OptimizerName = Literal["adamw", "foreach", "fused"]
Sync = Literal["last", "each"]


@dataclass(frozen=True)
class Work:
    """What is trained and how; the same value goes to every implementation.

    `mesh_shape` (4,) shards over four ranks, (2, 2) shards over two and replicates over two.
    bf16 keeps float32 parameters and reductions, and computes in bfloat16. `sync` says in which of
    a step's micro-batches gradients travel between ranks.
    """

    shape: Shape = field(default_factory=Shape)
    batch: BatchSize = field(default_factory=BatchSize)
    precision: Precision = "fp32"
    optimizer: OptimizerName = "adamw"
    num_microbatches: int = 1
    sync: Sync = "last"
    mesh_shape: tuple[int, ...] = (2,)


class Wrapped(NamedTuple):
    """What a rank trains with; DeepSpeed's engine is both."""

    model: nn.Module
    optimizer: Any


def _in_order(_model: Any, num_microbatches: int) -> Iterable[int]:
    return range(num_microbatches)


class Implementation(NamedTuple):
    """A way to train: how it wraps the model, and how it goes through a step's micro-batches.

    `in_last` and `in_each` take the wrapped model and a number of micro-batches, and iterate over
    them: gradients travel between ranks in the last one, or in each.
    """

    wrap: Callable[[GPT, Work], Wrapped]
    in_last: Callable[[Any, int], Iterable[int]]
    in_each: Callable[[Any, int], Iterable[int]] = _in_order

    def microbatches(self, model: nn.Module, work: Work) -> Iterable[int]:
        waits = work.sync == "last" and work.num_microbatches > 1
        iterate = self.in_last if waits else self.in_each
        return iterate(model, work.num_microbatches)


class MasterCopy(nn.Module):
    """Compute in bfloat16 with float32 parameters and gradients, on one process.

    The arithmetic of sharded training at world size 1, and so the least work that it can take:
    autocast would compute norms in float32 and convert weights at every use.
    """

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.master = model
        # In a tuple, so that it is no submodule and the optimizer does not see its parameters.
        self._compute = (deepcopy(model).to(torch.bfloat16),)
        self._pairs = [*zip(self._compute[0].parameters(), model.parameters(), strict=True)]
        for low, high in self._pairs:
            low.register_post_accumulate_grad_hook(partial(_move_gradient, high))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for low, high in self._pairs:
                low.copy_(high)
        loss: torch.Tensor = self._compute[0](tokens, targets)
        return loss


class Autocast(nn.Module):
    """Compute in bfloat16 through autocast, the documented way to mix precision under DDP."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = self.model(tokens, targets)
        return loss


def _move_gradient(high: torch.Tensor, low: torch.Tensor) -> None:
    assert low.grad is not None
    gradient = low.grad.float()
    high.grad = gradient if high.grad is None else high.grad.add_(gradient)
    low.grad = None


def _wrap_local(model: GPT, work: Work) -> nn.Module:
    return MasterCopy(model) if work.precision == "bf16" else model


def _wrap_ddp(model: GPT, work: Work) -> nn.Module:
    inner = Autocast(model) if work.precision == "bf16" else model
    # gradient_as_bucket_view saves DDP one copy of all gradients, in memory and time.
    return DistributedDataParallel(inner, gradient_as_bucket_view=True)


def _wrap_fsdp1(
    model: GPT, work: Work, *, library: Any, comm: Literal["auto", "process_group"] = "auto"
) -> nn.Module:
    fullshard.set_default_comm(comm)
    mixed = library.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    hybrid = len(work.mesh_shape) > 1
    strategy = library.ShardingStrategy
    wrapped: nn.Module = library.FullyShardedDataParallel(
        model,
        device_mesh=_mesh(work),
        sharding_strategy=strategy.HYBRID_SHARD if hybrid else strategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=mixed if work.precision == "bf16" else None,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return wrapped


def _wrap_fsdp2(model: GPT, work: Work, *, library: Any) -> nn.Module:
    policy = library.MixedPrecisionPolicy()
    if work.precision == "bf16":
        policy = library.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = _mesh(work)
    for block in model.blocks:
        library.fully_shard(block, mesh=mesh, mp_policy=policy)
    library.fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _wrap_fullshard(
    model: GPT, work: Work, *, comm: Literal["auto", "peer_memory", "process_group"] = "auto"
) -> nn.Module:
    fullshard.set_default_comm(comm)
    return _wrap_fsdp2(model, work, library=fullshard)


def _mesh(work: Work) -> DeviceMesh:
    names = ("shard",) if len(work.mesh_shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", work.mesh_shape, mesh_dim_names=names)


def _wrap_deepspeed(model: GPT, work: Work) -> Wrapped:
    optimizer = build_optimizer(model, work)
    in_bf16 = work.precision == "bf16"
    engine = zero3.wrap(model, optimizer, sequences=work.batch.sequences, in_bf16=in_bf16)
    return Wrapped(engine, engine)


def build_optimizer(model: nn.Module, work: Work) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=1e-4,
        foreach=True if work.optimizer == "foreach" else None,
        fused=True if work.optimizer == "fused" else None,
    )


def _with_optimizer(
    wrap: Callable[[GPT, Work], nn.Module], *, on_shards: bool = False
) -> Callable[[GPT, Work], Wrapped]:
    def wrap_and_build(model: GPT, work: Work) -> Wrapped:
        wrapped = wrap(model, work)
        optimizer = build_optimizer(wrapped, work)
        return Wrapped(wrapped, fullshard.step_on_shards(optimizer) if on_shards else optimizer)

    return wrap_and_build


def _no_sync(model: Any, num_microbatches: int) -> Iterator[int]:
    with model.no_sync():
        yield from range(num_microbatches - 1)
    yield num_microbatches - 1


def _requires_gradient_sync(model: Any, num_microbatches: int) -> Iterator[int]:
    for i in range(num_microbatches):
        model.set_requires_gradient_sync(i == num_microbatches - 1)
        yield i


IMPLEMENTATIONS: dict[str, Implementation] = {
    "local": Implementation(_with_optimizer(_wrap_local), _in_order),
    "ddp": Implementation(_with_optimizer(_wrap_ddp), _no_sync),
    "fsdp1": Implementation(_with_optimizer(partial(_wrap_fsdp1, library=fsdp)), _no_sync),
    "fsdp2": Implementation(
        _with_optimizer(partial(_wrap_fsdp2, library=fsdp)), _requires_gradient_sync
    ),
    "deepspeed": Implementation(_wrap_deepspeed, zero3.reduce_in_last, zero3.reduce_in_each),
    "fullshard": Implementation(
        _with_optimizer(_wrap_fullshard, on_shards=True), _requires_gradient_sync
    ),
    "fullshard-unmodified": Implementation(
        _with_optimizer(_wrap_fullshard), _requires_gradient_sync
    ),
    "fullshard-fsdp1": Implementation(
        _with_optimizer(partial(_wrap_fsdp1, library=fullshard)), _no_sync
    ),
    "fullshard-fsdp1-pg": Implementation(
        _with_optimizer(partial(_wrap_fsdp1, library=fullshard, comm="process_group")), _no_sync
    ),
    "fullshard-pg": Implementation(
        _with_optimizer(partial(_wrap_fullshard, comm="process_group"), on_shards=True),
        _requires_gradient_sync,
    ),
}


def why_not(implementation: str, work: Work) -> str | None:
    """Say why an implementation cannot do this work, None if it can."""
    if implementation == "deepspeed":
        if not zero3.is_installed():
            return "not installed"
        if len(work.mesh_shape) > 1:
            return zero3.NO_HYBRID
    return None


class Training:
    """One rank of one implementation: the model, its optimizer and its endless data."""

    def __init__(self, rank: Rank, implementation: str, work: Work) -> None:
        if implementation != "local":
            rank.init_gloo()
        self._implementation = IMPLEMENTATIONS[implementation]
        self.model, self.optimizer = self._implementation.wrap(build_model(work.shape), work)
        self._work = work
        self._batches = batches(work.batch, vocab=work.shape.vocab, rank=rank.index)

    def run(self, num_steps: int) -> list[float]:
        """Train and return this rank's loss of each step."""
        return [self.step() for _ in range(num_steps)]

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = sum(self.backward_microbatches())
        self.optimizer.step()
        return loss

    def backward_microbatches(self) -> Iterator[float]:
        """Run forward and backward of a step, yielding each micro-batch's part of the loss."""
        for _ in self._implementation.microbatches(self.model, self._work):
            tokens, targets = next(self._batches)
            loss = self.model(tokens, targets) / self._work.num_microbatches
            loss.backward()
            yield loss.item()


def build_training(rank: Rank, *, implementation: str, work: Work) -> Training:
    return Training(rank, implementation, work)
