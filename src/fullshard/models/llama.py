"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names, shapes and the half-split rotary layout are those of Hugging Face's
`LlamaForCausalLM`, so that its checkpoints fit without renaming:

    model.embed_tokens.weight                          (vocab, hidden)
    model.layers.0.input_layernorm.weight              (hidden,)
    model.layers.0.self_attn.{q,k,v,o}_proj.weight     (out, in)
    model.layers.0.post_attention_layernorm.weight     (hidden,)
    model.layers.0.mlp.{gate,up,down}_proj.weight      (out, in)
    model.norm.weight                                  (hidden,)
    lm_head.weight                                     (vocab, hidden), absent when tied

Nothing here knows about ranks: the model is built on any device, `meta` included, sharded from
outside, and filled by `init_weights`, whose values do not depend on how it is sharded.
"""

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from fullshard.models.sizes import LlamaConfig


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, in float32: (positions, head_dim), or one of these for each row,
    (batch, 1, positions, head_dim)."""

    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        """Rotate (batch, heads, positions, head_dim), keeping its dtype."""
        first, second = x.float().chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return (x.float() * self.cos + rotated * self.sin).to(x.dtype)


class KeyValueCache:
    """Keys and values of the positions seen so far, for one layer.

    Grown by `append` while generating; a whole sequence of n bytes costs n positions once.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[-2]

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add (batch, kv_heads, new, head_dim) and return everything so far."""
        if self.keys is not None and self.values is not None:
            keys = torch.cat((self.keys, keys), dim=-2)
            values = torch.cat((self.values, values), dim=-2)
        self.keys, self.values = keys, values
        return keys, values


class RMSNorm(nn.Module):
    """Divide by the root mean square, computed in float32 whatever the input is."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale).to(x.dtype) * self.weight


class RotaryEmbedding(nn.Module):
    """Angles position x theta ** (-2i / head_dim), as in RoFormer (arXiv 2104.09864).

    `inv_freq` is a non-persistent buffer: no checkpoint carries it, so `init_weights` recomputes
    it after `to_empty`.
    """

    inv_freq: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.theta = config.rope_theta
        empty = torch.empty(config.head_dim // 2, dtype=torch.float32)
        self.register_buffer("inv_freq", empty, persistent=False)

    def reset_buffers(self) -> None:
        # On the CPU, then copied: every device gets the same bits.
        exponent = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.inv_freq.copy_(self.theta**-exponent)

    def forward(self, positions: Tensor) -> Rotation:
        # float() because a mixed-precision cast of the whole model may have narrowed the buffer.
        angles = positions.float()[..., None] * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        if positions.ndim == 2:  # a row for each sequence, the same for all heads
            angles = angles[:, None]
        return Rotation(angles.cos(), angles.sin())


def within_documents(positions: Tensor) -> Tensor:
    """Return which tokens each token may see, (batch, 1, positions, positions) of bool.

    positions: (batch, positions), of each token in its document; 0 begins one. A token sees itself and those
    before it in its document.
    """
    document = (positions == 0).cumsum(-1)
    together = document[:, :, None] == document[:, None, :]
    return together.tril()[:, None]


class Attention(nn.Module):
    """Causal self-attention whose key/value heads each serve several query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        cache: KeyValueCache | None,
        visible: Tensor | None = None,
    ) -> Tensor:
        queries = rotation.turn(self._heads(self.q_proj(x)))
        keys = rotation.turn(self._heads(self.k_proj(x)))
        values = self._heads(self.v_proj(x))
        seen = 0
        if cache is not None:
            seen = cache.length
            keys, values = cache.append(keys, values)
        # With a filled cache only one new position comes at a time, and it may see everything.
        causal = seen == 0 and visible is None
        if visible is not None and values.device.type != "cpu":
            # On a GPU only the kernel that writes out all scores takes a mask and shared heads.
            shared_by = queries.shape[1] // keys.shape[1]
            keys, values = (each.repeat_interleave(shared_by, 1) for each in (keys, values))
        mixed = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=visible, is_causal=causal, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU feed-forward (arXiv 2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One layer: the natural sharding unit of the model.

    `recompute` keeps only the layer's input for the backward and runs the forward again there
    (activation checkpointing).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.recompute = False

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        visible: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        if not self.recompute or cache is not None:
            return self._layer(x, rotation, visible, cache)
        # Inside the module, so that a sharding unit around it gathers once for recompute and
        # backward together.
        return checkpoint(self._layer, x, rotation, visible, cache, use_reentrant=False)

    def _layer(
        self, x: Tensor, rotation: Rotation, visible: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, cache, visible)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers and final norm: Hugging Face's inner `model`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(
        self,
        tokens: Tensor,
        caches: list[KeyValueCache] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        seen = caches[0].length if caches else 0
        if seen and tokens.shape[1] != 1:
            raise ValueError(
                f"Llama: {tokens.shape[1]} tokens after {seen} cached ones; the cache takes the "
                "prompt at once and then one token at a time."
            )
        x = self.embed_tokens(tokens)
        visible = None if positions is None else within_documents(positions)
        if positions is None:
            positions = torch.arange(seen, seen + tokens.shape[1], device=tokens.device)
        rotation = self.rotary_emb(positions)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, visible, caches[index] if caches else None)
        return self.norm(x)


