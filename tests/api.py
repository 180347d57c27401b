"""The implementations that a behaviour test runs on: ours on either comm path, or PyTorch's.

A test takes `api` and uses `api.fully_shard`, `api.MixedPrecisionPolicy` and so on. Running the
same body on PyTorch's engine (`pytest --impl torch`) checks the test; running it on ours checks the
engine.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

TORCH = "torch"
OURS = ("peer_memory", "process_group")


class Api:
    """The public names of one implementation."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_torch = name == TORCH
        self._names = importlib.import_module(
            "torch.distributed.fsdp" if self.is_torch else "fullshard"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._names, name)

    def __repr__(self) -> str:
        return f"Api({self.name!r})"


@contextlib.contextmanager
def use_api(name: str) -> Iterator[Api]:
    """Yield an implementation, with its comm path as the default."""
    api = Api(name)
    if api.is_torch:
        yield api
        return
    previous = api.set_default_comm(name)
    try:
        yield api
    finally:
        api.set_default_comm(previous)
