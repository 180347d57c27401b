"""Any causal language model of Transformers: built without memory, cut into units, run.

    model = build_from_config(read_model_config(path), seed=0)     # no memory, no values
    recompute_layers(model)                                        # if asked for
    for layer in sharding_units(model):
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    fullshard.materialize(model)                                   # memory, and the values of the seed
    logits = next_token_logits(model, tokens, positions)

The model's code is that of Transformers, which is imported in functions only: it is an extra.
"""

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullshard.deferred.building import deferred_init
from fullshard.errors import FullshardError
from fullshard.models.evaluating import evaluating
from fullshard.models.model_config import (
    ModelConfigError,
    causal_language_models,
    check_trainable,
)

# Numbers of experts, by the names that families have for them.
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("num_routed_experts", "num_total_experts"),
)
# Layers that attend, and keep nothing of earlier tokens but keys and values.
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})


def build_from_config(fields: Mapping[str, Any], *, seed: int) -> nn.Module:
    """Return the causal language model of a configuration, in float32, without memory or values.

    `fullshard.materialize`, once it is sharded, gives it the values that `torch.manual_seed(seed)` and
    `AutoModelForCausalLM.from_config` give in one process, in every bit, buffers and ties included. The
    CPU's random generator is seeded here. Attention is PyTorch's scaled_dot_product_attention where the
    family has it, else the family's own. Dropout is what the configuration says (GPT-2's: 0.1 unless it
    says otherwise), in training mode, which the caller chooses. Code that comes with a model is never run.

    Raises ModelConfigError for what is no causal language model of text alone, for quantised weights, and
    for fields that Transformers cannot build a model of.
    """
    config = check_trainable(fields)
    models = causal_language_models()
    torch.manual_seed(seed)
    try:
        return cast(nn.Module, deferred_init(models.from_config, config, dtype=torch.float32))
    except FullshardError:
        raise
    except Exception as error:  # sizes that do not fit, each family in its own way
        raise ModelConfigError(
            f"model_type {config.model_type!r}: Transformers cannot build this model: {error!r:.300}. Look at "
            "what its configuration says, or leaves out."
        ) from error


def config_of(model: nn.Module) -> Any:
    """Return the configuration that a model of Transformers was built from."""
    return model.config


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, to be sharded one by one before the model.

    They are the list of modules with the most parameters, which in a decoder is that of its layers (of
    several kinds in some); experts and the like are lists within one. Empty if a model has no list.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    # The first of equals: `modules` comes to a list before those within it.
    layers = max(lists, key=lambda each: sum(param.numel() for param in each.parameters()))
    return list(layers)


def recompute_layers(model: nn.Module) -> None:
    """Keep only each layer's input for the backward, in training mode, and compute the rest again there.

    Before or after sharding. Raises ModelConfigError for a family that cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelConfigError(
            f"model_type {config_of(model).model_type!r}: Transformers cannot recompute its layers. Train "
            "it without activation checkpointing."
        )
    # The newer name, where there is one: the older then warns.
    enable: Any = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


def next_token_logits(model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Return logits (batch, positions, vocab) for tokens (batch, positions).

    positions: int64, of the same shape, for rows of several documents: they begin at 0 again where a
    document does, and attention then stays within a document:

        tokens     5 9 2 7 7 1        documents 5 9 2 and 7 7 1
        positions  0 1 2 0 1 2

    Transformers sees that by itself in most families; `check_documents_apart` tells whether in this one.
    Raises ModelConfigError for a family that takes no positions.
    """
    more: dict[str, Any] = {}
    if positions is not None:
        if "position_ids" not in _arguments(model):
            raise ModelConfigError(
                f"model_type {config_of(model).model_type!r}: takes no positions, so documents in one row "
                "cannot be kept apart."
            )
        more = {"position_ids": positions}
    logits: Tensor = model(input_ids=tokens, use_cache=False, **more).logits
    return logits


def _arguments(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(model.forward).parameters


class Continuation:
    """Some sequences of tokens that a model continues: what it has to keep of those so far.

    tokens = Continuation(model)
    logits = tokens.step(prompt)       # (batch, positions, vocab)
    logits = tokens.step(choice)       # (batch, 1, vocab), as if both were given at once

    Keys and values of attention are kept. Models with a state of another kind, and those that keep
    nothing, are given all tokens again: slower, with the same logits. Collective for a sharded model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._keeps = only_attends(model) and "past_key_values" in _arguments(model)
        self._cache: Any = None
        self._tokens: Tensor | None = None

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Take new tokens (batch, new) and return their logits (batch, new, vocab), without dropout."""
        with evaluating(self.model):
            if self._keeps:
                output = self.model(input_ids=tokens, past_key_values=self._cache, use_cache=True)
                self._cache = output.past_key_values
                return cast(Tensor, output.logits)
            seen = tokens if self._tokens is None else torch.cat((self._tokens, tokens), dim=1)
            self._tokens = seen
            return next_token_logits(self.model, seen)[:, -tokens.shape[1] :]


def only_attends(model: nn.Module) -> bool:
    """Whether attention is all by which tokens reach later ones: no recurrence, no convolution."""
    kinds = set(getattr(config_of(model), "layer_types", None) or ATTENTION_LAYERS)
    is_stateful = any(vars(kind).get("_is_stateful") for kind in type(model).__mro__)
    return kinds <= ATTENTION_LAYERS and not is_stateful


def has_experts(model: nn.Module) -> bool:
    """Whether layers send each token to some of several experts."""
    return any((getattr(config_of(model), name, None) or 0) > 1 for name in _EXPERTS)
