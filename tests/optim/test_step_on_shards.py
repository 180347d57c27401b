"""`step_on_shards`: equal in every bit to an optimizer over DTensors, and nobody sees a difference."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import tempfile
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.optim import Optimizer

import fullshard
from tests.api import Api
from tests.fsdp1 import models as wrapped_models
from tests.harness import mesh_of, on_ranks, rank
from tests.models import PartlyFrozen, UnevenMLP
from tests.training import local, make_batch, mean_square, my_part

Make = Callable[..., Optimizer]

MAKE: dict[str, Make] = {
    "adadelta": lambda p, **how: optim.Adadelta(p, lr=0.5, weight_decay=0.01, **how),
    "adagrad": lambda p, **how: optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, **how),
    "adam": lambda p, **how: optim.Adam(p, lr=0.01, amsgrad=True, **how),
    "adamax": lambda p, **how: optim.Adamax(p, lr=0.01, weight_decay=0.01, **how),
    "adamw": lambda p, **how: optim.AdamW(p, lr=0.01, weight_decay=0.1, **how),
    "asgd": lambda p, **how: optim.ASGD(p, lr=0.1, t0=1, **how),
    "nadam": lambda p, **how: optim.NAdam(p, lr=0.01, **how),
    "radam": lambda p, **how: optim.RAdam(p, lr=0.01, **how),
    "rmsprop": lambda p, **how: optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5, **how),
    "rprop": lambda p, **how: optim.Rprop(p, lr=0.01, **how),
    "sgd": lambda p, **how: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **how),
}
LOOPS: dict[str, dict[str, bool]] = {
    "each": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
# DTensor has no sharding strategy for what these do.
ONLY_ON_SHARDS = [("sgd", "fused"), ("adagrad", "fused"), ("rprop", "each"), ("rprop", "foreach")]
HAS_FUSED = ("adagrad", "adam", "adamw", "sgd")
FORMS = [
    (name, loop)
    for name in MAKE
    for loop in LOOPS
    if (loop != "fused" or name in HAS_FUSED) and (name, loop) not in ONLY_ON_SHARDS
]


def _streamed(optimizer: Optimizer) -> Optimizer:
    """Step on shards, with state that is on disk between steps."""
    policy = fullshard.PlacementPolicy(optimizer="disk", folder=tempfile.gettempdir())
    return fullshard.stream_state(optimizer, policy)


WRAPS: tuple[Callable[[Optimizer], Optimizer], ...] = (
    fullshard.step_on_shards,
    _streamed,
    lambda optimizer: optimizer,
)

# What does not depend on how bytes travel.
once = pytest.mark.apis("peer_memory", "torch")


def _sharded(api: Any, **options: Any) -> nn.Module:
    """Return a model of two units, of which some ranks own nothing of some parameters."""
    torch.manual_seed(3)
    model = UnevenMLP()
    api.fully_shard(model[0], **options)
    return api.fully_shard(model, **options)


def _backward(model: nn.Module, step: int) -> None:
    mean_square(model(my_part(make_batch(7, seed=step)))).backward()


def _train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        _backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(actual: Any, expected: Any) -> None:
    """Assert that two nested values are of the same types and equal in every bit."""
    assert type(actual) is type(expected)
    if isinstance(actual, DTensor):
        assert actual.placements == expected.placements
        assert actual.shape == expected.shape
        assert actual.stride() == expected.stride()
        actual, expected = local(actual), local(expected)
    if isinstance(actual, Tensor):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(actual, dict):
        assert list(actual) == list(expected), f"{list(actual)} {list(expected)}"
        for key, value in actual.items():
            _assert_same(value, expected[key])
    elif isinstance(actual, (list, tuple)):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            _assert_same(ours, theirs)
    else:
        assert actual == expected


def _assert_same_runs(*runs: tuple[nn.Module, Optimizer]) -> None:
    (model, optimizer), *others = runs
    for other_model, other in others:
        _assert_same(dict(model.named_parameters()), dict(other_model.named_parameters()))
        _assert_same(optimizer.state_dict(), other.state_dict())


def _runs(api: Any, make: Make, **options: Any) -> list[tuple[nn.Module, Optimizer]]:
    """Return equal models: one with an optimizer that steps on shards, one of each of the others."""
    runs = []
    for wrap in WRAPS:
        model = _sharded(api, **options)
        runs.append((model, wrap(make(model.parameters()))))
    return runs


# Arithmetic


def _steps_like_the_ordinary_optimizer(api: Api, name: str, loop: str, **options: Any) -> None:
    runs = _runs(api, lambda p: MAKE[name](p, **LOOPS[loop]), **options)
    for model, optimizer in runs:
        _train(model, optimizer, range(3))
    _assert_same_runs(*runs)


@once
@pytest.mark.parametrize(
    ("name", "loop"), [("adamw", loop) for loop in LOOPS] + [("sgd", "each"), ("asgd", "foreach")]
)
@on_ranks(2)
def test_results_are_those_of_the_ordinary_optimizer_in_every_bit(
    api: Api, name: str, loop: str
) -> None:
    _steps_like_the_ordinary_optimizer(api, name, loop)


@once
@pytest.mark.long
@pytest.mark.parametrize(("name", "loop"), FORMS)
@on_ranks(2, 4)
def test_every_form_gives_the_results_of_the_ordinary_optimizer(
    api: Api, name: str, loop: str
) -> None:
    _steps_like_the_ordinary_optimizer(api, name, loop)


@once
@pytest.mark.long
@pytest.mark.parametrize(("name", "loop"), FORMS)
@on_ranks(4)
def test_every_form_gives_the_results_of_the_ordinary_optimizer_on_two_axes(
    api: Api, name: str, loop: str
) -> None:
    _steps_like_the_ordinary_optimizer(api, name, loop, mesh=mesh_of(2, 2))


@once
@pytest.mark.parametrize(("name", "loop"), ONLY_ON_SHARDS)
@on_ranks(2)
def test_forms_that_dtensors_lack_step_as_on_plain_tensors(api: Api, name: str, loop: str) -> None:
    model = _sharded(api)
    optimizer = fullshard.step_on_shards(MAKE[name](model.parameters(), **LOOPS[loop]))
    plain = [nn.Parameter(local(p).detach().clone()) for p in model.parameters()]
    other = MAKE[name](plain, **LOOPS[loop])
    for step in range(3):
        _backward(model, step)
        for parameter, own in zip(model.parameters(), plain, strict=True):
            own.grad = local(parameter.grad).clone()
        optimizer.step()
        other.step()
        optimizer.zero_grad()
    for parameter, own in zip(model.parameters(), plain, strict=True):
        _assert_same(local(parameter).detach(), own.detach())
        for key, value in other.state[own].items():
            _assert_same(local(optimizer.state[parameter][key]), value)


@once
@on_ranks(4)
def test_ranks_that_own_nothing_of_a_parameter_have_its_state(api: Api) -> None:
    on_two_axes = _runs(api, MAKE["adamw"], mesh=mesh_of(2, 2))
    runs = _runs(api, MAKE["adamw"])  # 3 rows on 4 ranks
    for model, optimizer in (*on_two_axes, *runs):
        _train(model, optimizer, range(2))
    _assert_same_runs(*on_two_axes)
    _assert_same_runs(*runs)
    shards = [local(p).numel() for p in runs[0][0].parameters()]
    assert (0 in shards) == (rank() == 3)
    assert all(len(own) == 3 for own in runs[0][1].state_dict()["state"].values())


@once
@on_ranks(2)
def test_offloaded_shards_are_stepped(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"], offload_policy=api.CPUOffloadPolicy(pin_memory=False))
    for model, optimizer in runs:
        _train(model, optimizer, range(2))
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_low_precision_shards_are_stepped(api: Api) -> None:
    runs = []
    for wrap in WRAPS:
        torch.manual_seed(3)
        model = api.fully_shard(UnevenMLP().bfloat16())
        optimizer = wrap(MAKE["adamw"](model.parameters()))
        for step in range(2):
            mean_square(model(my_part(make_batch(7, seed=step)).bfloat16())).backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append((model, optimizer))
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_frozen_parameters_and_groups_are_kept_apart(api: Api) -> None:
    runs = []
    for wrap in WRAPS:
        torch.manual_seed(3)
        model = api.fully_shard(PartlyFrozen(), ignored_params=set())
        plain = nn.Parameter(torch.ones(3))  # not sharded
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.5},
            {"params": [*(p for p in model.parameters() if p.ndim < 2), plain], "lr": 0.1},
        ]
        optimizer = wrap(MAKE["adamw"](groups))
        for step in range(3):
            mean_square(model(my_part(make_batch(8, seed=step)))).backward()
            plain.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.equal(plain, torch.ones(3))
        runs.append((model, optimizer))
    _assert_same_runs(*runs)


@once
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    "name", [n if n == "adamw" else pytest.param(n, marks=pytest.mark.long) for n in MAKE]
)
@on_ranks(2)
def test_wrapped_models_are_stepped(api: Api, name: str, use_orig_params: bool) -> None:
    runs = []
    for wrap in WRAPS:
        with wrapped_models.quiet():
            model = wrapped_models.wrap(api, wrapped_models.net(), use_orig_params=use_orig_params)
            optimizer = wrap(MAKE[name](model.parameters()))
            wrapped_models.train(model, optimizer)
        runs.append((model, optimizer))
    _assert_same_runs(*runs)


@once
@on_ranks(4)
def test_tensor_parallel_parameters_and_partial_gradients_are_stepped(api: Api) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    runs = []
    for wrap in WRAPS:
        torch.manual_seed(3)
        layer = nn.Linear(6, 5, bias=False)
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh["tp"], [Shard(1)]))
        api.fully_shard(layer, mesh=mesh["dp"])
        alone = nn.Parameter(distribute_tensor(torch.ones(4), mesh["tp"], [Replicate()]))
        layer.alone = alone
        optimizer = wrap(MAKE["adamw"]([layer.weight, alone], foreach=False))
        for step in range(2):
            whole = make_batch(5, 6, size=1, seed=step)[0]
            dims = layer.weight.device_mesh
            grad = distribute_tensor(whole, dims, [Replicate()] * dims.ndim)
            layer.weight.grad = grad.redistribute(placements=layer.weight.placements)
            mine = torch.full((4,), rank() % 2 + step + 1.0)
            alone.grad = DTensor.from_local(mine, mesh["tp"], [Partial()])
            optimizer.step()
        runs.append((layer, optimizer))
    _assert_same_runs(*runs)


# State


def _saved(optimizer: Optimizer) -> dict[str, Any]:
    """Write a state dict to a file and read it again."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@once
