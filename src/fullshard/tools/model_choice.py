"""Which model a run trains: a named size, or the configuration that --model names. Decided before ranks start."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fullshard.models.blueprints import (
    Blueprint,
    ConfiguredBlueprint,
    ModelConfigError,
    check_trainable,
    read_model_config,
)
from fullshard.models.sizes import SIZES
from fullshard.tools.config import OptionError, TrainConfig
from fullshard.tools.run_blueprint import blueprint_of
from fullshard.tools.run_folder import RunFolder
from fullshard.tools.text.corpus import NUM_BYTES
from fullshard.tools.text.tokenizer import Tokenizer
from fullshard.tools.weights import check_initial_weights


class ModelChoice(NamedTuple):
    """What a run's model is built from. fields: of the config.json that --model names, if it does."""

    blueprint: Blueprint
    fields: Mapping[str, Any] | None


def choose_model(
    config: TrainConfig, tokenizer: Tokenizer | None, *, vocab_size: int | None
) -> tuple[TrainConfig, ModelChoice]:
    """Return the model of a run that is to begin, and its options with the size of its vocabulary.

    vocab_size: what was typed. Raises OptionError for a model that cannot be trained, does not fit the text's
    tokens and sequences, or is not that of --init-from.
    """
    try:
        fields = None if config.model in SIZES else read_model_config(Path(config.model))
        if fields is None:
            size = _vocab_size(vocab_size, tokenizer)
        else:
            size = _vocab_size_of(ConfiguredBlueprint(fields), config, vocab_size, tokenizer)
        config = dataclasses.replace(config, vocab_size=size)
        choice = ModelChoice(blueprint_of(config, fields), fields)
        if config.init_from:
            check_initial_weights(config, choice.blueprint)
    except ModelConfigError as error:
        raise OptionError(f"--model {config.model}: {error}") from error
    return config, choice


def model_of_run(config: TrainConfig, folder: RunFolder) -> ModelChoice:
    """Return the model of a run that goes on; raises OptionError if what it has kept cannot be read."""
    try:
        fields = folder.read_model_fields()
    except ModelConfigError as error:
        raise OptionError(f"--resume {folder.path}: {error}") from error
    return ModelChoice(blueprint_of(config, fields), fields)


def _vocab_size(wanted: int | None, tokenizer: Tokenizer | None) -> int:
    """Return how many kinds of tokens a model of ours is to tell apart."""
    needed = tokenizer.vocab_size if tokenizer else NUM_BYTES
    if wanted is not None and wanted < needed:
        what = "the tokenizer has" if tokenizer else "bytes have"
        raise OptionError(
            f"--vocab-size {wanted}: {what} {needed} kinds. Leave it out, or give more."
        )
    return wanted or needed


def _vocab_size_of(
    blueprint: ConfiguredBlueprint,
    config: TrainConfig,
    wanted: int | None,
    tokenizer: Tokenizer | None,
) -> int:
    """Return how many kinds of tokens a configuration has, after a look at whether text fits it."""
    check_trainable(blueprint.fields)
    has, where = blueprint.vocab_size, f"--model {config.model}"
    if wanted not in (None, has):
        raise OptionError(
            f"--vocab-size {wanted}: {where} has {has} kinds. Leave --vocab-size out."
        )
    if tokenizer is None and has != NUM_BYTES:
        raise OptionError(
            f"{where}: has {has} kinds of tokens, and without --tokenizer there are {NUM_BYTES}, of bytes. "
            "Give its --tokenizer."
        )
    if tokenizer is not None and has < tokenizer.vocab_size:
        raise OptionError(
            f"{where}: has {has} kinds of tokens, and the tokenizer {tokenizer.vocab_size}. Give the model's "
            "tokenizer, or a configuration with a larger vocab_size."
        )
    longest = blueprint.num_positions
    if longest is not None and config.seq > longest:
        raise OptionError(
            f"--seq {config.seq}: {where} is for {longest} tokens (max_position_embeddings). Give no more."
        )
    return has
