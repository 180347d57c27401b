"""Fingerprints of tensors, tensors in nested containers, and seeds."""

import copy
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch

from fullshard.compare.values import digest_of


def fingerprint(*tensors: torch.Tensor) -> str:
    """Return a digest of every bit of tensors, with their dtypes and shapes."""
    kinds = " ".join(f"{tensor.dtype}{tuple(tensor.shape)}" for tensor in tensors)
    return f"{digest_of(tensors)} {kinds}"


def fingerprints(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {name: fingerprint(tensor) for name, tensor in named}


def seed_all(*numbers: int) -> None:
    """Seed Python's, NumPy's and torch's generators from numbers, such as seed, step and rank."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return nested tuples, lists and dicts with their tensors changed; other values stay."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):  # libraries return mappings of classes of their own
        copied = copy.copy(value) if isinstance(value, MutableMapping) else {}
        for key, each in value.items():
            copied[key] = mapped(change, each)
        return copied
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(change, each) for each in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(change, each) for each in value)
    return value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    found: list[torch.Tensor] = []
    mapped(found.append, value)
    return found
