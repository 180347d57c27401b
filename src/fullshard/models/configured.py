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
from fullshard.models.blueprints import (
    ModelConfigError,
    causal_language_models,
    check_trainable,
)
from fullshard.models.generation import evaluating

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


# Does a model see what it must not: later tokens, other documents in its row? Measured, not believed. Of families in
# Transformers, most derive from positions where a document begins, some take positions and do not, and states run
# through all of a row. Nothing of that is an error there: such a model would learn across documents without a word.

_NUM_FIRST, _NUM_SECOND = 7, 9


def check_documents_apart(model: nn.Module, *, vocab_size: int, device: torch.device) -> None:
    """Raise ModelConfigError if in a packed row a document's logits depend on the one before it.

    Two rows are the same but for their first document. Two forwards without gradients or dropout, on
    every rank if the model is sharded; nothing is drawn, and modules are left in their modes.
    """
    row, other = _rows(vocab_size, device)
    other[:, _NUM_FIRST:] = row[:, _NUM_FIRST:]
    positions = torch.cat([torch.arange(n, device=device) for n in (_NUM_FIRST, _NUM_SECOND)])
    logits = _logits(model, row, positions[None]), _logits(model, other, positions[None])
    second = [each[:, _NUM_FIRST:] for each in logits]
    if not _same(model, second[0], second[1]):
        raise ModelConfigError(
            f"model_type {config_of(model).model_type!r}: documents in one row are not kept apart. What it "
            "predicts in the second depends on the first, so it would learn across documents."
        )


def check_causal(model: nn.Module, *, vocab_size: int, device: torch.device) -> None:
    """Raise ModelConfigError if the logits at a position depend on tokens that come later.

    Two rows differ in their last tokens only; otherwise as `check_documents_apart`.
    """
    row, other = _rows(vocab_size, device)
    other[:, :_NUM_FIRST] = row[:, :_NUM_FIRST]
    first = [_logits(model, each, None)[:, :_NUM_FIRST] for each in (row, other)]
    if not _same(model, first[0], first[1]):
        raise ModelConfigError(
            f"model_type {config_of(model).model_type!r}: tokens see later ones, so it cannot learn to "
            "predict the next. Give a causal model."
        )


def _rows(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two rows of tokens (1, positions) that differ everywhere."""
    if vocab_size < 2:
        raise ModelConfigError(f"vocab_size {vocab_size}: rows of one token cannot differ.")
    row = torch.arange(_NUM_FIRST + _NUM_SECOND, device=device)[None] * 7 % vocab_size
    return row, (row + 1 + vocab_size // 3) % vocab_size


@torch.no_grad()
def _logits(model: nn.Module, tokens: Tensor, positions: Tensor | None) -> Tensor:
    with evaluating(model):
        return next_token_logits(model, tokens, positions)


def _same(model: nn.Module, one: Tensor, other: Tensor) -> bool:
    """Whether logits are the same: in every bit, as what is masked counts nothing at all.

    Only what experts compute is rounded differently beside other tokens. There what is less than half
    of the digits counts as rounding, of a model that only attends: what attention lets through is more.
    """
    if torch.equal(one, other):
        return True
    if not (has_experts(model) and only_attends(model)):
        return False
    allowed = one.abs().max().item() * torch.finfo(one.dtype).eps ** 0.5
    return (one - other).abs().max().item() <= allowed


# How many operations training on a token takes


def flops_per_token(model: nn.Module, *, seq: int) -> int | None:
    """Return the operations of forward and backward for a token, as model FLOPs utilization counts them.

    Six for every weight of a matrix that it is multiplied with, read off the model itself, and for
    attention 12 x heads x head size x tokens in each layer, tokens being those of a window where a layer
    has one. None where that does not hold: experts, states, low-rank keys, tensors of other shapes.
    Source: arXiv 2204.02311, appendix B.
    """
    config = config_of(model)
    if not only_attends(model) or has_experts(model) or getattr(config, "kv_lora_rank", None):
        return None
    num_heads = getattr(config, "num_attention_heads", None)
    tokens = _tokens_attended(config, seq=seq)
    if num_heads is None or tokens is None:
        return None
    weights = 0
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if param.ndim < 2 or isinstance(module, nn.Embedding):
                continue  # looked up, or added, not multiplied with
            if param.ndim > 2 or name != "weight":
                return None
            weights += param.numel()
    head = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return 6 * weights + 12 * num_heads * head * tokens


def _tokens_attended(config: Any, *, seq: int) -> int | None:
    """Return how many tokens a token attends to, over all layers; None if that is not known."""
    num_layers = getattr(config, "num_hidden_layers", None)
    if num_layers is None or hasattr(config, "attention_layers"):  # GPT-Neo's own words
        return None
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"] * num_layers
    lengths = {"full_attention": seq, "sliding_attention": min(seq, window or seq)}
    if len(kinds) != num_layers or not set(kinds) <= lengths.keys():
        return None
    return sum(lengths[kind] for kind in kinds)
