"""Parameters of every kind: frozen, of several dtypes, uneven, empty, tied, meta."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from fullshard.engine.module_state import state_of
from fullshard.errors import MisuseError, StateError
from tests.api import Api
from tests.counting import calls_of
from tests.harness import on_ranks, rank, world_size
from tests.models import MixedDtypes, PartlyFrozen, Transformer, UnevenMLP, mlp
from tests.selection import one_way
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    assert_parameters_are_parts_of,
    full,
    full_parameters,
    gradients_alone,
    local,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")


def _check_step(model: nn.Module, batch: Tensor, expected: dict[str, Tensor]) -> None:
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


@pytest.mark.parametrize("reshards", [None, False, True])
@pytest.mark.parametrize("frozen", ["0.0.weight", "0.", "2.0.weight", "2.", ""])
@on_ranks(2)
def test_what_is_frozen_from_forward_to_backward_trains_again(
    api: Api, frozen: str, reshards: bool | None
) -> None:
    """As a GAN's discriminator is while the generator learns, in the form that is in sight then."""
    model, alone = mlp(), mlp()
    alone.load_state_dict(model.state_dict())
    for number, layer in enumerate(model):
        if number < 2:
            api.fully_shard(layer, reshard_after_forward=reshards)
    api.fully_shard(model)  # the last layer's are the root's, which stay whole

    def freeze(which: nn.Module, trained: bool) -> None:
        for name, parameter in which.named_parameters():
            if name.startswith(frozen):
                parameter.requires_grad_(trained)

    for step in range(4):
        batch = make_batch(16, seed=step)
        losses = {model: mean_square(model(my_part(batch))), alone: mean_square(alone(batch))}
        for each, loss in losses.items():
            if step == 1:
                freeze(each, False)
            loss.backward()
            if step == 1:
                freeze(each, True)
        expected = {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
        found = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        assert_equal(found, expected, rtol=1e-4, atol=1e-7)
        model.zero_grad()
        alone.zero_grad()


@on_ranks(2)
def test_frozen_and_trained_parameters_share_a_unit(api: Api) -> None:
    model, batch = PartlyFrozen(), make_batch(8)
    expected = gradients_alone(model, batch)
    assert list(expected) == ["mixed.bias", "trained.weight", "trained.bias"]
    api.fully_shard(model)
    _check_step(model, batch, expected)


@on_ranks(2)
def test_frozen_unit_passes_gradients_on_and_has_none(api: Api) -> None:
    model, batch = PartlyFrozen(), make_batch(8)
    model.frozen, model.trained = model.trained, model.frozen  # the frozen one comes last
    expected = gradients_alone(model, batch)
    for layer in list(model.children()):
        api.fully_shard(layer)
    api.fully_shard(model)
    _check_step(model, batch, expected)


@on_ranks(2)
def test_parameter_frozen_between_forward_and_backward_gets_no_gradient(api: Api) -> None:
    model = mlp(2)
    api.fully_shard(model)
    batch = make_batch(16)
    model(batch).sum().backward()
    model.zero_grad()
    frozen, *others = model.parameters()
    loss = model(batch).sum()
    frozen.requires_grad_(requires_grad=False)
    loss.backward()
    assert frozen.grad is None
    assert all(parameter.grad is not None for parameter in others)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.ours("zeroes the unsharded parameters only")
@on_ranks(2)
def test_zero_grad_between_forward_and_backward_reaches_what_is_trained(
    api: Api, set_to_none: bool
) -> None:
    model, batches = mlp(3), [make_batch(16, seed=seed) for seed in range(2)]
    expected = gradients_alone(model, batches[1])
    api.fully_shard(model[0], reshard_after_forward=False)
    api.fully_shard(model)
    mean_square(model(my_part(batches[0]))).backward()
    loss = mean_square(model(my_part(batches[1])))
    model.zero_grad(set_to_none)
    loss.backward()
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_parameter_frozen_between_steps_gets_no_gradient(api: Api) -> None:
    model, batch = UnevenMLP(), make_batch(7)
    api.fully_shard(model)
    mean_square(model(my_part(batch))).backward()
    model.zero_grad()
    model[0].weight.requires_grad_(requires_grad=False)
    mean_square(model(my_part(batch))).backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    model.zero_grad()
    model[0].weight.requires_grad_(requires_grad=True)
    mean_square(model(my_part(batch))).backward()
    assert model[0].weight.grad is not None


@pytest.mark.ours("one dtype of gradients per unit")
@on_ranks(2, 3)
def test_parameters_of_three_dtypes_share_a_unit(api: Api) -> None:
    model, batch = MixedDtypes(), make_batch(8)
    dtypes = [p.dtype for p in model.parameters()]
    whole, expected = full_parameters(model), gradients_alone(model, batch)
    api.fully_shard(model)
    assert [p.dtype for p in model.parameters()] == dtypes
    assert_parameters_are_parts_of(model, whole)
    mean_square(model(my_part(batch))).backward()
    # bfloat16 activations and gradients: eight bits.
    assert_gradients_are_parts_of(model, expected, rtol=2e-2, atol=2e-3)


@pytest.mark.ours("one dtype of gradients per unit")
@on_ranks(2)
def test_param_dtype_applies_to_floating_parameters_of_every_dtype(api: Api) -> None:
    model = MixedDtypes()
    api.fully_shard(model, mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.float32))
    model.unshard()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    model.reshard()
    assert {p.dtype for p in model.parameters()} == {
        torch.float32,
        torch.bfloat16,
        torch.float64,
    }


