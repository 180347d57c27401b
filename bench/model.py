"""The model that every implementation trains, and its data."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT; the default has 33.6M parameters in 8 blocks and a root of 8.4M."""

    num_layers: int = 8
    width: int = 512
    num_heads: int = 8
    hidden: int = 2048
    vocab: int = 8192


@dataclass(frozen=True)
class BatchSize:
    """What one rank trains on in one micro-batch: `sequences` of `tokens` each."""

    sequences: int = 2
    tokens: int = 128

    def __str__(self) -> str:
        return f"{self.sequences}x{self.tokens}"


class Attention(nn.Module):
    """Causal self-attention over x (sequences, tokens, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3)
        query, key, value = heads.unbind(2)  # each (sequences, heads, tokens, head width)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y: torch.Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return y


class Block(nn.Module):
    """One pre-norm transformer layer: the unit that is gathered and freed together."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class GPT(nn.Module):
    """A language model that returns its loss, so that the root's forward covers a whole step.

    Positions are sinusoids computed on the fly: a buffer would make DDP broadcast it every step,
    a parameter would tie the parameter count to the sequence length.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + _sinusoids(x)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _sinusoids(x: torch.Tensor) -> torch.Tensor:
    """Return positions (tokens, width) for x (sequences, tokens, width)."""
    _, num_tokens, width = x.shape
    frequencies = torch.exp(torch.arange(0, width, 2) * (-9.2 / width))
    angles = torch.arange(num_tokens)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1).to(x.dtype)


def build_model(shape: Shape) -> GPT:
    """Build the model with the same weights in every process."""
    torch.manual_seed(0)
    return GPT(shape)


def batches(
    size: BatchSize, *, vocab: int, rank: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, targets) for ever: the same for every implementation, different per rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (size.sequences, size.tokens + 1)
    while True:
        text = torch.randint(vocab, shape, generator=generator)
        yield text[:, :-1], text[:, 1:]
