"""What our own decoder is, in numbers, and in the words of Transformers' ``LlamaConfig``. Read without torch."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a model; raises ValueError for sizes that do not fit together.

    `10m` has 384 = 6 heads x 64, two key/value heads shared by three query heads each, and
    1.57M parameters in each of six layers.
    """

    vocab_size: int = 256
    hidden_size: int = 384
    intermediate_size: int = 1024
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 2
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    num_positions: ClassVar[None] = None

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"LlamaConfig: hidden_size {self.hidden_size} must be num_heads {self.num_heads} "
                "times an even head size (rotary positions turn pairs of elements)."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig: num_heads {self.num_heads} is not a multiple of num_kv_heads "
                f"{self.num_kv_heads}; each key/value head serves the same number of query heads."
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    def flops_per_token(self, *, seq: int) -> int:
        """Return the operations of forward and backward for a token, as model FLOPs utilization counts them.

        Six for every weight of a matrix that it is multiplied with, and for attention 12 x layers x heads x
        head size x tokens. What is computed again (activation checkpointing) is not counted.
        Source: arXiv 2204.02311, appendix B.
        """
        heads = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        weights = self.num_layers * (heads + mlp) + self.hidden_size * self.vocab_size
        return 6 * weights + 12 * self.num_layers * self.num_heads * self.head_dim * seq

    def config_fields(self, *, seq: int, marks: Mapping[str, int]) -> dict[str, Any]:
        """Return the fields of ``config.json`` with which ``LlamaForCausalLM`` is the same model.

        seq: of the sequences that it was trained on. marks: tokens that mark a beginning or an end; none where
        a byte is a token.
        """
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **self._hf_sizes(),
            "rope_theta": self.rope_theta,  # where Transformers before 5 looks for it
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": seq,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "dtype": "float32",
            **marks,
        }

    def differences(self, fields: Mapping[str, Any]) -> list[str]:
        """Say where the model of a ``config.json`` is another one than that of these sizes."""
        if fields.get("model_type") != "llama":
            return [f"model_type is {fields.get('model_type')!r}, and only 'llama' is known"]
        # What a file may leave out, as Transformers has it.
        given: dict[str, Any] = {
            "num_key_value_heads": fields.get("num_attention_heads"),
            "rms_norm_eps": 1e-6,
        }
        given |= {"tie_word_embeddings": False, "head_dim": self.head_dim}
        given |= {key: value for key, value in fields.items() if value is not None}
        rope = given.get("rope_parameters") or {"rope_theta": given.get("rope_theta", 10_000.0)}
        scaled = rope.get("rope_type", "default") != "default" or fields.get("rope_scaling")
        wanted = self._hf_sizes()
        found = [
            f"{key} is {given.get(key)}, and {value} here"
            for key, value in wanted.items()
            if given.get(key) != value
        ]
        if rope.get("rope_theta", 10_000.0) != self.rope_theta:
            found.append(f"rope_theta is {rope.get('rope_theta')}, and {self.rope_theta} here")
        if scaled:
            found.append("its rotary positions are scaled, and not here")
        found += [
            f"{key} is true, and false here"
            for key in ("attention_bias", "mlp_bias")
            if given.get(key)
        ]
        if given.get("hidden_act", "silu") != "silu":
            found.append(f"hidden_act is {given['hidden_act']}, and silu here")
        return found

    def is_same(self, other: object) -> bool:
        return self == other

    def _hf_sizes(self) -> dict[str, Any]:
        return {
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
        }


SIZES = {
    name: LlamaConfig(256, *sizes)
    for name, sizes in {
        # hidden, intermediate, layers, heads, key/value heads, rotary base
        "tiny": (64, 128, 2, 4, 2, 10_000.0),
        "10m": (384, 1024, 6, 6, 2, 10_000.0),
        "35m": (640, 1792, 8, 10, 2, 10_000.0),
        "125m": (768, 2560, 17, 12, 4, 10_000.0),
        "350m": (1024, 3584, 25, 16, 8, 10_000.0),
        "1b": (2048, 8192, 16, 32, 8, 500_000.0),
        "8b": (4096, 14336, 32, 32, 8, 500_000.0),
    }.items()
}
"""Named sizes; the name is the parameter count with a byte vocabulary."""
