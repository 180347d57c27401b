"""Programs that say where new tensors go, as `torch.set_default_device("cuda")` does.

Here they go to the meta device, on which nobody can compute: whatever is made without saying where fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW

import fullshard
from tests.api import Api
from tests.fsdp1.models import batch, net, quiet
from tests.harness import on_ranks
from tests.test_transfer import HYBRID, WAYS, _whole
from tests.training import assert_equal, mean_square, my_part


def _step(model: Any, optimizer: Any, values: torch.Tensor) -> torch.Tensor:
    loss = mean_square(model(values))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.apis("peer_memory", "process_group")
@pytest.mark.parametrize("way", ["fully_shard", "flat"])
@on_ranks(2)
def test_training_goes_on_under_a_default_device(api: Api, way: str) -> None:
    values = my_part(batch())
    losses = []
    for device in ("cpu", "meta"):
        with quiet():
            model: Any = WAYS[way](api, net())
            optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
            with torch.device(device):
                losses.append([_step(model, optimizer, values) for _ in range(3)])
                with torch.no_grad():
                    losses[-1].append(mean_square(model(values)))
    assert [each.item() for each in losses[0]] == [each.item() for each in losses[1]]


@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize(
    "way",
    [
        "flat",
        pytest.param("fully_shard", marks=pytest.mark.long),
        pytest.param("hybrid_fully_shard", marks=pytest.mark.long),
    ],
)
@on_ranks(4)
def test_state_is_saved_and_loaded_under_a_default_device(
    api: Api, way: str, tmp_path: Path
) -> None:
    shard = {**WAYS, **HYBRID}[way]
    with quiet():
        model = shard(api, net())
        model.batch_norm.momentum = 0.0  # else ranks differ, and a checkpoint has those of one
        optimizer = AdamW(model.parameters(), lr=0.01)
        _step(model, optimizer, my_part(batch()))
        other = shard(api, net(5))
        other_optimizer = AdamW(other.parameters(), lr=0.5)
        extra = {"values": torch.ones(3)}
        with torch.device("meta"):
            fullshard.save_checkpoint(tmp_path / "a", model, optimizer, extra=extra)
            fullshard.async_save_checkpoint(tmp_path / "b", model, optimizer, extra=extra).wait()
            loaded = fullshard.load_checkpoint(tmp_path / "b", other, other_optimizer)
            fullshard.verify_checkpoint(tmp_path / "b")
            assert fullshard.diff_checkpoints(tmp_path / "a", tmp_path / "b") == []
            before = dict(fullshard.iter_full_state(model))
            after = dict(fullshard.iter_full_state(other))
            fullshard.export_hf(model, tmp_path / "hf")
            fullshard.load_hf(other, tmp_path / "hf")
            averages = fullshard.EMA(other, decay=0.5)
            averages.update()
            states = [
                api.sharded_state(each, made)
                for each, made in ((model, optimizer), (other, other_optimizer))
            ]
    assert loaded.extra["values"].equal(torch.ones(3))
    assert_equal(before, after)
    assert_equal(*map(_whole, states))
