"""`fsdp1.py` moved to `fully_shard`: the same losses, and it goes on from that script's checkpoint.

    torchrun --nproc-per-node 2 -m fullshard.run examples/fsdp1.py --report   # writes the calls below
    torchrun --nproc-per-node 2 examples/fsdp1_moved.py                       # the same losses
    torchrun --nproc-per-node 4 examples/fsdp1_moved.py --load runs/fsdp1     # from where fsdp1.py has ended

What changed: the calls that shard, the clipping, and nothing else.
"""

import argparse

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp1 import batch, make_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fullshard import MixedPrecisionPolicy, clip_grad_norm_, fully_shard


def shard(model: nn.Module) -> nn.Module:
    """Shard the model as `migrate_report` says."""
    mp_policy_1 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mp_policy_2 = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for i in range(1, 5):  # TransformerEncoderLayer
        fully_shard(model.get_submodule(f"{i}"), reshard_after_forward=False, mp_policy=mp_policy_2)
    return fully_shard(model, reshard_after_forward=False, mp_policy=mp_policy_1)


def main() -> None:
    """Train, from the beginning or from a checkpoint of `fsdp1.py`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--load", help="the folder that fsdp1.py has saved")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = shard(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if arguments.load is not None:
        state, optimizer_state = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=arguments.load)
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        first = int(next(iter(optimizer.state.values()))["step"])
    for step in range(first, first + arguments.steps):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1}: loss {mean.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
