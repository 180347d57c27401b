"""Small models that between them have every kind of parameter the engine must shard.

Each is deterministic given `torch.manual_seed`, and every sample's output depends on that sample
alone, so that a batch split over ranks gives the gradients of the whole batch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Causal self-attention. x: (batch, seq, dim) -> same."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # No bias: the gradient of a key bias is zero but for rounding, which AdamW magnifies.
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over the positions before each one."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        mixed = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Sequential):
    """Two linear layers with biases. x: (..., dim) -> same."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))


class MoE(nn.Module):
    """Top-k routed experts. x: (..., dim) -> same. Some experts may see no token."""

    def __init__(self, dim: int, num_experts: int = 4, top_k: int = 2) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, num_experts, bias=False)
        self.experts = nn.ModuleList(FeedForward(dim, 2 * dim) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """Send each token to its best experts and add their weighted outputs."""
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            token, slot = (chosen == number).nonzero(as_tuple=True)
            # Every expert runs, on no token if none chose it: all ranks call the same modules.
            out = out.index_add(0, token, expert(tokens[token]) * weights[token, slot, None])
        return out.view_as(x)


class Block(nn.Module):
    """A pre-norm transformer block with a dense or a routed feed-forward."""

    def __init__(self, dim: int, num_heads: int, *, routed: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.feed_forward = MoE(dim) if routed else FeedForward(dim, 4 * dim)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the feed-forward."""
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """A decoder over a vocabulary of 61. tokens: (batch, seq) -> logits (batch, seq, 61)."""

    vocab = 61

    def __init__(
        self,
        *,
        dim: int = 16,
        num_blocks: int = 2,
        max_seq: int = 8,
        tied: bool = False,
        routed: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.vocab, dim)
        self.position = nn.Parameter(0.02 * torch.randn(max_seq, dim))
        self.blocks = nn.ModuleList(Block(dim, 2, routed=routed) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, self.vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Predict the next token at every position."""
        x = self.embed(tokens) + self.position[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ConvNet(nn.Module):
    """Convolutions, group norms (no batch statistics) and a linear head. (n, 3, 8, 8) -> (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.body = nn.Sequential(
            nn.Conv2d(8, 12, 3, stride=2, padding=1), nn.GroupNorm(3, 12), nn.GELU()
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Classify images."""
        return self.head(self.body(self.stem(x)).mean((-2, -1)))


class UnevenMLP(nn.Sequential):
    """Layers of 7, 13, 5 and 3 features: nothing divides by 2, 3 or 4. (n, 7) -> (n, 3)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def mlp(num_layers: int = 3, dim: int = 16) -> nn.Sequential:
    """Stack square linear layers, a tanh after each. (n, dim) -> same."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(num_layers))
    )


class Scale(nn.Module):
    """Multiplies by a weight of ones: its gradient is the sum of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.weight


class MixedDtypes(nn.Module):
    """float32, bfloat16 and float64 layers, one after another. (n, 8) -> (n, 8) float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer32 = nn.Linear(8, 8)
        self.layer16 = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.layer64 = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        """Apply each layer in its own dtype."""
        x = self.layer32(x)
        x = self.layer16(x.bfloat16())
        return self.layer64(x.double()).float()


class PartlyFrozen(nn.Module):
    """A frozen layer, and a layer with a frozen weight and a trainable bias. (n, 8) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.mixed = nn.Linear(8, 8)
        self.mixed.weight.requires_grad_(requires_grad=False)
        self.trained = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers in turn."""
        return self.trained(self.mixed(self.frozen(x)).tanh())


class Problem(NamedTuple):
    """A model to train, the data of one step, and the modules that become units."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    units: list[nn.Module]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss, over what it is given."""
        if targets.is_floating_point():
            return F.mse_loss(outputs.float(), targets)
        return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


# Divides evenly by 1, 2, 3 and 4 ranks.
BATCH = 12


def make_problem(name: str, *, seed: int = 1) -> Problem:
    """Build one of `PROBLEMS`, the same on every rank."""
    torch.manual_seed(seed)
    if name in ("transformer", "tied_transformer", "moe"):
        model = Transformer(tied=name.startswith("tied"), routed=name == "moe")
        tokens = torch.randint(Transformer.vocab, (BATCH, 9))
        return Problem(model, tokens[:, :-1], tokens[:, 1:], [*model.blocks])
    if name == "conv":
        conv = ConvNet()
        classes = torch.randint(5, (BATCH, 1))
        return Problem(conv, torch.randn(BATCH, 3, 8, 8), classes, [conv.stem, conv.body])
    net = UnevenMLP()
    targets = torch.randn(BATCH, 3)
    return Problem(net, torch.randn(BATCH, 7), targets, [net[0], net[2]])


PROBLEMS = ("transformer", "conv", "moe", "uneven")
