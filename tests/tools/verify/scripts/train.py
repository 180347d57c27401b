"""A training script as users write them, with faults that can be planted, one at a time."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import fullshard

WIDTH, WORDS = 16, 32


class Block(nn.Module):
    """Attention, whose key bias has a gradient of rounding alone, and a layer with dropout.

    Around zero, the gradient of its ReLU depends on how inputs are rounded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout: nn.Module = nn.Dropout(0.1)
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)

    def reset_buffers(self) -> None:
        self.scale.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x) * self.scale.to(x.dtype)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.dropout(functional.relu(self.linear(x)))


class Clamping(nn.Linear):
    """Keeps its weights small, by writing to them whenever it runs."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class OwnDropout(nn.Module):
    """Draws its masks from a generator that nobody seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape, generator=self.generator) > 0.5)


class Net(nn.Module):
    """Blocks between an embedding and a head that is tied to it, and a layer that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(WIDTH, 1)

    def encode(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.encode(words)).float()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--face", default="fully_shard")
    parser.add_argument("--optimizer", default="AdamW")
    parser.add_argument("--fault", default="")
    parser.add_argument("--does", nargs="*", default=[])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--spawn", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.spawn:
        torch.multiprocessing.spawn(run, args=(args.spawn, args), nprocs=args.spawn)
    else:
        run(0, 0, args)


def run(spawned: int, num_spawned: int, args: argparse.Namespace) -> None:
    does, fault = set(args.does), args.fault
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    if num_spawned:
        assert (spawned, num_spawned) == (dist.get_rank(), dist.get_world_size())
    rank = dist.get_rank()
    if fault != "no seed":
        torch.manual_seed(rank if fault == "seeds" or "sync" in does else 0)
    if "meta" in does:
        with torch.device("meta"):
            model: Any = Net()
    else:
        model = Net()
    plant_before(model, fault, rank)
    model = shard(model, args.face, does, fault)
    if "meta" in does and args.face == "fully_shard":
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        for block in model.blocks:
            block.reset_buffers()
    plant_after(model, fault)
    if fault == "no steps":
        return
    if fault == "exit":
        sys.exit(3)
    make: Any = getattr(torch.optim, args.optimizer)
    optimizer = make([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    words = torch.arange(640).reshape(-1, 4) * 7 % WORDS
    alike: Any = {"num_replicas": 1, "rank": 0} if fault == "same data" else {}
    sampler: Any = DistributedSampler(TensorDataset(words), seed=1, **alike)
    loader = DataLoader(TensorDataset(words), batch_size=4, sampler=sampler)
    num_micro = 2 if "accumulate" in does or "no_sync" in does else 1
    batches = iter(loader)
    caught: Any = BaseException if "catch" in does else ()
    for _ in range(args.steps):
        with contextlib.suppress(caught):
            for micro in range(num_micro):
                (batch,) = next(batches)
                with synchronising(model, "no_sync" not in does or micro == num_micro - 1):
                    loss = loss_of(model, batch, does, fault, rank)
                    if "weighted" not in does:
                        loss = loss / num_micro
                    loss.backward()
            if "clip" in does:
                clip(model)
            optimizer.step()
            optimizer.zero_grad()
            if fault == "raises":
                raise ValueError("no such thing")


def loss_of(model: Any, batch: Tensor, does: set[str], fault: str, rank: int) -> Tensor:
    if "encode" in does:
        return model.encode(batch).float().square().mean()
    if "weighted" in does:
        batch = batch[: rank + 1]
    loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, 1).flatten())
    if "parts" in does:
        loss = loss + model.module.blocks[0](model(batch).new_ones(1, 4, WIDTH)).square().mean()
    if fault == "outside":
        loss = loss + model.blocks[0].linear.weight.square().mean()
    if "weighted" in does:
        return fullshard.weighted_loss(loss, batch.numel(), model)
    return loss


def shard(model: Any, face: str, does: set[str], fault: str) -> Any:
    if fault == "nothing":
        return model
    half = "mixed" in does
    if face == "fully_shard":
        mesh = None
        if "hybrid" in does:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = fullshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
        for block in model.blocks:
            fullshard.fully_shard(block, mesh=mesh, mp_policy=policy)
        if fault == "no root":
            return model
        fullshard.fully_shard(model, mesh=mesh, mp_policy=policy)
        if "register" in does:
            fullshard.register_fsdp_forward_method(model, "encode")
        return model
    return fullshard.FullyShardedDataParallel(
        model,
        auto_wrap_policy=fullshard.ModuleWrapPolicy({Block}),
        use_orig_params=face == "fsdp1",
        sync_module_states="sync" in does,
        mixed_precision=fullshard.MixedPrecision(torch.bfloat16) if half else None,
    )


@contextlib.contextmanager
def synchronising(model: Any, does: bool) -> Any:
    if isinstance(model, fullshard.FSDPModule):
        model.set_requires_gradient_sync(does)
        yield
        return
    with contextlib.nullcontext() if does else model.no_sync():
        yield


def clip(model: Any) -> None:
    if isinstance(model, fullshard.FullyShardedDataParallel):
        model.clip_grad_norm_(0.5)
    else:
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        assert norm.full_tensor() > 0  # as scripts log it


def plant_before(model: Any, fault: str, rank: int) -> None:
    if fault == "buffer":
        model.blocks[1].scale += 0.5 * rank
    if fault == "clamp":
        model.blocks[1].linear = Clamping(WIDTH, WIDTH)
    if fault == "generator":
        model.blocks[1].dropout = OwnDropout()


def plant_after(model: Any, fault: str) -> None:
    if fault == "factor":
        model.blocks[0].set_gradient_divide_factor(1.0)
    if fault == "sums":  # no fault, if it is said
        for module in model.modules():
            if isinstance(module, fullshard.FSDPModule):
                module.set_gradient_divide_factor(1.0)
    if fault == "untied":
        with torch.no_grad():
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    if fault == "dies" and dist.get_rank() == 1:
        os._exit(7)


if __name__ == "__main__":
    main()
