"""Programs for `fullshard verify`: a model that is right, and ways to get it wrong, one fault each."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import fullshard

WIDTH, WORDS = 16, 32


class Block(nn.Module):
    """A layer with dropout, and buffers of both sorts: one of them is updated in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(self.norm(x) * self.scale)
        return x + self.dropout(functional.gelu(hidden))


class Net(nn.Module):
    """Blocks between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def encode(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.head(self.encode(words)), targets)}


def build() -> Net:
    return Net()


def batch(step: int) -> dict[str, Tensor]:
    words = torch.randint(WORDS, (8,))
    return {"words": words, "targets": words.roll(step)}


def build_with_batch() -> tuple[nn.Module, tuple[Tensor]]:
    """Build a model of which only the last loss is known how to compute, with its batch."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)), (torch.randn(8, 4),)


def mean_square(model: nn.Module, parts: tuple[Tensor]) -> Tensor:
    return model(*parts).square().mean()


# Faults of the model


def build_unseeded() -> nn.Module:
    """Build a model from random numbers that nobody can seed."""
    model = Net()
    with torch.no_grad():
        model.blocks[0].linear.bias.fill_(int.from_bytes(os.urandom(4), "little") / 2**32)
    return model


class Clamping(nn.Linear):
    """Keeps its weights small, by writing to them whenever it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class OwnDropout(nn.Module):
    """Draws its masks from a generator that goes on from forward to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.rand(x.shape, generator=self.generator, device=x.device) > 0.5
        return x * mask if self.training else x


def build_with_own_generator() -> nn.Module:
    model = Net()
    model.blocks[1].dropout = OwnDropout()
    return model


def build_that_raises() -> nn.Module:
    raise ValueError("no such dataset")


def build_that_sleeps() -> nn.Module:
    time.sleep(600)
    return Net()


def build_nothing() -> str:
    return "no model"


def loss_by_encode(model: Any, parts: dict[str, Tensor]) -> Tensor:
    """Compute a loss by a method that is not the forward."""
    return model.encode(parts["words"]).square().mean()


def batch_of_seven(step: int) -> Tensor:
    return torch.zeros(7, 4)


def batch_of_words(step: int) -> str:
    return "no tensor"


def batch_of_the_time(step: int) -> dict[str, Tensor]:
    """Return another batch in every process."""
    words = torch.full((8,), (os.getpid() + time.time_ns() // 1000) % WORDS)
    words[dist.get_rank() if dist.is_initialized() else -1] = step
    return {"words": words, "targets": words}


# Faults of sharding


def shard(model: Any) -> nn.Module:
    """Shard as one does."""
    for block in model.blocks:
        fullshard.fully_shard(block)
    return fullshard.fully_shard(model)


def shard_and_register(model: Any) -> nn.Module:
    sharded = shard(model)
    fullshard.register_fsdp_forward_method(sharded, "encode")
    return sharded


def shard_with_sums(model: Any) -> nn.Module:
    """Shard one block so that its gradients are summed."""
    sharded = shard(model)
    model.blocks[0].set_gradient_divide_factor(1.0)
    return sharded


def shard_compiled(model: Any) -> nn.Module:
    for block in model.blocks:
        block.compile(backend="eager")
    return shard(model)


def shard_untied(model: Any) -> nn.Module:
    """Shard after the head got a copy of the weight that it is tied to."""
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    return shard(model)


def shard_in_bf16(model: Any) -> nn.Module:
    policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return fullshard.fully_shard(model, mp_policy=policy)


def leave_whole(model: Any) -> nn.Module:
    """Forget to shard."""
    return model


def shard_and_die(model: Any) -> nn.Module:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return shard(model)


def shard_and_exit(model: Any) -> nn.Module:
    if dist.get_rank() == 1:
        os._exit(1)
    return shard(model)


def shard_and_raise(model: Any) -> nn.Module:
    if dist.get_rank() == 1:
        raise ValueError("no such layer")
    return shard(model)


def shard_and_sleep(model: Any) -> nn.Module:
    if dist.get_rank() == 1:
        time.sleep(600)
    return shard(model)
