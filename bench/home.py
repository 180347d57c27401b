"""What `bench.planned` plans and runs: small models on ranks of this machine, and the same as workloads.

Transformer, convolutions, mixture of experts with dense routing, and LoRA, with the settings that change what a
rank holds and does. A `Home` is one of them; `workload_of` and `settings_of` are what is planned, `HomeTraining` runs it.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import fullshard
from fullshard.plan.step import OptimizerPlan, StepSettings
from fullshard.plan.unit_plan import Sharding
from fullshard.plan.ways import GLOO, PEER_MEMORY
from fullshard.plan.workload import Workload
from fullshard.planning.traced import Example, TraceOptions, trace_workload

from .model import GPT, BatchSize, Block, Shape, batches
from .ranks import Rank
from .tensor_bytes import LiveTensors

Kind = Literal["gpt", "conv", "moe", "lora"]
OptimizerName = Literal["adamw", "foreach", "fused"]
NUM_WARM_UP_STEPS = 4


@dataclass(frozen=True)
class Home:
    """A model and how ranks of one machine train it.

    width: of the model; all other sizes follow. checkpoints: each block is computed again in backward.
    bf16: units compute in bfloat16 and reduce in float32. comm: as of `fullshard.set_default_comm`.
    """

    kind: Kind = "gpt"
    width: int = 512
    num_layers: int = 8
    batch: BatchSize = field(default_factory=BatchSize)
    bf16: bool = False
    checkpoints: bool = False
    num_microbatches: int = 1
    reshard: bool | None = None
    optimizer: OptimizerName = "adamw"
    comm: Literal["peer_memory", "process_group"] = "peer_memory"
    num_ranks: int = 2

    @property
    def name(self) -> str:
        parts = [
            *(self.kind, f"{self.num_layers}x{self.width}", str(self.batch)),
            *(["bf16"] if self.bf16 else []),
            *(["checkpoints"] if self.checkpoints else []),
            *([f"{self.num_microbatches} micro-batches"] if self.num_microbatches > 1 else []),
            *([f"reshard={self.reshard}"] if self.reshard is not None else []),
            *([self.optimizer] if self.optimizer != "adamw" else []),
            *(["Gloo"] if self.comm == "process_group" else []),
            f"{self.num_ranks} ranks",
        ]
        return ", ".join(parts)

    @property
    def policy(self) -> fullshard.MixedPrecisionPolicy:
        if not self.bf16:
            return fullshard.MixedPrecisionPolicy()
        return fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)


# The models


class Experts(nn.Module):
    """An MLP of several experts, each of which sees every token: x (sequences, tokens, width)."""

    def __init__(self, width: int, num: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, num)
        self.up = nn.ModuleList(nn.Linear(width, width) for _ in range(num))
        self.down = nn.ModuleList(nn.Linear(width, width) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        outputs = [down(F.silu(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        return sum(
            (share.unsqueeze(-1) * y for share, y in zip(shares.unbind(-1), outputs, strict=True)),
            start=torch.zeros((), dtype=x.dtype),
        )


class LoraLinear(nn.Module):
    """A linear layer that is not trained, and the product of two thin matrices that is."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.up(self.down(x))
        return y


class Residual(nn.Module):
    """Two convolutions around which x (images, channels, height, width) also goes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.convs(x))


class ConvNet(nn.Module):
    """Classifies images (images, 3, 32, 32), and returns its loss."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(num_layers))
        self.head = nn.Linear(channels, 100)

    def forward(self, images: Tensor, targets: Tensor) -> Tensor:
        x = F.relu(self.stem(images))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))).float(), targets)


def build_model(home: Home) -> nn.Module:
    """Build the model with the same weights in every process."""
    torch.manual_seed(0)
    if home.kind == "conv":
        model: nn.Module = ConvNet(home.width, home.num_layers)
    else:
        model = GPT(_shape(home))
    for block in model.blocks if isinstance(model, GPT) else ():
        if home.kind == "moe":
            block.up, block.down = nn.Identity(), Experts(home.width)
        elif home.kind == "lora":
            _add_lora(block)
    if home.kind == "lora":
        trained = {
            each
            for m in model.modules()
            if isinstance(m, LoraLinear)
            for each in (m.up.weight, m.down.weight)
        }
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in trained)
    if home.checkpoints:
        blocks: Any = model.blocks
        model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in blocks)
    return model


