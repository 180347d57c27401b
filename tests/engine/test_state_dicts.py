"""`torch.distributed.checkpoint` reads and writes sharded models and their optimizers.

None of it needs `install()`: DTensors are all that it looks for.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW, Optimizer

from tests.api import Api
from tests.harness import Pools, Task, mesh_of, on_ranks, rank, world_size
from tests.models import PartlyFrozen, Problem, UnevenMLP, make_problem
from tests.selection import one_way
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    full,
    full_parameters,
    gradients_alone,
    make_batch,
    mean_over_ranks,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FULL_FROZEN = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _shard_layers(api: Api, model: nn.Module) -> None:
    for layer in model.children():
        if next(layer.parameters(), None) is not None:
            api.fully_shard(layer)
    api.fully_shard(model)


def _shard_over_pairs(api: Api, model: nn.Module) -> None:
    for layer in (model[0], model):
        api.fully_shard(layer, mesh=mesh_of(2, 2))


def _shard_as_one(api: Api, model: nn.Module) -> None:
    api.fully_shard(model)


def _shard_columns(api: Api, model: nn.Module) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        divides = parameter.ndim > 1 and parameter.size(1) % world_size() == 0
        return Shard(1) if divides else None

    api.fully_shard(model, shard_placement_fn=placement)


LAYOUTS: dict[str, Callable[[Api, nn.Module], None]] = {
    "layers": _shard_layers,
    "pairs": _shard_over_pairs,
    "one": _shard_as_one,
    "columns": _shard_columns,
}


def _make(
    api: Api, seed: int, layout: str = "layers", model_type: type[nn.Module] = UnevenMLP
) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(seed)
    model = model_type()
    LAYOUTS[layout](api, model)
    return model, _optimizer(model)


def _optimizer(model: nn.Module) -> Optimizer:
    return AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1, eps=1e-3)


def _train(
    model: nn.Module, optimizer: Optimizer, steps: int = 2, batch: Tensor | None = None
) -> list[float]:
    """Take some steps on this rank's part of a batch and return its losses."""
    losses = []
    for _ in range(steps):
        loss = mean_square(model(my_part(make_batch(7)) if batch is None else batch))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train_alone(seed: int) -> tuple[nn.Module, Optimizer]:
    """Take the same steps on the whole batch, unsharded."""
    torch.manual_seed(seed)
    model = UnevenMLP()
    optimizer = _optimizer(model)
    _train(model, optimizer, batch=make_batch(7))
    return model, optimizer


def _flat(optim_state: dict[str, Any]) -> dict[str, Tensor]:
    """Name every tensor of an optimizer's state dict, gathered."""
    return {
        f"{name}.{key}": full(value)
        for name, state in optim_state["state"].items()
        for key, value in state.items()
    }


# What comes out


@on_ranks(2)
def test_names_and_groups_are_those_of_the_unwrapped_model(api: Api) -> None:
    alone, alone_optimizer = _train_alone(1)
    model, optimizer = _make(api, 1)
    _train(model, optimizer)
    expected, expected_optim = get_state_dict(alone, alone_optimizer)
    state, optim_state = get_state_dict(model, optimizer)
    assert list(state) == list(expected)
    assert list(optim_state["state"]) == list(expected_optim["state"])
    assert optim_state["param_groups"] == expected_optim["param_groups"]
    for name, values in optim_state["state"].items():
        assert list(values) == list(expected_optim["state"][name])


@on_ranks(2, 3)
def test_sharded_state_has_the_placements_of_the_parameters(api: Api) -> None:
    model, optimizer = _make(api, 1)
    _train(model, optimizer)
    state, optim_state = get_state_dict(model, optimizer)
    for name, parameter in model.named_parameters():
        moments = optim_state["state"][name]
        for value in (state[name], moments["exp_avg"], moments["exp_avg_sq"]):
            assert isinstance(value, DTensor)
            assert value.placements == parameter.placements
            assert value.shape == parameter.shape
            assert value.to_local().shape == parameter.to_local().shape


