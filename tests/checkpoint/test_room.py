"""A load that does not fit into the memory of its hosts is refused on all ranks before anything is read."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fullshard.checkpoint import fit, save
from fullshard.engine.checks import meta as checks
from fullshard.errors import AllocationError, CheckpointError
from fullshard.host import Pool
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank

pytestmark = [pytest.mark.ours("has no such check"), pytest.mark.apis("peer_memory")]

GIB = 2**30
# What a rank loads: half of a layer, and two moments of it.
LAYER = 1024 * 1024 * 4
SHARD = LAYER // 2


@contextlib.contextmanager
def _memory(free: int, *, resident: int = 0, swap: int = 0, hosts: int = 1) -> Iterator[list[str]]:
    """Plant what the system tells; yield what is logged. hosts: that ranks are on, in turn."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fullshard")
    logger.addHandler(handler)
    pools = {str(rank() % hosts): Pool("this host", free, swap)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "memory_pools", lambda: pools)
        patch.setattr(fit, "resident_nbytes", lambda: resident)
        yield said
    logger.removeHandler(handler)


def _model(api: Api) -> Any:
    return api.fully_shard(nn.Linear(1024, 1024, bias=False), mesh=mesh_of(2))


def _saved(api: Api, path: Path) -> tuple[Any, Any]:
    """Return a model and its optimizer, saved after a step."""
    model = _model(api)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    api.save_checkpoint(path, model, optimizer)
    return model, optimizer


@on_ranks(2)
def test_what_cannot_fit_is_refused_on_all_ranks(api: Api, tmp_path: Path) -> None:
    _saved(api, tmp_path / "saved")
    model = _model(api)
    with torch.no_grad():
        model.weight.fill_(3.0)
    with _memory(LAYER), pytest.raises(CheckpointError) as caught:
        api.load_checkpoint(tmp_path / "saved", model, torch.optim.AdamW(model.parameters()))
    said = str(caught.value)
    # The layer and two moments of it, on the two ranks of one host.
    assert "on this host (ranks 0, 1), tensors of 12 MiB are to be loaded" in said
    assert 'allow=["memory"] tries it' in said
    assert (model.weight.to_local() == 3.0).all()  # nothing was read
    with _memory(LAYER // 2), pytest.raises(CheckpointError, match="At least 4 MiB of that"):
        api.load_checkpoint(tmp_path / "saved", model)


@on_ranks(2)
def test_what_may_fit_is_loaded(api: Api, tmp_path: Path) -> None:
    _saved(api, tmp_path / "saved")
    model = _model(api)

    def load(*, optimizer: Any = None, allow: tuple[str, ...] = ()) -> None:
        api.load_checkpoint(tmp_path / "saved", model, optimizer, allow=allow)

    with _memory(2 * LAYER) as said:
        load()
    assert not said
    with _memory(LAYER) as said:
        load()
    # Close to what there is: the first rank of the host says so.
    assert len(said) == (rank() == 0)
    assert all("That is close" in line for line in said)
    with _memory(LAYER // 2, swap=LAYER):
        load()
    with _memory(0, resident=SHARD):  # perhaps all of it is in memory already
        load()
    with _memory(SHARD, hosts=2):
        load()
    with _memory(0):
        load(allow=("memory",))
    with _memory(4 * LAYER) as said:
        load(optimizer=torch.optim.AdamW(model.parameters()))
    assert not said
    with _memory(2 * LAYER), pytest.raises(CheckpointError):
        load(optimizer=torch.optim.AdamW(model.parameters()))


@on_ranks(2)
def test_a_model_that_gets_its_memory_is_checked_before_it(api: Api) -> None:
    def on_meta() -> Any:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(3)))
        for part in (*model, model):
            api.fully_shard(part, mesh=mesh_of(2))
        return model

    model = on_meta()
    with pytest.MonkeyPatch.context() as patch:
        pools = {"here": Pool("this host", 2 * LAYER, 0)}
        patch.setattr(checks, "memory_pools", lambda: pools)
        with pytest.raises(
            AllocationError, match=r"parameters and buffers need 12 MiB .* 8 MiB can be had"
        ):
            model.to_empty(device="cpu")
        assert all(parameter.is_meta for parameter in model.parameters())
        pools["here"] = Pool("this host", 2 * LAYER, LAYER)
        model.to_empty(device="cpu")
    assert not any(parameter.is_meta for parameter in model.parameters())


@on_ranks(2)
def test_a_construction_that_gets_its_memory_is_checked_before_it(api: Api) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1024, 1024, bias=False)
            self.register_buffer("table", torch.zeros(1024, 1024))

    for is_sharded in (True, False):
        model = api.deferred_init(Net)
        if is_sharded:
            api.fully_shard(model, mesh=mesh_of(2))
        with pytest.MonkeyPatch.context() as patch:
            pools = {"here": Pool("this host", LAYER + LAYER // 4, 0)}
            patch.setattr(checks, "memory_pools", lambda pools=pools: pools)
            with pytest.raises(AllocationError, match=r"materialize .* 5 MiB can be had"):
                api.materialize(model)
            assert all(each.is_meta for each in (*model.parameters(), *model.buffers()))
            pools["here"] = Pool("this host", 2 * LAYER, 0)
            api.materialize(model)
        assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))


@on_ranks(2)
def test_copies_for_a_save_in_the_background_are_checked(api: Api, tmp_path: Path) -> None:
    model = _model(api)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(save, "staging", save.Staging())
        with _memory(SHARD // 2):
            pending = api.async_save_checkpoint(tmp_path / "saved", model)
            with pytest.raises(CheckpointError, match=r"copies of \d MiB, .* Use save_checkpoint"):
                pending.wait()
        with _memory(2 * SHARD):
            api.async_save_checkpoint(tmp_path / "saved", model).wait()
        with _memory(0):  # the copies' memory is kept
            api.async_save_checkpoint(tmp_path / "again", model).wait()


@on_ranks(2)
def test_hugging_face_files_are_checked_too(api: Api, tmp_path: Path) -> None:
    model, _ = _saved(api, tmp_path / "saved")
    api.export_hf(model, tmp_path / "weights")
    with _memory(0), pytest.raises(CheckpointError, match=r"weights.*ranks 0, 1.*memory"):
        api.load_hf(model, tmp_path / "weights")
    with _memory(0):
        api.load_hf(model, tmp_path / "weights", allow=["memory"])