def _shape(home: Home) -> Shape:
    return Shape(
        home.num_layers,
        home.width,
        num_heads=max(1, home.width // 64),
        hidden=4 * home.width,
        vocab=16 * home.width,
    )


def _add_lora(block: Block) -> None:
    block.attention.qkv, block.attention.out = (
        LoraLinear(each) for each in (block.attention.qkv, block.attention.out)
    )
    block.up, block.down = LoraLinear(block.up), LoraLinear(block.down)


def data(home: Home, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield micro-batches for ever."""
    if home.kind != "conv":
        yield from batches(home.batch, vocab=_shape(home).vocab, rank=rank)
    generator = torch.Generator().manual_seed(1 + rank)
    num = home.batch.sequences
    while True:
        images = torch.randn(num, 3, 32, 32, generator=generator)
        yield images, torch.randint(100, (num,), generator=generator)


# Planned


def example_of(home: Home) -> Example:
    return Example(next(data(home, 0)))


def units_of(home: Home) -> list[str]:
    return [f"blocks.{number}" for number in range(home.num_layers)]


def options_of(home: Home) -> TraceOptions:
    return TraceOptions(home.policy, loss=_itself)


def _itself(loss: Tensor) -> Tensor:
    return loss


def workload_of(home: Home) -> Workload:
    with torch.device("meta"):
        model = build_model(home)
    return trace_workload(model, example_of(home), units=units_of(home), options=options_of(home))


_OPTIMIZERS = {
    "adamw": OptimizerPlan(peak_of_largest=8),  # a root, and what it is divided by
    "foreach": OptimizerPlan(peak_per_element=4),
    "fused": OptimizerPlan(),
}


def settings_of(home: Home, shard_rank: int = 0) -> StepSettings:
    way = PEER_MEMORY if home.comm == "peer_memory" else GLOO
    sharding = Sharding(
        home.num_ranks, way, shard_rank=shard_rank, reduce_dtype=home.policy.reduce_dtype
    )
    return StepSettings(
        sharding,
        reshard_after_forward=home.reshard,
        num_microbatches=home.num_microbatches,
        optimizer=_OPTIMIZERS[home.optimizer],
    )


# Executed


class HomeTraining:
    """One rank that trains."""

    def __init__(self, rank: Rank, home: Home) -> None:
        if not torch.distributed.is_initialized():
            rank.init_gloo()
        fullshard.set_default_comm(home.comm)
        self._tensors = LiveTensors()
        self._home = home
        with self._tensors:
            self.model: Any = build_model(home)
            # A group of its own, since models of one group share what it stages.
            mesh = DeviceMesh.from_group(torch.distributed.new_group(), "cpu")
            modules: Sequence[nn.Module] = [*self.model.blocks, self.model]
            for module in modules:
                fullshard.fully_shard(
                    module, mesh=mesh, mp_policy=home.policy, reshard_after_forward=home.reshard
                )
            self.optimizer = fullshard.step_on_shards(
                torch.optim.AdamW(
                    [p for p in self.model.parameters() if p.requires_grad],
                    lr=1e-4,
                    foreach=True if home.optimizer == "foreach" else None,
                    fused=True if home.optimizer == "fused" else None,
                )
            )
            self._data = data(home, rank.index)

    def run(self, num_steps: int) -> None:
        """Train, as `bench.step` does."""
        for _ in range(num_steps):
            self.optimizer.zero_grad()
            for number in range(self._home.num_microbatches):
                if self._home.num_microbatches > 1:
                    is_last = number == self._home.num_microbatches - 1
                    self.model.set_requires_gradient_sync(is_last)
                loss = self.model(*next(self._data)) / self._home.num_microbatches
                loss.backward()
                loss.item()
            self.optimizer.step()

    def peak_nbytes(self) -> int:
        """Return the most bytes of tensors that a step has, with this rank's part of shared memory."""
        with self._tensors:
            self.run(NUM_WARM_UP_STEPS)
            gc.collect()
            self._tensors.reset_peak()
            self.run(1)
        report = fullshard.memory_report(self.model, self.optimizer)
        return self._tensors.peak_nbytes + report.shared_nbytes


_SHORT = BatchSize(2, 64)
HOMES = (
    Home(),
    Home(checkpoints=True, batch=BatchSize(4, 128)),
    Home(bf16=True),
    Home(num_microbatches=3, batch=_SHORT),
    Home(bf16=True, num_microbatches=2, checkpoints=True, batch=_SHORT),
    Home(reshard=False),
    Home(comm="process_group"),
    Home(optimizer="fused", width=256),
    Home("conv", width=128, num_layers=6, batch=BatchSize(8, 1)),
    Home("moe", width=256, num_layers=6),
    Home("lora", batch=BatchSize(4, 128)),
    Home(num_ranks=4, width=256, num_layers=4),
)
