"""Any causal language model of Transformers: built without memory, cut into units, run.

    model = build_from_config(read_model_config(path), seed=0)     # no memory, no values
    recompute_layers(model)                                        # if asked for
    for layer in sharding_units(model):
        fullshard.fully_shard(layer)
    fullshard.fully_shard(model)
    fullshard.materialize(model)                                   # memory, and the values of the seed
    logits = ConfiguredModel(model).logits(tokens, positions)

The model's code is that of Transformers, which is imported in functions only: it is an extra.
"""

import collections
import contextlib
import dataclasses
import importlib
import inspect
import logging
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
from fullshard.models.generation import Step, evaluating

# Numbers of experts, by the names that families have for them.
_EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    *("num_routed_experts", "num_total_experts"),
)
# Layers that attend, and keep nothing of earlier tokens but keys and values.
_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_NUM_FIRST, _NUM_SECOND = 7, 9  # tokens of the documents in a row that is checked


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
        # Packages that few models need, such as torchao, are imported by all, and log what they lack.
        with contextlib.ExitStack() as quiet:
            quiet.callback(logging.disable, logging.root.manager.disable)
            logging.disable(logging.WARNING)
            importlib.import_module("transformers.modeling_utils")
        return cast(nn.Module, deferred_init(models.from_config, config, dtype=torch.float32))
    except FullshardError:
        raise
    except Exception as error:  # sizes that do not fit, each family in its own way
        raise ModelConfigError(
            f"model_type {config.model_type!r}: Transformers cannot build this model: {error!r:.300}. Look at "
            "what its configuration says, or leaves out."
        ) from error


_MOST_LISTS = 3  # of one kind: more are a part of each layer


def sharding_units(model: nn.Module) -> list[nn.Module]:
    """Return the repeated layers, to be sharded one by one before the model.

    They are what its lists of modules hold: that of a decoder, and of an encoder. Experts and the like are lists within
    one, or many lists of one kind. Empty if a model has no other.
    """
    lists: list[nn.ModuleList] = []
    inside: set[nn.Module] = set()
    for module in model.modules():  # which comes to a list before those within it
        if isinstance(module, nn.ModuleList) and len(module) and module not in inside:
            inside.update(module.modules())
            lists.append(module)
    kinds = collections.Counter(type(each[0]) for each in lists)
    lists = [each for each in lists if kinds[type(each[0])] <= _MOST_LISTS]
    return [layer for each in lists for layer in each if [*layer.parameters()]]


def recompute_layers(model: Any) -> None:
    """Keep only each layer's input for the backward, in training mode, and compute the rest again there.

    Before or after sharding. Raises ModelConfigError for a family that cannot.
    """
    if not model.supports_gradient_checkpointing:
        raise ModelConfigError(
            f"model_type {model.config.model_type!r}: Transformers cannot recompute its layers. Train "
            "it without activation checkpointing."
        )
    # The newer name, where there is one: the older then warns.
    enable: Any = getattr(
        model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
    )
    enable({"use_reentrant": False})


