"""Models that go on under the other API, sharded in another way or over other ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from tests.api import Api
from tests.fsdp1.models import Block, full_value, net, quiet, train, wrap
from tests.harness import Pools, Task, mesh_of, on_ranks, world_size
from tests.training import assert_equal

# There is nothing of PyTorch's to compare with, and it does not depend on how bytes travel.
on_default_comm = pytest.mark.apis("peer_memory")


def _wrapped(strategy: str, *mesh: int, use_orig_params: bool) -> Callable[[Api, nn.Module], Any]:
    def shard(api: Api, model: nn.Module) -> Any:
        options = {"device_mesh": _mesh(mesh)} if mesh else {}
        return wrap(api, model, strategy, use_orig_params=use_orig_params, **options)

    return shard


def _fully_sharded(*mesh: int) -> Callable[[Api, nn.Module], Any]:
    def shard(api: Api, model: nn.Module) -> Any:
        for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
            api.fully_shard(module, mesh=_mesh(mesh))
        return model

    return shard


def _mesh(shape: tuple[int, ...]) -> Any:
    return mesh_of(*(world_size() if n == -1 else n for n in shape))


WAYS: dict[str, Callable[[Api, nn.Module], Any]] = {
    "orig": _wrapped("FULL_SHARD", use_orig_params=True),
    "flat": _wrapped("FULL_SHARD", use_orig_params=False),
    "orig_mesh": _wrapped("SHARD_GRAD_OP", -1, use_orig_params=True),
    "flat_mesh": _wrapped("FULL_SHARD", -1, use_orig_params=False),
    "replicated": _wrapped("NO_SHARD", use_orig_params=True),
    "replicated_flat": _wrapped("NO_SHARD", use_orig_params=False),
    "fully_shard": _fully_sharded(-1),
}
HYBRID: dict[str, Callable[[Api, nn.Module], Any]] = {
    "hybrid_orig": _wrapped("HYBRID_SHARD", 2, 2, use_orig_params=True),
    "hybrid_flat": _wrapped("_HYBRID_SHARD_ZERO2", 2, 2, use_orig_params=False),
    "hybrid_fully_shard": _fully_sharded(2, 2),
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda params: AdamW(params, lr=0.01),
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
}


def _make(
    api: Api, way: str, *, seed: int = 1, optimizer: str = "adamw", steps: int = 2
) -> tuple[Any, Optimizer]:
    """Shard a model in a way, and train it a little."""
    model = {**WAYS, **HYBRID}[way](api, net(seed))
    model.batch_norm.momentum = 0.0  # else ranks differ, and a checkpoint has those of one
    made = OPTIMIZERS[optimizer](model.parameters())
    train(model, made, steps)
    return model, made


def _whole(state: dict[str, Any]) -> dict[str, Tensor]:
    """Gather all tensors of a state, by the names of what they belong to."""
    named = dict(state["model"])
    for name, own in state.get("optimizer", {"state": {}})["state"].items():
        named.update({f"{name}/{key}": value for key, value in own.items()})
    return {name: torch.as_tensor(full_value(named[name])).clone() for name in sorted(named)}


def _assert_goes_on(api: Api, first: str, second: str, optimizer: str, *, exact: bool) -> None:
    model, other = (
        _make(api, first, optimizer=optimizer),
        _make(api, second, seed=5, optimizer=optimizer),
    )
    other[1].param_groups[0]["lr"] = 9.0
    with quiet():  # ShardedTensors are deprecated
        state = api.sharded_state(*model)
        api.load_sharded_state(state, *other)
        assert_equal(_whole(api.sharded_state(*other)), _whole(api.sharded_state(*model)))
    assert [g["lr"] for g in other[1].param_groups] == [g["lr"] for g in model[1].param_groups]
    losses = [train(*each, steps=3) for each in (model, other)]
    assert losses[1][0] == losses[0][0]
    if exact:
        assert losses[1] == losses[0]
        with quiet():
            assert_equal(_whole(api.sharded_state(*other)), _whole(api.sharded_state(*model)))
    else:  # (a + b) + (c + d) over a mesh of two axes, ((a + b) + c) + d over one
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def _neighbours(ways: list[str]) -> list[tuple[str, str]]:
    """Pair each way with itself, and with the next two in a ring."""
    ring = ways * 2
    return [(way, ring[number + by]) for number, way in enumerate(ways) for by in range(3)]


PAIRS = _neighbours(list(WAYS))
HYBRID_PAIRS = [("fully_shard", "hybrid_orig"), ("hybrid_flat", "hybrid_fully_shard")]
HYBRID_PAIRS += [("hybrid_fully_shard", "flat_mesh"), ("hybrid_orig", "hybrid_flat")]
ALL_HYBRID = itertools.product([*WAYS, *HYBRID], repeat=2)


@on_default_comm
@pytest.mark.parametrize(("first", "second"), PAIRS)
@on_ranks(2)
def test_training_goes_on_sharded_in_another_way(api: Api, first: str, second: str) -> None:
    _assert_goes_on(api, first, second, "adamw", exact=True)


@pytest.mark.long
@pytest.mark.apis("peer_memory", "process_group")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("first", WAYS)
@pytest.mark.parametrize("second", WAYS)
@on_ranks(2)
def test_training_goes_on_sharded_in_any_other_way(
    api: Api, first: str, second: str, optimizer: str
) -> None:
    _assert_goes_on(api, first, second, optimizer, exact=True)


@on_default_comm
@pytest.mark.parametrize(("first", "second"), HYBRID_PAIRS)
@on_ranks(4)
def test_training_goes_on_with_replicas(api: Api, first: str, second: str) -> None:
    exact = (first in HYBRID) == (second in HYBRID)
    _assert_goes_on(api, first, second, "sgd", exact=exact)


@pytest.mark.long
@on_default_comm
@pytest.mark.parametrize(
    ("first", "second"), [pair for pair in ALL_HYBRID if pair not in HYBRID_PAIRS]
)
@on_ranks(4)
def test_training_goes_on_over_any_mesh(api: Api, first: str, second: str) -> None:
    exact = (first in HYBRID) == (second in HYBRID)
    _assert_goes_on(api, first, second, "sgd", exact=exact)


@on_default_comm
@pytest.mark.parametrize("way", ["orig", "flat_mesh", "fully_shard", "replicated_flat"])
@on_ranks(2)
def test_model_may_move_without_an_optimizer(api: Api, way: str) -> None:
    model, optimizer = _make(api, way)
    other, _ = _make(api, "flat", seed=5)
    with quiet():
        state = api.sharded_state(model)
        assert list(state) == ["model"]
        assert list(state["model"]) == list(net().state_dict())
        api.load_sharded_state(state, other)
        assert_equal(_whole(api.sharded_state(other)), _whole(state))
    train(model, optimizer)


@on_default_comm
@on_ranks(2)
def test_settings_of_the_wrapper_stay_what_they_are(api: Api) -> None:
    model, _ = _make(api, "orig")
    settings = api.FullyShardedDataParallel.get_state_dict_type(model)
    with quiet():
        api.sharded_state(model)
    assert api.FullyShardedDataParallel.get_state_dict_type(model) == settings


# Through a checkpoint


RESIZED = [
    ("flat", "fully_shard", (4, 2)),
    ("fully_shard", "flat", (2, 4)),
    ("orig_mesh", "hybrid_flat", (2, 4)),
    ("hybrid_fully_shard", "orig", (4, 2)),
    ("fully_shard", "replicated", (2, 1)),
    ("replicated_flat", "flat_mesh", (1, 2)),
]


@on_default_comm
@pytest.mark.parametrize(("first", "second", "ranks"), RESIZED)
def test_checkpoints_load_on_other_numbers_of_ranks(
    api: str, first: str, second: str, ranks: tuple[int, int], pools: Pools, tmp_path: Path
) -> None:
    written = {"api": api, "way": first, "folder": tmp_path}
    read = {"api": api, "way": second, "folder": tmp_path}
    before = pools.run(ranks[0], Task(__name__, "_write_checkpoint", written))
    after = pools.run(ranks[1], Task(__name__, "_read_checkpoint", read))
    for state in after:
        assert_equal(state, before[0])


def _write_checkpoint(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    model = _make(api, way)
    with quiet():
        dcp.save(api.sharded_state(*model), checkpoint_id=folder)
        return _whole(api.sharded_state(*model))


def _read_checkpoint(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    model = _make(api, way, seed=5)
    with quiet():
        state = api.sharded_state(*model)
        dcp.load(state, checkpoint_id=folder)
        api.load_sharded_state(state, *model)
        result = _whole(api.sharded_state(*model))
    train(*model)
    return result


# Errors


@on_default_comm
@pytest.mark.parametrize("change", ["Missing", "Unexpected", "size mismatch"])
@pytest.mark.parametrize("way", ["orig", "flat", "fully_shard", "replicated"])
@on_ranks(2)
def test_names_that_do_not_fit_are_refused(api: Api, way: str, change: str) -> None:
    model, _ = _make(api, "flat_mesh")
    other, optimizer = _make(api, way, seed=5)
    state = api.sharded_state(model)
    values = state["model"]
    if change == "Missing":
        del values["blocks.1.wide.weight"]
    elif change == "Unexpected":
        values["blocks.7.wide.weight"] = values["blocks.1.wide.weight"]
    else:
        values["blocks.1.wide.weight"] = values["stem.weight"]
    with quiet():
        with pytest.raises(RuntimeError, match=rf"{change}[^\n]*blocks\.[17]\.wide\.weight"):
            api.load_sharded_state(state, other)
        before = _whole(api.sharded_state(other))
    train(other, optimizer)
    assert before.keys() == net().state_dict().keys()


@on_default_comm
@pytest.mark.parametrize("way", ["orig", "fully_shard"])
@on_ranks(2)
def test_state_of_an_optimizer_is_needed_to_load_one(api: Api, way: str) -> None:
    model, _ = _make(api, "flat_mesh")
    other = _make(api, way, seed=5)
    state = api.sharded_state(model)
    with pytest.raises((KeyError, ValueError), match="optimizer"):
        api.load_sharded_state(state, *other)
    with pytest.raises(ValueError, match='must have the keys "state"'):
        api.load_sharded_state({**state, "optimizer": {}}, *other)
