"""Models that go on under the other API, sharded in another way or over other ranks."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.optim import SGD, AdamW, Optimizer

from fullshard.errors import StateError
from tests.api import Api
from tests.fsdp1.models import Block, clean, full_value, net, quiet, train, wrap
from tests.harness import Fate, Pools, Task, mesh_of, on_ranks, run_fresh, world_size
from tests.selection import Settings, one_way, repeats
from tests.training import assert_equal

pytestmark = one_way("the other files: what moves comes from the same tensors")

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
SOME_PAIRS = [pair for pair in PAIRS[1::5] if "mesh" not in pair[0]]  # each with the next one
SOME_PAIRS += [("orig", "orig"), ("flat", "flat")]
HYBRID_PAIRS = [("fully_shard", "hybrid_orig"), ("hybrid_flat", "hybrid_fully_shard")]
HYBRID_PAIRS += [("hybrid_fully_shard", "flat_mesh"), ("hybrid_orig", "hybrid_flat")]
ALL_HYBRID = itertools.product([*WAYS, *HYBRID], repeat=2)


@on_default_comm
@repeats(lambda s: (s["first"], s["second"]) not in SOME_PAIRS)
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
@repeats(lambda s: s["first"] != "hybrid_flat")
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
@repeats(
    lambda s: s["ranks"] in ((2, 1), (1, 2))
)  # test_checkpoint_resumes_before_any_step has them
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


def _write_checkpoint(
    api: Api, way: str, folder: Path, optimizer: str = "adamw", steps: int = 2
) -> dict[str, Tensor]:
    model = _make(api, way, optimizer=optimizer, steps=steps)
    with quiet():
        dcp.save(api.sharded_state(*model), checkpoint_id=folder)
        return _whole(api.sharded_state(*model))


def _read_checkpoint(
    api: Api, way: str, folder: Path, optimizer: str = "adamw", steps: int = 2
) -> dict[str, Tensor]:
    model = _make(api, way, seed=5, optimizer=optimizer, steps=steps)
    with quiet():
        state = api.sharded_state(*model)
        dcp.load(state, checkpoint_id=folder)
        api.load_sharded_state(state, *model)
        result = _whole(api.sharded_state(*model))
    train(*model)
    return result


# Into an optimizer that has not stepped


NEW: list[tuple[str, str, tuple[int, int]]] = [
    ("orig", "fully_shard", (2, 2)),
    ("fully_shard", "flat", (2, 2)),
    ("flat", "fully_shard", (4, 2)),
    ("fully_shard", "orig_mesh", (2, 4)),
    ("replicated", "flat_mesh", (1, 2)),
    ("flat_mesh", "replicated_flat", (2, 1)),
]


@pytest.mark.apis("peer_memory", "process_group")
@repeats(
    lambda s: (
        (NEW.index((s["first"], s["second"], s["ranks"])) + (s["optimizer"] == "sgd")) % 4 != 2
    )
)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("first", "second", "ranks"), NEW)
def test_checkpoint_resumes_before_any_step(
    api: str,
    first: str,
    second: str,
    ranks: tuple[int, int],
    optimizer: str,
    pools: Pools,
    tmp_path: Path,
) -> None:
    how = {"api": api, "folder": tmp_path, "optimizer": optimizer}
    before = pools.run(ranks[0], Task(__name__, "_write_checkpoint", {"way": first, **how}))
    read = {"way": second, "steps": 0, **how}
    for state in pools.run(ranks[1], Task(__name__, "_read_checkpoint", read)):
        assert_equal(state, before[0])


@on_default_comm
def test_checkpoint_resumes_in_new_processes(api: str, tmp_path: Path) -> None:
    how = {"api": api, "folder": tmp_path}
    before = run_fresh(4, _write_checkpoint, way="flat", **how)
    after = run_fresh(2, _read_checkpoint, way="fully_shard", steps=0, **how)
    for outcome in (*before, *after):
        assert outcome.fate is Fate.RETURNED, outcome.text
        assert_equal(outcome.value, before[0].value)


MORE_OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    **OPTIMIZERS,
    "adam_amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw_foreach": lambda params: AdamW(params, lr=0.01, foreach=True),
    "adamw_tensor": lambda params: AdamW(params, lr=torch.tensor(0.01)),
    "adamw_fused": lambda params: AdamW(params, lr=0.01, fused=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1, initial_accumulator_value=0.1),
    "adadelta": lambda params: optim.Adadelta(params, lr=0.5, weight_decay=0.01),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "asgd": lambda params: optim.ASGD(params, lr=0.1, t0=1, weight_decay=0.1),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, centered=True, momentum=0.5),
    "sgd_plain": lambda params: SGD(params, lr=0.1),
    "own": lambda params: _Own(params),  # noqa: PLW0108 -- defined below
}


class _Own(Optimizer):
    """A user's optimizer: momentum, its own counter, and state that begins with the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Follow the momentum, pulled back to where it began."""
        self.num_steps += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = 0
                    state["momentum"] = torch.zeros_like(parameter)
                    state["anchor"] = parameter.detach().clone()
                state["step"] += 1
                state["momentum"].mul_(0.9).add_(parameter.grad)
                parameter.sub_(group["lr"] * state["momentum"] / state["step"])
                parameter.lerp_(state["anchor"], 0.01)