@dataclasses.dataclass(frozen=True)
class ConfiguredModel:
    """A model of Transformers, sharded or not, as a language model. Its methods are collective if it is sharded."""

    module: Any

    def logits(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
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
            if not self._takes("position_ids"):
                raise self._refused(
                    "takes no positions, so documents in one row cannot be kept apart."
                )
            more = {"position_ids": positions}
        logits: Tensor = self.module(input_ids=tokens, use_cache=False, **more).logits
        return logits

    def continuation(self) -> Step:
        """Return what takes the next tokens (batch, new) of some sequences, and returns their logits.

        Those are the same as if all tokens were given at once, without dropout. Keys and values of attention
        are kept. Models with a state of another kind, and those that keep nothing, are given all tokens again,
        which is slower.
        """
        keeps = self.only_attends and self._takes("past_key_values")
        cache: Any = None
        seen: Tensor | None = None

        @torch.no_grad()
        def step(tokens: Tensor) -> Tensor:
            nonlocal cache, seen
            with evaluating(self.module):
                if keeps:
                    output = self.module(input_ids=tokens, past_key_values=cache, use_cache=True)
                    cache = output.past_key_values
                    return cast(Tensor, output.logits)
                seen = tokens if seen is None else torch.cat((seen, tokens), dim=1)
                return self.logits(seen)[:, -tokens.shape[1] :]

        return step

    # Does a model see what it must not: later tokens, other documents in its row? Measured, not believed. Of
    # families in Transformers, most derive from positions where a document begins, some take positions and do not,
    # and states run through all of a row. Nothing of that is an error there: such a model would learn across
    # documents without a word.

    def check_documents_apart(self, *, vocab_size: int, device: torch.device) -> None:
        """Raise ModelConfigError if in a packed row a document's logits depend on the one before it.

        Two rows are the same but for their first document. Two forwards without gradients or dropout; nothing
        is drawn, and modules are left in their modes.
        """
        row, other = _rows(vocab_size, device)
        other[:, _NUM_FIRST:] = row[:, _NUM_FIRST:]
        positions = torch.cat([torch.arange(n, device=device) for n in (_NUM_FIRST, _NUM_SECOND)])
        if not self._is_same(row, other, positions[None], slice(_NUM_FIRST, None)):
            raise self._refused(
                "documents in one row are not kept apart. What it predicts in the second depends on the first, "
                "so it would learn across documents."
            )

    def check_causal(self, *, vocab_size: int, device: torch.device) -> None:
        """Raise ModelConfigError if the logits at a position depend on tokens that come later.

        Two rows differ in their last tokens only; otherwise as `check_documents_apart`.
        """
        row, other = _rows(vocab_size, device)
        other[:, :_NUM_FIRST] = row[:, :_NUM_FIRST]
        if not self._is_same(row, other, None, slice(_NUM_FIRST)):
            raise self._refused(
                "tokens see later ones, so it cannot learn to predict the next. Give a causal model."
            )

    @torch.no_grad()
    def _is_same(self, row: Tensor, other: Tensor, positions: Tensor | None, part: slice) -> bool:
        """Whether logits in a part of two rows are the same: in every bit, as what is masked counts nothing at all.

        Only what experts compute is rounded differently beside other tokens. There what is less than half
        of the digits counts as rounding, of a model that only attends: what attention lets through is more.
        """
        with evaluating(self.module):
            one, two = (self.logits(each, positions)[:, part] for each in (row, other))
        if torch.equal(one, two):
            return True
        if not (self.has_experts and self.only_attends):
            return False
        allowed = one.abs().max().item() * torch.finfo(one.dtype).eps ** 0.5
        return (one - two).abs().max().item() <= allowed

    @property
    def only_attends(self) -> bool:
        """Whether attention is all by which tokens reach later ones: no recurrence, no convolution."""
        kinds = set(getattr(self.module.config, "layer_types", None) or _ATTENTION_LAYERS)
        is_stateful = any(vars(kind).get("_is_stateful") for kind in type(self.module).__mro__)
        return kinds <= _ATTENTION_LAYERS and not is_stateful

    @property
    def has_experts(self) -> bool:
        """Whether layers send each token to some of several experts."""
        return any((getattr(self.module.config, name, None) or 0) > 1 for name in _EXPERTS)

    def flops_per_token(self, *, seq: int) -> int | None:
        """Return the operations of forward and backward for a token, as model FLOPs utilization counts them.

        Six for every weight of a matrix that it is multiplied with, read off the model itself, and for
        attention 12 x heads x head size x tokens in each layer, tokens being those of a window where a layer
        has one. None where that does not hold: experts, states, low-rank keys, tensors of other shapes.
        Source: arXiv 2204.02311, appendix B.
        """
        config = self.module.config
        if not self.only_attends or self.has_experts or getattr(config, "kv_lora_rank", None):
            return None
        num_heads = getattr(config, "num_attention_heads", None)
        tokens = _tokens_attended(config, seq=seq)
        if num_heads is None or tokens is None:
            return None
        weights = 0
        for module in self.module.modules():
            for name, param in module.named_parameters(recurse=False):
                if param.ndim < 2 or isinstance(module, nn.Embedding):
                    continue  # looked up, or added, not multiplied with
                if param.ndim > 2 or name != "weight":
                    return None
                weights += param.numel()
        head = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        return 6 * weights + 12 * num_heads * head * tokens

    def _takes(self, argument: str) -> bool:
        return argument in inspect.signature(self.module.forward).parameters

    def _refused(self, why: str) -> ModelConfigError:
        return ModelConfigError(f"model_type {self.module.config.model_type!r}: {why}")


def _rows(vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return two rows of tokens (1, positions) that differ everywhere."""
    if vocab_size < 2:
        raise ModelConfigError(f"vocab_size {vocab_size}: rows of one token cannot differ.")
    row = torch.arange(_NUM_FIRST + _NUM_SECOND, device=device)[None] * 7 % vocab_size
    return row, (row + 1 + vocab_size // 3) % vocab_size


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