class Llama(nn.Module):
    """Next-token logits (batch, positions, vocab) for tokens (batch, positions).

    positions, of the same shape, are for rows of several documents: they count from 0 in each, and no document
    sees another.

    with torch.device("meta"):
        model = Llama(SIZES["10m"])
    ...                                  # fully_shard(layer) for each layer, then the model
    model.to_empty(device="cpu")
    model.tie_weights()
    init_weights(model, seed=0)
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head share the embedding's weight, if the configuration says so.

        `to_empty` on meta parameters replaces them one by one and so undoes the tie: call this
        after it.
        """
        if self.config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def recompute_layers(self, recompute: bool) -> None:
        """Turn activation checkpointing on or off in every layer."""
        for layer in self.model.layers:
            assert isinstance(layer, DecoderLayer)
            layer.recompute = recompute

    def forward(
        self,
        tokens: Tensor,
        caches: list[KeyValueCache] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        return self.lm_head(self.model(tokens, caches, positions))


def continuation(model: Llama) -> Callable[[Tensor], Tensor]:
    """Return what keeps the keys and values of the tokens that it is given, for some sequences."""
    caches = [KeyValueCache() for _ in range(model.config.num_layers)]
    return lambda tokens: model(tokens, caches)


def init_weights(model: Llama, *, seed: int) -> None:
    """Fill every parameter and recompute the rotary buffers.

    Matrices are normal with standard deviation 1/sqrt(inputs), the two projections that write to
    the residual stream divided by sqrt(2 x layers) (GPT-2), embedding and head 0.02, norm weights one.

    Each parameter draws from its own CPU generator, seeded by `seed` and its name, and a sharded
    one keeps its rows of the full tensor. So the values are the same on any number of ranks, on
    any device, built on `meta` or not, and no rank holds more than one full parameter at a time.
    """
    for module in model.modules():
        if isinstance(module, RotaryEmbedding):
            module.reset_buffers()
    for name, param in model.named_parameters():
        # One 32-bit number: the CPU generator ignores the upper half of a 64-bit seed.
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        full = torch.empty(param.shape, dtype=param.dtype)
        if param.ndim == 1:
            full.fill_(1.0)
        else:
            full.normal_(std=_init_std(name, model.config), generator=generator)
        _fill(param, full)


def _init_std(name: str, config: LlamaConfig) -> float:
    inputs = config.intermediate_size if "down_proj" in name else config.hidden_size
    if "embed_tokens" in name or "lm_head" in name:
        return 0.02
    if "o_proj" in name or "down_proj" in name:
        return float((inputs * 2 * config.num_layers) ** -0.5)
    return float(inputs**-0.5)


@torch.no_grad()
def _fill(param: Tensor, full: Tensor) -> None:
    """Copy a full CPU tensor into a plain parameter, or this rank's rows into a sharded one."""
    if isinstance(param, DTensor):
        # src_data_rank=None: every rank has the same `full`, so nothing has to be sent.
        source = distribute_tensor(
            full.to(param.to_local().device), param.device_mesh, param.placements,
            src_data_rank=None,
        )  # fmt: skip
        param.to_local().copy_(source.to_local())
    else:
        param.copy_(full)