def _has_another_third(settings: Settings) -> bool:
    """An optimizer's first state does not depend on where parameters lie: each way has a third.

    Of these every other one: what else an optimizer keeps, tests/checkpoint/test_any_to_any.py has.
    """
    number = list(MORE_OPTIMIZERS).index(settings["optimizer"])
    return number % 2 != 1 or number % 3 != ("orig", "flat", "fully_shard").index(settings["way"])


@on_default_comm
@repeats(_has_another_third)
@pytest.mark.parametrize("optimizer", MORE_OPTIMIZERS)
@pytest.mark.parametrize("way", ["orig", "flat", "fully_shard"])
@on_ranks(2)
def test_state_from_before_the_first_step_begins_like_none(
    api: Api, way: str, optimizer: str
) -> None:
    def make(seed: int) -> tuple[Any, Optimizer]:
        model, _ = _make(api, way, seed=seed, steps=0)
        return model, MORE_OPTIMIZERS[optimizer](model.parameters())

    plain, saved, loaded = make(1), make(1), make(5)
    before = copy.deepcopy(saved[1].state_dict())
    calls: list[object] = []
    saved[1].register_step_pre_hook(lambda *args: calls.append(args))
    torch.optim.lr_scheduler.LambdaLR(saved[1], lambda _: 1.0)  # counts steps
    rng = torch.random.get_rng_state()
    with quiet():
        state = api.sharded_state(*saved)
        assert len(saved[1].state) == len(before["state"])  # Adagrad has some from the start
        assert saved[1].state_dict()["param_groups"] == [
            {**group, "initial_lr": group["lr"]} for group in before["param_groups"]
        ]
        assert not calls
        assert torch.equal(torch.random.get_rng_state(), rng)
        assert all(parameter.grad is None for parameter in saved[0].parameters())
        api.load_sharded_state(state, *loaded)
        losses = [train(*each, steps=3) for each in (plain, saved, loaded)]
        assert losses[1] == losses[0]
        assert losses[2] == losses[0]
        assert_equal(_whole(api.sharded_state(*loaded)), _whole(api.sharded_state(*plain)))


@pytest.mark.apis("peer_memory", "process_group")
@pytest.mark.parametrize("fused", [False, True])
@on_ranks(2)
def test_optimizer_that_steps_on_shards_has_a_first_state_too(api: Api, fused: bool) -> None:
    def make(seed: int) -> tuple[Any, Optimizer]:
        model, _ = _make(api, "fully_shard", seed=seed, steps=0)
        made = SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
        return model, api.step_on_shards(made)

    trained, new = make(1), make(5)
    train(*trained)
    with quiet():
        state = api.sharded_state(*new)
        names = [name for name, _ in new[0].named_parameters()]
        assert sorted(state["optimizer"]["state"]) == sorted(names)
        api.load_sharded_state(api.sharded_state(*trained), *new)
        losses = [train(*each, steps=2) for each in (trained, new)]
    assert losses[0] == losses[1]