@on_ranks(2)
def test_full_state_is_that_of_the_unwrapped_model(api: Api) -> None:
    alone, alone_optimizer = _train_alone(1)
    model, optimizer = _make(api, 1)
    _train(model, optimizer)
    expected, expected_optim = get_state_dict(alone, alone_optimizer)
    state, optim_state = get_state_dict(model, optimizer, options=FULL)
    values = [*state.values(), *_flat(optim_state).values()]
    assert not any(isinstance(value, DTensor) for value in values)
    assert_equal(state, expected, rtol=1e-4, atol=1e-5)
    assert_equal(_flat(optim_state), _flat(expected_optim), rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_full_state_with_offload_is_given_to_rank_0_alone(api: Api) -> None:
    model, optimizer = _make(api, 1)
    _train(model, optimizer)
    whole = full_parameters(model)
    state, optim_state = get_state_dict(model, optimizer, options=ON_RANK_0)
    if rank() == 0:
        assert_equal(state, whole)
        assert list(optim_state["state"]) == list(whole)
    else:
        assert not state
        assert not optim_state


@on_ranks(2)
def test_frozen_parameters_can_be_left_out(api: Api) -> None:
    options = StateDictOptions(ignore_frozen_params=True, strict=False)
    model, _ = _make(api, 1, model_type=PartlyFrozen)
    whole = full_parameters(model)
    state = get_model_state_dict(model, options=options)
    assert list(state) == ["mixed.bias", "trained.weight", "trained.bias"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    set_model_state_dict(model, {name: whole[name] for name in state}, options=FULL_FROZEN)
    kept = {name: value * (name in state) for name, value in whole.items()}
    assert_equal(full_parameters(model), kept)


@on_ranks(2)
def test_tied_parameters_appear_under_both_names_with_one_state(api: Api) -> None:
    problem = _sharded_problem(api, "tied_transformer")
    optimizer = _optimizer(problem.model)
    _train_problem(problem, optimizer)
    state, optim_state = get_state_dict(problem.model, optimizer, options=FULL)
    torch.testing.assert_close(state["head.weight"], state["embed.weight"], rtol=0, atol=0)
    assert [n for n in optim_state["state"] if n in ("head.weight", "embed.weight")] == [
        "embed.weight"
    ]


# What goes in


@pytest.mark.parametrize(
    ("out", "into"),
    [(StateDictOptions(), StateDictOptions()), (FULL, FULL), (ON_RANK_0, FROM_RANK_0)],
    ids=["sharded", "full", "from rank 0"],
)
@on_ranks(2, 3)
def test_training_continues_with_identical_losses(
    api: Api, out: StateDictOptions, into: StateDictOptions
) -> None:
    model, optimizer = _make(api, 1)
    _train(model, optimizer)
    state, optim_state = get_state_dict(model, optimizer, options=out)
    other, other_optimizer = _make(api, 2)
    set_model_state_dict(other, state, options=into)
    optim_state = copy.deepcopy(optim_state)  # the other optimizer keeps these tensors
    set_optimizer_state_dict(other, other_optimizer, optim_state, options=into)
    assert_equal(full_parameters(other), full_parameters(model))
    other_losses = _train(other, other_optimizer)
    assert other_losses == _train(model, optimizer)
    assert_equal(full_parameters(other), full_parameters(model))


@on_ranks(2)
def test_state_of_an_unwrapped_model_is_broadcast_from_rank_0(api: Api) -> None:
    alone, alone_optimizer = _train_alone(1)
    state, optim_state = get_state_dict(alone, alone_optimizer)
    whole = full_parameters(alone)
    model, optimizer = _make(api, 2)
    if rank() != 0:
        state, optim_state = {}, {}
    set_model_state_dict(model, state, options=FROM_RANK_0)
    set_optimizer_state_dict(model, optimizer, optim_state, options=FROM_RANK_0)
    assert_equal(full_parameters(model), whole)
    own = get_optimizer_state_dict(model, optimizer, options=FULL)
    assert_equal(_flat(own), _flat(get_optimizer_state_dict(alone, alone_optimizer)))
    assert_gradients_after_forward(model, alone)


def assert_gradients_after_forward(model: nn.Module, alone: nn.Module) -> None:
    """Assert that what was loaded is what all ranks compute with."""
    mean_square(model(my_part(make_batch(7)))).backward()
    assert_gradients_are_parts_of(model, gradients_alone(alone, make_batch(7)))


@pytest.mark.parametrize("first", ["stays on meta", "gets memory"])
@on_ranks(2)
def test_meta_model_is_filled_from_rank_0(api: Api, first: str) -> None:
    torch.manual_seed(1)
    alone = UnevenMLP()
    with torch.device("meta"):
        model = UnevenMLP()
    _shard_layers(api, model)
    if first == "gets memory":
        model.to_empty(device="cpu")
    state = alone.state_dict() if rank() == 0 else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own use of what it deprecates
        set_model_state_dict(model, state, options=FROM_RANK_0)
    assert_equal(full_parameters(model), full_parameters(alone))
    assert_gradients_after_forward(model, alone)


@on_ranks(2)
def test_missing_and_unexpected_names_are_errors_only_if_strict(api: Api) -> None:
    model, _ = _make(api, 1)
    whole = full_parameters(model)
    state = {name: torch.zeros_like(v) for name, v in get_model_state_dict(model).items()}
    state["9.weight"] = state.pop("0.weight")
    with pytest.raises(RuntimeError, match=r'Missing key.*"0\.weight"[^"]*"9\.weight"'):
        set_model_state_dict(model, dict(state))
    result = set_model_state_dict(model, dict(state), options=StateDictOptions(strict=False))
    assert result.missing_keys == ["0.weight"]
    assert result.unexpected_keys == ["9.weight"]
    kept = {name: value * (name == "0.weight") for name, value in whole.items()}
    assert_equal(full_parameters(model), kept)


@on_ranks(2)
def test_flattened_optimizer_state_round_trips(api: Api) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = _make(api, 1)
    _train(model, optimizer)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    assert "state.0.weight.exp_avg" in flat
    assert flat["param_groups.0.weight.lr"] == 0.1
    other, other_optimizer = _make(api, 1)
    set_optimizer_state_dict(other, other_optimizer, flat, options=options)
    expected = get_optimizer_state_dict(model, optimizer)
    assert_equal(_flat(get_optimizer_state_dict(other, other_optimizer)), _flat(expected))


# Through files


def _sharded_problem(api: Api, name: str, seed: int = 1) -> Problem:
    problem = make_problem(name, seed=seed)
    for unit in problem.units:
        api.fully_shard(unit)
    api.fully_shard(problem.model)
    return problem


def _train_problem(problem: Problem, optimizer: Optimizer) -> list[float]:
    losses = []
    for _ in range(2):
        loss = problem.loss(problem.model(my_part(problem.inputs)), my_part(problem.targets))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


class _App(Stateful):
    """What PyTorch's tutorial wraps a model and an optimizer in."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        state, optim_state = get_state_dict(self.model, self.optimizer)
        return {"model": state, "optimizer": optim_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


@pytest.mark.parametrize("name", ["tied_transformer", "moe", "conv"])
@on_ranks(2)
def test_checkpoint_continues_with_identical_losses(api: Api, name: str, tmp_path: Path) -> None:
    problem = _sharded_problem(api, name)
    optimizer = _optimizer(problem.model)
    _train_problem(problem, optimizer)
    dcp.save({"app": _App(problem.model, optimizer)}, checkpoint_id=tmp_path)
    losses = _train_problem(problem, optimizer)
    other = _sharded_problem(api, name, seed=2)
    other_optimizer = _optimizer(other.model)
    dcp.load({"app": _App(other.model, other_optimizer)}, checkpoint_id=tmp_path)
    other = other._replace(inputs=problem.inputs, targets=problem.targets)
    assert _train_problem(other, other_optimizer) == losses
    assert_equal(full_parameters(other.model), full_parameters(problem.model))


@on_ranks(2)
def test_asynchronous_save_writes_the_values_of_its_time(api: Api, tmp_path: Path) -> None:
    model, optimizer = _make(api, 1)
    whole = full_parameters(model)
    future: Any = dcp.async_save(
        get_model_state_dict(model),
        checkpoint_id=tmp_path,
        process_group=dist.new_group(),  # its thread must not meet training's collectives
    )
    _train(model, optimizer)
    future.result()
    other, _ = _make(api, 2)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path)
    set_model_state_dict(other, state)
    assert_equal(full_parameters(other), whole)


@on_ranks(2)
def test_checkpoint_becomes_a_plain_file_and_back(api: Api, tmp_path: Path) -> None:
    model, _ = _make(api, 1)
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "sharded")
    alone = UnevenMLP()
    if rank() == 0:
        dcp_to_torch_save(tmp_path / "sharded", tmp_path / "plain.pt")
        alone.load_state_dict(torch.load(tmp_path / "plain.pt"))
        torch_save_to_dcp(tmp_path / "plain.pt", tmp_path / "again")
    whole = full_parameters(model)
    if rank() == 0:
        assert_equal(full_parameters(alone), whole)
    dist.barrier()
    other, _ = _make(api, 2)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=tmp_path / "again")
    set_model_state_dict(other, state)
    assert_equal(full_parameters(other), whole)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("pairs", "layers"), ("layers", "pairs"), ("layers", "one"), ("columns", "layers")],
)
@on_ranks(4)
def test_checkpoint_is_loaded_into_another_sharding(
    api: Api, saved: str, loaded: str, tmp_path: Path
) -> None:
    model, optimizer = _make(api, 1, saved, EvenMLP)
    _train(model, optimizer)
    dcp.save(_App(model, optimizer).state_dict(), checkpoint_id=tmp_path)
    other, other_optimizer = _make(api, 2, loaded, EvenMLP)
    state = _App(other, other_optimizer).state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    _App(other, other_optimizer).load_state_dict(state)
    assert_equal(full_parameters(other), full_parameters(model))
    moments = [get_optimizer_state_dict(*x) for x in ((other, other_optimizer), (model, optimizer))]
    assert_equal(_flat(moments[0]), _flat(moments[1]))
    _train(other, other_optimizer)
    _train(model, optimizer)
    assert_equal(full_parameters(other), full_parameters(model), rtol=1e-4, atol=1e-5)


class EvenMLP(nn.Sequential):
    """Layers of 7, 16 and 6 features, some of which divide by 2. (n, 7) -> (n, 6)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 6))


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_checkpoint_is_loaded_by_another_number_of_ranks(
    pools: Pools, api: str, before: int, after: int, tmp_path: Path
) -> None:
    saved = _run(pools, before, _save, api=api, folder=tmp_path)
    loaded = _run(pools, after, _load, api=api, folder=tmp_path)
    assert_equal(loaded["parameters"], saved["parameters"])
    assert_equal(loaded["optimizer"], saved["optimizer"])
    assert loaded["losses"] == pytest.approx(saved["losses"], rel=1e-5)
    assert saved["losses"][1] < saved["losses"][0]


def _run(pools: Pools, size: int, body: Callable[..., Any], **kwargs: Any) -> dict[str, Any]:
    return pools.run(size, Task(body.__module__, body.__qualname__, kwargs))[0]


def _save(api: Api, folder: Path) -> dict[str, Any]:
    model, optimizer = _make(api, 1)
    _train(model, optimizer)
    dcp.save({"app": _App(model, optimizer)}, checkpoint_id=folder)
    return _observe(model, optimizer)


def _load(api: Api, folder: Path) -> dict[str, Any]:
    model, optimizer = _make(api, 2)
    dcp.load({"app": _App(model, optimizer)}, checkpoint_id=folder)
    return _observe(model, optimizer)


def _observe(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return everything gathered, and the losses of the next steps."""
    return {
        "parameters": full_parameters(model),
        "optimizer": _flat(get_optimizer_state_dict(model, optimizer, options=FULL)),
        "losses": mean_over_ranks(_train(model, optimizer)),
    }
