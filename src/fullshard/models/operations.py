"""How many operations training on a token takes, read off a model of Transformers."""

from typing import Any

from torch import nn

from fullshard.models.configured import config_of, has_experts, only_attends


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
