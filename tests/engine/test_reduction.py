"""What happens to gradients between backward and the optimizer, and what users may change of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.api import Api
from tests.custom_collectives import custom_reduce, public
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.models import Scale, mlp
from tests.training import (
    assert_gradients_are_parts_of,
    full_gradients,
    gradients_alone,
    local,
    local_gradients,
    make_batch,
    mean_square,
    my_part,
)
from tests.twins import assert_train_alike, run_step, shard_layers, sharded_mlp

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
# Either the test chooses how units communicate itself, or it counts collectives.
on_process_groups = pytest.mark.apis("process_group", "torch")


# Hooks after the reduction


def _values(tensors: Sequence[Tensor]) -> Tensor:
    """Return what is not zero in any order: hooks see padding, and no parameter's place."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    return flat[flat != 0].sort().values


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
@on_ranks(4)
def test_all_reduce_hook_sees_what_becomes_of_the_gradients(
    api: Api, shape: tuple[int, ...]
) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(*shape))
    seen: list[list[Tensor]] = [[], [], []]
    for number, layer in enumerate(model):
        layer.set_all_reduce_hook(lambda sums, n=number: seen[n].append(sums.clone()))
    for step in range(2):
        batch = make_batch(16, seed=step)
        expected = gradients_alone(alone, batch)
        mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, expected)
        for number, layer in enumerate(model):
            assert len(seen[number]) == step + 1
            assert seen[number][step].ndim == 1
            gradients = [local(p.grad) for p in layer.parameters()]
            assert torch.equal(_values([seen[number][step]]), _values(gradients))
        model.zero_grad()


@on_ranks(2)
def test_all_reduce_hook_changes_gradients_in_place(api: Api) -> None:
    model, alone = sharded_mlp(api)
    expected = gradients_alone(alone, make_batch(16))
    model[1].set_all_reduce_hook(lambda sums: sums.mul_(3))
    run_step(model)
    for name in ("1.0.weight", "1.0.bias"):
        expected[name] *= 3
    assert_gradients_are_parts_of(model, expected)
    run_step(model)  # gradients that are there already are not changed again
    assert_gradients_are_parts_of(model, {n: 2 * g for n, g in expected.items()})


@on_ranks(4)
def test_all_reduce_hook_may_add_the_axis_of_replicas(api: Api) -> None:
    mesh = mesh_of(2, 2)
    replicas = mesh["replicate"].get_group()

    def average(sums: Tensor) -> None:
        dist.all_reduce(sums, group=replicas)
        sums.div_(2)

    model, alone = sharded_mlp(api, mesh=mesh["shard"])
    for layer in model:
        layer.set_all_reduce_hook(average)
    assert_train_alike(alone, model)


@on_ranks(4)
def test_all_reduce_hook_waits_for_the_all_reduce(api: Api) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(2, 2))
    calls: list[int] = []
    model[1].set_all_reduce_hook(lambda sums: calls.append(sums.numel()))
    for index in range(3):
        batch = make_batch(16, seed=index)
        mean_square(alone(batch)).backward()
        model.set_requires_all_reduce(requires_all_reduce=index == 2)
        mean_square(model(my_part(batch))).backward()
        assert len(calls) == index // 2
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_all_reduce_hook_runs_with_every_reduction_on_one_axis(api: Api) -> None:
    model, _ = sharded_mlp(api)
    calls: list[int] = []
    model[1].set_all_reduce_hook(lambda sums: calls.append(sums.numel()))
    model.set_requires_all_reduce(requires_all_reduce=False)  # there is no second axis
    run_step(model)
    assert len(calls) == 1
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    run_step(model)
    assert len(calls) == 1
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    run_step(model)
    assert len(calls) == 2


@on_ranks(4)
def test_all_reduce_hook_has_no_stream_of_its_own_on_two_axes(api: Api) -> None:
    model, _ = sharded_mlp(api, mesh=mesh_of(2, 2))
    with pytest.raises(ValueError, match="stream cannot be set"):
        model[1].set_all_reduce_hook(lambda sums: None, stream=torch.cpu.Stream())


@on_ranks(2)
def test_all_reduce_hook_may_have_a_stream_of_its_own(api: Api) -> None:
    model, alone = sharded_mlp(api)
    expected = gradients_alone(alone, make_batch(16))
    for layer in model:
        layer.set_all_reduce_hook(lambda sums: sums.mul_(2), stream=torch.cpu.Stream())
    run_step(model)
    assert_gradients_are_parts_of(model, {n: 2 * g for n, g in expected.items()})


# Two axes


