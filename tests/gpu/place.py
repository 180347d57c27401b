"""Where a check runs, and the model that it trains there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fullshard
from fullshard.models.llama import DecoderLayer, Llama, init_weights
from fullshard.models.sizes import LlamaConfig

SMALL = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
)
NUM_STEPS = 4
BATCH, LENGTH = 4, 64

Wrap = Callable[[Llama], nn.Module]


@dataclass(frozen=True)
class Place:
    """This rank and its device."""

    device: torch.device
    rank: int
    size: int

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def model(self, config: LlamaConfig = SMALL, dtype: torch.dtype = torch.float32) -> Llama:
        """Build the same weights on every rank."""
        with self.device:
            model = Llama(config).to(dtype)
        init_weights(model, seed=0)
        return model

    def tokens(self, step: int, *, vocab: int = SMALL.vocab_size) -> Tensor:
        """Return the whole batch of a step, (BATCH, LENGTH + 1), the same on every rank."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(vocab, (BATCH, LENGTH + 1), generator=generator).to(self.device)

    def own(self, tokens: Tensor) -> Tensor:
        """Cut this rank's part of a batch."""
        return tokens.chunk(self.size)[self.rank]


def nccl_host(host: int) -> dict[str, str]:
    """Return the environment in which NCCL takes a process for one on this host, reached through sockets.

    NCCL refuses two ranks of one host on one GPU, but lets two hosts name theirs alike.
    """
    return {
        "NCCL_HOSTID": f"host-{host}",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NET": "Socket",
    }


@contextlib.contextmanager
def exact(place: Place) -> Iterator[None]:
    """Let equal inputs give equal bits."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    if place.is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    with sdpa_kernel(SDPBackend.MATH):
        yield


def shard(model: Llama, **options: Any) -> nn.Module:
    """Apply `fully_shard` to every layer and the model."""
    for layer in model.model.layers:
        fullshard.fully_shard(layer, **options)
    return fullshard.fully_shard(model, **options)


def wrap(model: Llama, *, use_orig_params: bool, **options: Any) -> nn.Module:
    """Wrap every layer and the model with `FullyShardedDataParallel`."""
    return fullshard.FullyShardedDataParallel(
        model,
        auto_wrap_policy=fullshard.ModuleWrapPolicy({DecoderLayer}),
        use_orig_params=use_orig_params,
        **options,
    )


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the mean next-token loss, in float32."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """One tensor after the other, so that plain, sharded and flat parameters compute the same."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5, foreach=False)


def train(
    place: Place,
    model: nn.Module,
    *,
    num_steps: int = NUM_STEPS,
    num_microbatches: int = 1,
    syncs_every_time: bool = False,
    max_norm: float | None = None,
    whole_batch: bool = False,
    policy: fullshard.PlacementPolicy | None = None,
) -> list[float]:
    """Train and return this rank's losses, read at the end. policy: where the optimizer's state is kept."""
    optimizer = make_optimizer(model)
    if policy is not None:
        optimizer = fullshard.stream_state(optimizer, policy)
    losses: list[Tensor] = []
    for step in range(num_steps):
        for micro in range(num_microbatches):
            tokens = place.tokens(step * num_microbatches + micro)
            if isinstance(model, fullshard.FSDPModule) and not syncs_every_time:
                model.set_requires_gradient_sync(micro == num_microbatches - 1)
            loss = loss_of(model, tokens if whole_batch else place.own(tokens)) / num_microbatches
            loss.backward()
            losses.append(loss.detach())
        if max_norm is not None:
            norm = clip(model, max_norm)
            losses.append(norm.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [float(value) for value in losses]


def clip(model: nn.Module, max_norm: float) -> Tensor:
    """Clip in the way of the model's face; return the norm before."""
    if isinstance(model, fullshard.FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    if isinstance(model, fullshard.FSDPModule):
        return fullshard.clip_grad_norm_(model.parameters(), max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters on the CPU, by the names of the unwrapped model."""
    if isinstance(model, fullshard.FullyShardedDataParallel):
        with fullshard.FullyShardedDataParallel.summon_full_params(model):
            return {clean(name): p.detach().cpu().clone() for name, p in model.named_parameters()}
    if isinstance(model, fullshard.FSDPModule):
        # Not by `full_tensor`: over Gloo, with tensors on a GPU, torch 2.11 dies in it.
        names = {name for name, _ in model.named_parameters()}
        found = fullshard.iter_full_state(model)
        return {clean(name): value.cpu() for name, value in found if name in names}
    return {clean(name): p.detach().cpu().clone() for name, p in model.named_parameters()}


def clean(name: str) -> str:
    return name.replace("_fsdp_wrapped_module.", "")


def largest_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Return the largest difference of any element; infinity for other names or shapes."""
    if one.keys() != other.keys():
        raise AssertionError(f"names differ: {sorted(one.keys() ^ other.keys())[:4]}")
    worst = 0.0
    for name, value in one.items():
        difference = (value.double() - other[name].double()).abs().max() if value.numel() else 0.0
        worst = max(worst, float(difference))
    return worst


def mean_over_ranks(place: Place, numbers: list[float]) -> list[float]:
    """Return the mean of each number over the ranks."""
    gathered: list[Any] = [None] * place.size
    dist.all_gather_object(gathered, numbers)
    return [sum(column) / place.size for column in zip(*gathered, strict=True)]
