"""A training script for PyTorch's FSDP1, as there are many: `fsdp1_moved.py` is what becomes of it.

torchrun --nproc-per-node 2 examples/fsdp1.py                             # under PyTorch's FSDP
torchrun --nproc-per-node 2 -m fullshard.run examples/fsdp1.py            # under fullshard, as it is
torchrun --nproc-per-node 2 -m fullshard.run examples/fsdp1.py --report   # how it would be written today
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import (
    BackwardPrefetch,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


def make_model() -> nn.Module:
    """Return a small transformer for sequences of vectors."""
    torch.manual_seed(0)
    layers = [
        nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True) for _ in range(4)
    ]
    return nn.Sequential(nn.Linear(16, 64), *layers, nn.Linear(64, 16))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences, and what the model is to make of them: each vector's mean with the one before."""
    data = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(8, 12, 16, generator=data)
    return inputs, (inputs + inputs.roll(1, dims=1)) / 2


def main() -> None:
    """Train, and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default="runs/fsdp1")
    parser.add_argument("--report", action="store_true", help="print fullshard's migrate_report")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = FSDP(
        make_model(),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    if arguments.report:
        import fullshard

        report = fullshard.migrate_report(model)
        if rank == 0:
            print(report)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(arguments.steps):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
