"""From a run's options to what its model is built from. Read without the engine."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from fullshard.models.blueprints import Blueprint, ConfiguredBlueprint
from fullshard.models.sizes import SIZES, LlamaConfig
from fullshard.tools.config import TrainConfig


def model_config(config: TrainConfig) -> LlamaConfig:
    """Return the sizes of a run's model, which is one of ours."""
    return dataclasses.replace(
        SIZES[config.model],
        vocab_size=config.vocab_size,
        tie_embeddings=config.tie_embeddings,
    )


def blueprint_of(config: TrainConfig, fields: Mapping[str, Any] | None) -> Blueprint:
    """Return what a run's model is built from. fields: of the config.json that --model names, if it does."""
    return model_config(config) if fields is None else ConfiguredBlueprint(fields)
