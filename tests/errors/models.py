"""One small model for the tests of errors, and how each API shards it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.api import Api
from tests.faults.job import Plan
from tests.faults.run import Ending, run

FACES = ("fully_shard", "orig", "flat")
faces = pytest.mark.parametrize("face", FACES)
LATE = Plan("sleep", "auto", timeout_s=2.0)  # rank 1 sleeps, rank 0 gives up
TOKENS = torch.arange(6).view(2, 3)


class Block(nn.Module):
    """A layer and a tanh. (..., 8) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Apply both."""
        return self.layer(x).tanh()


class Net(nn.Module):
    """An embedding, two blocks and a head. tokens: (batch, seq) -> logits (batch, seq, 12)."""

    def __init__(self, *, tied: bool = False, dim: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, dim)
        self.blocks = nn.ModuleList(Block() for _ in range(2 if dim == 8 else 0))
        self.head = nn.Linear(dim, 12, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Run everything in turn."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard(api: Api, face: str, model: nn.Module, **options: Any) -> Any:
    """Shard each `Block`, then the model, by one of FACES."""
    if face == "fully_shard":
        for module in model.modules():
            if isinstance(module, Block):
                api.fully_shard(module, **options)
        return api.fully_shard(model, **options)
    policy = api.ModuleWrapPolicy({Block})
    orig = face == "orig"
    options.setdefault("auto_wrap_policy", policy)
    return api.FullyShardedDataParallel(model, use_orig_params=orig, **options)


def inside(model: nn.Module) -> Any:
    """Return what a wrapper wraps; any other module as it is."""
    return getattr(model, "module", model)


def step(model: nn.Module, *args: Any) -> None:
    """Run a forward and a backward."""
    model(TOKENS, *args).square().mean().backward()


@functools.cache
def endings_of(plan: Plan) -> list[Ending]:
    """Return how the ranks ended in which a fault was planted, from one run for all tests."""
    return run(plan, limit_s=12.0 if plan == LATE else 40.0)  # the late rank never ends


def as_one(error: BaseException | pytest.ExceptionInfo[BaseException]) -> str:
    """Return a message in one line."""
    if isinstance(error, pytest.ExceptionInfo):
        error = error.value
    return " ".join(str(error).split())
