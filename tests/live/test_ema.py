"""`EMA`: averages over shards are those of whole parameters, and load on any number of ranks."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fullshard
from fullshard.errors import CheckpointError, MisuseError, ShardingError, StateError
from tests.api import Api
from tests.collectives import record_traffic
from tests.fsdp1.models import batch, clean, net
from tests.harness import Pools, Task, mesh_of, on_ranks
from tests.live.ways import ON_TWO, sharded
from tests.test_transfer import HYBRID
from tests.training import assert_equal, mean_square

ours = pytest.mark.apis("peer_memory")


def _state(model: nn.Module) -> dict[str, Tensor]:
    return dict(fullshard.iter_full_state(model))


def _step(model: Any, optimizer: Any, seed: int) -> float:
    loss = mean_square(model(batch(seed)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@functools.cache
def _averaged() -> set[str]:
    return {name for name, _ in net().named_parameters(remove_duplicate=False)}


@ours
@pytest.mark.parametrize("way", ON_TWO)
@on_ranks(2)
def test_averages_are_those_of_whole_parameters_and_training_does_not_notice(
    api: Api, way: str
) -> None:
    results = []
    for averages in (False, True):
        model = sharded(api, way)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        expected = _state(model)
        ema = fullshard.EMA(model, decay=0.9) if averages else None
        losses = []
        for seed in range(4):
            losses.append(_step(model, optimizer, seed))
            for name, value in _state(model).items():
                is_averaged = name in _averaged()
                expected[name] = expected[name].lerp(value, 0.1) if is_averaged else value
            if ema is not None:
                ema.update()
        trained = _state(model)
        if ema is not None:
            with ema.applied():
                found = _state(model)
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
            assert_equal(_state(model), trained)
        losses += [_step(model, optimizer, seed) for seed in range(2)]
        results.append((losses, _state(model)))
    assert results[0][0] == results[1][0]
    assert_equal(results[1][1], results[0][1])


@ours
@pytest.mark.parametrize("way", HYBRID)
@on_ranks(4)
def test_replicas_average_alike(api: Api, way: str) -> None:
    model = sharded(api, way)
    ema = fullshard.EMA(model, decay=0.5)
    first = _state(model)
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5), 0)
    ema.update()
    last = _state(model)
    with ema.applied(), fullshard.full_parameters(model):
        for name, parameter in model.named_parameters():
            expected = first[clean(name)].lerp(last[clean(name)], 0.5)
            torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=1e-7)


@ours
@on_ranks(2)
def test_updates_communicate_nothing(api: Api) -> None:
    for way in ("fully_shard", "flat"):
        model = sharded(api, way)
        _step(model, torch.optim.SGD(model.parameters(), lr=0.5), 0)
        ema = fullshard.EMA(model)
        with record_traffic() as traffic:
            for _ in range(3):
                ema.update()
        assert not traffic.calls


@ours
@on_ranks(2)
def test_low_precision_parameters_have_float32_averages(api: Api) -> None:
    model = net().to(torch.bfloat16)
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh_of(2))
    api.fully_shard(model, mesh=mesh_of(2))
    ema = fullshard.EMA(model, decay=0.999)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    for _ in range(200):
        ema.update()
    # In bfloat16 the average would not have moved at all.
    state = ema.state_dict()["averages"]["stem.bias"].holding
    assert state.dtype == torch.float32
    start = net().to(torch.bfloat16).stem.bias.float()
    for box, view in state.boxes:
        begin = start[box.offset[0] : box.offset[0] + box.shape[0]]
        moved = (begin.bfloat16() + 1).float() - begin
        torch.testing.assert_close(view, begin + moved * (1 - 0.999**200), rtol=1e-3, atol=1e-3)
    assert fullshard.EMA(model, dtype=torch.bfloat16)._averages["stem.bias"][0].dtype == (
        torch.bfloat16
    )


@ours
@on_ranks(2)
def test_forwards_inside_use_averages_also_where_units_stay_unsharded(api: Api) -> None:
    model, alone = net(), net(5).eval()
    for block in model.blocks:
        api.fully_shard(block, mesh=mesh_of(2), reshard_after_forward=False)
    api.fully_shard(model, mesh=mesh_of(2), reshard_after_forward=False)
    ema = fullshard.EMA(model, decay=0.0)
    with fullshard.full_parameters(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(alone.get_parameter(name))
    ema.update()  # the averages are those of the other model
    with fullshard.full_parameters(model), torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(net().get_parameter(name))
    own = net().eval()
    model.eval()
    for _ in range(2):
        torch.testing.assert_close(model(batch()), own(batch()))
        with ema.applied(), torch.no_grad():
            torch.testing.assert_close(model(batch()), alone(batch()))
    torch.testing.assert_close(model(batch()), own(batch()))


@ours
@on_ranks(1)
def test_warmup_and_functions_decide_on_the_decay(api: Api) -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    api.fully_shard(model, mesh=mesh_of(1))
    seen: list[int] = []
    by_function = fullshard.EMA(model, lambda n: seen.append(n) or 0.5)
    warming = fullshard.EMA(model, 0.9, warmup=True)
    with torch.no_grad():
        model.weight.fill_(1.0)
    for ema in (by_function, warming):
        ema.update()
        ema.update()
    assert seen == [0, 1]
    assert by_function._averages["weight"][0].item() == 0.75
    assert warming._averages["weight"][0].item() == pytest.approx(1 - 0.1 * 2 / 11)
    for decay in (2, "0.9", None):
        with pytest.raises(ShardingError, match="decay is"):
            fullshard.EMA(model, decay)  # type: ignore[arg-type]
    with pytest.raises(ShardingError, match=r"torch\.int32"):
        fullshard.EMA(model, dtype=torch.int32)


@ours
@pytest.mark.parametrize("way", ["fully_shard", "orig", "flat"])
@on_ranks(2)
def test_an_exception_gives_the_model_its_values_back(api: Api, way: str) -> None:
    model = sharded(api, way)
    ema = fullshard.EMA(model, decay=0.5)
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5), 0)
    ema.update()
    before = _state(model)
    with pytest.raises(StateError, match="inside applied"), ema.applied():
        ema.update()
    assert_equal(_state(model), before)


@ours
@on_ranks(2)
def test_parameters_that_come_and_go(api: Api) -> None:
    model = sharded(api, "fully_shard")
    ema = fullshard.EMA(model, decay=0.5)
    model.register_buffer("later", torch.ones(2))
    model.added = nn.Linear(2, 2)
    model.stem.weight.requires_grad_(False)
    ema.update()
    state = ema.state_dict()["averages"]
    assert {"later", "added.weight"} <= set(state)
    del model.added
    ema.update()
    assert "added.weight" not in ema.state_dict()["averages"]


# Checkpoints


def _averages(ema: fullshard.EMA, model: nn.Module) -> dict[str, Tensor]:
    with ema.applied():
        return _state(model)


def _write(api: Api, way: str, folder: Path) -> dict[str, Tensor]:
    model = sharded(api, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = fullshard.EMA(model, decay=0.9)
    for seed in range(2):
        _step(model, optimizer, seed)
        ema.update()
    fullshard.save_checkpoint(folder, model, optimizer, extra={"ema": ema})
    return _averages(ema, model)


def _read(api: Api, way: str, folder: Path) -> tuple[dict[str, Tensor], int]:
    model = sharded(api, way, seed=5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ema = fullshard.EMA(model, decay=0.9)
    fullshard.load_checkpoint(folder, model, optimizer, extra={"ema": ema})
    return _averages(ema, model), ema.num_updates


PAIRS = [
    ("fully_shard", 2, "flat", 3),
    ("flat", 3, "orig", 2),
    ("hybrid_flat", 4, "plain", 1),
    ("plain", 1, "hybrid_fully_shard", 4),
    pytest.param("orig", 2, "fully_shard", 4, marks=pytest.mark.long),
    pytest.param("hybrid_fully_shard", 4, "replicate", 2, marks=pytest.mark.long),
    pytest.param("flat", 2, "flat", 2, marks=pytest.mark.long),
]


@ours
@pytest.mark.parametrize("way", ["fully_shard", "plain"])
@on_ranks(2)
def test_averages_follow_another_dtype_of_the_model(api: Api, way: str, tmp_path: Path) -> None:
    model = sharded(api, way) if way != "plain" else net()
    ema = api.EMA(model, decay=0.5)
    model.to(torch.float64)
    with ema.applied():
        pass
    ema.update()
    fullshard.save_checkpoint(tmp_path / "a", model, extra={"ema": ema})
    expected = {name: held.holding.dtype for name, held in ema.state_dict()["averages"].items()}
    assert torch.float64 in expected.values()
    fullshard.load_checkpoint(tmp_path / "a", model, extra={"ema": ema})
    assert {n: h.holding.dtype for n, h in ema.state_dict()["averages"].items()} == expected


@ours
@pytest.mark.parametrize(("first", "num_first", "second", "num_second"), PAIRS)
def test_any_number_of_ranks_loads_averages_bit_for_bit(
    api: str,
    first: str,
    num_first: int,
    second: str,
    num_second: int,
    pools: Pools,
    tmp_path: Path,
) -> None:
    common: dict[str, Any] = {"api": api, "folder": tmp_path / "a"}
    written = pools.run(num_first, Task(__name__, "_write", {"way": first, **common}))
    read = pools.run(num_second, Task(__name__, "_read", {"way": second, **common}))
    for averages, num_updates in read:
        assert_equal(averages, written[0])
        assert num_updates == 2


@ours
@on_ranks(2)
def test_states_of_the_same_ranks_load_directly_and_others_are_refused(api: Api) -> None:
    model = sharded(api, "flat")
    ema = fullshard.EMA(model, decay=0.5)
    _step(model, torch.optim.SGD(model.parameters(), lr=0.5), 0)
    ema.update()
    other = fullshard.EMA(model)
    other.load_state_dict(copy.deepcopy(ema.state_dict()))
    assert_equal(_averages(other, model), _averages(ema, model))
    state = ema.state_dict()
    state["averages"].pop("stem.weight")
    with pytest.raises(StateError, match=r"differ in stem\.weight"):
        other.load_state_dict(state)
    rows = fullshard.EMA(sharded(api, "fully_shard"))
    with pytest.raises(StateError, match="another part"):
        rows.load_state_dict(ema.state_dict())


@ours
@on_ranks(2)
def test_averages_from_before_sharding_begin_again_with_a_warning(api: Api) -> None:
    model = nn.Linear(4, 4)
    ema = fullshard.EMA(model, decay=0.5)
    api.fully_shard(model, mesh=mesh_of(2))
    with pytest.warns(UserWarning, match="of 2 tensors, such as weight"):
        ema.update()
    wanted = _state(model)
    with ema.applied():
        assert_equal(_state(model), wanted)


@ours
@on_ranks(2)
def test_a_checkpoint_of_another_model_is_refused(api: Api, tmp_path: Path) -> None:
    small = nn.Linear(3, 3)
    api.fully_shard(small, mesh=mesh_of(2))
    fullshard.save_checkpoint(tmp_path / "a", small, extra={"ema": fullshard.EMA(small)})
    ema = fullshard.EMA(sharded(api, "fully_shard"))
    with pytest.raises((StateError, CheckpointError), match="differ in"):
        fullshard.load_checkpoint(tmp_path / "a", small, extra={"ema": ema})


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_averages_of_a_model_in_distributed_data_parallel(api: Api) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    averages = fullshard.EMA(model, decay=0.5)
    before = model.module.weight.detach().clone()
    with torch.no_grad():
        model.module.weight.add_(2)
    averages.update()
    with averages.applied():
        torch.testing.assert_close(model.module.weight.detach(), before + 1)


@ours
@pytest.mark.parametrize("way", ["plain", "fully_shard", "flat"])
@on_ranks(2)
def test_nothing_is_loaded_where_averages_are_shown(api: Api, tmp_path: Path, way: str) -> None:
    model = sharded(api, way)
    before = _state(model)
    fullshard.save_checkpoint(tmp_path / "a", model)
    fullshard.export_hf(model, tmp_path / "hf")
    ema = fullshard.EMA(model, decay=0.5)
    optimizer = torch.optim.SGD(model.parameters())
    other = torch.optim.SGD(nn.Linear(1, 1).parameters())
    with ema.applied():
        with pytest.raises(MisuseError, match=r"load_checkpoint is called inside EMA.applied"):
            fullshard.load_checkpoint(tmp_path / "a", model)
        with pytest.raises(MisuseError, match=r"load_hf is called inside EMA.applied"):
            fullshard.load_hf(model, tmp_path / "hf")
        for each in (model, next(model.children())):
            with pytest.raises(MisuseError, match="load_state_dict inside applied"):
                each.load_state_dict({}, strict=False)
        with pytest.raises(MisuseError, match="step of SGD inside applied"):
            optimizer.step()
        other.step()
    assert_equal(_state(model), before)
    optimizer.step()
    model.load_state_dict(model.state_dict())
    fullshard.load_checkpoint(tmp_path / "a", model)
