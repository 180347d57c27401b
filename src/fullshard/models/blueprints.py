"""What models to train are, before ranks build them: our own of given sizes, or one of Transformers' configurations.

Read by the launcher as well, which does not wait for torch; `models/built.py` builds them. Of Transformers this has
what a `config.json` says: read, compared, and whether a model of it can be trained.
"""

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fullshard.errors import FullshardError
from fullshard.json_files import read_json
from fullshard.models.sizes import LlamaConfig
from fullshard.versions import install_hint

# What says how a model is stored, started or run by others, and not what it computes from its weights.
_ASIDE = frozenset(
    (
        *("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
        *("_name_or_path", "name_or_path", "_commit_hash", "use_cache", "return_dict"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset"),
        *("_experts_implementation", "experts_implementation", "use_kernels", "torchscript"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("initializer_range", "gradient_checkpointing", "task_specific_params"),
        *("id2label", "label2id", "problem_type", "chunk_size_feed_forward"),
    )
)

# These have the field is_decoder from the encoders that they were made of, and do not read it.
_ALWAYS_DECODERS = frozenset({"gpt_neox", "gpt_neox_japanese"})


# How many there are of what, by the names that families have for it: n_layer, num_local_experts.
_COUNT = re.compile(r"(?:n|num)_(?:\w+_)?(layer|expert)s?")
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 200_000


class ModelConfigError(FullshardError, ValueError):
    """A configuration that cannot be read, or whose model cannot be trained here."""


@dataclasses.dataclass(frozen=True)
class ConfiguredBlueprint:
    """Any causal language model of Transformers. fields: of its `config.json`."""

    fields: Mapping[str, Any]

    @property
    def vocab_size(self) -> int:
        return int(transformers_config(self.fields).vocab_size)

    @property
    def num_positions(self) -> int | None:
        """The longest sequence that the model takes; None for any."""
        return getattr(transformers_config(self.fields), "max_position_embeddings", None)

    def config_fields(self, *, seq: int, marks: Mapping[str, int]) -> dict[str, Any]:
        return {**self.fields, **marks, "dtype": "float32"}

    def differences(self, fields: Mapping[str, Any]) -> list[str]:
        return config_differences(fields, self.fields)

    def is_same(self, other: object) -> bool:
        """Whether weights of the other are weights of this one, and mean the same."""
        return isinstance(other, ConfiguredBlueprint) and not self.differences(other.fields)


Blueprint = LlamaConfig | ConfiguredBlueprint
"""What a model is, from which every rank builds it."""


def read_model_config(path: Path) -> dict[str, Any]:
    """Return the fields of a `config.json`, or of the one in a folder.

    Raises ModelConfigError where there is none, or where it is another file than a model's.
    """
    file = path / "config.json" if path.is_dir() else path
    fields = read_json(
        file,
        dict[str, Any],
        lambda why: ModelConfigError(
            f"{file}: {why}. Give the config.json of a model of Transformers, or its folder."
        ),
    )
    if isinstance(fields.get("model_type"), str):
        return fields
    if "options" in fields and "corpus" in fields:
        raise ModelConfigError(
            f"{file}: describes a run of fullshard train, not a model. To go on with its weights give "
            "the run to --init-from; or write its model with fullshard export --hf, and give that folder."
        )
    raise ModelConfigError(
        f"{file}: has no model_type, by which Transformers finds a model's code. Give the config.json "
        "that save_pretrained writes, or add model_type to this one."
    )


def config_differences(fields: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Say where two configurations are of models that compute differently with the same weights.

    {"model_type": "gpt2", "n_layer": 2} and {"model_type": "gpt2", "n_layer": 3, "use_cache": False}:
        ["n_layer is 2, and 3 in the other"]

    What only training or storage knows about does not count: dtypes, names, initial values, dropout,
    the numbers of special tokens. Where Transformers is installed, a field that is left out has its
    value there, and old names are new ones; elsewhere a field that one side leaves out is a difference.
    """
    kinds = [each.get("model_type") for each in (fields, other)]
    if kinds[0] != kinds[1]:
        return [f"model_type is {kinds[0]!r}, and {kinds[1]!r} in the other"]
    ours, theirs = _complete(fields), _complete(other)
    if ours is None or theirs is None:
        ours, theirs = dict(fields), dict(other)
    return [
        f"{key} is {ours.get(key)!r}, and {theirs.get(key)!r} in the other"
        for key in sorted(ours.keys() | theirs.keys())
        if not _is_aside(key) and ours.get(key) != theirs.get(key)
    ]


def _is_aside(key: str) -> bool:
    endings = ("_token_id", "_token_ids", "dropout", "_drop", "_dropout_prob", "pdrop")
    return key in _ASIDE or key.endswith(endings)


def _complete(fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return all fields as Transformers has them; None if it is not there or does not take these."""
    try:
        return dict(transformers_config(fields).to_dict())
    except ModelConfigError:
        return None


def transformers_config(fields: Mapping[str, Any]) -> Any:
    """Return the configuration of Transformers that these fields give.

    What would choose code from elsewhere, or another way to attend, is left out. Raises
    ModelConfigError without Transformers, for a model that it does not know, and for fields that it
    does not take.
    """
    _check_counts(fields)
    configs = _transformers().CONFIG_MAPPING
    kind = fields["model_type"]
    if kind not in configs:
        raise ModelConfigError(
            f"model_type {kind!r}: is not known to Transformers {_transformers().__version__}. Install "
            "one that knows it; code that comes with a model is never run here."
        )
    ignored = {"auto_map", "return_dict", "output_attentions", "output_hidden_states"}
    ignored |= {key for key in fields if key.endswith(("attn_implementation", "use_kernels"))}
    ignored |= {key for key in fields if key.endswith("experts_implementation")}
    given = {key: value for key, value in fields.items() if key not in ignored}
    try:
        return configs[kind].from_dict(given)
    except Exception as error:  # each configuration checks its fields in its own way
        said = " ".join(str(error).split())
        raise ModelConfigError(
            f"the configuration of a {kind} is not one that Transformers takes: {said}"
        ) from error


def _check_counts(fields: Mapping[str, Any]) -> None:
    """Refuse numbers that no model has: Transformers makes lists and modules of as many as it is told."""
    most: dict[str, float] = {"layer": 1, "expert": 1}
    for key, value in fields.items():
        if isinstance(value, Mapping):
            _check_counts(value)
        elif isinstance(value, int | float) and (found := _COUNT.fullmatch(str(key))):
            if value < 0:
                raise ModelConfigError(
                    f"the configuration says {key}: {value}; there are no fewer than 0 layers."
                )
            most[found[1]] = max(most[found[1]], value)
    layers, experts = most.values()
    if not (layers <= _MOST_LAYERS and layers * experts <= _MOST_EXPERTS):
        raise ModelConfigError(
            f"the configuration is of {layers:g} layers with {experts:g} experts each: more than "
            f"{_MOST_LAYERS} layers, or {_MOST_EXPERTS} experts in all, are not built."
        )


def _transformers() -> Any:
    # An extra, and slow to import: not before somebody needs it.
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ModelConfigError(
            "Models of a config.json need the package transformers. Install it with: "
            f"{install_hint('huggingface')}"
        ) from error


def causal_language_models() -> Any:
    """Return what builds a causal language model of a configuration: `AutoModelForCausalLM`."""
    return _transformers().AutoModelForCausalLM


def check_trainable(fields: Mapping[str, Any]) -> Any:
    """Return the configuration of Transformers; raises ModelConfigError for what cannot be trained.

    That is what is no causal language model of text alone, and quantised weights.
    """
    config = transformers_config(fields)
    kind = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        raise ModelConfigError(
            f"model_type {kind!r}: the configuration is of quantised weights, which cannot be trained. "
            "Take quantization_config out of it, or give that of the model before."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelConfigError(
            f"model_type {kind!r}: has an encoder beside its decoder. Give a model that is a decoder alone."
        )
    known = vars(causal_language_models())["_model_mapping"]
    text = config.get_text_config(decoder=True)
    if text is not config:
        names = [name for name, value in vars(config).items() if value is text]
        what_to_do = (
            "Its language model cannot be trained alone here. Give the configuration of a model of text, such as "
            "llama, qwen3 or gpt2."
        )
        with contextlib.suppress(ModelConfigError, KeyError, IndexError):
            check_trainable(text.to_dict())
            what_to_do = (
                f"Give what its configuration has under {names[0]} as a config.json of its own."
            )
        raise ModelConfigError(f"model_type {kind!r}: is a model of more than text. {what_to_do}")
    if type(config) not in known:
        raise ModelConfigError(
            f"model_type {kind!r}: Transformers has no causal language model for it. Give one that "
            "predicts the next token, such as llama, qwen3 or gpt2."
        )
    if getattr(config, "is_decoder", True) is False and kind not in _ALWAYS_DECODERS:
        raise ModelConfigError(
            f"model_type {kind!r}: is an encoder, whose tokens see later ones, unless its configuration "
            'says "is_decoder": true. Say so in config.json, or give another model.'
        )
    return config
