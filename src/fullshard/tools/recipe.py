"""What is trained and how: which model, sharded, its optimizer and the learning rate of each step."""

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.models.blueprints import Blueprint
from fullshard.models.built import LanguageModel, build
from fullshard.tools.config import TrainConfig

_BETAS = (0.9, 0.95)


def build_model(blueprint: Blueprint, config: TrainConfig, device: torch.device) -> LanguageModel:
    """Build the model on `meta`, shard each layer and the rest, then allocate and fill only the shards."""
    mesh = init_device_mesh(device.type, (config.ranks,), mesh_dim_names=("shard",))
    policy = fullshard.MixedPrecisionPolicy()
    if config.dtype == "bf16":
        policy = fullshard.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )

    def shard(layers: Sequence[nn.Module], model: nn.Module) -> None:
        for layer in (*layers, model):
            fullshard.fully_shard(layer, mesh=mesh, mp_policy=policy)

    recompute = config.activation_checkpointing
    return build(blueprint, shard, device=device, seed=config.seed, recompute=recompute)


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=config.lr, betas=_BETAS, fused=True)
    return fullshard.step_on_shards(adamw)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Rise linearly for `warmup` steps, then fall as a cosine to `min_lr` at the last step.

    With lr 1, min_lr 0, warmup 2 and 6 steps: 0.5, 1, 0.85, 0.5, 0.15, 0.
    """
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    span = max(1, config.steps - config.warmup)
    progress = min(1.0, (step - config.warmup + 1) / span)
    return config.min_lr + (config.lr - config.min_lr) * (1 + math.cos(math.pi * progress)) / 2
