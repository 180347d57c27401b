"""Attention as a GPU computes it, for traces without values, whose tensors are the CPU's."""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fullshard.torch_private import attention_math, efficient_attention, flash_attention


class AttentionOfGpu(TorchFunctionMode):
    """Let `scaled_dot_product_attention` call the kernels of a GPU.

    Flash attention for two bytes an element and no mask; the memory-efficient one for masks, float32, and values of
    another size than keys; all scores written out where these meet heads that share keys. The CPU's kernels also write
    out all scores for dropout and for values of another size. Source: sdp_utils.cpp of PyTorch.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        call = _attend if func is F.scaled_dot_product_attention else func
        return call(*args, **(kwargs or {}))


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    heads = [each.shape[-3] if each.ndim > 2 else 1 for each in (query, key)]
    shares = enable_gqa and heads[0] != heads[1]
    # Of numbers of heads that do not fit, it is this one that complains.
    is_odd = heads[0] % heads[1] > 0 or (heads[0] != heads[1] and not enable_gqa)
    is_equal = query.shape[-1] == key.shape[-1] == value.shape[-1]
    is_flash = attn_mask is None and is_equal and query.itemsize == 2
    if query.ndim != 4 or is_odd or (shares and not is_flash):
        outputs, _ = attention_math(
            *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=shares
        )
        return cast(Tensor, outputs)
    if is_flash:
        outputs, *_ = flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return cast(Tensor, outputs)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[-2])
    outputs, *_ = efficient_attention(
        *(query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal), scale=scale
    )
    return cast(Tensor, outputs)
