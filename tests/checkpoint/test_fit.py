"""What does not fit is refused before anything changes, and listed; extra state comes along."""

from __future__ import annotations

import collections
import contextlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import Adam

import fullshard
from fullshard.errors import CheckpointError, FullshardError, StateError
from tests.api import Api
from tests.harness import Pools, Task, mesh_of, on_ranks, rank, world_size
from tests.live.ways import sharded
from tests.models import mlp
from tests.test_transfer import _whole
from tests.training import assert_equal

alone = pytest.mark.apis("peer_memory")


def _net(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))


def _stepped(model: Any, kind: Any = torch.optim.Adam, **options: Any) -> Any:
    """Return an optimizer of a net that has taken a step."""
    optimizer = kind(model.parameters(), **options)
    model(torch.randn(2, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_what_does_not_fit_is_listed_and_nothing_changes(tmp_path: Path) -> None:
    fullshard.save_checkpoint(tmp_path / "a", nn.ModuleDict({"encoder": _net(3, 4, 5)}))
    other = nn.ModuleDict({"encoder_new": _net(3, 4, 5)})
    before = _values(other)
    with pytest.raises(CheckpointError) as caught:
        fullshard.load_checkpoint(tmp_path / "a", other)
    said = str(caught.value)
    assert "the checkpoint lacks" in said
    assert "nothing takes" in said
    assert "model/encoder.0.weight -> model/encoder_new.0.weight" in said
    assert all(value.equal(before[name]) for name, value in other.state_dict().items())
    loaded = fullshard.load_checkpoint(tmp_path / "a", other, allow=["missing", "unexpected"])
    assert len(loaded.left_out) == 8


class _Scaled(nn.Linear):
    """Keeps a value of its own beside its parameters."""

    own: Any = None

    def get_extra_state(self) -> Any:
        return self.own

    def set_extra_state(self, state: Any) -> None:
        self.own = state


def _scaled(own: Any = None) -> nn.Sequential:
    model = nn.Sequential(_Scaled(4, 4), nn.Linear(4, 4))
    model[0].own = own
    return model


OWN_STATES: list[Any] = [7, {"amax": torch.ones(2), "n": [1, (2.5, "a")]}, torch.arange(3.0)]


def _assert_same(one: Any, other: Any) -> None:
    if isinstance(one, dict | list | tuple):
        assert type(one) is type(other)
        assert len(one) == len(other)
        for key in one if isinstance(one, dict) else range(len(one)):
            _assert_same(one[key], other[key])
    else:
        assert np.array_equal(one, other)


@pytest.mark.parametrize("form", ["ours", "weights", "dcp", "file", "exported"])
@pytest.mark.parametrize("number", range(len(OWN_STATES)))
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_modules_keep_of_their_own_comes_along(tmp_path: Path, form: str, number: int) -> None:
    own, path = OWN_STATES[number], tmp_path / "a"
    model = _scaled(own)
    if form == "dcp":
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    elif form == "file":
        torch.save(model.state_dict(), path)
    else:
        fullshard.save_checkpoint(path, model)
    if form == "weights":
        path = fullshard.convert_checkpoint(path, tmp_path / "b", weights_only=True).path
    if form == "exported":
        fullshard.export_dcp(path, tmp_path / "b")
        state: dict[str, Any] = {"model": _scaled(own).state_dict()}
        for value in state["model"].values():
            if isinstance(value, torch.Tensor):
                value.zero_()
        dcp.load(state, checkpoint_id=tmp_path / "b")
        _assert_same(state["model"]["0._extra_state"], OWN_STATES[number])
        path = tmp_path / "b"
    other = _scaled()
    loaded = fullshard.load_checkpoint(path, other)
    _assert_same(other[0].own, own)
    assert not loaded.extra


def test_modules_own_state_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fullshard.save_checkpoint(tmp_path / "plain", plain)
    fullshard.save_checkpoint(tmp_path / "scaled", _scaled(7))
    with pytest.raises(CheckpointError, match=r"(?s)lacks.*model/0\._extra_state"):
        fullshard.load_checkpoint(tmp_path / "plain", _scaled())
    with pytest.raises(CheckpointError, match=r"(?s)nothing takes.*model/0\._extra_state"):
        fullshard.load_checkpoint(tmp_path / "scaled", plain)
    with pytest.raises(CheckpointError, match=r"module_states/model/0\._extra_state is a .*set"):
        fullshard.save_checkpoint(tmp_path / "b", _scaled({1, 2}))


@alone
@pytest.mark.parametrize("differ", [False, True])
@on_ranks(2)
def test_modules_own_state_on_ranks(api: Api, tmp_path: Path, differ: bool) -> None:
    mesh = mesh_of(world_size())
    model = api.fully_shard(_scaled({"n": rank() if differ else 5}), mesh=mesh)
    fullshard.save_checkpoint(tmp_path / "a", model)
    other = api.fully_shard(_scaled(), mesh=mesh)
    fullshard.load_checkpoint(tmp_path / "a", other)
    assert other[0].own == model[0].own


class _OwnWay(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}more"] = torch.ones(1)


def test_names_may_begin_with_a_dollar(tmp_path: Path) -> None:
    def build() -> tuple[Any, Any]:
        model = nn.ParameterDict({"$dict": torch.ones(2), "$tensor": torch.ones(3)})
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    for parameter in model.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    other, other_optimizer = build()
    fullshard.load_checkpoint(tmp_path / "a", other, other_optimizer)
    for name, parameter in other.items():
        assert parameter.equal(model[name])
        own, expected = other_optimizer.state[parameter], optimizer.state[model[name]]
        assert all(own[key].equal(expected[key]) for key in expected)


def test_a_module_that_fills_state_dicts_in_its_own_way_is_named(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="_OwnWay: fill state dicts in a way of their own"):
        fullshard.save_checkpoint(tmp_path / "a", _OwnWay(2, 2))


_CIRCULAR: dict[str, Any] = {}
_CIRCULAR["itself"] = _CIRCULAR


def _with_state(key: Any, value: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return an optimizer that keeps state of its first parameter, or of no parameter, under a key."""
    model = _net(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    place: Any = optimizer.state
    if key != "count":
        place = optimizer.state[model[0].weight] = {}
    place[key] = value
    return model, optimizer


# What is given to a save, and what its error says.
UNSAVABLE: dict[str, tuple[dict[str, Any], str]] = {
    "lazy": ({"model": nn.LazyLinear(4)}, "weight has no shape yet"),
    "no model": ({"model": None}, "model is a NoneType"),
    "a list": ({"model": [nn.Linear(2, 2)]}, "model is a list"),
    "circular": ({"metadata": _CIRCULAR}, "metadata cannot be saved"),
    "text array": ({"metadata": {"a": np.array(["b"])}}, "metadata cannot be saved"),
    "path": ({"path": "a\0b"}, "is no path"),
    "bytes": ({"path": b"a"}, "is no path"),
    "number": ({"path": 5}, "is no path"),
    "no path": ({"path": ""}, "name a folder"),
    "bool": ({"step": True}, "step is True"),
    "text": ({"step": "three"}, "step is 'three'"),
    "array": ({"extra": {"mine": np.array(["a"])}}, "extra.*mine"),
    "masked": ({"extra": {"mine": np.ma.array([1], mask=[True])}}, "extra.*mine"),
    "sparse": ({"extra": {"mine": torch.eye(2).to_sparse()}}, "extra.*mine"),
    "set": ({"extra": {"mine": {3, 4}}}, "extra.*mine"),
    "function": ({"extra": {"a": {"f": [lambda: 0]}}}, "extra/a/f/0 is a builtins.function"),
    "integer": ({"extra": {"n": 10**5000}}, "n is an integer of more than 8192 bits"),
    "state of none": (
        dict(zip(("model", "optimizer"), _with_state("count", 5), strict=True)),
        "'count', which is no parameter",
    ),
    "other key": (
        dict(zip(("model", "optimizer"), _with_state(3, torch.ones(1)), strict=True)),
        "keeps state under 3",
    ),
}


@pytest.mark.parametrize("name", UNSAVABLE)
def test_what_cannot_be_saved_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    given, said = UNSAVABLE[name]
    monkeypatch.chdir(tmp_path)
    with pytest.raises((CheckpointError, StateError), match=said):
        fullshard.save_checkpoint(**{"path": tmp_path / "a", "model": _net(3, 4), **given})
    assert list(tmp_path.iterdir()) == []


class _Counting(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 5}


def test_what_an_optimizer_saves_in_its_own_way_is_named(tmp_path: Path) -> None:
    model = _net(3, 4)
    with pytest.warns(UserWarning, match=r"_Counting.state_dict\(\) has 'count' beside"):
        fullshard.save_checkpoint(tmp_path / "a", model, _Counting(model.parameters(), lr=0.1))


def test_elements_that_share_memory_are_named(tmp_path: Path) -> None:
    model = _net(3, 4)
    model.register_buffer("wide", torch.ones(4, 1).expand(4, 3))
    before = _values(model)
    fullshard.save_checkpoint(tmp_path / "a", _with_wide(_net(3, 4)))
    with pytest.raises(StateError, match="model/wide: several of its elements share memory"):
        fullshard.load_checkpoint(tmp_path / "a", model)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


def _with_wide(model: nn.Module) -> nn.Module:
    model.register_buffer("wide", torch.ones(4, 3))
    return model


CONVERTED = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
}


@alone
@pytest.mark.parametrize("way", ["plain", "fully_shard", "flat"])
@pytest.mark.parametrize("kind", CONVERTED)
@on_ranks(2)
def test_state_of_parameters_of_another_dtype_is_converted_too(
    api: Api, tmp_path: Path, kind: str, way: str
) -> None:
    def build(dtype: torch.dtype) -> tuple[Any, Any]:
        torch.manual_seed(3)
        model: Any = _net(4, 4).to(dtype)
        if way == "fully_shard":
            api.fully_shard(model, mesh=mesh_of(world_size()))
        elif way == "flat":
            model = api.FullyShardedDataParallel(model, device_id=torch.device("cpu"))
        return model, CONVERTED[kind](model)

    def step(model: Any, optimizer: Any) -> float:
        dtype = next(model.parameters()).dtype
        loss = model(torch.ones(2, 4, dtype=dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    for saved, here in ((torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)):
        model, optimizer = build(saved)
        step(model, optimizer)
        path = tmp_path / str(saved)
        fullshard.save_checkpoint(path, model, optimizer)
        other, other_optimizer = build(here)
        with pytest.raises(CheckpointError, match="allow="):
            fullshard.load_checkpoint(path, other, other_optimizer)
        fullshard.load_checkpoint(path, other, other_optimizer, allow=["dtype"])
        states = [
            v for own in other_optimizer.state.values() for k, v in own.items() if k != "step"
        ]
        assert {state.dtype for state in states} == {here}
        torch.manual_seed(3)
        alone_ = _net(4, 4).to(saved)
        alone_optimizer = CONVERTED[kind](alone_)
        step(alone_, alone_optimizer)
        expected = _net(4, 4).to(here)
        expected_optimizer = CONVERTED[kind](expected)
        expected.load_state_dict(alone_.state_dict())
        expected_optimizer.load_state_dict(alone_optimizer.state_dict())
        for _ in range(2):
            assert step(other, other_optimizer) == step(expected, expected_optimizer)


LACKS = {
    "exp_avg": lambda state: state["2.weight"].pop("exp_avg"),
    "step": lambda state: state["2.weight"].pop("step"),
}


@pytest.mark.parametrize("lacks", LACKS)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_part_of_a_parameters_state_that_is_lacking_is_refused(
    tmp_path: Path, lacks: str
) -> None:
    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        return model, _stepped(model, torch.optim.AdamW, lr=0.1)

    model, optimizer = build()
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    state = {names[number]: dict(own) for number, own in optimizer.state_dict()["state"].items()}
    LACKS[lacks](state)
    content = {"state": state, "param_groups": [{"params": list(state), "lr": 0.1}]}
    dcp.save({"model": model.state_dict(), "optim": content}, checkpoint_id=tmp_path / "a")
    other, other_optimizer = build()
    with pytest.raises(CheckpointError, match=rf"(?s)lacks.*: 1\n *optimizer/2.weight/{lacks}"):
        fullshard.load_checkpoint(tmp_path / "a", other, other_optimizer)
    fullshard.load_checkpoint(tmp_path / "a", other, other_optimizer, allow=["missing"])
    assert set(other_optimizer.state[other[2].weight]) == {"step", "exp_avg", "exp_avg_sq"}
    fresh, fresh_optimizer = build()
    fresh_optimizer.state.clear()
    fullshard.load_checkpoint(tmp_path / "a", fresh, fresh_optimizer, allow=["missing"])
    own = fresh_optimizer.state[fresh[2].weight]
    assert not own[lacks].any()
    fresh(torch.ones(4, 5)).sum().backward()
    fresh_optimizer.step()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_parameter_without_any_state_in_others_files_is_noted(tmp_path: Path) -> None:
    model = _net(3, 4, 5)
    optimizer = _stepped(model, torch.optim.AdamW)
    state = {
        name: dict(own)
        for (name, _), own in zip(
            model.named_parameters(), optimizer.state_dict()["state"].values(), strict=True
        )
    }
    del state["1.bias"]
    groups = [{"params": ["0.weight", "0.bias", "1.weight", "1.bias"], "lr": 0.1}]
    content = {"model": model.state_dict(), "optim": {"state": state, "param_groups": groups}}
    dcp.save(content, checkpoint_id=tmp_path / "a")
    loaded = fullshard.load_checkpoint(tmp_path / "a", model, optimizer)
    assert any(
        "no optimizer state of 1 trained parameters, the first 1.bias" in note
        for note in loaded.notes
    )


def test_other_shapes_and_dtypes_are_refused(tmp_path: Path) -> None:
    saved, other = _net(3, 4), _net(3, 5)
    fullshard.save_checkpoint(tmp_path / "a", saved, _stepped(saved))
    for optimizer in (None, torch.optim.Adam(other.parameters())):
        with pytest.raises(
            CheckpointError, match=r"model/0.weight: \(4, 3\) in the checkpoint, \(5, 3\)"
        ):
            fullshard.load_checkpoint(tmp_path / "a", other, optimizer, allow=["missing", "dtype"])
    model = _net(3, 4).bfloat16()
    with pytest.raises(CheckpointError, match=r"float32 in the checkpoint, torch\.bfloat16 here"):
        fullshard.load_checkpoint(tmp_path / "a", model)
    fullshard.load_checkpoint(tmp_path / "a", model, allow=["dtype"])
    with pytest.raises(CheckpointError, match="is not known"):
        fullshard.load_checkpoint(tmp_path / "a", model, allow=["everything"])


def test_moments_are_never_dropped(tmp_path: Path) -> None:
    model = _net(3, 4)
    optimizer = _stepped(model)
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    # One that does not train all: its state is left over, which is said.
    fewer = torch.optim.Adam([model[0].weight])
    with pytest.raises(CheckpointError, match=r"optimizer/0\.bias/exp_avg"):
        fullshard.load_checkpoint(tmp_path / "a", model, fewer)
    fullshard.save_checkpoint(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks[^\n]*: 1\n    optimizer"):
        fullshard.load_checkpoint(tmp_path / "b", model, optimizer)


def test_tied_and_untied(tmp_path: Path) -> None:
    tied = _net(3, 3, 3)
    tied[1].weight = tied[0].weight
    fullshard.save_checkpoint(tmp_path / "a", tied)
    untied = _net(3, 3, 3)
    fullshard.load_checkpoint(tmp_path / "a", untied)
    assert untied[1].weight.equal(tied[0].weight)
    fullshard.save_checkpoint(tmp_path / "b", untied)
    fullshard.load_checkpoint(tmp_path / "b", tied)  # its two tensors are equal
    with torch.no_grad():
        untied[1].weight[2, 1] += 1
    fullshard.save_checkpoint(tmp_path / "c", untied)
    with pytest.raises(CheckpointError, match="One tensor in the model, and several"):
        fullshard.load_checkpoint(tmp_path / "c", tied)
    fullshard.save_checkpoint(tmp_path / "d", tied, _stepped(tied))
    with pytest.raises(CheckpointError, match=r"lacks[^\n]*: 1\n    optimizer/1\.weight\n"):
        fullshard.load_checkpoint(tmp_path / "d", untied, _stepped(untied))
    models = {"b": untied, "a": tied}  # what is tied in one of them is not in the other
    optimizers = [{"b": torch.optim.SGD([untied[place].weight])} for place in range(2)]
    fullshard.save_checkpoint(tmp_path / "e", models, optimizers[0])
    with pytest.raises(CheckpointError, match=r"lacks[^\n]*: 1\n    optimizer\.b/1\.weight\n"):
        fullshard.load_checkpoint(tmp_path / "e", models, optimizers[1])


def test_groups_that_are_divided_otherwise_are_refused(tmp_path: Path) -> None:
    model = _net(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    weight, bias = model.parameters()
    groups = [{"params": [weight], "weight_decay": 0.1}, {"params": [bias]}]
    divided = torch.optim.SGD(groups, lr=0.1)
    with pytest.raises(CheckpointError, match=r"divided in another way.*: 1\n.*weight and .*bias"):
        fullshard.load_checkpoint(tmp_path / "a", model, divided)
    assert divided.param_groups[0]["weight_decay"] == 0.1
    fullshard.save_checkpoint(tmp_path / "b", model, divided)
    with pytest.raises(CheckpointError, match=r"divided in another way"):
        fullshard.load_checkpoint(tmp_path / "b", model, optimizer)


def test_state_of_everything_comes_along(tmp_path: Path) -> None:
    model = _net(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.5, total_steps=10)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    values = {
        "position": (3, [1, 2.5, float("inf")]),
        "by_number": {1: "a", 2: b"bytes"},
        "weights": torch.randn(3, 2).bfloat16(),
        "array": np.arange(3, dtype=np.uint16),
        "none": None,
        "large": -(2**8000),
    }
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    fullshard.save_checkpoint(
        tmp_path / "a",
        model,
        optimizer,
        extra={"scheduler": scheduler, "scaler": scaler, "values": values},
        metadata={"data": "books"},
    )
    drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
    other = torch.optim.SGD(model.parameters(), lr=9.0, momentum=0.1)
    scheduler2 = torch.optim.lr_scheduler.OneCycleLR(other, 0.5, total_steps=10)
    loaded = fullshard.load_checkpoint(
        tmp_path / "a", model, other, extra={"scheduler": scheduler2, "scaler": scaler}
    )
    assert scheduler2.state_dict() == scheduler.state_dict()
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert [random.random(), np.random.rand(), torch.rand(()).item()] == drawn
    assert loaded.metadata == {"data": "books"}
    found = loaded.extra["values"]
    for key in ("position", "by_number", "large"):
        assert found[key] == values[key]
    assert found["weights"].equal(values["weights"])
    assert found["array"].dtype == np.uint16
    assert found["array"].tolist() == [0, 1, 2]


def test_a_checkpoint_is_replaced_only_on_request(tmp_path: Path) -> None:
    first, second = _net(3, 4), _net(3, 4)
    fullshard.save_checkpoint(tmp_path / "a", first)
    with pytest.raises(CheckpointError, match="already holds a checkpoint"):
        fullshard.save_checkpoint(tmp_path / "a", second)
    fullshard.save_checkpoint(tmp_path / "a", second, overwrite=True)
    fullshard.load_checkpoint(tmp_path / "a", first)
    assert first[0].weight.equal(second[0].weight)
    assert len(list((tmp_path / "a").iterdir())) == 2
    (tmp_path / "b").mkdir()
    with pytest.raises(CheckpointError, match="has no manifest"):
        fullshard.load_checkpoint(tmp_path / "b", first)
    with pytest.raises(CheckpointError, match="is no folder"):
        fullshard.load_checkpoint(tmp_path / "c", first)


def _save_own(api: Api, folder: Path) -> None:
    model = mlp()
    torch.manual_seed(rank())
    fullshard.save_checkpoint(folder, model, extra={"position": rank()})


def _load_own(api: Api, folder: Path) -> tuple[Any, float]:
    loaded = fullshard.load_checkpoint(folder, mlp())
    return loaded.extra["position"], torch.rand(()).item()


@alone
def test_other_numbers_of_ranks_get_all_values_and_different_randomness(
    api: str, pools: Pools, tmp_path: Path
) -> None:
    how = {"api": api, "folder": tmp_path / "a"}
    pools.run(2, Task(__name__, "_save_own", how))
    found = pools.run(3, Task(__name__, "_load_own", how))
    assert [position for position, _ in found] == [[0, 1]] * 3
    assert len({drawn for _, drawn in found}) == 3
    assert pools.run(3, Task(__name__, "_refused_own", how)) == [True] * 3


def _refused_own(api: Api, folder: Path) -> bool:
    """Whether a sampler is refused the states of another number of ranks, before the model changes."""
    model = mlp()
    nn.utils.vector_to_parameters(
        torch.ones(sum(p.numel() for p in model.parameters())), model.parameters()
    )
    before = _values(model)
    with pytest.raises(CheckpointError, match="saved separately by 2 ranks, and these are 3"):
        fullshard.load_checkpoint(folder, model, extra={"position": nn.Linear(1, 1)})
    return all(value.equal(before[name]) for name, value in model.state_dict().items())


@alone
@on_ranks(2)
def test_a_folder_that_one_rank_lacks_is_an_error_on_all(api: Api, tmp_path: Path) -> None:
    model = mlp()
    api.fully_shard(model, mesh=mesh_of(world_size()))
    with pytest.raises(CheckpointError, match="is no folder"):
        fullshard.load_checkpoint(tmp_path / "a", model)
    # A rank that sees another folder.
    fullshard.save_checkpoint(tmp_path / "b", model)
    with pytest.raises(CheckpointError, match=r"rank 1: .*is no folder"):
        fullshard.load_checkpoint(tmp_path / ("b" if rank() == 0 else "c"), model)


@alone
@on_ranks(2)
def test_saving_needs_no_meta_and_no_whole_parameters(api: Api, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = mlp()
    api.fully_shard(model, mesh=mesh_of(2))
    with pytest.raises(StateError, match="meta device"):
        fullshard.save_checkpoint(tmp_path / "a", model)
    model.to_empty(device="cpu")
    fullshard.save_checkpoint(tmp_path / "a", model)


def test_extra_state_that_is_lacking_is_found_before_anything_changes(tmp_path: Path) -> None:
    fullshard.save_checkpoint(tmp_path / "a", _net(3, 4))
    model = _net(3, 4)
    before = _values(model)
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(CheckpointError, match="extra/scaler"):
        fullshard.load_checkpoint(tmp_path / "a", model, extra={"scaler": scaler})
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    fullshard.load_checkpoint(tmp_path / "a", model, extra={"scaler": scaler}, allow="missing")


@pytest.mark.parametrize("other", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_state_of_another_optimizer_is_refused(tmp_path: Path, other: Any) -> None:
    model = _net(3, 4)
    optimizer = _stepped(model, torch.optim.AdamW)
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    with pytest.raises(CheckpointError, match=f"AdamW in the checkpoint, {other.__name__} here"):
        fullshard.load_checkpoint(tmp_path / "a", model, other(model.parameters(), lr=0.1))


def test_a_new_head_is_let_through_with_its_optimizer(tmp_path: Path) -> None:
    old = _net(3, 4)
    optimizer = _stepped(old, lr=0.5)
    fullshard.save_checkpoint(tmp_path / "a", old, optimizer)
    model = _net(3, 4, 2)
    both = torch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"optimizer/1\.weight"):
        fullshard.load_checkpoint(tmp_path / "a", model, both)
    fullshard.load_checkpoint(tmp_path / "a", model, both, allow=["missing"])
    assert model[0].weight.equal(old[0].weight)
    assert both.state[model[0].weight]["exp_avg"].equal(optimizer.state[old[0].weight]["exp_avg"])
    assert both.param_groups[0]["lr"] == 0.5
    model(torch.randn(2, 3)).sum().backward()
    both.step()


def test_compiled_models_have_their_own_names(tmp_path: Path) -> None:
    model = _net(3, 4)
    compiled: Any = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), momentum=0.5)
    fullshard.save_checkpoint(tmp_path / "a", compiled, optimizer)
    other = _net(3, 4)
    fullshard.load_checkpoint(
        tmp_path / "a", other, torch.optim.SGD(other.parameters(), momentum=0.1)
    )
    assert other[0].weight.equal(model[0].weight)
    fullshard.load_checkpoint(tmp_path / "a", compiled, optimizer)


def test_state_loaded_in_inference_mode_can_be_trained(tmp_path: Path) -> None:
    model = _net(3, 4)
    optimizer = _stepped(model)
    fullshard.save_checkpoint(tmp_path / "step-1", model, optimizer)
    fresh = torch.optim.Adam(model.parameters())
    newest = fullshard.latest_checkpoint(tmp_path)
    assert newest is not None
    with torch.inference_mode():
        fullshard.load_checkpoint(newest, model, fresh)
    fresh.step()


@alone
@on_ranks(2)
def test_ranks_with_different_arguments_are_told_and_stay_in_step(api: Api, tmp_path: Path) -> None:
    model = mlp()
    api.fully_shard(model, mesh=mesh_of(2))
    optimizer = torch.optim.Adam(model.parameters())
    first = rank() == 0
    faster = torch.optim.SGD(model.parameters(), lr=0.1 + rank())
    other: Any = (torch.optim.SGD, torch.optim.AdamW)[rank()](model.parameters(), lr=0.1)
    weight, *rest = model.parameters()
    groups = [[weight], rest] if first else [[weight, rest[0]], rest[1:]]
    divided = torch.optim.SGD([{"params": group} for group in groups], lr=0.1)
    wrong = None if first else 3
    for arguments, said in (
        ({"path": tmp_path / ("a" if first else "b")}, "path is"),
        ({"step": rank()}, "step is 0 on rank 0 and 1 on rank 1"),
        ({"optimizer": optimizer if first else None}, "optimizer is"),
        ({"optimizer": faster}, r"lr is 0\.1 on rank 0 and 1\.1 on rank 1"),
        ({"optimizer": other}, "is a SGD on rank 0 and a AdamW on rank 1"),
        ({"optimizer": divided}, r"0\.bias and .*weight are in two .* on rank 1"),
        ({"metadata": {"host": rank()}}, r"metadata is \{'host': 0\} on rank 0 and"),
        ({"metadata": wrong}, "rank 1: metadata is 3: give a dict"),
        ({"extra": wrong}, "rank 1: extra is 3: give a dict"),
        ({"extra": {"log": 1} if first else {}}, r"extra is \['log'\] on rank 0 and \[\] on"),
        ({"extra": {"bad": 1 if first else object()}}, r"extra/bad is a builtins\.object"),
    ):
        with pytest.raises(CheckpointError, match=said):
            fullshard.save_checkpoint(**{"path": tmp_path / "a", "model": model, **arguments})
    assert not list(tmp_path.iterdir())
    fullshard.save_checkpoint(tmp_path / "a", model)
    with pytest.raises(CheckpointError, match="allow is"):
        fullshard.load_checkpoint(tmp_path / "a", model, allow=["missing"] if first else [])
    with pytest.raises(CheckpointError, match="None is no path"):
        fullshard.load_checkpoint(tmp_path / "a" if first else None, model)  # type: ignore[arg-type]
    fullshard.load_checkpoint(tmp_path / "a", model)


@alone
@on_ranks(2)
def test_plain_models_that_differ_are_never_mixed(api: Api, tmp_path: Path) -> None:
    model = _net(3, 4, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank())
    with _told_of_differing("model/0.weight"):
        fullshard.save_checkpoint(tmp_path / "a", model)
    fullshard.load_checkpoint(tmp_path / "a", model)
    assert all(parameter.eq(0).all() for parameter in model.parameters())


@alone
@on_ranks(2)
def test_flat_parameters_need_the_state_of_all_inside(api: Api, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mlp()
    trained = [p for name, p in model.named_parameters() if "bias" not in name]
    optimizer = torch.optim.Adam(trained)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    flat = api.FullyShardedDataParallel(mlp(), device_id=torch.device("cpu"), use_orig_params=False)
    other = torch.optim.Adam(flat.parameters())
    before = [p.detach().clone() for p in flat.parameters()]
    with pytest.raises(CheckpointError, match="of the same flat parameter"):
        fullshard.load_checkpoint(tmp_path / "a", flat, other, allow=["missing"])
    assert all(p.equal(b) for p, b in zip(flat.parameters(), before, strict=True))


# Optimizers of several ranks


@alone
@on_ranks(2)
def test_each_rank_may_train_other_parameters(api: Api, tmp_path: Path) -> None:
    """As stages of a pipeline do."""

    def stage() -> tuple[nn.Module, torch.optim.Optimizer]:
        layers = nn.ModuleDict(
            {f"layer{rank()}": nn.Linear(4, 4), f"norm{rank()}": nn.LayerNorm(4)}
        )
        own = [{"params": layers[f"layer{rank()}"].parameters()}]
        own += [{"params": layers[f"norm{rank()}"].parameters(), "lr": 0.5 + rank()}]
        return layers, torch.optim.AdamW(own, lr=0.25)

    model, optimizer = stage()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0 + rank())
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    other, made = stage()
    for group in made.param_groups:
        group["lr"] = 9.0
    fullshard.load_checkpoint(tmp_path / "a", other, made)
    assert [group["lr"] for group in made.param_groups] == [0.25, 0.5 + rank()]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.equal(q)
        assert all(made.state[q][key].equal(value) for key, value in optimizer.state[p].items())


@alone
@on_ranks(2)
def test_groups_without_parameters_are_each_ranks_own(api: Api, tmp_path: Path) -> None:
    model = nn.ModuleDict({f"stage{rank()}": nn.Linear(3, 3)})

    def check(options: list[float], *, filled: int) -> None:
        groups: list[Any] = [{"params": [], "lr": lr} for lr in options]
        groups[filled]["params"] = list(model.parameters())
        optimizer = torch.optim.AdamW(groups)
        fullshard.save_checkpoint(tmp_path / "a", model, optimizer, overwrite=True)
        for group in optimizer.param_groups:
            group["lr"] = 77.0
        fullshard.load_checkpoint(tmp_path / "a", model, optimizer)
        assert [group["lr"] for group in optimizer.param_groups] == options

    check([9.0 + rank(), 0.5], filled=1)
    check([0.1, 0.5][: 1 + rank()], filled=rank())  # other numbers of groups
    check([0.1, 0.2], filled=rank())  # what is empty on one rank is not on the other
    check([3.0, 0.5], filled=1)


@alone
@on_ranks(4)
def test_stages_that_are_sharded_may_differ_in_everything(api: Api, tmp_path: Path) -> None:
    mesh, number = mesh_of(2, 2), rank() // 2  # the ranks of one row of the mesh are a stage

    def stage() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(number)
        named = {f"{number}-{n}": nn.Linear(4, 4) for n in range(2 + number)}
        layers = nn.Sequential(collections.OrderedDict(named))
        for layer in layers:
            if number:
                api.fully_shard(layer, mesh=mesh["shard"])
        api.fully_shard(layers, mesh=mesh["shard"])
        own = list(layers.parameters())
        return layers, torch.optim.AdamW(own[number:], lr=0.25, amsgrad=number == 1)

    model, optimizer = stage()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    other, made = stage()
    for parameter in other.parameters():
        torch.nn.init.zeros_(parameter)
    fullshard.load_checkpoint(tmp_path / "a", other, made)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert p.full_tensor().equal(q.full_tensor())
        assert set(optimizer.state.get(p, ())) == set(made.state.get(q, ()))
        for key, value in optimizer.state.get(p, {}).items():
            found = made.state[q][key]
            assert getattr(value, "_local_tensor", value).equal(
                getattr(found, "_local_tensor", found)
            )


@contextlib.contextmanager
def _told_of_differing(names: str) -> Iterator[None]:
    """Expect the warning on rank 0, and none elsewhere."""
    with pytest.warns(UserWarning, match=names) if rank() == 0 else contextlib.nullcontext():
        yield


@alone
@on_ranks(3)
def test_stages_with_parameters_of_one_name_are_named(api: Api, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for value in model.state_dict().values():
        torch.distributed.broadcast(value, 0)
    model[1].running_mean.fill_(float(rank()))  # buffers differ in training as well
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    extra = {"loss": torch.tensor([1.0 + rank()])}
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer, extra=extra)
    if rank() == 2:
        nn.init.ones_(model[0].bias)
    with _told_of_differing("^model/0.bias: rank 2 has other values than rank 0"):
        fullshard.async_save_checkpoint(tmp_path / "b", model, optimizer).wait()


@alone
@on_ranks(2)
def test_values_that_ddp_keeps_equal_are_not_compared(api: Api, tmp_path: Path) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    with torch.no_grad():
        model.module.bias.fill_(rank())  # behind its back: no warning tells that nobody looked
    fullshard.save_checkpoint(tmp_path / "a", model)
    with _told_of_differing("model.other/bias"):
        models = {"first": model, "other": model.module}
        fullshard.save_checkpoint(tmp_path / "b", models)


@alone
@on_ranks(4)
def test_copies_that_nobody_keeps_equal_are_saved_as_the_first(api: Api, tmp_path: Path) -> None:
    mesh = mesh_of(2, 2)
    model = mlp()
    api.fully_shard(model, mesh=mesh["shard"])  # twice in the job, without replication
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 + rank() // 2)
    with _told_of_differing("model/0.0.weight, .* and 3 more: rank 2 has other values than rank 0"):
        fullshard.save_checkpoint(tmp_path / "a", model)
    wholes = dict(fullshard.iter_full_state(model))
    fullshard.load_checkpoint(tmp_path / "a", model)
    for name, parameter in model.named_parameters():
        assert parameter.full_tensor().eq(1).all(), name
        assert wholes[name].eq(1.0 + rank() // 2).all(), name  # each pair's own


class _Pair(nn.Module):
    """Has a weight in two modules, which are registered in the order of ``names``. x: indices."""

    def __init__(self, seed: int, names: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        enc, dec = nn.Embedding(7, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
        dec[1].weight = enc.weight
        for name in names.split():
            self.add_module(name, {"enc": enc, "dec": dec}[name])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(self.enc(x))


@pytest.mark.parametrize("is_one", [False, True])
def test_optimizers_of_two_models_keep_the_state_of_both(tmp_path: Path, is_one: bool) -> None:
    def build(seed: int, **orders: str) -> Any:
        models = {key: _Pair(seed + number, orders[key]) for number, key in enumerate(orders)}
        if is_one:
            return models, Adam([p for model in models.values() for p in model.parameters()])
        return models, {key: Adam(model.parameters()) for key, model in models.items()}

    def moments(models: Any, made: Any) -> dict[str, torch.Tensor]:
        """Return an average of each parameter of both models, by all its names."""
        return {
            f"{key}.{name}": (made if is_one else made[key]).state[parameter]["exp_avg"]
            for key, model in models.items()
            for name, parameter in sorted(model.named_parameters(remove_duplicate=False))
        }

    models, made = build(0, a="enc dec", b="dec enc")
    sum(model(torch.arange(7)).square().sum() for model in models.values()).backward()
    for optimizer in [made] if is_one else made.values():
        optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", models, made)
    name = "optimizer/b.dec.0.weight" if is_one else "optimizer.b/dec.0.weight"
    assert f"{name}/exp_avg" in fullshard.inspect_checkpoint(tmp_path / "a").tensors
    others, loaded = build(5, a="dec enc", b="enc dec")  # each tied weight is under its other name
    fullshard.load_checkpoint(tmp_path / "a", others, loaded)
    assert_equal(moments(others, loaded), moments(models, made))


@alone
@on_ranks(2)
def test_a_unit_may_change_between_saves(api: Api, tmp_path: Path) -> None:
    """What is known of a unit's rows is kept from one save to the next."""
    model = _net(4, 4, 4)
    model[1].weight = model[0].weight  # moves to the root's unit at the first forward
    for layer in model:
        api.fully_shard(layer, mesh=mesh_of(2))
    api.fully_shard(model, mesh=mesh_of(2))
    fullshard.save_checkpoint(tmp_path / "a", model)
    model(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    fullshard.save_checkpoint(tmp_path / "b", model)
    model.double()
    fullshard.save_checkpoint(tmp_path / "c", model)
    wholes = dict(fullshard.iter_full_state(model))
    for name, dtype in (("a", torch.float32), ("b", torch.float32), ("c", torch.float64)):
        other = _net(4, 4, 4).to(dtype)
        other[1].weight = other[0].weight
        fullshard.load_checkpoint(tmp_path / name, other)
        same = [value.double().equal(wholes[key]) for key, value in other.state_dict().items()]
        assert all(same) == (name != "a")


@alone
@on_ranks(2)
def test_models_may_share_a_weight(api: Api, tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        models = {"a": _net(4, 6, 2), "b": _net(4, 6, 2)}
        models["b"][0].weight = models["a"][0].weight
        for model in models.values():
            api.fully_shard(model, mesh=mesh_of(2))
        return models, torch.optim.SGD(models["a"].parameters(), momentum=0.9)

    models, optimizer = build(0)
    for parameter in models["a"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", models, {"a": optimizer})
    others, made = build(1)
    fullshard.load_checkpoint(tmp_path / "a", others, {"a": made})
    for key, model in models.items():
        for p, q in zip(model.parameters(), others[key].parameters(), strict=True):
            assert p.full_tensor().equal(q.full_tensor())
    for p, q in zip(models["a"].parameters(), others["a"].parameters(), strict=True):
        own, found = (o.state[x]["momentum_buffer"] for o, x in ((optimizer, p), (made, q)))
        assert own.full_tensor().equal(found.full_tensor())


def test_one_of_several_is_not_left_out_without_a_word(tmp_path: Path) -> None:
    models = {key: _net(3, 4) for key in ("a", "b")}
    optimizers = {key: torch.optim.SGD(model.parameters()) for key, model in models.items()}
    fullshard.save_checkpoint(tmp_path / "a", models, optimizers)
    one = {"a": models["a"]}
    with pytest.raises(CheckpointError, match=r"(?s)nothing takes.*optimizer\.b"):
        fullshard.load_checkpoint(tmp_path / "a", models, {"a": optimizers["a"]})
    with pytest.raises(CheckpointError, match=r"(?s)nothing takes.*model\.b"):
        fullshard.load_checkpoint(tmp_path / "a", one)
    loaded = fullshard.load_checkpoint(
        tmp_path / "a", one, {"a": optimizers["a"]}, allow="unexpected"
    )
    assert {"model.b", "optimizer.b"} <= set(loaded.left_out)
    assert fullshard.load_checkpoint(tmp_path / "a", models).notes  # only the models


@alone
@on_ranks(2)
def test_state_of_other_shapes_is_made_before_it_is_loaded(api: Api, tmp_path: Path) -> None:
    def build() -> Any:
        model = api.replicate(nn.Linear(4, 8), mesh=mesh_of(2))
        return model, torch.optim.Adafactor(model.parameters(), lr=0.1)

    model, optimizer = build()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    other, made = build()
    fullshard.load_checkpoint(tmp_path / "a", other, made)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert set(made.state[q]) == set(optimizer.state[p])
        for key, value in optimizer.state[p].items():
            assert torch.as_tensor(made.state[q][key]).equal(torch.as_tensor(value)), key
    made.step()


@alone
@on_ranks(2)
def test_an_argument_that_is_wrong_on_one_rank_is_named_on_all(api: Api, tmp_path: Path) -> None:
    model = _net(3, 4)
    fullshard.save_checkpoint(tmp_path / "a", model)
    fullshard.export_hf(model, tmp_path / "hf")
    allow: Any
    for allow in ("foo", 3, [3]):
        wrong = allow if rank() == 1 else ()
        for load, path in ((fullshard.load_checkpoint, "a"), (fullshard.load_hf, "hf")):
            with pytest.raises(CheckpointError, match=r"rank 1: allow: \[.*\] is not known. Use"):
                load(tmp_path / path, model, allow=wrong)


@alone
@pytest.mark.parametrize("is_sharded", [False, True])
@on_ranks(2)
def test_steps_that_nothing_keeps_equal_are_named(
    api: Api, is_sharded: bool, tmp_path: Path
) -> None:
    model = _net(3, 4)
    if is_sharded:
        api.fully_shard(model, mesh=mesh_of(2))
    optimizer = _stepped(model, torch.optim.AdamW)
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer)
    for state in optimizer.state.values():
        state["step"] += 5 * rank()
    told = pytest.warns(
        UserWarning, match=r"0\.weight/step, .*: rank 1 has other values than rank 0"
    )
    with told if rank() == 0 else contextlib.nullcontext():
        fullshard.async_save_checkpoint(tmp_path / "b", model, optimizer).wait()


# Tensors and values of unusual forms


class _Turned(nn.Module):
    """Has tensors that show other values than their memory has, each in memory of its own."""

    def __init__(self, value: complex) -> None:
        super().__init__()

        def turned() -> torch.Tensor:
            return torch.full((3,), value).conj()

        self.parameter = nn.Parameter(turned())
        self.register_buffer("turned", turned())
        self.register_buffer("negative", turned().imag)


def test_views_that_negate_get_the_values_that_were_saved(tmp_path: Path) -> None:
    model, other = _Turned(1 + 2j), _Turned(0j)
    assert other.parameter.is_conj()
    assert other.turned.is_conj()
    assert other.negative.is_neg()
    fullshard.save_checkpoint(tmp_path / "a", model)
    fullshard.load_checkpoint(tmp_path / "a", other)
    assert_equal(
        {name: value.resolve_conj().resolve_neg() for name, value in other.state_dict().items()},
        {
            "parameter": torch.full((3,), 1 - 2j),
            "turned": torch.full((3,), 1 - 2j),
            "negative": torch.full((3,), -2.0),
        },
    )


def test_models_without_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        models = {"net": _net(3, 4), "loss": nn.MSELoss()}
        return models, torch.optim.SGD(models["net"].parameters(), lr=0.1)

    models, optimizer = build(0)
    fullshard.save_checkpoint(tmp_path / "a", models, {"net": optimizer})
    others, made = build(1)
    fullshard.load_checkpoint(tmp_path / "a", others, {"net": made})
    assert_equal(others["net"].state_dict(), models["net"].state_dict())


def test_milestones_come_along_and_count_on(tmp_path: Path) -> None:
    def build() -> Any:
        model = _net(3, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rates = torch.optim.lr_scheduler
        parts = [
            rates.LinearLR(optimizer, total_iters=2),
            rates.MultiStepLR(optimizer, milestones=[2, 4, 4, 6], gamma=0.5),
        ]
        return model, optimizer, rates.SequentialLR(optimizer, parts, milestones=[2])

    def rates_of(optimizer: Any, scheduler: Any) -> list[float]:
        found = []
        for _ in range(7):
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
        return found

    model, optimizer, scheduler = build()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    fullshard.save_checkpoint(tmp_path / "a", model, optimizer, extra={"scheduler": scheduler})
    other, made, fresh = build()
    fullshard.load_checkpoint(tmp_path / "a", other, made, extra={"scheduler": fresh})
    assert type(fresh._schedulers[1].milestones) is collections.Counter
    assert rates_of(made, fresh) == rates_of(optimizer, scheduler)


@pytest.mark.parametrize("kind", [list, tuple])
def test_what_is_nested_loads_or_is_not_saved(tmp_path: Path, kind: Any) -> None:
    def nested(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = kind([value])
        return value

    model = _net(3, 4)
    fits = 190 if kind is list else 95
    given = {"deep": nested(fits)}
    fullshard.save_checkpoint(tmp_path / "a", model, extra=given, metadata=given)
    loaded = fullshard.load_checkpoint(tmp_path / "a", model)
    assert loaded.extra == given
    assert loaded.metadata == given
    for depth in (210, 400, 100_000):
        for name in ("extra", "metadata"):
            with pytest.raises(CheckpointError, match=f"{name}.*nested deeper than the 200 levels"):
                fullshard.save_checkpoint(tmp_path / "b", model, **{name: {"deep": nested(depth)}})
    assert not (tmp_path / "b").exists()


CLASHING: list[Any] = [
    {"a/b": torch.ones(2), "a": {"b": torch.zeros(3)}},
    {1: torch.ones(2), "1": torch.zeros(3)},
    {"a": [torch.ones(2)], "a/0": torch.zeros(2), "a/0~2": torch.full((2,), 2.0)},
    {(1, 2): np.ones(2), "(1, 2)": np.zeros(2), None: np.ones(1), "None": np.zeros(1)},
]


@alone
@pytest.mark.parametrize("number", range(len(CLASHING)))
@on_ranks(2)
def test_keys_that_read_alike_have_values_of_their_own(
    api: Api, tmp_path: Path, number: int
) -> None:
    given, model = CLASHING[number], _net(3, 4)
    own = {key: value if rank() == 0 else [value] for key, value in given.items()}
    fullshard.save_checkpoint(tmp_path / "a", model, extra={"k": given, "own": own})
    extra = fullshard.load_checkpoint(tmp_path / "a", model).extra
    _assert_same(extra["k"], given)
    _assert_same(extra["own"], own)


# Parts of a model


@alone
@pytest.mark.parametrize("way", ["orig", "flat"])
@on_ranks(2)
def test_what_was_wrapped_is_the_wrappers(api: Api, tmp_path: Path, way: str) -> None:
    model = sharded(api, way)
    whole = dict(fullshard.iter_full_state(model))
    inner = model.module
    assert_equal(dict(fullshard.iter_full_state(inner)), whole)
    fullshard.save_checkpoint(tmp_path / "a", inner)
    other = sharded(api, way, seed=2)
    fullshard.load_checkpoint(tmp_path / "a", other.module)
    assert_equal(dict(fullshard.iter_full_state(other)), whole)
    third = sharded(api, way, seed=3)
    fullshard.load_sharded_state(fullshard.sharded_state(inner), third.module)
    assert_equal(dict(fullshard.iter_full_state(third)), whole)
    ema = fullshard.EMA(inner, decay=0.5)
    ema.update()
    part = next(module for module in model.modules() if type(module) is nn.Linear)
    calls: list[Callable[[], object]] = [
        lambda: dict(fullshard.iter_full_state(part)),
        lambda: fullshard.save_checkpoint(tmp_path / "b", part),
        lambda: fullshard.load_checkpoint(tmp_path / "a", part),
        lambda: fullshard.sharded_state(part),
        lambda: fullshard.EMA(part, decay=0.5),
    ]
    for call in calls:
        with pytest.raises(FullshardError, match=r"Linear is a part of .* Pass that wrapper"):
            call()


class _Twice(nn.Module):
    """Has one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.again = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.second(self.first(x)))


@alone
@pytest.mark.parametrize("way", ["plain", "fully_shard", "replicate", "orig", "flat"])
@on_ranks(2)
def test_a_module_under_two_names_has_both(api: Api, tmp_path: Path, way: str) -> None:
    def build(seed: int) -> Any:
        torch.manual_seed(seed)
        return sharded(api, way, _Twice())

    def whole(model: Any) -> dict[str, torch.Tensor]:
        found = dict(fullshard.iter_full_state(model))  # names of one tensor come in a row
        return {name: found[name] for name in sorted(found)}

    torch.manual_seed(0)
    expected = dict(sorted(_Twice().state_dict().items()))
    model = build(0)
    assert_equal(whole(model), expected)
    fullshard.save_checkpoint(tmp_path / "a", model)
    other = build(1)
    fullshard.load_checkpoint(tmp_path / "a", other)
    assert_equal(whole(other), expected)
    if rank() == 0:
        fullshard.export_dcp(tmp_path / "a", tmp_path / "dcp")
        found = {"model": {name: torch.zeros_like(value) for name, value in expected.items()}}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is one process
            dcp.load(found, checkpoint_id=tmp_path / "dcp", no_dist=True)
        assert_equal(found["model"], expected)
    plain = _Twice()
    fullshard.load_checkpoint(tmp_path / "a", plain)
    assert_equal(dict(sorted(plain.state_dict().items())), expected)


# In which order modules are registered, and how they are sharded: as a whole, or each in turn.
TIES = {
    "plain": ("enc dec", "plain"),
    "plain_reversed": ("dec enc", "plain"),
    "root": ("enc dec", "fully_shard"),
    "orig": ("enc dec", "orig"),
    "flat": ("enc dec", "flat"),
    "two": ("enc dec", "enc dec"),
    "two_sharded_in_reverse": ("enc dec", "dec enc"),
    "two_reversed": ("dec enc", "enc dec"),
}


@alone
@on_ranks(2)
def test_a_tied_weight_has_its_state_however_its_modules_are_sharded(
    api: Api, tmp_path: Path
) -> None:
    def build(names: str, how: str, seed: int) -> Any:
        model = _Pair(seed, names)
        if how in ("enc dec", "dec enc"):
            for name in how.split():
                api.fully_shard(model.get_submodule(name), mesh=mesh_of(2))
        else:
            model = sharded(api, how, model)
        return model, Adam(model.parameters()), fullshard.EMA(model, decay=0.5)

    def stepped(model: Any, optimizer: Any, ema: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Take a step; return the values of all, and the averages."""
        model(torch.arange(7)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
        found = _whole(fullshard.sharded_state(model, optimizer))
        own = {name.replace("dec.1.weight/", "enc.weight/"): found[name] for name in found}
        with ema.applied():
            return dict(sorted(own.items())), dict(sorted(fullshard.iter_full_state(model)))

    for name, (names, how) in TIES.items():
        made = build(names, how, seed=0)
        stepped(*made)
        fullshard.save_checkpoint(tmp_path / name, *made[:2], extra={"ema": made[2]})
        first = "enc.weight" if names == "enc dec" else "dec.1.weight"  # as in one process
        saved = fullshard.inspect_checkpoint(tmp_path / name).tensors
        assert {f"model/{first}", f"optimizer/{first}/exp_avg"} <= saved.keys()
        if rank() == 0 and how == "plain":
            state = {"model": made[0].state_dict(), "optim": get_optimizer_state_dict(*made[:2])}
            torch.save(state, tmp_path / f"{name}.pt")
    torch.distributed.barrier()
    made = build("enc dec", "plain", seed=0)
    stepped(*made)
    expected = stepped(*made)
    pairs = [*itertools.product(sorted(tmp_path.iterdir()), TIES.values())]
    for path, (names, how) in pairs[::3]:
        model, optimizer, ema = build(names, how, seed=1)
        extra = {} if path.suffix else {"ema": ema}
        fullshard.load_checkpoint(path, model, optimizer, extra=extra)
        found = stepped(model, optimizer, ema)
        assert_equal(found[0], expected[0])
        if extra:
            assert_equal(found[1], expected[1])
