"""Models to train, before and after they are built: our own of given sizes, or one of Transformers' configurations.

    blueprint = ConfiguredBlueprint(read_model_config(path))
    model = blueprint.build(shard, device=device, seed=0, recompute=False)    # memory for shards alone
    logits = model.logits(tokens, positions)

`shard` is called with the layers and the model, on the meta device.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fullshard.deferred.building import materialize
from fullshard.models import configured
from fullshard.models.documents import check_causal, check_documents_apart
from fullshard.models.generation import Step, continuation
from fullshard.models.hugging_face import config_fields, differences
from fullshard.models.llama import Llama, init_weights
from fullshard.models.model_config import config_differences, transformers_config
from fullshard.models.operations import flops_per_token as configured_flops_per_token
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


class Blueprint(Protocol):
    """What a model is, from which every rank builds it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_positions(self) -> int | None:
        """The longest sequence that the model takes; None for any."""
        ...

    def build(
        self, shard: Shard, *, device: torch.device, seed: int, recompute: bool
    ) -> LanguageModel:
        """Build the model, sharded, with values that depend on the seed alone. Collective.

        recompute: whether layers keep their inputs only, and are computed again in the backward.
        """
        ...

    def config_fields(self, *, seq: int, marks: Mapping[str, int]) -> dict[str, Any]:
        """Return the `config.json` with which Transformers has the same model.

        seq: of the sequences that it was trained on. marks: bos_token_id and eos_token_id of its tokenizer.
        """
        ...

    def differences(self, fields: Mapping[str, Any]) -> list[str]:
        """Say where the model of a `config.json` is another one."""
        ...

    def is_same(self, other: "Blueprint") -> bool:
        """Whether weights of the other are weights of this one, and mean the same."""
        ...


@dataclasses.dataclass(frozen=True)
class OwnBlueprint:
    """Our own decoder (`models/llama.py`)."""

    config: LlamaConfig
    num_positions: None = None

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def build(
        self, shard: Shard, *, device: torch.device, seed: int, recompute: bool
    ) -> LanguageModel:
        with torch.device("meta"):
            model = Llama(self.config)
        model.recompute_layers(recompute)
        shard(list(model.model.layers), model)
        model.to_empty(device=device)
        model.tie_weights()
        init_weights(model, seed=seed)
        return _Own(model)

    def config_fields(self, *, seq: int, marks: Mapping[str, int]) -> dict[str, Any]:
        return config_fields(self.config, num_positions=seq) | dict(marks)

    def differences(self, fields: Mapping[str, Any]) -> list[str]:
        return differences(self.config, fields)

    def is_same(self, other: Blueprint) -> bool:
        return self == other


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
        pass  # tests/test_llama.py does

    def check_documents_apart(self, *, vocab_size: int, device: torch.device) -> None:
        pass  # the same


@dataclasses.dataclass(frozen=True)
class ConfiguredBlueprint:
    """Any causal language model of Transformers. fields: of its `config.json`."""

    fields: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(transformers_config(self.fields).vocab_size)

    @property
    def num_positions(self) -> int | None:
        return getattr(transformers_config(self.fields), "max_position_embeddings", None)

    def build(
        self, shard: Shard, *, device: torch.device, seed: int, recompute: bool
    ) -> LanguageModel:
        model = configured.build_from_config(self.fields, seed=seed)
        if recompute:
            configured.recompute_layers(model)
        shard(configured.sharding_units(model), model)
        materialize(model, device=device)
        return _Configured(model)

    def config_fields(self, *, seq: int, marks: Mapping[str, int]) -> dict[str, Any]:
        return {**self.fields, **marks, "dtype": "float32"}

    def differences(self, fields: Mapping[str, Any]) -> list[str]:
        return config_differences(fields, self.fields)

    def is_same(self, other: Blueprint) -> bool:
        return isinstance(other, ConfiguredBlueprint) and not self.differences(other.fields)


@dataclasses.dataclass(frozen=True)
class _Configured:
    module: nn.Module

    def logits(self, tokens: Tensor, positions: Tensor | None) -> Tensor:
        return configured.next_token_logits(self.module, tokens, positions)

    def continuation(self) -> Step:
        return configured.Continuation(self.module).step

    def flops_per_token(self, *, seq: int) -> int | None:
        return configured_flops_per_token(self.module, seq=seq)

    def check_causal(self, *, vocab_size: int, device: torch.device) -> None:
        check_causal(self.module, vocab_size=vocab_size, device=device)

    def check_documents_apart(self, *, vocab_size: int, device: torch.device) -> None:
        check_documents_apart(self.module, vocab_size=vocab_size, device=device)
