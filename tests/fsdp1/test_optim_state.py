"""State dicts of optimizers of wrapped models: by name, and good for any other wrapping or for none.

Between implementations everything is bit by bit on two ranks: two terms have one sum in any order.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer

from tests.api import Api
from tests.fsdp1.models import (
    averaged_gradients,
    full_value,
    load,
    net,
    orig_params,
    parameters,
    quiet,
    run_step,
    save,
    saving,
    train,
    whole,
    wrap,
)
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.training import assert_equal

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    # A usual eps would turn the rounding of a gradient near zero into a full step.
    "adamw": lambda groups: AdamW(groups, lr=0.01, eps=1e-4),
    "sgd": lambda groups: SGD(groups, lr=0.1, momentum=0.9),
    "stateless": lambda groups: SGD(groups, lr=0.1),
}
# Name -> kind, strategy, and the shape of the device mesh; None is a process group.
STATES: dict[str, tuple[str, str, tuple[int, ...] | None]] = {
    "full": ("FULL", "FULL_SHARD", None),
    "full-replicated": ("FULL", "NO_SHARD", None),
    "full-hybrid": ("FULL", "HYBRID_SHARD", (2, 2)),
    "sharded": ("SHARDED", "SHARD_GRAD_OP", None),
    "dtensor": ("SHARDED", "FULL_SHARD", (-1,)),
    "dtensor-hybrid": ("SHARDED", "_HYBRID_SHARD_ZERO2", (2, 2)),
    "dtensor-beside": (
        "SHARDED",
        "FULL_SHARD",
        (2, 2),
    ),  # over the first axis: the others train apart
}
ON_2_RANKS = [name for name, (*_, shape) in STATES.items() if shape != (2, 2)]
ON_4_RANKS = ["full", "full-hybrid", "sharded", "dtensor-hybrid"]

with_state = pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
# What does not depend on how bytes travel.
on_default_comm = pytest.mark.apis("peer_memory", "torch")


class Run(NamedTuple):
    """A model with the optimizer that trains it."""

    model: Any
    optimizer: Optimizer


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Put a block into a group of its own, whether it is one parameter or many."""
    inner, outer = [], []
    for name, parameter in parameters(model).items():
        (inner if name.startswith("blocks.1") else outer).append(parameter)
    return [{"params": outer}, {"params": inner, "lr": 0.03, "weight_decay": 0.02}]


def _run(
    api: Api,
    state: str = "full",
    optimizer: str = "adamw",
    *,
    seed: int = 1,
    use_orig_params: bool = False,
    steps: int = 2,
) -> Run:
    """Wrap and train a model as one whose optimizer's state is to be of a kind."""
    _, strategy, shape = STATES[state]
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    if shape is not None:
        options["device_mesh"] = mesh_of(*(world_size() if n == -1 else n for n in shape))
    model = wrap(api, net(seed), strategy, **options)
    run = Run(model, OPTIMIZERS[optimizer](_groups(model)))
    train(*run, steps=steps)
    return run


def _alone(optimizer: str = "adamw", *, seed: int = 1, steps: int = 2) -> Run:
    """Train a model that is not wrapped with the gradients that the wrapped one has."""
    model = net(seed)
    run = Run(model, OPTIMIZERS[optimizer](_groups(model)))
    _train_alone(run, steps)
    return run