@pytest.mark.parametrize("name", ["adamw", "sgd"])
@on_ranks(2)
def test_state_dicts_of_both_kinds_load_into_both_kinds(api: Api, name: str) -> None:
    runs = _runs(api, MAKE[name])
    for model, optimizer in runs:
        _train(model, optimizer, range(2))
    # Of another one, two of them through a file.
    states = [
        _saved(runs[1][1]),
        _saved(runs[2][1]),
        copy.deepcopy(runs[0][1].state_dict()),
    ]
    _assert_same(states[0], states[1])
    _assert_same(states[0], states[2])
    resumed = _runs(api, MAKE[name])
    for (model, optimizer), (before, _), state in zip(resumed, runs, states, strict=True):
        _train(model, optimizer, range(7, 8))  # what was there is replaced
        model.load_state_dict(before.state_dict())
        optimizer.load_state_dict(state)
        _train(model, optimizer, range(2, 4))
    for model, optimizer in runs:
        _train(model, optimizer, range(2, 4))
    _assert_same_runs(*runs, *resumed)


@once
@on_ranks(2)
def test_state_moves_to_and_from_pytorchs_own_engine(api: Api) -> None:
    from torch.distributed import fsdp

    (model, optimizer), *_ = _runs(api, MAKE["adamw"])
    theirs = _sharded(fsdp)
    their_optimizer = MAKE["adamw"](theirs.parameters())
    runs = [(model, optimizer), (theirs, their_optimizer)]
    for each, own in runs:
        _train(each, own, range(2))
    # Sums over two ranks are the same in any order.
    _assert_same_runs(*runs)
    exchanged = [copy.deepcopy(get_optimizer_state_dict(*run)) for run in reversed(runs)]
    for (each, own), state in zip(runs, exchanged, strict=True):
        set_optimizer_state_dict(each, own, state)
        _train(each, own, range(2, 4))
    _assert_same_runs(*runs)
    _assert_same(*(get_optimizer_state_dict(*run) for run in runs))


