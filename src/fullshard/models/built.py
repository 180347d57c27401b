"""Language models that are built from blueprints: ours, and those of Transformers, as one interface.

    model = build(ConfiguredBlueprint(fields), shard, device=device, seed=0, recompute=False)
    logits = model.logits(tokens, positions)

`shard` is called with the layers and the model, on the meta device; memory is that of the shards.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from fullshard.deferred.building import materialize
from fullshard.models import configured
from fullshard.models.blueprints import Blueprint, ConfiguredBlueprint
from fullshard.models.generation import Step
from fullshard.models.llama import Llama, continuation, init_weights
from fullshard.models.sizes import LlamaConfig

Shard = Callable[[Sequence[nn.Module], nn.Module], None]


class LanguageModel(Protocol):
    """A model that is built. module: what holds its parameters."""

    @property
    def module(self) -> nn.Module: ...

    def logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Return (batch, positions, vocab) for tokens (batch, positions).

        positions, of the same shape: in rows of several documents, from 0 in each; none sees another.
        """
        ...

    def continuation(self) -> Step:
        """Return what takes the next tokens (batch, new) of some sequences and returns their logits."""
        ...

    def flops_per_token(self, *, seq: int) -> int | None:
        """Return the operations of forward and backward for a token; None where they are not known."""
        ...

    def check_causal(self, *, vocab_size: int, device: torch.device) -> None:
        """Raise ModelConfigError if a token sees later ones. Collective."""
        ...

    def check_documents_apart(self, *, vocab_size: int, device: torch.device) -> None:
        """Raise ModelConfigError if a token sees those of other documents in its row. Collective."""
        ...


def build(
    blueprint: Blueprint, shard: Shard, *, device: torch.device, seed: int, recompute: bool
) -> LanguageModel:
    """Build a model, sharded, with values that depend on the seed alone. Collective.

    recompute: whether layers keep their inputs only, and are computed again in the backward. Raises
    ModelConfigError for a configuration that Transformers cannot build.
    """
    if isinstance(blueprint, LlamaConfig):
        return _build_own(blueprint, shard, device=device, seed=seed, recompute=recompute)
    assert isinstance(blueprint, ConfiguredBlueprint)
    model = configured.build_from_config(blueprint.fields, seed=seed)
    if recompute:
        configured.recompute_layers(model)
    shard(configured.sharding_units(model), model)
    materialize(model, device=device)
    return _Configured(model)


def _build_own(
    config: LlamaConfig, shard: Shard, *, device: torch.device, seed: int, recompute: bool
) -> LanguageModel:
    with torch.device("meta"):
        model = Llama(config)
    model.recompute_layers(recompute)
    shard(list(model.model.layers), model)
    model.to_empty(device=device)
    model.tie_weights()
    init_weights(model, seed=seed)
    return _Own(model)


@dataclasses.dataclass(frozen=True)
class _Own:
    module: Llama

    def logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        logits: Tensor = self.module(tokens, positions=positions)
        return logits

    def continuation(self) -> Step:
        return continuation(self.module)

    def flops_per_token(self, *, seq: int) -> int | None:
        return self.module.config.flops_per_token(seq=seq)

    def check_causal(self, *, vocab_size: int, device: torch.device) -> None:
        """Find nothing: what this model lets tokens see is the same for all sizes (tests/test_llama.py)."""

    def check_documents_apart(self, *, vocab_size: int, device: torch.device) -> None:
        """Find nothing, for the same reason."""


@dataclasses.dataclass(frozen=True)
class _Configured:
    module: nn.Module

    def logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return configured.next_token_logits(self.module, tokens, positions)

    def continuation(self) -> Step:
        return configured.Continuation(self.module).step

    def flops_per_token(self, *, seq: int) -> int | None:
        return configured.flops_per_token(self.module, seq=seq)

    def check_causal(self, *, vocab_size: int, device: torch.device) -> None:
        configured.check_causal(self.module, vocab_size=vocab_size, device=device)

    def check_documents_apart(self, *, vocab_size: int, device: torch.device) -> None:
        configured.check_documents_apart(self.module, vocab_size=vocab_size, device=device)
