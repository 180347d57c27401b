"""Ways in which a test's model is sharded, and its whole values as one process knows them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from tests.api import Api
from tests.fsdp1.models import net, quiet
from tests.harness import mesh_of, world_size
from tests.test_transfer import HYBRID, WAYS

ALL = {
    **WAYS,
    **HYBRID,
    "plain": lambda _, model: model,
    "replicate": lambda api, model: api.replicate(model, mesh=mesh_of(world_size())),
}
FEW = ["fully_shard", "orig", "flat"]
# On two ranks; `make test` takes a few of them.
TRAINING = [
    pytest.param(way, marks=() if way in (*FEW, "replicate") else pytest.mark.long)
    for way in (*WAYS, "replicate")
]
ON_TWO = [*TRAINING, "plain"]  # a plain model is not trained on ranks with own batches


def sharded(api: Api, way: str, model: nn.Module | None = None, *, seed: int = 1) -> Any:
    """Shard a model in a way; by default `net`, whose buffers stay alike on all ranks."""
    if model is None:
        model = net(seed)
        model.batch_norm.momentum = 0.0
    with quiet():
        return ALL[way](api, model)


@contextlib.contextmanager
def without_sync(model: Any) -> Iterator[None]:
    """Accumulate gradients without reducing them, under either API."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
