"""One small model for the tests of the wrapper, how they wrap it, and what they read from it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from tests.api import Api
from tests.training import make_batch, mean_square, my_part

CPU = torch.device("cpu")
orig_params = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


class Block(nn.Module):
    """What the policy wraps. x: (n, 6) -> same. Nothing in it divides by 2 or 4 but a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(6, 5)
        self.norm = nn.LayerNorm(5)
        self.narrow = nn.Linear(5, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what the layers make of x."""
        return x + self.narrow(self.norm(self.wide(x)).tanh())


class Net(nn.Module):
    """Two blocks between layers of the root, with buffers and a tied weight. (n, 7) -> (n, 6)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.batch_norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.head.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("shift", torch.arange(6.0))
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Run everything in turn."""
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = self.tied(self.head(self.batch_norm(x) * self.scale).tanh())
        return x + self.shift.to(x.dtype)


def net(seed: int = 1) -> Net:
    """Build the model, the same on every rank."""
    torch.manual_seed(seed)
    return Net()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore what both implementations warn of: deprecations, and frozen parameters in a unit."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def wrap(
    api: Api, model: nn.Module, strategy: str | None = None, *, nested: bool = True, **options: Any
) -> Any:
    """Wrap a model, each `Block` in it as well unless told otherwise."""
    if nested:
        options.setdefault("auto_wrap_policy", ModuleWrapPolicy({Block}))
    if strategy is not None:
        options["sharding_strategy"] = api.ShardingStrategy[strategy]
    with quiet():
        # PyTorch's computes on CPUs only where it is told to.
        return api.FullyShardedDataParallel(model, **{"device_id": CPU, **options})


def batch(seed: int = 7) -> Tensor:
    """Make the batch of all ranks."""
    return make_batch(7, seed=seed)


def run_step(model: nn.Module, seed: int = 7) -> Tensor:
    """Run forward and backward on this rank's part of a batch; return the loss."""
    loss = mean_square(model(my_part(batch(seed))))
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    """Take some steps, each on another batch; return this rank's losses."""
    losses = []
    for step in range(steps):
        losses.append(run_step(model, seed=step).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def clean(name: str) -> str:
    """Take off what wrapping adds to a name."""
    return name.replace("_fsdp_wrapped_module.", "").replace("_checkpoint_wrapped_module.", "")


def parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return what is registered now, by names before wrapping."""
    return {clean(name): parameter for name, parameter in model.named_parameters()}


def buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers, by names before wrapping."""
    return {clean(name): buffer for name, buffer in model.named_buffers()}


def summon(api: Api, model: nn.Module, **options: Any) -> Any:
    """Show whole parameters for a while."""
    return api.FullyShardedDataParallel.summon_full_params(model, **options)


def whole(api: Api, model: nn.Module) -> dict[str, Tensor]:
    """Copy every whole parameter."""
    with summon(api, model, writeback=False):
        return {name: p.detach().clone() for name, p in parameters(model).items()}


def whole_gradients(api: Api, model: nn.Module) -> dict[str, Tensor]:
    """Copy every whole gradient of a model wrapped with ``use_orig_params=True``."""
    with summon(api, model, writeback=False, with_grads=True):
        return {n: p.grad.clone() for n, p in parameters(model).items() if p.grad is not None}


def averaged_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Average the gradients of an unwrapped model over the ranks, as data parallelism does."""
    result = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            result[name] = parameter.grad.clone()
            dist.all_reduce(result[name])
            result[name] /= dist.get_world_size()
    return result


@contextlib.contextmanager
def saving(api: Api, model: nn.Module, kind: str, **options: Any) -> Iterator[None]:
    """Let state dicts be of a kind (FULL, LOCAL or SHARDED) for a while.

    options: of the model's state dict, and in ``optim`` of the optimizer's.
    """
    name = kind.title()
    optim = options.pop("optim", {})
    with quiet():
        manager = api.FullyShardedDataParallel.state_dict_type(
            model,
            api.StateDictType[f"{kind}_STATE_DICT"],
            getattr(api, f"{name}StateDictConfig")(**options),
            getattr(api, f"{name}OptimStateDictConfig")(**optim),
        )
        with manager:
            yield


def save(api: Api, model: nn.Module, kind: str = "FULL", **options: Any) -> dict[str, Any]:
    """Return a state dict of a kind."""
    with saving(api, model, kind, **options):
        return model.state_dict()


def load(
    api: Api, model: nn.Module, state: dict[str, Any], kind: str = "FULL", *, strict: bool = True
) -> Any:
    """Load a state dict with the settings of a kind."""
    with saving(api, model, kind):
        return model.load_state_dict(state, strict=strict)


def full_value(value: Any) -> Tensor:
    """Gather a value of any kind of state dict. Every rank has to take part."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    with quiet():  # every method of it is deprecated
        shards = [(s.metadata.shard_offsets, s.tensor.cpu()) for s in value.local_shards()]
        full = torch.empty(value.size(), dtype=value.dtype)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, shards)
    for offsets, tensor in (shard for own in everyone for shard in own):
        place = full
        for dim, (offset, size) in enumerate(zip(offsets, tensor.shape, strict=True)):
            place = place.narrow(dim, offset, size)
        place.copy_(tensor)
    return full
