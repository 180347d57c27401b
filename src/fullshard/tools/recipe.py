"""What is trained and how: which model, sharded, its optimizer and the learning rate of each step."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.models.blueprints import (
    Blueprint,
    ConfiguredBlueprint,
    LanguageModel,
    OwnBlueprint,
)
from fullshard.models.sizes import SIZES, LlamaConfig
from fullshard.tools.config import TrainConfig

_BETAS = (0.9, 0.95)


def model_config(config: TrainConfig) -> LlamaConfig:
    """Return the sizes of a run's model, which is one of ours."""
    return dataclasses.replace(
        SIZES[config.model],
        vocab_size=config.vocab_size,
        tie_embeddings=config.tie_embeddings,
    )


def blueprint_of(config: TrainConfig, fields: Mapping[str, Any] | None) -> Blueprint:
    """Return what a run's model is built from. fields: of the config.json that --model names, if it does."""
    return OwnBlueprint(model_config(config)) if fields is None else ConfiguredBlueprint(fields)


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
    return blueprint.build(shard, device=device, seed=config.seed, recompute=recompute)


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