@once
@on_ranks(2)
def test_checkpoint_functions_take_a_fresh_optimizer(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        state = get_optimizer_state_dict(model, optimizer)  # makes the state it is to describe
        set_optimizer_state_dict(model, optimizer, state)
        _train(model, optimizer, range(2))
    _assert_same_runs(*runs)


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_our_own_state_functions_take_it(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        _train(model, optimizer, range(2))
    states = [fullshard.sharded_state(*run) for run in runs]
    _assert_same(states[0], states[1])
    _assert_same(states[0], states[2])
    resumed = _runs(api, MAKE["adamw"])
    for (model, optimizer), state in zip(resumed, reversed(states), strict=True):
        fullshard.load_sharded_state(copy.deepcopy(state), model, optimizer)
        _train(model, optimizer, range(2, 4))
    _assert_same_runs(*resumed)
    _train(*runs[0], range(2, 4))
    _assert_same(dict(runs[0][0].named_parameters()), dict(resumed[0][0].named_parameters()))


@once
@on_ranks(2)
def test_what_is_written_to_the_state_counts(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        _train(model, optimizer, range(2))
        first, second, *_ = model.parameters()
        kept = optimizer.state[first]  # and written to steps later
        with torch.no_grad():
            optimizer.state[second]["exp_avg"].zero_()
        _train(model, optimizer, range(2, 3))
        assert kept is optimizer.state[first]
        assert kept["step"] == 3
        kept["exp_avg"] = torch.zeros_like(first)
        del optimizer.state[second]
        _train(model, optimizer, range(3, 4))
        assert optimizer.state[second]["step"] == 1
        optimizer.state.clear()
        _train(model, optimizer, range(4, 5))
        optimizer.state = type(optimizer.state)(dict)
        _train(model, optimizer, range(5, 6))
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_state_is_shown_as_ordinary_state(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        _train(model, optimizer, range(2))
    (model, optimizer), (_, streamed), (_, ordinary) = runs
    for own, other in zip(streamed.state.items(), ordinary.state.items(), strict=True):
        _assert_same(own, other)
    for own, other in zip(optimizer.state.items(), ordinary.state.items(), strict=True):
        _assert_same(own, other)
    assert type(optimizer.state) is type(ordinary.state)
    shown = optimizer.state[model[0].weight]["exp_avg"]
    assert shown is optimizer.state[model[0].weight]["exp_avg"]
    before = local(shown).clone()
    _train(model, optimizer, range(2, 3))
    assert not torch.equal(local(shown), before)  # the same memory


@once
@on_ranks(2)
def test_shown_state_is_let_go_of(api: Api) -> None:
    (model, optimizer), *_ = _runs(api, MAKE["adamw"])
    _train(model, optimizer, range(1))
    assert "state" not in vars(optimizer)
    kept = optimizer.state_dict()
    _train(model, optimizer, range(1, 2))
    assert "state" in vars(optimizer)
    del kept
    _train(model, optimizer, range(2, 3))
    assert "state" not in vars(optimizer)


@once
@on_ranks(2)
def test_shards_that_move_keep_their_state(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        _train(model, optimizer, range(2))
        for parameter in model.parameters():  # as loading with assign=True does
            parameter._local_tensor = parameter._local_tensor.clone()
        _train(model, optimizer, range(2, 4))
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_model_with_gradients_is_converted(api: Api) -> None:
    runs = _runs(api, lambda p: optim.SGD(p, lr=0.1))
    for model, optimizer in runs:
        for step in range(3):
            model.zero_grad()
            _backward(model, step)
            optimizer.step()
        model.double()  # swaps parameters and gradients, to which nobody may have weak references
        optimizer.step()
        x = my_part(make_batch(7)).double()
        mean_square(model(x)).backward()
        optimizer.step()
        assert next(model.parameters()).dtype == torch.float64
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_groups_and_parameters_may_come_and_go(api: Api) -> None:
    runs = []
    for wrap in WRAPS:
        model = _sharded(api)
        first, *others = model.parameters()
        optimizer = wrap(MAKE["adamw"]([first]))
        _train(model, optimizer, range(2))
        model.zero_grad()
        optimizer.add_param_group({"params": others, "lr": 0.1})
        _train(model, optimizer, range(2, 4))
        taken_away = optimizer.param_groups[1]["params"].pop()
        _train(model, optimizer, range(4, 6))
        optimizer.param_groups[1]["params"].append(taken_away)
        _train(model, optimizer, range(6, 7))
        runs.append((model, optimizer))
    _assert_same_runs(*runs)


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_state_of_another_sharding_is_refused(api: Api) -> None:
    (model, optimizer), *_ = _runs(api, MAKE["adamw"])
    _train(model, optimizer, range(1))
    whole = model[0].weight.full_tensor().detach()
    replicated = distribute_tensor(whole, mesh_of(2), [Replicate()])
    _backward(model, 2)
    for wrong in (whole, replicated):
        optimizer.state[model[0].weight]["exp_avg"] = wrong
        with pytest.raises(
            fullshard.StateError, match=r"0\.weight: the optimizer's state 'exp_avg'"
        ):
            optimizer.step()
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros_like(model[0].weight)
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 2


# What users and libraries do with optimizers


@once
@on_ranks(2)
def test_learning_rate_schedulers_drive_it(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        scheduler = optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        for step in range(4):
            _train(model, optimizer, range(step, step + 1))
            scheduler.step()
    _assert_same_runs(*runs)


@once
@pytest.mark.parametrize("loop", ["each", "fused"])
@on_ranks(2)
def test_gradient_scalers_drive_it(api: Api, loop: str) -> None:
    runs = _runs(api, lambda p: MAKE["adamw"](p, **LOOPS[loop]))
    for model, optimizer in runs:
        scaler = GradScaler("cpu", init_scale=4.0, growth_interval=2)
        for step in range(4):
            factor = 1e38 if step == 1 and rank() == 1 else 1.0  # overflows on one rank
            loss = mean_square(model(my_part(make_batch(7, seed=step)))) * factor
            scaler.scale(loss * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 4.0
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_hooks_and_closures_see_what_they_always_see(api: Api) -> None:
    (model, optimizer), *_ = _runs(api, MAKE["adamw"])
    parameters = list(model.parameters())
    seen = []

    def see(*_: Any) -> None:
        seen.append(len(optimizer.state))
        for parameter, param in zip(parameters, optimizer.param_groups[0]["params"], strict=True):
            assert param is parameter
            assert isinstance(param.grad, DTensor)

    def closure() -> Tensor:
        optimizer.zero_grad()
        _backward(model, len(seen))
        see()
        return torch.tensor(7.0)

    _backward(model, 0)
    optimizer.register_step_pre_hook(see)
    optimizer.register_step_post_hook(see)
    assert optimizer.step(closure) == 7.0
    assert optimizer.step(closure=closure) == 7.0
    assert optimizer.step() is None
    assert seen == [0, 0, 6, 6, 6, 6, 6, 6]


@once
@on_ranks(2)
def test_gradients_that_come_again_are_followed(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        first, *others = model.parameters()
        _train(model, optimizer, range(3))
        if api.name != "torch" and optimizer is runs[0][1]:
            assert optimizer._local_step._gradients_last  # type: ignore[attr-defined]
        _backward(model, 3)
        first.grad = None
        optimizer.step()
        optimizer.zero_grad()
        _train(model, optimizer, range(4, 7))
        _backward(model, 7)
        for parameter in others:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        _train(model, optimizer, range(8, 11))
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_gradients_of_which_nobody_has_memory_any_more_are_not_held(api: Api) -> None:
    """Unless the engine keeps their memory for the next ones."""
    (model, optimizer), *_ = _runs(api, MAKE["adamw"])
    parameter = next(model.parameters())
    for step in range(3):
        _backward(model, step)
        parameter.grad = parameter.grad * 2  # memory that is not the engine's
        optimizer.step()
        held = weakref.ref(parameter.grad._local_tensor)  # type: ignore[attr-defined]
        optimizer.zero_grad()
        assert held() is None


@once
@on_ranks(2)
def test_exception_in_a_step_leaves_everything_in_order(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        _train(model, optimizer, range(1))
        _backward(model, 1)
        group = optimizer.param_groups[0]
        optimizer.param_groups.append({**group, "params": [], "betas": None})
        with pytest.raises(TypeError):
            optimizer.step()  # in the second group, when the first is done
        optimizer.param_groups.pop()
        assert group["params"] == list(model.parameters())
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 // 0)
    # Unit by unit, what came after the exception was not stepped on.
    runs = [runs[0], runs[2]]
    _assert_same_runs(*runs)
    for model, optimizer in runs:
        model.zero_grad()
        _train(model, optimizer, range(2, 4))
    _assert_same_runs(*runs)


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_gradient_that_is_not_sharded_is_refused_before_anything_changes(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    for model, optimizer in runs:
        _train(model, optimizer, range(1))
    model, optimizer = runs[0]
    _backward(model, 1)
    model[2].weight.grad = torch.ones(model[2].weight.shape)
    with pytest.raises(fullshard.StateError, match=r"2\.weight is a DTensor"):
        optimizer.step()
    assert all(p._local_tensor.grad is None for p in model.parameters())
    model.zero_grad()
    _assert_same_runs(*runs)


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_next_forward_sees_the_step(api: Api) -> None:
    (model, optimizer), *_ = _runs(api, MAKE["adamw"], reshard_after_forward=False)
    batch = my_part(make_batch(7))
    mean_square(model(batch)).backward()
    with torch.no_grad():
        before = model(batch)  # stays unsharded
        optimizer.step()
        assert not torch.equal(model(batch), before)


@once
@on_ranks(2)
def test_optimizer_is_what_it_was(api: Api) -> None:
    model = _sharded(api)
    optimizer = MAKE["adamw"](model.parameters())
    groups, text = optimizer.param_groups, repr(optimizer)
    assert fullshard.step_on_shards(optimizer) is optimizer
    assert fullshard.step_on_shards(optimizer) is optimizer
    assert isinstance(optimizer, optim.AdamW)
    assert type(optimizer).__name__ == "AdamW"
    assert optimizer.param_groups is groups
    assert repr(optimizer) == text
    assert optim.AdamW.step is not type(optimizer).step
    _train(model, optimizer, range(1))
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is None for p in model.parameters())


@once
@on_ranks(2)
def test_state_that_was_there_before_goes_on(api: Api) -> None:
    runs = _runs(api, MAKE["adamw"])
    (model, optimizer), (back, streamed), (other, ordinary) = runs
    _train(model, optimizer, range(3))
    _train(back, streamed, range(3))
    _train(other, ordinary, range(1))
    _train(other, fullshard.step_on_shards(ordinary), range(1, 2))
    _train(other, _streamed(ordinary), range(2, 3))
    _assert_same_runs(*runs)


@once
@on_ranks(2)
def test_copies_step_on_shards_as_well(api: Api) -> None:
    model = _sharded(api)
    optimizer = fullshard.step_on_shards(MAKE["adamw"](model.parameters()))
    _train(model, optimizer, range(2))
    other = copy.deepcopy(optimizer)
    assert type(other) is type(optimizer)
    _assert_same(other.state_dict(), optimizer.state_dict())
    _backward(model, 2)
    copied = other.param_groups[0]["params"]
    for parameter, own in zip(model.parameters(), copied, strict=True):
        own.grad = parameter.grad.clone()
    optimizer.step()
    other.step()
    _assert_same(copied, list(model.parameters()))
    _assert_same(other.state_dict(), optimizer.state_dict())


def test_pickled_optimizer_steps_on_shards_as_well() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = fullshard.step_on_shards(MAKE["adamw"]([parameter]))
    parameter.grad = torch.ones(2)
    optimizer.step()
    other = pickle.loads(pickle.dumps(optimizer))
    assert type(other) is type(optimizer)
    assert other.state_dict()["state"][0]["step"] == 1
    (own,) = other.param_groups[0]["params"]
    own.grad = torch.ones(2)
    other.step()
    optimizer.step()
    assert torch.equal(own, parameter)


def test_dropped_optimizer_is_freed_at_once() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = fullshard.step_on_shards(MAKE["adamw"]([parameter]))
    parameter.grad = torch.ones(2)
    optimizer.step()
    moment = weakref.ref(optimizer.state[parameter]["exp_avg"])
    gc.disable()
    try:
        del optimizer
        assert moment() is None
    finally:
        gc.enable()


# Refusals


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon", "SparseAdam"])
@pytest.mark.parametrize("elementwise", [False, True])
def test_optimizers_that_need_whole_parameters_are_refused(name: str, elementwise: bool) -> None:
    optimizer = getattr(optim, name)([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(fullshard.ShardingError, match=f"{name} cannot step on shards"):
        fullshard.step_on_shards(optimizer, elementwise=elementwise)
    assert type(optimizer) is getattr(optim, name)


class Sign(Optimizer):
    """An elementwise optimizer that nobody knows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None, *, scale: float = 1.0) -> None:
        """Step against the sign of the gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                assert type(parameter) is Tensor
                parameter.sub_(parameter.grad.sign(), alpha=scale * group["lr"])
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


@once
@on_ranks(2)
def test_unknown_optimizers_are_taken_when_told_that_they_are_elementwise(api: Api) -> None:
    model = _sharded(api)
    optimizer = Sign(model.parameters())
    with pytest.raises(fullshard.ShardingError, match=r"Sign .*elementwise"):
        fullshard.step_on_shards(optimizer)
    optimizer = fullshard.step_on_shards(optimizer, elementwise=True)
    before = local(model[0].weight).detach().clone()
    for step in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        kept = optimizer.state[model[0].weight]
        optimizer.step(scale=2.0 - step)
        assert kept == {"count": step + 1}
    torch.testing.assert_close(local(model[0].weight), before - 1.5)


def test_what_autograd_is_to_record_is_refused() -> None:
    optimizer = optim.Adam([nn.Parameter(torch.ones(2))], differentiable=True)
    with pytest.raises(fullshard.ShardingError, match="differentiable=True"):
        fullshard.step_on_shards(optimizer)


def test_replaced_step_is_refused() -> None:
    optimizer = optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(fullshard.StateError, match="right after the optimizer"):
        fullshard.step_on_shards(optimizer)
