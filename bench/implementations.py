"""Who trains the model: plain local compute, PyTorch's data parallelism, and fullshard.

Each implementation wraps the same model the way its documentation recommends: one unit per block
and one for the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
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

from .model import GPT, BatchSize, Block, Shape, batches, build_model
from .ranks import Rank

Precision = Literal["fp32", "bf16"]
OptimizerName = Literal["adamw", "foreach", "fused"]


@dataclass(frozen=True)
class Work:
    """What is trained and how; the same value goes to every implementation.

    `mesh_shape` (4,) shards over four ranks, (2, 2) shards over two and replicates over two.
    bf16 keeps float32 parameters and reductions, and computes in bfloat16.
    """

    shape: Shape = field(default_factory=Shape)
    batch: BatchSize = field(default_factory=BatchSize)
    precision: Precision = "fp32"
    optimizer: OptimizerName = "adamw"
    num_microbatches: int = 1
    mesh_shape: tuple[int, ...] = (2,)


class Implementation(NamedTuple):
    """A way to train: how it wraps the model, and how it goes through a micro-batch.

    `microbatch(model, is_last)` returns the context for one forward and backward; gradients
    travel between ranks only in the last one.
    """

    wrap: Callable[[GPT, Work], nn.Module]
    microbatch: Callable[[Any, bool], AbstractContextManager[Any]]


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


def _wrap_fsdp1(model: GPT, work: Work, *, library: Any) -> nn.Module:
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


def _wrap_fsdp2(model: GPT, work: Work) -> nn.Module:
    policy = fsdp.MixedPrecisionPolicy()
    if work.precision == "bf16":
        policy = fsdp.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    mesh = _mesh(work)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh, mp_policy=policy)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _wrap_fullshard(
    model: GPT, work: Work, *, comm: Literal["auto", "peer_memory", "process_group"]
) -> nn.Module:
    policy = fullshard.MixedPrecisionPolicy()
    if work.precision == "bf16":
        policy = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    fullshard.set_default_comm(comm)
    mesh = _mesh(work)
    for block in model.blocks:
        fullshard.fully_shard(block, mesh=mesh, mp_policy=policy)
    fullshard.fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def _mesh(work: Work) -> DeviceMesh:
    names = ("shard",) if len(work.mesh_shape) == 1 else ("replicate", "shard")
    return init_device_mesh("cpu", work.mesh_shape, mesh_dim_names=names)


def _no_sync_until_last(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = nullcontext() if is_last else model.no_sync()
    return context


def _set_requires_gradient_sync(model: Any, is_last: bool) -> AbstractContextManager[Any]:
    model.set_requires_gradient_sync(is_last)
    return nullcontext()


IMPLEMENTATIONS: dict[str, Implementation] = {
    "local": Implementation(_wrap_local, lambda _model, _is_last: nullcontext()),
    "ddp": Implementation(_wrap_ddp, _no_sync_until_last),
    "fsdp1": Implementation(partial(_wrap_fsdp1, library=fsdp), _no_sync_until_last),
    "fsdp2": Implementation(_wrap_fsdp2, _set_requires_gradient_sync),
    "fullshard": Implementation(partial(_wrap_fullshard, comm="auto"), _set_requires_gradient_sync),
    "fullshard-fsdp1": Implementation(partial(_wrap_fsdp1, library=fullshard), _no_sync_until_last),
    "fullshard-pg": Implementation(
        partial(_wrap_fullshard, comm="process_group"), _set_requires_gradient_sync
    ),
}


class Training:
    """One rank of one implementation: the model, its optimizer and its endless data."""

    def __init__(self, rank: Rank, implementation: str, work: Work) -> None:
        if implementation != "local":
            rank.init_gloo()
        self._implementation = IMPLEMENTATIONS[implementation]
        self.model = self._implementation.wrap(build_model(work.shape), work)
        self.optimizer = _build_optimizer(self.model, work.optimizer)
        self._num_microbatches = work.num_microbatches
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
        for i in range(self._num_microbatches):
            tokens, targets = next(self._batches)
            is_last = i == self._num_microbatches - 1
            with self._implementation.microbatch(self.model, is_last):
                loss = self.model(tokens, targets) / self._num_microbatches
                loss.backward()
            yield loss.item()


def build_training(rank: Rank, *, implementation: str, work: Work) -> Training:
    return Training(rank, implementation, work)


def _build_optimizer(model: nn.Module, name: OptimizerName) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=1e-4,
        foreach=True if name == "foreach" else None,
        fused=True if name == "fused" else None,
    )
