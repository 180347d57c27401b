"""The language model that `fullshard train` trains."""

from fullshard.models.generation import generate
from fullshard.models.llama import SIZES, Llama, LlamaConfig, init_weights

__all__ = ["SIZES", "Llama", "LlamaConfig", "generate", "init_weights"]
