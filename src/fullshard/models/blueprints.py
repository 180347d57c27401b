"""What models to train are, before ranks build them: our own of given sizes, or one of Transformers' configurations.

Read by the launcher as well, which does not wait for the engine; `models/built.py` builds them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from fullshard.models.hugging_face import config_fields, differences
from fullshard.models.model_config import config_differences, transformers_config
from fullshard.models.sizes import LlamaConfig


class Blueprint(Protocol):
    """What a model is, from which every rank builds it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def num_positions(self) -> int | None:
        """The longest sequence that the model takes; None for any."""
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

    def config_fields(self, *, seq: int, marks: Mapping[str, int]) -> dict[str, Any]:
        return config_fields(self.config, num_positions=seq) | dict(marks)

    def differences(self, fields: Mapping[str, Any]) -> list[str]:
        return differences(self.config, fields)

    def is_same(self, other: Blueprint) -> bool:
        return self == other


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

    def config_fields(self, *, seq: int, marks: Mapping[str, int]) -> dict[str, Any]:
        return {**self.fields, **marks, "dtype": "float32"}

    def differences(self, fields: Mapping[str, Any]) -> list[str]:
        return config_differences(fields, self.fields)

    def is_same(self, other: Blueprint) -> bool:
        return isinstance(other, ConfiguredBlueprint) and not self.differences(other.fields)
