"""Train torchtitan's Llama 3, parallelized by torchtitan's own function, in a plain loop.

    torchrun --nproc-per-node 8 -m fullshard.run examples/torchtitan_llama.py
    torchrun --nproc-per-node 2 -m fullshard.run examples/torchtitan_llama.py      # CPUs need nothing else

torchtitan's trainer wants GPUs. There it runs as it is:

    torchrun --nproc-per-node 8 -m fullshard.run -m torchtitan.train --module llama3 --config llama3_debugmodel

Its models and its `parallelize_llama` need none, and are what shards. Nothing here knows of fullshard.
"""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.flex_attention import AuxOutput
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: Any, enable_gqa: bool, **_: Any
) -> tuple[torch.Tensor, AuxOutput]:
    """Attend as torchtitan's attention does on one document. `flex_attention` has no backward on CPUs."""
    attended = F.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
    )
    return attended, AuxOutput()


def main() -> None:
    """Train a few steps on counting sequences."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--replicas", type=int, default=1, help="HSDP: copies of the sharded model")
    arguments = parser.parse_args()

    device = torch.device("cpu")
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        device = torch.accelerator.current_accelerator(check_available=True)
    else:  # torchtitan takes CUDA for granted: for meshes, and for compiled attention
        parallel_dims.device_type = "cpu"
        FlexAttention._compiled_flex_attn = staticmethod(causal_attention)
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()

    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=arguments.replicas,
        data_parallel_shard_degree=size // arguments.replicas,
        spmd_backend="partial_dtensor",
    )
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    spec = model_registry("debugmodel", attn_backend="flex")
    torch.manual_seed(0)
    with device:  # before it is divided, so that values do not depend on the number of ranks
        model = spec.model.build()
        with torch.no_grad():
            model.init_states()
    model = spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims.from_config(parallelism, size),
        training=training,
        parallelism=parallelism,
        compile_config=CompileConfig(enable=False),
        ac_config=FullAC.Config(),
        dump_folder="runs/torchtitan",
    )
    model.train()
    optimizers = default_adamw(lr=8e-4).build(model_parts=[model])

    sequences = 4 // size
    positions = torch.arange(64, device=device).expand(sequences, 64)
    masks = model.get_attention_masks(positions)
    for step in range(arguments.steps):
        starts = torch.randint(0, 1024, (4, 1), generator=torch.Generator().manual_seed(step))
        tokens = ((starts + torch.arange(65)) % 1024).chunk(size)[rank].to(device)
        logits = model(tokens[:, :-1], positions, masks).flatten(0, 1)
        # torchtitan has gradients added up, not averaged: a loss is divided by the tokens of all ranks.
        loss = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="sum") / (4 * 64)
        loss.backward()
        optimizers.step()
        optimizers.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1}: loss {total.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