@on_process_groups
@on_ranks(4)
def test_deferred_all_reduce_costs_one_for_all_microbatches(api: Api) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(2, 2), reshard_after_forward=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.2) for m in (model, alone)]
    for _ in range(2):
        for index in range(3):
            model.set_requires_all_reduce(requires_all_reduce=index == 2)
            expected = {"all_gather": 6, "reduce_scatter": 3}
            if index == 2:
                # Of ours, one tells which parameters had a gradient.
                expected["all_reduce"] = 3 if api.is_torch else 6
            assert run_step(model).calls == expected
            assert bool(local_gradients(model)) == (index == 2)
            mean_square(alone(make_batch(16))).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(4)
def test_deferred_all_reduce_adds_to_gradients_of_an_earlier_one(api: Api) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(2, 2))
    for index in range(4):
        batch = make_batch(16, seed=index)
        mean_square(alone(batch)).backward()
        model.set_requires_all_reduce(requires_all_reduce=index % 2 == 1)
        mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


class Two(nn.Module):
    """Two layers, of which a forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, *, uses_second: bool = True) -> Tensor:
        x = self.first(x).tanh()
        return self.second(x) + x if uses_second else x


@pytest.mark.parametrize(
    "change",
    [
        "freeze a parameter",
        "freeze a unit",
        "unfreeze a parameter",
        "unfreeze a parameter, and put off once more",
        "leave out a unit",
    ],
)
@pytest.mark.ours("fails where sizes change, or loses what it kept")
@on_ranks(4)
def test_deferred_all_reduce_follows_what_is_trained(api: Api, change: str) -> None:
    alone = Two()
    model = copy.deepcopy(alone)
    for layer in (model.first, model.second, model):
        api.fully_shard(layer, mesh=mesh_of(2, 2))
    for step in range(3):
        for each in (alone, model):
            weight = each.second.weight
            for index in range(3):
                is_last = index == 2
                if change == "freeze a parameter":
                    weight.requires_grad_(not is_last)
                elif change == "freeze a unit":
                    each.second.requires_grad_(not is_last)
                elif change == "unfreeze a parameter":
                    weight.requires_grad_(is_last)
                elif change == "unfreeze a parameter, and put off once more":
                    weight.requires_grad_(index > 0)
                batch = make_batch(16, seed=3 * step + index)
                if each is model:
                    batch = my_part(batch)
                    model.set_requires_all_reduce(is_last)
                uses_second = not is_last or change != "leave out a unit"
                mean_square(each(batch, uses_second=uses_second)).backward()
            each.requires_grad_(True)
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for each in (alone, model):
            each.zero_grad()


@pytest.mark.ours("goes on, or fails elsewhere")
@on_ranks(4)
def test_parameters_do_not_change_while_an_all_reduce_is_put_off(api: Api) -> None:
    model, _ = sharded_mlp(api, mesh=mesh_of(2, 2))
    model.set_requires_all_reduce(False)
    run_step(model)
    with pytest.raises(RuntimeError, match="still wait for their all-reduce"):
        model.bfloat16()


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.ours("pairs gradients of different parameters")
@on_ranks(4)
def test_replicas_may_use_different_parameters(api: Api, shape: tuple[int, int]) -> None:
    alone = Two()
    model = api.fully_shard(copy.deepcopy(alone), mesh=mesh_of(*shape))
    for user in (0, 3):
        parts = make_batch(16, seed=user).chunk(world_size())
        for number, part in enumerate(parts):
            loss = mean_square(alone(part, uses_second=number == user))
            (loss / world_size()).backward()
        mean_square(model(parts[rank()], uses_second=rank() == user)).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for each in (alone, model):
            each.zero_grad()
    mean_square(model(make_batch(16), uses_second=False)).backward()
    assert model.second.weight.grad is None  # nobody used it


@pytest.mark.ours("pairs gradients of different parameters")
@on_ranks(4)
def test_replicas_may_use_different_parameters_before_they_are_frozen(api: Api) -> None:
    alone = Two()
    model = api.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2, 2))
    for is_last in (False, True):
        parts = make_batch(16, seed=int(is_last)).chunk(world_size())
        for each in (alone, model):
            each.second.requires_grad_(not is_last)
        for number, part in enumerate(parts):
            loss = mean_square(alone(part, uses_second=number == 0))
            (loss / world_size()).backward()
        model.set_requires_all_reduce(is_last)
        mean_square(model(parts[rank()], uses_second=rank() == 0)).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


# What divides a gradient


def _force_sums(model: nn.Module, *, enable: bool = True) -> None:
    """Let PyTorch's engine divide apart from its reductions: Gloo has only sums and averages."""
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(enable)


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
@pytest.mark.parametrize("factor", [1.0, 3.0, 8.0])
@on_ranks(4)
def test_divide_factor_replaces_the_number_of_ranks_on_any_mesh(
    api: Api, shape: tuple[int, ...], factor: float
) -> None:
    if api.is_torch and shape[-1] == 1:
        pytest.skip("PyTorch: divides twice where nothing is sharded")
    model, alone = sharded_mlp(api, mesh=mesh_of(*shape))
    _force_sums(model)
    for layer in model:
        layer.set_gradient_divide_factor(factor)
    means = gradients_alone(alone, make_batch(16))
    run_step(model)
    assert_gradients_are_parts_of(model, {n: g * 4 / factor for n, g in means.items()})


