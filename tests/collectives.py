"""Count what a piece of code sends through `torch.distributed`."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

# Function on torch.distributed -> its common name, and which positional argument is sent.
_WATCHED = {
    "all_gather_single": ("all_gather", 1),
    "all_gather_into_tensor": ("all_gather", 1),
    "all_gather": ("all_gather", 1),
    "reduce_scatter_single": ("reduce_scatter", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 1),
    "all_to_all_single": ("reduce_scatter", 1),  # how a reduce-scatter travels on Gloo
    "all_reduce": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "barrier": ("barrier", None),
    "all_gather_object": ("object", None),
    "broadcast_object_list": ("object", None),
    "send": ("send", 0),
    "isend": ("send", 0),
}


@dataclass
class Traffic:
    """Calls and bytes this rank handed over, by the common name of the collective."""

    calls: Counter[str] = field(default_factory=Counter)
    nbytes: Counter[str] = field(default_factory=Counter)


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record the collectives that are looked up on `torch.distributed` inside."""
    traffic = Traffic()
    with contextlib.ExitStack() as stack:
        for function, (name, sent) in _WATCHED.items():
            if hasattr(dist, function):
                watched = _watch(traffic, getattr(dist, function), name, sent)
                stack.enter_context(mock.patch.object(dist, function, watched))
        yield traffic


def _watch(
    traffic: Traffic, original: Callable[..., Any], name: str, sent: int | None
) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        traffic.calls[name] += 1
        if sent is not None:
            named = next((v for k, v in kwargs.items() if k.startswith(("input", "tensor"))), None)
            tensor = args[sent] if len(args) > sent else named
            assert isinstance(tensor, Tensor), f"{name} was called in a way this file cannot read"
            traffic.nbytes[name] += tensor.numel() * tensor.element_size()
        return original(*args, **kwargs)

    return call
