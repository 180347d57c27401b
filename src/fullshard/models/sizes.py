"""What a model is, in numbers; read by the command line, which does not wait for torch."""

import dataclasses


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


SIZES = {
    "tiny": LlamaConfig(
        hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2
    ),
    "10m": LlamaConfig(),
    "35m": LlamaConfig(
        hidden_size=640, intermediate_size=1792, num_layers=8, num_heads=10, num_kv_heads=2
    ),
    "125m": LlamaConfig(
        hidden_size=768, intermediate_size=2560, num_layers=17, num_heads=12, num_kv_heads=4
    ),
    "350m": LlamaConfig(
        hidden_size=1024, intermediate_size=3584, num_layers=25, num_heads=16, num_kv_heads=8
    ),
    "1b": LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=500_000.0,
    ),
    "8b": LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        rope_theta=500_000.0,
    ),
}
"""Named sizes; the name is the parameter count with a byte vocabulary."""