def _train_alone(run: Run, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        losses.append(run_step(run.model, seed=step).item())
        for name, gradient in averaged_gradients(run.model).items():
            run.model.get_parameter(name).grad = gradient
        run.optimizer.step()
        run.optimizer.zero_grad()
    return losses


def _save(api: Api, run: Run, kind: str = "FULL", **options: Any) -> dict[str, Any]:
    states = max(map(len, run.optimizer.state.values()), default=0)
    if api.is_torch and kind == "FULL" and states > 1 and run.model._use_orig_params:
        pytest.skip("PyTorch: gathers all states of a parameter on the CPU into one buffer")
    with saving(api, run.model, kind, optim=options):
        return api.FullyShardedDataParallel.optim_state_dict(*run)


def _load(api: Api, run: Run, state: dict[str, Any], kind: str = "FULL", **options: Any) -> None:
    with saving(api, run.model, kind, optim=options):
        loaded = api.FullyShardedDataParallel.optim_state_dict_to_load(*run, state)
    # PyTorch's would go on training what was loaded, where nothing is sharded.
    run.optimizer.load_state_dict(copy.deepcopy(loaded) if api.is_torch else loaded)


def _values(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return every whole tensor of a state dict, by the names of parameter and state."""
    return {
        f"{name}/{key}": torch.as_tensor(full_value(own[key]))
        for name, own in sorted(state["state"].items())
        for key in sorted(own)
    }


def _assert_goes_on_alike(first: tuple[Api, Run], second: tuple[Api, Run]) -> None:
    """Train both on and compare: bit by bit."""
    losses = [train(*run) for _, run in (first, second)]
    assert losses[0] == losses[1]
    assert_equal(whole(second[0], second[1].model), whole(first[0], first[1].model))


# What it holds


@on_default_comm
@with_state
@orig_params
@on_ranks(1, 2)
def test_full_state_is_that_of_an_unwrapped_model(
    api: Api, optimizer: str, use_orig_params: bool
) -> None:
    state = "full-replicated" if world_size() == 1 else "full"
    run, alone = _run(api, state, optimizer, use_orig_params=use_orig_params), _alone(optimizer)
    saved = _save(api, run)
    expected = alone.optimizer.state_dict()
    names = {p: n for n, p in alone.model.named_parameters()}
    order = [names[p] for g in alone.optimizer.param_groups for p in g["params"]]
    assert set(saved["state"]) == set(order)
    by_name = {"state": {order[key]: own for key, own in expected["state"].items()}}
    assert_equal(_values(saved), _values(by_name), rtol=1e-5, atol=1e-7)
    for group, other in zip(saved["param_groups"], expected["param_groups"], strict=True):
        assert sorted(group["params"]) == sorted(order[key] for key in other["params"])
        assert {**group, "params": 0} == {**other, "params": 0}


@on_default_comm
@with_state
@pytest.mark.parametrize("state", ON_2_RANKS)
@orig_params
@on_ranks(2)
def test_state_is_torch_s(api: Api, state: str, optimizer: str, use_orig_params: bool) -> None:
    _assert_state_is_torch_s(api, state, optimizer, use_orig_params)


@pytest.mark.long
@on_default_comm
@with_state
@pytest.mark.parametrize("state", [*ON_4_RANKS, "dtensor-beside"])
@orig_params
@on_ranks(4)
def test_state_is_torch_s_on_four_ranks(
    api: Api, state: str, optimizer: str, use_orig_params: bool
) -> None:
    # Sums over 4 ranks are not formed in the same order.
    _assert_state_is_torch_s(api, state, optimizer, use_orig_params, tolerance=1e-5)


def _assert_state_is_torch_s(
    api: Api, state: str, optimizer: str, use_orig_params: bool, *, tolerance: float = 0.0
) -> None:
    ours, theirs = (
        _save(each, _run(each, state, optimizer, use_orig_params=use_orig_params), STATES[state][0])
        for each in (api, Api("torch"))
    )
    for name, own in ours["state"].items():
        for key, value in own.items():
            other = theirs["state"][name][key]
            assert type(value) is type(other), (name, key)
            if isinstance(value, DTensor):
                assert value._spec == other._spec, (name, key)
            elif isinstance(value, ShardedTensor):
                assert value.metadata() == other.metadata(), (name, key)
    assert_equal(_values(ours), _values(theirs), rtol=tolerance, atol=tolerance)
    for group, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert sorted(group.pop("params")) == sorted(other.pop("params"))
        assert group == other


@on_default_comm
@pytest.mark.parametrize("offload", [False, True])
@orig_params
@on_ranks(2, 4)
def test_first_rank_alone_may_have_the_state(
    api: Api, offload: bool, use_orig_params: bool
) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    expected = _save(api, run)
    state = _save(api, run, rank0_only=True, offload_to_cpu=offload)
    if rank() == 0:
        assert_equal(_values(state), _values(expected))
        assert state["param_groups"] == expected["param_groups"]
    else:
        assert not state.get("state")
    other = _run(api, seed=5, use_orig_params=use_orig_params)
    load(api, other.model, save(api, run.model))
    _load(api, other, state, rank0_only=True)
    _assert_goes_on_alike((api, run), (api, other))


@on_default_comm
@orig_params
@on_ranks(2)
def test_state_is_a_copy_by_the_time_it_is_changed(api: Api, use_orig_params: bool) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    state = _save(api, run)
    for own in state["state"].values():
        for value in own.values():
            value.zero_()
    steps = {s["step"].item() for s in run.optimizer.state.values()}
    assert steps == {2.0}
    assert all(s["exp_avg_sq"].any() for s in run.optimizer.state.values() if s["step"].numel())


@on_default_comm
@pytest.mark.parametrize("strategy", ["full", "full-replicated"])
@orig_params
@on_ranks(2)
def test_training_does_not_change_what_was_loaded(
    api: Api, strategy: str, use_orig_params: bool
) -> None:
    if api.is_torch and strategy == "full-replicated":
        pytest.skip("PyTorch: trains on what was loaded where nothing is sharded")
    run = _run(api, strategy, use_orig_params=use_orig_params)
    state = _save(api, run)
    before = {name: value.clone() for name, value in _values(state).items()}
    other = _run(api, strategy, seed=5, use_orig_params=use_orig_params)
    _load(api, other, state)
    train(*other)
    assert_equal(_values(state), before)


@on_default_comm
@orig_params
@on_ranks(2)
def test_parameters_that_are_not_trained_have_no_state(api: Api, use_orig_params: bool) -> None:
    model = wrap(api, net(), use_orig_params=use_orig_params)
    run = Run(model, AdamW(model.blocks[0].parameters(), lr=0.01))
    train(*run)
    state = _save(api, run)
    names = [f"blocks.0.{name}" for name, _ in net().blocks[0].named_parameters()]
    assert list(state["state"]) == names
    assert [group["params"] for group in state["param_groups"]] == [names]
    train(*run)
    later = _save(api, run)
    _load(api, run, state)
    assert_equal(_values(_save(api, run)), _values(state))
    assert all(own["step"] == 4 for own in later["state"].values())


@on_default_comm
@orig_params
@on_ranks(2)
def test_state_of_users_own_is_copied(api: Api, use_orig_params: bool) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    original = run.optimizer.state_dict()
    original["state"]["extra"] = 3
    FSDP = api.FullyShardedDataParallel
    with saving(api, run.model, "FULL"), pytest.warns(UserWarning, match="extra"):
        state = FSDP.optim_state_dict(*run, original)
    assert state["state"]["extra"] == 3
    assert FSDP.optim_state_dict_to_load(*run, state)["state"]["extra"] == 3


@on_default_comm
@on_ranks(2)
def test_state_dicts_by_name_are_those_by_position(api: Api) -> None:
    run = _run(api, use_orig_params=True)
    names = {p: n for n, p in run.model.named_parameters()}
    own = run.optimizer.state_dict()
    order = [names[p] for g in run.optimizer.param_groups for p in g["params"]]
    named = {
        "state": {order[key]: value for key, value in own["state"].items()},
        "param_groups": [
            {**g, "params": [order[key] for key in g["params"]]} for g in own["param_groups"]
        ],
    }
    FSDP = api.FullyShardedDataParallel
    expected = _save(api, run)
    with saving(api, run.model, "FULL"):
        state = FSDP.optim_state_dict(*run, named)
        assert_equal(_values(state), _values(expected))
        loaded = FSDP.optim_state_dict_to_load(*run, state, is_named_optimizer=True)
    # A named optimizer wants state of what this rank owns nothing of as well, if it has some.
    assert set(named["state"]) == set(loaded["state"])
    assert_equal(_values(loaded), _values(named))


# There and back


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("state", ON_2_RANKS)
@orig_params
@on_ranks(2)
def test_training_resumes_bit_by_bit(
    api: Api, state: str, optimizer: str, use_orig_params: bool
) -> None:
    _assert_resumes(api, state, optimizer, use_orig_params)


@on_default_comm
@with_state
@pytest.mark.parametrize("state", ["full-hybrid", "dtensor-hybrid"])
@orig_params
@on_ranks(4)
def test_training_resumes_on_four_ranks(
    api: Api, state: str, optimizer: str, use_orig_params: bool
) -> None:
    _assert_resumes(api, state, optimizer, use_orig_params)


def _assert_resumes(api: Api, state: str, optimizer: str, use_orig_params: bool) -> None:
    kind = STATES[state][0]
    run, other = (
        _run(api, state, optimizer, seed=seed, use_orig_params=use_orig_params) for seed in (1, 5)
    )
    for group in other.optimizer.param_groups:
        group["lr"] = 9.0
    load(api, other.model, save(api, run.model, kind), kind)
    saved = _save(api, run, kind)
    _load(api, other, saved, kind)
    assert_equal(_values(_save(api, other, kind)), _values(saved))
    assert [g["lr"] for g in other.optimizer.param_groups] == [
        g["lr"] for g in run.optimizer.param_groups
    ]
    _assert_goes_on_alike((api, run), (api, other))


@on_default_comm
@pytest.mark.parametrize("fresh", [False, True])
@orig_params
@on_ranks(2)
def test_state_is_loaded_directly_if_asked_for(
    api: Api, use_orig_params: bool, fresh: bool
) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    other = _run(api, seed=5, use_orig_params=use_orig_params, steps=0 if fresh else 2)
    load(api, other.model, save(api, run.model))
    state = _save(api, run)
    with saving(api, other.model, "FULL"):
        api.FullyShardedDataParallel.optim_state_dict_to_load(*other, state, load_directly=True)
    _assert_goes_on_alike((api, run), (api, other))


@on_default_comm
@pytest.mark.ours("loads what its settings say")
@pytest.mark.parametrize("state", ["full", "sharded", "dtensor"])
@pytest.mark.parametrize("into", ON_2_RANKS)
@orig_params
@on_ranks(2)
def test_any_wrapping_loads_what_any_other_saved(
    api: Api, state: str, into: str, use_orig_params: bool
) -> None:
    run = _run(api, state, use_orig_params=use_orig_params)
    other = _run(api, into, seed=5, use_orig_params=not use_orig_params)
    kind = STATES[state][0]
    load(api, other.model, save(api, run.model, kind))
    _load(api, other, _save(api, run, kind))
    _assert_goes_on_alike((api, run), (api, other))


@on_default_comm
@with_state
@pytest.mark.parametrize("state", ["full", "sharded", "dtensor"])
@pytest.mark.parametrize("direction", ["to_torch", "from_torch"])
@pytest.mark.parametrize("into_orig_params", [False, True], ids=["into_flat", "into_orig"])
@orig_params
@on_ranks(2)
def test_torch_s_states_are_ours(
    api: Api,
    state: str,
    optimizer: str,
    use_orig_params: bool,
    into_orig_params: bool,
    direction: str,
) -> None:
    first, second = (api, Api("torch")) if direction == "to_torch" else (Api("torch"), api)
    kind = STATES[state][0]
    run = _run(first, state, optimizer, use_orig_params=use_orig_params)
    other = _run(second, state, optimizer, seed=5, use_orig_params=into_orig_params)
    load(second, other.model, save(first, run.model, kind), kind)
    _load(second, other, _save(first, run, kind), kind)
    _assert_goes_on_alike((first, run), (second, other))


@on_default_comm
@with_state
@orig_params
@on_ranks(2)
def test_model_that_was_never_wrapped_goes_on_with_the_state(
    api: Api, optimizer: str, use_orig_params: bool
) -> None:
    if api.is_torch and optimizer == "adamw":
        pytest.skip("PyTorch: gives all parameters of a flat one the same step tensor")
    run, alone = _run(api, "full", optimizer, use_orig_params=use_orig_params), _alone(seed=5)
    alone = alone._replace(optimizer=OPTIMIZERS[optimizer](_groups(alone.model)))
    alone.model.load_state_dict(save(api, run.model))
    rekeyed = api.FullyShardedDataParallel.rekey_optim_state_dict(
        _save(api, run), api.OptimStateKeyType.PARAM_ID, alone.model, optim=alone.optimizer
    )
    alone.optimizer.load_state_dict(rekeyed)
    assert _train_alone(alone, 3) == pytest.approx(train(*run, steps=3), rel=1e-5)
    expected = dict(alone.model.named_parameters())
    assert_equal(whole(api, run.model), expected, rtol=1e-4, atol=1e-5)


@on_default_comm
@with_state
@orig_params
@on_ranks(2)
def test_wrapped_model_goes_on_with_the_state_of_one_that_was_not(
    api: Api, optimizer: str, use_orig_params: bool
) -> None:
    run, alone = (
        _run(api, "full", optimizer, seed=5, use_orig_params=use_orig_params),
        _alone(optimizer),
    )
    load(api, run.model, alone.model.state_dict())
    rekeyed = api.FullyShardedDataParallel.rekey_optim_state_dict(
        alone.optimizer.state_dict(),
        api.OptimStateKeyType.PARAM_NAME,
        alone.model,
        optim=alone.optimizer,
    )
    _load(api, run, rekeyed)
    assert train(*run, steps=3) == pytest.approx(_train_alone(alone, 3), rel=1e-5)
    expected = dict(alone.model.named_parameters())
    assert_equal(whole(api, run.model), expected, rtol=1e-4, atol=1e-5)


# What came before


@on_default_comm
@pytest.mark.parametrize("rank0_only", [False, True])
@pytest.mark.parametrize("with_input", [False, True])
@orig_params
@on_ranks(2)
def test_full_optim_state_dict_is_the_full_state(
    api: Api, use_orig_params: bool, rank0_only: bool, with_input: bool
) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    options = {"optim_input": _groups(run.model)} if with_input else {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state = api.FullyShardedDataParallel.full_optim_state_dict(
            *run, rank0_only=rank0_only, **options
        )
    messages = [str(each.message) for each in caught if each.category is FutureWarning]
    assert any("full_optim_state_dict" in each for each in messages)
    assert with_input == any("`optim_input` argument" in each for each in messages)
    expected = _save(api, run)
    if rank() == 0 or not rank0_only:
        assert_equal(_values(state), _values(expected))
        assert state["param_groups"] == expected["param_groups"]
    else:
        assert not state.get("state")


@on_default_comm
@pytest.mark.parametrize("state", ["sharded", "dtensor"])
@orig_params
@on_ranks(2)
def test_sharded_optim_state_dict_is_the_sharded_state(
    api: Api, use_orig_params: bool, state: str
) -> None:
    run = _run(api, state, use_orig_params=use_orig_params)
    with saving(api, run.model, "SHARDED"):
        old = api.FullyShardedDataParallel.sharded_optim_state_dict(*run)
    new = _save(api, run, "SHARDED")
    types = [{type(v) for own in s["state"].values() for v in own.values()} for s in (old, new)]
    assert types[0] == types[1]
    assert_equal(_values(old), _values(new))


@on_default_comm
@pytest.mark.parametrize("function", ["shard_full", "scatter_full", "flatten_sharded"])
@with_state
@orig_params
@on_ranks(2)
def test_functions_of_old_load_the_state(
    api: Api, function: str, optimizer: str, use_orig_params: bool
) -> None:
    kind = "SHARDED" if function == "flatten_sharded" else "FULL"
    run, other = (
        _run(api, "sharded", optimizer, seed=seed, use_orig_params=use_orig_params)
        for seed in (1, 5)
    )
    load(api, other.model, save(api, run.model, kind), kind)
    state: Any = _save(api, run, kind)
    if function == "scatter_full" and rank() != 0:
        state = None
    call = getattr(api.FullyShardedDataParallel, f"{function}_optim_state_dict")
    with saving(api, other.model, kind):
        loaded = call(state, other.model, optim=other.optimizer)
    other.optimizer.load_state_dict(loaded)
    _assert_goes_on_alike((api, run), (api, other))


@on_default_comm
@pytest.mark.parametrize(
    "function",
    [
        "full_optim_state_dict",
        "sharded_optim_state_dict",
        "shard_full_optim_state_dict",
        "flatten_sharded_optim_state_dict",
        "scatter_full_optim_state_dict",
    ],
)
@on_ranks(2)
def test_functions_of_old_are_deprecated(api: Api, function: str) -> None:
    run = _run(api, "sharded", use_orig_params=True)
    call = getattr(api.FullyShardedDataParallel, function)
    state = _save(api, run, "SHARDED" if "flatten" in function else "FULL")
    saves = function in ("full_optim_state_dict", "sharded_optim_state_dict")
    arguments = () if saves else (state,)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*arguments, model=run.model, optim=run.optimizer)
    messages = [str(each.message) for each in caught if each.category is FutureWarning]
    assert any(f"FullyShardedDataParallel.{function}``" in each for each in messages)


@on_default_comm
@on_ranks(1)
def test_state_dicts_of_the_wanted_keys_are_returned_as_they_are(api: Api) -> None:
    alone = _alone()
    own = alone.optimizer.state_dict()
    rekey = api.FullyShardedDataParallel.rekey_optim_state_dict
    options = {"model": alone.model, "optim": alone.optimizer}
    assert rekey(own, api.OptimStateKeyType.PARAM_ID, **options) is own
    named = rekey(own, api.OptimStateKeyType.PARAM_NAME, **options)
    assert set(named["state"]) == {name for name, _ in alone.model.named_parameters()}
    assert rekey(named, api.OptimStateKeyType.PARAM_NAME, **options) is named
    back = rekey(named, api.OptimStateKeyType.PARAM_ID, **options)
    assert back["state"].keys() == own["state"].keys()
    for key, value in own["state"].items():
        assert back["state"][key] is value
    mixed = {"state": {0: {}, "stem.weight": {}}, "param_groups": []}
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        rekey(mixed, api.OptimStateKeyType.PARAM_ID, **options)
    with pytest.raises(AssertionError):
        rekey(own, "PARAM_ID", **options)


# Errors


@on_default_comm
@pytest.mark.ours("fails on the first rank alone, and the others wait")
@orig_params
@on_ranks(2)
def test_state_dict_without_state_on_the_first_rank_is_refused_on_every_rank(
    api: Api, use_orig_params: bool
) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    with pytest.raises(ValueError, match='must have the keys "state"'):
        _load(api, run, {"param_groups": []}, rank0_only=True)


@on_default_comm
@orig_params
@on_ranks(2)
def test_state_dict_without_state_is_refused(api: Api, use_orig_params: bool) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    with pytest.raises(ValueError, match='must have the keys "state"'):
        _load(api, run, {"param_groups": []})


@on_default_comm
@on_ranks(2)
def test_optimizers_of_different_parameters_are_refused_on_every_rank(api: Api) -> None:
    model = wrap(api, net(), use_orig_params=True)
    # Every rank owns something of a block.
    parts = list(model.parameters()) if rank() == 0 else list(model.stem.parameters())
    run = Run(model, AdamW(parts, lr=0.01))
    train(*run)
    with pytest.raises(RuntimeError, match="each rank to have at least"):
        _save(api, run)


@on_default_comm
@pytest.mark.ours("waits")
@pytest.mark.parametrize("lacks", ["parameter", "state"])
@on_ranks(2)
def test_sharded_values_that_a_rank_lacks_are_named_on_every_rank(api: Api, lacks: str) -> None:
    run = _run(api, use_orig_params=True)
    state = _save(api, run, "SHARDED")
    if rank() == 1:
        own = state["state"]
        own.pop("stem.weight") if lacks == "parameter" else own["stem.weight"].pop("exp_avg")
    with pytest.raises(RuntimeError, match=r"rank 1 has none of stem\.weight"):
        _load(api, run, state, "SHARDED")


@on_default_comm
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@on_ranks(2)
def test_flat_parameter_has_one_step(api: Api, kind: str) -> None:
    run = _run(api)
    state = _save(api, _run(api, use_orig_params=True), kind)
    state["state"]["blocks.0.norm.bias"]["step"] = torch.tensor(7.0)
    with pytest.raises(ValueError, match="the same value and dtype"):
        _load(api, run, state, kind)
    # Parameters of their own may differ.
    apart = _run(api, use_orig_params=True)
    _load(api, apart, state, kind)
    steps = {name: own["step"].item() for name, own in _save(api, apart)["state"].items()}
    assert steps.pop("blocks.0.norm.bias") == 7.0
    assert set(steps.values()) == {2.0}


@on_default_comm
@pytest.mark.ours("asserts, or says that shapes differ somewhere")
@orig_params
@pytest.mark.parametrize("kind", ["FULL", "SHARDED"])
@on_ranks(2)
def test_state_of_another_shape_is_refused(api: Api, use_orig_params: bool, kind: str) -> None:
    run = _run(api, use_orig_params=use_orig_params)
    state = _save(api, run, kind)
    state["state"]["blocks.0.wide.weight"] = copy.copy(state["state"]["stem.weight"])
    with (
        quiet(),
        pytest.raises(ValueError, match=r"blocks.0.wide.weight: .* shape \(6, 7\)"),
    ):
        _load(api, run, state, kind)
    _load(api, run, _save(api, run, kind), kind)
    train(*run)


@on_default_comm
@pytest.mark.ours("fails on some attribute")
@pytest.mark.parametrize("lacks", ["parameter", "state"])
@on_ranks(2)
def test_flat_parameter_takes_all_states_or_none(api: Api, lacks: str) -> None:
    run = _run(api)
    state = _save(api, run)
    if lacks == "parameter":
        del state["state"]["blocks.0.norm.bias"]
    else:
        del state["state"]["blocks.0.norm.bias"]["exp_avg"]
    with pytest.raises(ValueError, match=r"blocks\.0\.norm\.bias"):
        _load(api, run, state)


@on_default_comm
@pytest.mark.parametrize(
    ("optim_input", "error", "match"),
    [
        (3, TypeError, "iterable of Tensors or dicts"),
        ([], ValueError, "should not be empty"),
        ([3], TypeError, "iterable of Tensors or dicts"),
        ([{"lr": 0.1}], AssertionError, 'map "params" to a list'),
    ],
    ids=["number", "empty", "numbers", "no_params"],
)
@on_ranks(2)
def test_optim_input_that_is_none_is_refused(
    api: Api, optim_input: Any, error: type[Exception], match: str
) -> None:
    run = _run(api, use_orig_params=True)
    with quiet(), pytest.raises(error, match=match):
        api.FullyShardedDataParallel.full_optim_state_dict(*run, optim_input=optim_input)