@on_default_comm
@pytest.mark.parametrize("way", ["orig", "fully_shard"])
@on_ranks(2)
def test_first_state_is_made_of_what_is_trainable_and_lacks_it(api: Api, way: str) -> None:
    model, optimizer = _make(api, way, steps=0)
    frozen = [name for name, _ in model.named_parameters() if "stem" in name]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    train(model, optimizer)
    frozen = [clean(name) for name in frozen]
    with quiet():
        state = api.sharded_state(model, optimizer)["optimizer"]["state"]
        assert all(name not in state for name in frozen)
        model.requires_grad_(requires_grad=True)
        state = api.sharded_state(model, optimizer)["optimizer"]["state"]
    for name in frozen:
        assert state[name]["step"] == 0
        assert not full_value(state[name]["exp_avg"]).any()
    assert state["head.weight"]["step"] == 2
    assert full_value(state["head.weight"]["exp_avg"]).any()


# Errors


@on_default_comm
@pytest.mark.parametrize("way", ["orig", "flat", "fully_shard"])
@pytest.mark.parametrize("steps", [0, 2])
@on_ranks(2)
def test_state_that_would_be_left_behind_is_named(api: Api, way: str, steps: int) -> None:
    model, optimizer = _make(api, way)
    other, new = _make(api, way, seed=5, steps=steps)
    with quiet():
        before = _whole(api.sharded_state(other))
        state = api.sharded_state(model, optimizer)
        for lacking in (
            {},
            {n: s for n, s in state["optimizer"]["state"].items() if "stem" not in n},
        ):
            saved = {**state["optimizer"], "state": lacking}
            with pytest.raises(StateError, match=r"stem\.bias \(exp_avg, exp_avg_sq, step\)"):
                api.load_sharded_state({**state, "optimizer": saved}, other, new)
        part = {**state["optimizer"]["state"]}
        part["stem.weight"] = {"step": part["stem.weight"]["step"]}
        saved = {**state["optimizer"], "state": part}
        with pytest.raises(StateError, match=r"of stem\.weight \(exp_avg, exp_avg_sq\)\."):
            api.load_sharded_state({**state, "optimizer": saved}, other, new)
        assert_equal(_whole(api.sharded_state(other)), before)


@on_default_comm
@pytest.mark.parametrize("way", ["fully_shard", "orig"])
@on_ranks(2)
def test_parameter_without_elements_needs_no_state(api: Api, way: str) -> None:
    def make() -> tuple[Any, Optimizer]:
        model = net()
        model.empty = nn.Parameter(torch.zeros(0, 3))
        model = WAYS[way](api, model)
        return model, AdamW(model.parameters())

    model, optimizer = make()
    train(model, optimizer, 1)
    state = api.sharded_state(model, optimizer)
    again, other = make()
    api.load_sharded_state(state, again, other)
    assert_equal(_whole(api.sharded_state(again, other)), _whole(state))


@on_default_comm
@pytest.mark.parametrize("way", ["orig", "fully_shard"])
@on_ranks(2)
def test_state_of_what_the_optimizer_does_not_train_is_named(api: Api, way: str) -> None:
    model, optimizer = _make(api, way)
    few = [p for name, p in model.named_parameters() if "stem" not in name]
    with quiet(), pytest.raises(StateError, match=r"does not train stem\.weight, stem\.bias"):
        api.load_sharded_state(api.sharded_state(model, optimizer), model, AdamW(few))


@on_default_comm
@pytest.mark.parametrize("way", ["orig", "fully_shard"])
@on_ranks(2)
def test_optimizer_that_cannot_say_what_it_begins_with_says_so(api: Api, way: str) -> None:
    model, _ = _make(api, way, steps=0)
    with quiet(), pytest.raises(StateError, match=r"LBFGS .*Take a step first"):
        api.sharded_state(model, optim.LBFGS(model.parameters()))


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


@on_default_comm
@pytest.mark.parametrize("way", ["orig", "fully_shard"])
@on_ranks(2)
def test_optimizers_of_what_was_replaced_are_named(api: Api, way: str) -> None:
    model, optimizer = _make(api, way)
    inner = getattr(model, "module", model)
    inner.batch_norm = nn.BatchNorm1d(inner.batch_norm.num_features)
    with pytest.raises(StateError, match="trains 2 parameters"):
        api.sharded_state(model, optimizer)
