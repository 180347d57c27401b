"""Buffers are made equal on all ranks, or found to differ, with their dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fullshard
from fullshard.errors import ShardingError, StateError
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank

pytestmark = pytest.mark.apis("peer_memory")


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer(
            "inverse", torch.arange(4.0, dtype=torch.float64) + rank(), persistent=False
        )
        self.register_buffer("seen", torch.tensor(3, dtype=torch.int32))
        self.register_buffer("mask", torch.eye(3).bool().t()[rank() :])


def _model(api: Api) -> Any:
    model = nn.Sequential(_Rotary(), nn.BatchNorm1d(4))
    model[0].mask = torch.eye(3).bool().t() if rank() == 0 else torch.ones(3, 3).bool()
    return api.fully_shard(model, mesh=mesh_of(2))


@on_ranks(2)
def test_every_rank_gets_the_first_ones(api: Api) -> None:
    model = _model(api)
    inverse, mask = model[0].inverse, model[0].mask
    with pytest.raises(StateError, match=r"0\.inverse on ranks \[1\]; 0\.mask on ranks \[1\]"):
        fullshard.sync_buffers(model, "check")
    assert fullshard.sync_buffers(model) == ["0.inverse", "0.mask"]
    assert model[0].inverse is inverse
    assert torch.equal(inverse, torch.arange(4.0, dtype=torch.float64))
    assert inverse.dtype is torch.float64
    assert torch.equal(mask, torch.eye(3).bool())
    assert fullshard.sync_buffers(model, "check") == []


@on_ranks(2)
def test_what_cannot_be_compared_is_refused_on_all(api: Api) -> None:
    model = nn.Sequential(_Rotary())
    with pytest.raises(StateError, match=r"0\.mask .*\(3, 3\), .* rank 0 .*\(2, 3\), .* rank 1"):
        fullshard.sync_buffers(model)
    model[0].mask = torch.eye(3, device="meta" if rank() else "cpu")
    with pytest.raises(StateError, match=r"0\.mask on rank 1 .*meta device"):
        fullshard.sync_buffers(model)
    with pytest.raises(ShardingError, match="policy is 'send'"):
        fullshard.sync_buffers(model, "send")  # type: ignore[arg-type]


def test_one_process_has_nothing_to_compare() -> None:
    assert fullshard.sync_buffers(nn.BatchNorm1d(3)) == []