@on_ranks(2)
def test_divide_factor_is_of_one_unit_alone(api: Api) -> None:
    model = mlp()
    means = gradients_alone(model, make_batch(16))
    api.fully_shard(model[1])
    api.fully_shard(model)
    _force_sums(model)
    model.set_gradient_divide_factor(8.0)
    run_step(model)
    expected = {n: g if n.startswith("1.") else g / 4 for n, g in means.items()}
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_divide_factor_may_change_between_backwards(api: Api) -> None:
    model = mlp()
    means = gradients_alone(model, make_batch(16))
    api.fully_shard(model)
    _force_sums(model)
    for factor in (1.0, 4.0):
        model.set_gradient_divide_factor(factor)
        run_step(model)
    assert_gradients_are_parts_of(model, {n: g * 2 + g / 2 for n, g in means.items()})


@pytest.mark.ours("takes any number")
@pytest.mark.parametrize("factor", [0, -1.0, float("nan")])
@on_ranks(2)
def test_divide_factor_must_be_positive(api: Api, factor: float) -> None:
    model = api.fully_shard(mlp())
    with pytest.raises(ValueError, match=rf"set_gradient_divide_factor\({factor}\).*positive"):
        model.set_gradient_divide_factor(factor)


@on_ranks(2)
def test_older_name_of_the_divide_factor_warns_and_works(api: Api) -> None:
    model = mlp()
    means = gradients_alone(model, make_batch(16))
    api.fully_shard(model)
    _force_sums(model)
    kinds = (DeprecationWarning, FutureWarning)
    with pytest.warns(kinds, match="set_gradient_divide_factor"):
        model.set_reduce_scatter_divide_factor(8.0)
    run_step(model)
    assert_gradients_are_parts_of(model, {n: g / 4 for n, g in means.items()})


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_forced_sums_change_no_gradient(api: Api, shape: tuple[int, ...]) -> None:
    model, alone = sharded_mlp(api, mesh=mesh_of(*shape))
    reduce = custom_reduce(api)
    model[1].set_custom_reduce_scatter(reduce)
    _force_sums(model)
    assert_train_alike(alone, model)
    assert {str(call["op"]) for call in reduce.calls} == {str(dist.ReduceOp.SUM)}
    _force_sums(model, enable=False)
    assert_train_alike(alone, model)


@pytest.mark.parametrize("divides", ["by ranks", "by shard ranks"])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@on_ranks(4)
def test_custom_reduce_scatter_is_asked_for_means_as_by_pytorch(
    api: Api, shape: tuple[int, ...], divides: str
) -> None:
    asked = []

    class Means(public(api, "DefaultReduceScatter")):  # type: ignore[misc]
        """Forms means, whatever it is asked for."""

        def __call__(self, *args: Any, op: Any, **options: Any) -> Any:
            asked.append(op)
            return super().__call__(*args, op=dist.ReduceOp.AVG, **options)

    model, alone = sharded_mlp(api, mesh=mesh_of(*shape))
    expected = gradients_alone(alone, make_batch(16))
    for layer in model:
        layer.set_custom_reduce_scatter(Means())
        if divides == "by shard ranks":
            layer.set_gradient_divide_factor(float(shape[-1]))
    if divides == "by shard ranks":
        expected = {name: grad * 4 / shape[-1] for name, grad in expected.items()}
    mean_square(model(my_part(make_batch(16)))).backward()
    assert_gradients_are_parts_of(model, expected)
    assert asked == 3 * [dist.ReduceOp.AVG]