@on_ranks(2, 3, 4)
def test_uneven_parameters_are_cut_like_dtensors(api: Api) -> None:
    model, batch = UnevenMLP(), make_batch(7)
    whole, expected = full_parameters(model), gradients_alone(model, batch)
    api.fully_shard(model[0])
    api.fully_shard(model)
    assert_parameters_are_parts_of(model, whole)
    assert_equal(full_parameters(model), whole)
    _check_step(model, batch, expected)


@on_ranks(2, 4)
def test_even_sizes_are_cut_along_any_dim(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    whole, expected = full_parameters(model), gradients_alone(model, batch)
    api.fully_shard(model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert model[0][0].weight.placements == (Shard(1),)
    assert_parameters_are_parts_of(model, whole)
    _check_step(model, batch, expected)
    assert_equal(full_parameters(model), whole)


@on_ranks(3, 4)
def test_rank_may_own_nothing_of_a_parameter(api: Api) -> None:
    model, batch = nn.Linear(7, 2), make_batch(7)
    whole, expected = full_parameters(model), gradients_alone(model, batch)
    api.fully_shard(model)
    assert local(model.weight).shape == ((1, 7) if rank() < 2 else (0, 7))
    assert_parameters_are_parts_of(model, whole)
    _check_step(model, batch, expected)
    if rank() == world_size() - 1:
        assert model.weight.grad is not None
        assert local(model.weight.grad).shape == (0, 7)


@pytest.mark.ours("no empty parameters")
@on_ranks(2)
def test_parameter_without_elements_is_allowed(api: Api) -> None:
    class WithEmpty(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.empty = nn.Parameter(torch.empty(0, 3))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.empty.sum()

    model, batch = WithEmpty(), make_batch(8)
    expected = gradients_alone(model, batch)
    api.fully_shard(model)
    _check_step(model, batch, expected)


@on_ranks(2, 3)
def test_tied_parameters_in_one_unit_are_one_parameter(api: Api) -> None:
    model, tokens = Transformer(tied=True), torch.randint(61, (12, 8))
    expected = _token_gradients(model, tokens)
    for block in model.blocks:
        api.fully_shard(block)
    api.fully_shard(model)
    assert model.head.weight is model.embed.weight
    mean_square(model(my_part(tokens))).backward()
    assert_gradients_are_parts_of(model, expected)


@pytest.mark.ours("a tie across units is an error")
@on_ranks(2, 3)
def test_tie_across_units_moves_to_the_lowest_common_unit(api: Api) -> None:
    model, tokens = Transformer(tied=True), torch.randint(61, (12, 8))
    expected = _token_gradients(model, tokens)
    for unit in (model.embed, model.head, *model.blocks):
        api.fully_shard(unit)
    api.fully_shard(model)
    for _ in range(2):
        mean_square(model(my_part(tokens))).backward()
        assert model.head.weight is model.embed.weight
        assert_gradients_are_parts_of(model, expected)
        model.zero_grad()
    assert "embed.weight" in str(api.describe(model))


@pytest.mark.ours("a tie across units is an error")
@on_ranks(2)
def test_tie_below_the_root_moves_no_higher_than_needed(api: Api) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(16, 16), nn.Linear(16, 16)
            self.right.weight = self.left.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.right(self.left(x).tanh())

    model, batch = nn.Sequential(Twins(), nn.Linear(16, 16)), make_batch(16)
    expected = gradients_alone(model, batch)
    for unit in (model[0].left, model[0].right, model[0], model):
        api.fully_shard(unit)
    for _ in range(2):
        _check_step(model, batch, expected)
        model.zero_grad()
    model[0].unshard()
    assert not isinstance(model[0].left.weight, DTensor)
    assert model[0].right.weight is model[0].left.weight


class _Tower(nn.Module):
    """Uses its first weight three times, last outside of the module that has it, and perhaps another tower."""

    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(16, 16) for _ in range(3))
        self.first.weight = weight = self.first.weight if weight is None else weight
        self.last.weight = weight
        self.others: list[nn.Module] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.last(self.middle(self.first(x).tanh()).tanh())
        for other in self.others:
            x = other(x)
        return nn.functional.linear(x, self.first.weight)


@pytest.mark.ours("the weight is untied without a word")
@pytest.mark.parametrize("reshards", [None, True])
@on_ranks(2)
def test_tie_that_no_unit_contains_trains_as_one_parameter(api: Api, reshards: bool | None) -> None:
    """Whichever tower owns the weight, runs first, alone, without gradients, or inside the other."""
    for owner in (0, 1):
        first = _Tower()
        model, batch = nn.Sequential(first, _Tower(first.first.weight)), make_batch(16)
        alone = copy.deepcopy(model)
        for tower in (model[owner], model[1 - owner]):
            for unit in (tower.first, tower):
                api.fully_shard(unit, reshard_after_forward=reshards)
        if reshards:
            model = copy.deepcopy(model)
        for _ in range(2):
            model[1 - owner].unshard()
            assert not isinstance(model[1 - owner].last.weight, DTensor)
            model[1 - owner].reshard()
            assert isinstance(model[1 - owner].last.weight, DTensor)
            with torch.no_grad():
                model(my_part(batch))

        for runs in (owner, 1 - owner):  # and goes on to use what the other one frees

            def gather_and_free(*_: object, other: Any = model[1 - runs]) -> None:
                other.unshard()
                other.reshard()

            handle = model[runs].middle.register_forward_pre_hook(gather_and_free)
            with torch.no_grad():
                expected = my_part(alone[runs](batch))
                torch.testing.assert_close(model[runs](my_part(batch)), expected)
            handle.remove()
        for begin in (lambda each: each[1], lambda each: each, lambda each: each[0]):
            with torch.no_grad():
                expected = my_part(begin(alone)(batch))
                torch.testing.assert_close(begin(model)(my_part(batch)), expected)
            for sharded in (model, alone):
                sharded.zero_grad()
            losses = [
                begin(e)(b).square().mean() for e, b in ((model, my_part(batch)), (alone, batch))
            ]
            for loss in losses:
                loss.backward()
            assert_gradients_are_parts_of(
                model, {n: p.grad for n, p in alone.named_parameters() if p.grad is not None}
            )
        model(my_part(batch))
        values = model.state_dict()  # while the owner may stay whole for a backward
        assert all(isinstance(value, DTensor) for value in values.values())
        for each in (model, alone):
            each[0].others.append(each[1])  # which is no part of it
        _check_step(model[0], batch, gradients_alone(alone[0], batch))
        for each in (model, alone):
            each[0].others.clear()
        model[1].last.weight = new = nn.Parameter(torch.randn(16, 16) / 4)
        for module in (alone[0].first, alone[0].last, alone[1].first, alone[1].last):
            module.weight = new
        user, without = model[1 - owner], alone[1 - owner]
        del model, unit, tower, values, each, begin, sharded, loss, losses, gather_and_free
        gc.collect()
        with pytest.warns(UserWarning, match="weight of Linear was replaced.*untie them before"):
            user(my_part(batch))
        for each in (user, without):
            each.zero_grad()
        _check_step(user, batch, gradients_alone(without, batch))


@pytest.mark.ours("the weight is untied without a word")
@on_ranks(2)
def test_tie_between_units_of_two_dtypes_is_refused_by_both_names(api: Api) -> None:
    first = _Tower()
    other = _Tower(first.first.weight)
    api.fully_shard(first)
    api.fully_shard(other, mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for _ in range(2):
        first(torch.ones(2, 16))
        with pytest.raises(
            StateError, match=r"first\.weight and first\.weight of .*Tower.*bfloat16.*float32"
        ):
            other(torch.ones(2, 16))


@pytest.mark.ours("the weight is untied without a word")
@pytest.mark.parametrize("of", ["model", "unit", "plain"])
@on_ranks(2)
def test_tie_to_a_module_in_no_unit_is_refused_by_both_names(api: Api, of: str) -> None:
    """In the first forward that is seen to have both; else where the other one's gradient or step would be lost."""
    for shard in (
        api.fully_shard,
        partial(api.FullyShardedDataParallel, device_id=torch.device("cpu")),
    ):
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        model[2] = shard(model[2])
        batch, optimizer = torch.randn(4, 8), torch.optim.SGD(model.parameters(), lr=0.1)
        if of == "model":
            with pytest.raises(StateError, match=r"2\.weight.* 0\.weight.*contains both"):
                model(batch)
            continue
        with torch.no_grad():
            model(batch)  # both have the same values
        loss = {"unit": model[2], "plain": model[0]}[of](batch).sum()
        with pytest.raises((StateError, MisuseError), match=r"weight of a Linear.*contains both"):
            (loss.backward(), optimizer.step())


def _calls_of_first_use(api: Api, num_units: int) -> int:
    """Count what it takes to make a model the root whose units are tied two by two."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_units)))
    for even, odd in zip(model[::2], model[1::2], strict=True):
        odd.weight = even.weight
    for layer in model:
        api.fully_shard(layer)
    root = state_of(api.fully_shard(model))
    assert root is not None
    return calls_of(root.initialise)


@pytest.mark.apis("process_group")  # a wait for peers' memory takes as many calls as it is long
@on_ranks(2)
def test_first_use_takes_work_in_proportion_to_the_units(api: Api) -> None:
    _calls_of_first_use(api, 2)  # what is made once in a process
    few, many = (_calls_of_first_use(api, num_units) for num_units in (20, 80))
    assert many < 4.4 * few


@on_ranks(2)
def test_module_used_twice_is_one_module(api: Api) -> None:
    shared, batch = nn.Linear(16, 16), make_batch(16)
    model = nn.Sequential(shared, nn.Tanh(), shared)
    expected = gradients_alone(model, batch)
    api.fully_shard(shared)
    api.fully_shard(model)
    _check_step(model, batch, expected)


@on_ranks(2)
def test_module_that_lists_its_weights_sees_the_whole_ones(api: Api) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(x.transpose(0, 1))[0].tanh()

    model, batch = Recurrent(), make_batch(5, 8)
    expected = gradients_alone(model, batch)
    api.fully_shard(model.lstm)
    api.fully_shard(model)
    for _ in range(2):
        _check_step(model, batch, expected)
        model.zero_grad()


@on_ranks(2)
def test_meta_model_is_materialized_after_sharding(api: Api) -> None:
    torch.manual_seed(3)
    expected = UnevenMLP()
    with torch.device("meta"):
        model = UnevenMLP()
    api.fully_shard(model[0])
    api.fully_shard(model)
    assert all(p.device.type == "meta" for p in model.parameters())
    model.to_empty(device="cpu")
    assert all(isinstance(p, DTensor) for p in model.parameters())
    for name, parameter in model.named_parameters():
        whole = expected.get_parameter(name).detach()
        with torch.no_grad():
            rows = whole.chunk(world_size())
            parameter.to_local().copy_(rows[rank()])
    batch = make_batch(7)
    _check_step(model, batch, gradients_alone(expected, batch))


@on_ranks(2)
def test_meta_model_is_initialized_by_its_own_reset(api: Api) -> None:
    with torch.device("meta"):
        model = UnevenMLP()
    for layer in (model[0], model[2]):
        api.fully_shard(layer)
    api.fully_shard(model)
    model.to_empty(device="cpu")
    for layer in (model[0], model[2], model[4]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    alone = UnevenMLP()
    for layer in (alone[0], alone[2], alone[4]):
        nn.init.constant_(layer.weight, 0.1)
        nn.init.zeros_(layer.bias)
    batch = make_batch(7)
    _check_step(model, batch, gradients_alone(alone, batch))


@on_ranks(2)
def test_module_moves_keep_the_parameters_sharded(api: Api) -> None:
    model, batch = UnevenMLP(), make_batch(7).double()
    double = copy.deepcopy(model).double()
    expected = gradients_alone(double, batch)
    api.fully_shard(model)
    model.to(torch.float64)
    assert all(isinstance(p, DTensor) and p.dtype == torch.float64 for p in model.parameters())
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


def _swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        new = nn.Parameter(parameter.detach() * 1, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, new)


@pytest.mark.ours("its forward mixes dtypes once a parameter's has changed")
@pytest.mark.parametrize("num_steps", [0, 1])
@on_ranks(2)
def test_what_is_frozen_is_converted_and_trains_again(api: Api, num_steps: int) -> None:
    def load(model: nn.Module) -> None:
        model.load_state_dict({n: p.clone() for n, p in model.state_dict().items()}, assign=True)

    conversions: dict[str, Callable[[nn.Module], object]] = {
        "another dtype": lambda model: model.double(),
        "the same dtype": lambda model: model.float(),
        "a module inside": lambda model: model.get_submodule("0").bfloat16().float(),
        "swapped by the program": _swap,
        "assigned": load,
    }
    for name, convert in conversions.items():
        for runs_frozen in (True, False):
            model, batch = mlp(), make_batch(16)
            alone = copy.deepcopy(model)
            api.fully_shard(model)
            for _ in range(num_steps):
                mean_square(model(my_part(batch))).backward()
                model.zero_grad()
            for each in (alone, model):
                each[0][0].weight.requires_grad_(False)
                convert(each)
            assert not model[0][0].weight.requires_grad, name
            for frozen in (True, False) if runs_frozen else (False,):
                model.zero_grad()
                for each in (alone, model):
                    each[0][0].weight.requires_grad_(not frozen)
                x = batch.to(alone[0][0].weight.dtype)
                _check_step(model, x, gradients_alone(alone, x))
            if convert is not load:
                with pytest.warns(UserWarning, match=r"^0\.0\.bias: .* full_tensor\(\)"):
                    model[0][0].bias.full_tensor().sum().backward()


def _token_gradients(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    mean_square(model(tokens)).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    return gradients


@pytest.mark.ours("one use loses its gradient without a word")
@pytest.mark.parametrize("hooks", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1])
@on_ranks(2)
def test_tie_after_sharding_gets_the_gradients_of_both_uses(
    api: Api, num_steps: int, hooks: bool
) -> None:
    gradients = []
    for shard in (lambda model: model, api.fully_shard):
        torch.manual_seed(0)
        model = shard(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))))
        for _ in range(num_steps):
            mean_square(model(my_part(make_batch(8)))).backward()
            model.zero_grad()
        model[2].weight = model[0].weight
        if hooks:
            model[1].weight.register_hook(lambda grad: grad)
        for _ in range(2):
            mean_square(model(make_batch(8))).backward()
        gradients.append(model[0].weight.grad)
    plain, sharded = gradients
    torch.testing.assert_close(sharded.full_tensor(), plain)


@pytest.mark.ours("freezing is undone without a word")
@pytest.mark.parametrize("when", ["before", "in forward", "before backward"])
@on_ranks(2)
def test_parameter_that_is_out_of_sight_is_frozen(api: Api, when: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    kept = model[0].weight  # as an optimizer keeps it: modules show the unsharded one in forward
    model[0].register_forward_hook(lambda *_: freeze("in forward"))

    def freeze(now: str) -> None:
        if now == when and step == 1:
            kept.requires_grad_(False)

    for step in range(3):
        kept.requires_grad_()
        freeze("before")
        loss = mean_square(model(my_part(make_batch(8, seed=step))))
        freeze("before backward")
        loss.backward()
        assert (kept.grad is not None) == (step != 1)
        assert all(p.grad is not None for p in model.parameters() if p is not kept)
        model.zero_grad()


@pytest.mark.ours("the exchange is undone without a word")
@pytest.mark.parametrize("in_units", [False, True])
@pytest.mark.parametrize("num_steps", [0, 1])
@on_ranks(2)
def test_exchange_of_parameters_is_refused(api: Api, in_units: bool, num_steps: int) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model if in_units else ():
        api.fully_shard(layer)
    api.fully_shard(model)
    for _ in range(num_steps):
        mean_square(model(make_batch(8))).backward()
    first, second = model[0].weight, model[1].weight
    model[0].weight, model[1].weight = second, first
    with pytest.raises(StateError, match="weight was replaced by"):
        model(make_batch(8))
    model[0].weight, model[1].weight = first, second  # as it was, all goes on
    mean_square(model(make_batch(8))).backward()
    assert model[0].weight is first
    assert first.grad is not None


@pytest.mark.ours("PyTorch computes with the values, or mixes them with whole parameters")
@on_ranks(2)
def test_values_for_one_call_do_not_stay(api: Api) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), make_batch(8)
    api.fully_shard(model[0])
    api.fully_shard(model)
    with torch.no_grad():
        before = model(x)
        halves = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        with pytest.raises(StateError, match="weight"):
            functional_call(model, halves, (x,))
        assert model(x).equal(before)


@pytest.mark.ours("the new one is overwritten without a word")
@pytest.mark.parametrize("name", ["embed", "head"])
@on_ranks(2)
def test_replacing_one_of_tied_parameters_replaces_both_and_says_so(api: Api, name: str) -> None:
    model, tokens = Transformer(tied=True), torch.randint(61, (12, 8))
    api.fully_shard(model)
    for _ in range(2):  # before the first forward and after it
        model.reshard()
        new = torch.randn(model.embed.weight.shape, generator=torch.Generator().manual_seed(3))
        getattr(model, name).weight = nn.Parameter(new)
        with pytest.warns(UserWarning, match=rf"{name}\.weight was replaced.*untie them before"):
            model(tokens)
        model.reshard()
        assert model.head.weight is model.embed.weight
        assert model.embed.weight.full_tensor().equal(new)
