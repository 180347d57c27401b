"""Checkpoints of version 1, written on 2 ranks by 2b61ed6, load bit for bit and are still written in the same form.

golden/plain     a model that is not sharded: rank 0 wrote it
golden/adamw     rows of each parameter, AdamW, values that ranks have alike and of their own, random generators
golden/flat      pieces of flat parameters in many files, SGD with momentum
golden/dcp       by torch.distributed.checkpoint
golden/NAME.pt   the whole tensors of each, by `torch.save`
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import fullshard
from fullshard.checkpoint import write
from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import Pools, Task, mesh_of, rank, world_size
from tests.test_transfer import _whole
from tests.training import assert_equal

pytestmark = pytest.mark.apis("peer_memory")

GOLDEN = Path(__file__).parent / "golden"


class Odd(nn.Module):
    """Sizes that no number of ranks divides, several dtypes, a tied weight, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.middle = nn.Linear(7, 11, dtype=torch.bfloat16)
        self.last = nn.Linear(11, 1, dtype=torch.float64)
        self.second = nn.Linear(5, 7, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("empty", torch.empty(0, 2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle((self.first(x) + self.second(x)).bfloat16())
        return self.last(x.double()) * self.mask.sum()


def _rows(api: Api, model: Odd) -> nn.Module:
    mesh = mesh_of(world_size())
    for part in (model.middle, model.last):
        api.fully_shard(part, mesh=mesh)
    return api.fully_shard(model, mesh=mesh)


def _flat(api: Api, model: Odd, *, use_orig_params: bool) -> nn.Module:
    for name in ("middle", "last"):
        part = api.FullyShardedDataParallel(
            getattr(model, name), use_orig_params=use_orig_params, device_id=torch.device("cpu")
        )
        setattr(model, name, part)
    return api.FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )


WAYS: dict[str, Callable[[Api, Odd], nn.Module]] = {
    "plain": lambda _, model: model,
    "rows": _rows,
    "flat": lambda api, model: _flat(api, model, use_orig_params=False),
    "orig": lambda api, model: _flat(api, model, use_orig_params=True),
}
OPTIMIZERS: dict[str, Any] = {
    "plain": None,
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.25, betas=(0.5, 0.75)),
    "flat": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5),
    "dcp": lambda p: torch.optim.SGD(p, lr=0.25, momentum=0.5),
}
WRITTEN_IN = {"plain": "plain", "adamw": "rows", "flat": "flat", "dcp": "rows"}


def _built(api: Api, case: str, way: str, *, seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    with quiet():
        model = WAYS[way](api, Odd())
    make = OPTIMIZERS[case]
    return model, make and make(model.parameters())


def _options(case: str) -> dict[str, Any]:
    """Return what else a case saves, on this rank."""
    if case != "adamw":
        return {"rng": False, "step": None}
    values = {"odd": (1, float("inf"), b"x"), 2: [torch.arange(3), torch.tensor(0.5).bfloat16()]}
    own = {"position": 10 * rank(), "seen": torch.full((2,), float(rank()))}
    extra = {"values": values, "own": own, "array": np.arange(4, dtype=np.uint16)}
    return {"extra": extra, "step": 7, "metadata": {"data": "books"}, "rng": True}


def _save(case: str, folder: Path, model: nn.Module, optimizer: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if case == "flat":
            patch.setattr(write, "_SMALLEST_FILE", 64)
        fullshard.save_checkpoint(folder, model, optimizer, **_options(case))


def _state(api: Api, model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    with quiet():
        return _whole(api.sharded_state(model, optimizer))


def _load(api: Api, case: str, way: str) -> tuple[dict[str, Tensor], Any, list[float]]:
    model, optimizer = _built(api, case, way, seed=5)
    loaded = fullshard.load_checkpoint(GOLDEN / case, model, optimizer)
    drawn = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    found = loaded.step, loaded.metadata, loaded.extra
    return _state(api, model, optimizer), found, drawn


@pytest.mark.parametrize(("way", "num_ranks"), [("plain", 1), ("rows", 2), ("orig", 3)])
@pytest.mark.parametrize("case", WRITTEN_IN)
def test_golden_checkpoints_load_bit_for_bit(
    api: str, pools: Pools, case: str, way: str, num_ranks: int
) -> None:
    wanted = torch.load(GOLDEN / f"{case}.pt")
    task = Task(__name__, "_load", {"api": api, "case": case, "way": way})
    for number, (state, found, drawn) in enumerate(pools.run(num_ranks, task)):
        assert_equal(state, {name: wanted[name] for name in state})
        assert len(state) == len(wanted)
        if case != "adamw":
            continue
        step, metadata, extra = found
        assert (step, metadata) == (7, {"data": "books"})
        assert extra["values"]["odd"] == (1, float("inf"), b"x")
        assert extra["values"][2][0].tolist() == [0, 1, 2]
        assert extra["values"][2][1].equal(torch.tensor(0.5).bfloat16())
        assert extra["array"].tolist() == [0, 1, 2, 3]
        if num_ranks == 2:
            assert extra["own"]["position"] == 10 * number
            assert extra["own"]["seen"].tolist() == [float(number)] * 2
            assert drawn == _wanted_drawn(number)
        else:
            assert [own["position"] for own in extra["own"]] == [0, 10]


def _wanted_drawn(number: int) -> list[float]:
    """Return what a rank draws next whose generators were saved."""
    _seed(number)
    return [random.random(), float(np.random.rand()), torch.rand(()).item()]


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def _save_again(api: Api, case: str, folder: Path) -> None:
    model, optimizer = _built(api, case, WRITTEN_IN[case], seed=5)
    fullshard.load_checkpoint(GOLDEN / case, model, optimizer)
    _save(case, folder, model, optimizer)


@pytest.mark.parametrize("case", ["plain", "adamw", "flat"])
def test_checkpoints_are_written_in_the_form_of_the_golden_ones(
    api: str, pools: Pools, tmp_path: Path, case: str
) -> None:
    task = Task(__name__, "_save_again", {"api": api, "case": case, "folder": tmp_path / "a"})
    pools.run(2, task)
    assert _form(tmp_path / "a") == _form(GOLDEN / case)


def _form(folder: Path) -> list[Any]:
    """Return a manifest's content, in its order, but for what each save has of its own."""
    text = re.sub(
        r"\.[0-9a-f]{8}\.safetensors", ".safetensors", (folder / "manifest.json").read_text()
    )
    content = json.loads(text)
    del content["checksum"], content["created"], content["versions"]
    return [
        [key, list(value) if isinstance(value, dict) else value, value]
        for key, value in content.items()
    ]


def _write(api: Api, case: str) -> None:
    """Write a golden checkpoint. Only for another version of the format: readers keep reading these."""
    model, optimizer = _built(api, case, WRITTEN_IN[case], seed=1)
    if optimizer is not None:
        model(torch.ones(3, 5)).sum().backward()
        optimizer.step()
    if case == "dcp":
        dcp.save(fullshard.sharded_state(model, optimizer), checkpoint_id=GOLDEN / case)
    else:
        _seed(rank())
        _save(case, GOLDEN / case, model, optimizer)
    state = _state(api, model, optimizer)
    if rank() == 0:
        torch.save(state, GOLDEN / f"{case}.pt")