@pytest.mark.parametrize("custom", [False, True])
@on_ranks(2, 4)
def test_float16_sums_are_divided_in_two_parts(api: Api, custom: bool) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP16)
    model = api.fully_shard(Scale(), mp_policy=policy)
    reduce = custom_reduce(api)
    if custom:
        model.set_custom_reduce_scatter(reduce)
    # The largest number is 65504: the sum is above it, and the sum of halves is not.
    value = 60000.0 * 2 / world_size()
    model(torch.full((1, 8), value)).sum().backward()
    gradient = local(model.weight.grad)
    torch.testing.assert_close(gradient, torch.full_like(gradient, value), rtol=1e-3, atol=0)
    if custom:
        (call,) = reduce.calls
        assert call["input"].dtype == FP16
        assert call["input"].max() == value / 2


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
@pytest.mark.parametrize("custom", [False, True])
@on_ranks(4)
def test_float16_sums_over_two_axes_do_not_overflow(
    api: Api, shape: tuple[int, ...], custom: bool
) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=FP32, reduce_dtype=FP16)
    model = api.fully_shard(Scale(), mesh=mesh_of(*shape), mp_policy=policy)
    if custom:
        model.set_custom_reduce_scatter(custom_reduce(api))
    model(torch.full((1, 8), 30000.0)).sum().backward()
    gradient = local(model.weight.grad)
    torch.testing.assert_close(gradient, torch.full_like(gradient, 30000.0), rtol=1e-3, atol=0)


# Reductions under way, and units that not every rank uses


@pytest.mark.parametrize(
    ("value", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError)]
)
@on_ranks(2)
def test_number_of_reductions_under_way_must_be_a_positive_int(
    api: Api, value: Any, error: type[Exception]
) -> None:
    model, alone = sharded_mlp(api)
    with pytest.raises(error, match="max_input_buffers must be a"):
        model.set_reduce_scatter_max_input_buffers(value)
    assert_train_alike(alone, model)


@pytest.mark.parametrize("number", [1, 2, 10])
@pytest.mark.parametrize("shape", [(2,), (1, 2)])
@on_ranks(2)
def test_any_number_of_reductions_under_way_gives_the_same_gradients(
    api: Api, shape: tuple[int, ...], number: int
) -> None:
    model, alone = shard_layers(api, mlp(5), mesh=mesh_of(*shape))
    model.set_reduce_scatter_max_input_buffers(number)
    assert_train_alike(alone, model)
    model[2].set_reduce_scatter_max_input_buffers(3, recurse=False)
    assert_train_alike(alone, model)


class Optional(nn.Module):
    """A layer that is used on request, before one that always is. (n, 16) -> same."""

    def __init__(self) -> None:
        super().__init__()
        self.optional = nn.Linear(16, 16)
        self.always = nn.Linear(16, 16)

    def forward(self, x: Tensor, *, everything: bool) -> Tensor:
        """Apply what is used."""
        return self.always(self.optional(x).tanh() if everything else x)


@pytest.mark.parametrize("needs_gradient", [False, True])
@on_ranks(2, 3)
def test_unit_that_some_ranks_skip_is_reduced_on_all_on_request(
    api: Api, needs_gradient: bool
) -> None:
    if api.is_torch and not needs_gradient:
        pytest.skip("PyTorch: reduces units in another order where one is skipped")
    model, batch = Optional(), make_batch(16)
    alone = copy.deepcopy(model)
    for number, part in enumerate(batch.chunk(world_size())):
        out = alone(part, everything=number == 0)
        (mean_square(out) / world_size()).backward()
    api.fully_shard(model.optional, reshard_after_forward=False)
    api.fully_shard(model.always)
    api.fully_shard(model)
    model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
    for _ in range(2):
        model.optional.unshard()  # every rank takes part in the gather as well
        part = my_part(batch).clone().requires_grad_(needs_gradient)
        mean_square(model(part, everything=rank() == 0)).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()


@on_ranks(2)
def test_unit_that_no_rank_uses_gets_zeros_on_request(api: Api) -> None:
    model, batch = Optional(), make_batch(16)
    api.fully_shard(model.optional)
    api.fully_shard(model.always)
    api.fully_shard(model)
    model.optional.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True)
    mean_square(model(my_part(batch), everything=True)).backward()
    model.zero_grad()
    mean_square(model(my_part(batch), everything=False)).backward()
    for parameter in model.optional.parameters():
        assert isinstance(parameter.grad, DTensor)
        assert not local(parameter.grad).any()
    model.zero_grad()
    model.set_reduce_scatter_unused_params(reduce_scatter_unused_params=False)
    mean_square(model(my_part(batch), everything=False)).backward()
    assert model.optional.weight.grad is None
    assert model.always.weight.grad is not None
