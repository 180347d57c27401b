"""`keep_unsharded`: within the budget, with the same gradients, and with one gather less for each unit that stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.errors import FullshardError, MisuseError, ShardingError, StateError
from fullshard.watch.memory import MemoryCategory
from tests.api import Api, use_api
from tests.collectives import record_traffic
from tests.harness import Fate, mesh_of, on_ranks, rank, run_fresh, world_size
from tests.models import mlp
from tests.training import assert_equal, local_gradients, make_batch, mean_square, my_part

UNIT_NBYTES = 1088  # of a layer of `mlp`: (16 x 16 + 16) x 4
over_groups = pytest.mark.apis("process_group")
both = pytest.mark.apis("peer_memory", "process_group")


class Nested(nn.Module):
    """A unit with units inside it, one of which runs twice, and one that is recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"inner": mlp(1), "more": mlp(2)})
        self.block = _Block(self.outer)
        self.last = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.block, x, use_reentrant=False))


class _Block(nn.Module):
    def __init__(self, parts: nn.ModuleDict) -> None:
        super().__init__()
        self.parts, self.own = parts, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        inner: Callable[[Tensor], Tensor] = self.parts["inner"]
        return self.parts["more"](self.own(inner(inner(x))))


def _layers(api: Api, model: nn.Sequential | None = None, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = mlp(4) if model is None else model
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def _nested(api: Api) -> nn.Module:
    torch.manual_seed(0)
    model = Nested()
    for unit in (model.block.parts["inner"], model.block.parts["more"], model.block, model):
        api.fully_shard(unit)
    return model


def _wrapped(api: Api, strategy: str = "FULL_SHARD", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return api.FullyShardedDataParallel(
        mlp(4),
        auto_wrap_policy=api.ModuleWrapPolicy({nn.Linear}),
        sharding_strategy=api.ShardingStrategy[strategy],
        device_id=torch.device("cpu"),
        **options,
    )


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
MODELS: dict[str, Callable[[Api], nn.Module]] = {
    "units": _layers,
    "nested": _nested,
    "bf16": lambda api: _layers(api, mp_policy=api.MixedPrecisionPolicy(**BF16)),
    "offload": lambda api: _layers(api, offload_policy=api.CPUOffloadPolicy()),
    "wrapper": _wrapped,
    "wrapper, bf16": lambda api: _wrapped(
        api, use_orig_params=True, mixed_precision=api.MixedPrecision(**BF16)
    ),
    "replicas": lambda api: _layers(api, mesh=mesh_of(2, 2)),
    "groups": lambda api: _layers(api, reshard_after_forward=2),
}
ON_FOUR = ("replicas", "groups")


def _steps(model: Any, num: int = 3) -> list[dict[str, Tensor]]:
    """Train, with two micro-batches a step; return the gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(num):
        for part in my_part(make_batch(16, seed=step)).chunk(2):
            mean_square(model(part)).backward()
        seen.append(local_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def _keeps(api: Api, name: str) -> None:
    expected = _steps(MODELS[name](api))
    model = MODELS[name](api)
    budget = fullshard.keep_unsharded(model, 1 << 30).nbytes * 2 // 3
    kept = fullshard.keep_unsharded(model, budget)
    names = {unit.name for unit in kept.units}
    assert 0 < kept.nbytes <= budget
    assert {unit.name for unit in api.describe(model).units if unit.is_kept} == names
    for seen, own in zip(_steps(model), expected, strict=True):
        assert_equal(seen, own)


@over_groups
@pytest.mark.parametrize("name", [name for name in MODELS if name not in ON_FOUR])
@on_ranks(2)
def test_gradients_are_the_same_with_units_that_stay(api: Api, name: str) -> None:
    _keeps(api, name)


@over_groups
@pytest.mark.parametrize("name", ON_FOUR)
@on_ranks(4)
def test_gradients_are_the_same_over_two_axes_and_smaller_groups(api: Api, name: str) -> None:
    _keeps(api, name)


def _gathers(model: nn.Module) -> int:
    with record_traffic() as traffic:
        mean_square(model(my_part(make_batch(16)))).backward()
    model.zero_grad()
    return traffic.calls["all_gather"]


@over_groups
@on_ranks(2)
def test_each_unit_that_stays_is_gathered_once_less(api: Api) -> None:
    model = _layers(api)
    _steps(model, 2)
    assert _gathers(model) == 8
    for num_kept in (3, 1, 4, 0, 2):  # each call replaces the one before
        kept = fullshard.keep_unsharded(model, num_kept * UNIT_NBYTES)
        assert (len(kept.units), kept.nbytes) == (num_kept, num_kept * UNIT_NBYTES)
        assert _gathers(model) == 8 - num_kept


@over_groups
@on_ranks(2)
def test_a_unit_that_runs_twice_saves_two_gathers(api: Api) -> None:
    model = _nested(api)
    _steps(model, 2)
    before = _gathers(model)
    size = {unit.name: unit.unsharded_nbytes for unit in api.describe(model).units}
    kept = fullshard.keep_unsharded(model, sum(size.values()))
    assert {unit.name for unit in kept.units} == set(size) - {""}
    # In backward each once, and `inner` a second time in forward.
    assert before - _gathers(model) == len(kept.units) + 1


@both
@on_ranks(2)
def test_what_is_read_in_place_takes_and_saves_nothing(api: Api) -> None:
    model = _layers(api)
    _steps(model, 3)
    kept = fullshard.keep_unsharded(model, 1) if api.name == "peer_memory" else None
    if kept is not None:
        assert (kept.units, kept.nbytes) == ((), 0)
        return
    with pytest.raises(ShardingError, match=f"takes {UNIT_NBYTES} bytes.*all 4.*{4 * UNIT_NBYTES}"):
        fullshard.keep_unsharded(model, 1)


@both
@on_ranks(2)
def test_casts_of_what_peers_hold_can_stay(api: Api) -> None:
    model = MODELS["bf16"](api)
    kept = fullshard.keep_unsharded(model, UNIT_NBYTES)
    assert [unit.nbytes for unit in kept.units] == [UNIT_NBYTES // 2] * 2


@over_groups
@on_ranks(2)
def test_units_that_stay_anyway_take_nothing_of_the_budget(api: Api) -> None:
    model = _layers(api)
    model[1].set_reshard_after_forward(False)
    model[2].set_unshard_in_backward(False)
    fullshard.set_unused(model[3], "zero", may_be_skipped=True)
    assert [unit.name for unit in fullshard.keep_unsharded(model, 1 << 30).units] == ["0"]
    assert fullshard.keep_unsharded(_wrapped(api, "SHARD_GRAD_OP"), 1 << 30).units == ()
    with pytest.warns(FutureWarning, match="NO_SHARD"):
        whole = _wrapped(api, "NO_SHARD")
    assert fullshard.keep_unsharded(whole, 1 << 30).units == ()


@over_groups
@on_ranks(2)
def test_what_is_set_afterwards_has_the_last_word(api: Api) -> None:
    model = _layers(api)
    fullshard.keep_unsharded(model, 1 << 30)
    model[1].set_reshard_after_forward(True)
    model[2].set_reshard_after_forward(False)
    described = {unit.name: unit for unit in api.describe(model).units}
    assert [each.is_kept for each in described.values()] == [True, False, False, True]
    fullshard.keep_unsharded(model, 0)
    described = {unit.name: unit for unit in api.describe(model).units}
    assert [each.reshard_after_forward for each in described.values()] == [True, True, False, True]


def _unsharded(model: nn.Module, names: set[str]) -> int:
    """Return what a memory report counts as unsharded, of units with these names."""
    report = fullshard.memory_report(model)
    return sum(report.total(MemoryCategory.UNSHARDED, unit=name) for name in names)


@over_groups
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_a_memory_report_counts_what_was_said(api: Api, param_dtype: torch.dtype | None) -> None:
    dim = 740  # smaller buffers in host memory are never freed
    policy = api.MixedPrecisionPolicy(param_dtype=param_dtype)
    model = _layers(api, mlp(3, dim=dim), mp_policy=policy)
    size = api.describe(model).units[1].unsharded_nbytes
    assert 0 <= size - dim * (dim + 1) * (param_dtype or torch.float32).itemsize < 32
    kept = fullshard.keep_unsharded(model, 2 * size + 100)
    assert [unit.nbytes for unit in kept.units] == [size] * 2
    names = {unit.name for unit in api.describe(model).units}
    for _ in range(2):
        loss = mean_square(model(make_batch(dim)))
        assert _unsharded(model, names) == kept.nbytes
        loss.backward()
        assert _unsharded(model, names) == 0
    with torch.no_grad():
        model(make_batch(dim))
    assert _unsharded(model, names) == 0  # an evaluation leaves nothing


@both
@on_ranks(2)
def test_checkpoints_are_those_of_a_model_that_reshards(api: Api, tmp_path: Path) -> None:
    model, other = _layers(api), _layers(api)
    fullshard.keep_unsharded(model, 2 * UNIT_NBYTES)
    _steps(model), _steps(other)
    fullshard.save_checkpoint(tmp_path / "a", model=model)
    fullshard.load_checkpoint(tmp_path / "a", model=other)
    assert_equal(_steps(model, 1)[0], _steps(other, 1)[0])


# By a trace


def _record(model: nn.Module, folder: Path) -> None:
    with fullshard.trace(model, folder) as tracing:
        for step in range(3):
            mean_square(model(my_part(make_batch(16, seed=step)))).backward()
            model.zero_grad()
            tracing.step()


@over_groups
@on_ranks(2)
def test_a_trace_decides_and_says_what_is_saved(api: Api, tmp_path: Path) -> None:
    model = _layers(api)
    _steps(model, 2)
    _record(model, tmp_path)
    kept = fullshard.keep_unsharded(model, 2 * UNIT_NBYTES, trace=tmp_path)
    assert len(kept.units) == 2
    assert kept.saved_s is not None
    assert kept.exposed_s is not None
    assert 0 < kept.saved_s <= kept.exposed_s
    assert all(unit.saved_s for unit in kept.units)
    every: list[Any] = [None] * world_size()
    dist.all_gather_object(every, kept)
    assert every == [kept] * world_size()
    _record(model, tmp_path / "kept")
    with pytest.raises(StateError, match="was not gathered in backward"):
        fullshard.keep_unsharded(model, 2 * UNIT_NBYTES, trace=tmp_path / "kept")


@over_groups
@on_ranks(2)
def test_a_trace_that_one_rank_lacks_is_refused_on_all(api: Api, tmp_path: Path) -> None:
    model, another = _layers(api), _layers(api, mlp(3))
    _record(another, tmp_path)
    with pytest.raises(ShardingError, match="3 units and the model 4"):
        fullshard.keep_unsharded(model, UNIT_NBYTES, trace=tmp_path)
    _record(model, tmp_path)
    dist.barrier()
    if rank() == 1:
        (tmp_path / "rank00001.json").unlink()
    with pytest.raises(ShardingError, match="rank00001") as caught:
        fullshard.keep_unsharded(model, UNIT_NBYTES, trace=tmp_path)
    said = str(caught.value)
    assert ".." not in said
    assert said.count("Record ") == 1
    assert not any(unit.is_kept for unit in api.describe(model).units)


# Refused


@over_groups
@on_ranks(2)
def test_wrong_calls_are_refused_and_change_nothing(api: Api) -> None:
    model = _layers(api)
    fullshard.keep_unsharded(model, UNIT_NBYTES)
    _steps(model, 1)
    before = api.describe(model)
    for wrong in (-1, 1.5, True, None, UNIT_NBYTES - 1):
        with pytest.raises(ShardingError, match="bytes"):
            fullshard.keep_unsharded(model, wrong)
    for part in (model[1], mlp()):
        with pytest.raises(ShardingError, match="outermost"):
            fullshard.keep_unsharded(part, 1 << 30)
    handle = model[1].register_forward_hook(lambda *_: fullshard.keep_unsharded(model, 0))
    with pytest.raises(MisuseError, match="keep_unsharded"):
        model(make_batch(16))
    handle.remove()
    assert api.describe(model) == before


def _differ(path: str, when: str) -> None:
    with use_api(path) as api:
        model = _layers(api)
        if when == "later":
            _steps(model, 2)
        fullshard.keep_unsharded(model, (1 + rank()) * UNIT_NBYTES)
        _steps(model, 2)


@pytest.mark.parametrize("when", ["before the first use", "later"])
@pytest.mark.parametrize("path", ["process_group"])
def test_ranks_that_choose_otherwise_get_an_error(path: str, when: str) -> None:
    for outcome in run_fresh(2, _differ, path=path, when=when):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert "DivergenceError" in outcome.error, outcome.text


def _other_model() -> None:
    with use_api("process_group") as api:
        model = _layers(api, mlp(4, dim=16 + 16 * rank()))
        fullshard.keep_unsharded(model, 8 * UNIT_NBYTES)
        mean_square(model(make_batch(16 + 16 * rank()))).backward()


def test_ranks_with_other_models_get_an_error() -> None:
    for outcome in run_fresh(2, _other_model):
        assert outcome.fate is Fate.RAISED, outcome.text
        assert FullshardError.__name__ in outcome.error, outcome.text
