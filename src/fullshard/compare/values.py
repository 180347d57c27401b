"""Values as records keep them: a digest of every bit, and a sample that tells how far two of them are apart."""

import hashlib
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from fullshard.plan.units import clean_name, without_compile
from fullshard.state.host_memory import host_bytes


def path_of(name: str) -> str:
    """Return the path of a module, parameter or buffer as before sharding and ``torch.compile``."""
    return without_compile(clean_name(name))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, without its graph."""
    tensor = tensor.detach()
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of every bit of tensors."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(host_bytes(tensor))
    return digest.hexdigest()


def sample_of(tensor: torch.Tensor, numel: int) -> torch.Tensor:
    """Return at most so many evenly spread elements: 1-D, float64, always the same places of one size."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    every = max(1, -(-flat.numel() // numel))
    return flat[::every].to("cpu", torch.float64)
