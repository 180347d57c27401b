"""`copy.deepcopy` of sharded models."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import SGD

import fullshard
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank
from tests.models import Transformer, UnevenMLP, make_problem, mlp
from tests.selection import one_way
from tests.training import (
    assert_equal,
    full_gradients,
    full_parameters,
    gradients_alone,
    local,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = [
    pytest.mark.ours("refuses every deepcopy"),
    one_way("the other files of this folder; tests/parity; tests/differential"),
]


def _shard(api: Api, model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if next(layer.parameters(), None) is not None:
            api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def _train(model: nn.Module, batch: Tensor, *, num_steps: int = 3) -> None:
    """Train on a batch: all of it, or this rank's part if the model is sharded."""
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    for step in range(num_steps):
        rolled = batch.roll(step, 0)
        mean_square(model(my_part(rolled) if sharded else rolled)).backward()
        optimizer.step()
        optimizer.zero_grad()


def _assert_same(model: nn.Module, alone: nn.Module) -> None:
    assert_equal(full_parameters(model), full_parameters(alone), rtol=1e-4, atol=1e-6)


@on_ranks(2, 3)
def test_copy_trains_like_the_original_would(api: Api) -> None:
    alone = UnevenMLP()
    model = _shard(api, copy.deepcopy(alone))
    other = copy.deepcopy(model)
    assert_equal(full_parameters(other), full_parameters(alone))
    _train(other, make_batch(7))
    _train(alone, make_batch(7))
    _assert_same(other, alone)


@on_ranks(2)
def test_original_and_copy_do_not_see_each_other(api: Api) -> None:
    alone, batch = mlp(), make_batch(16)
    model = _shard(api, copy.deepcopy(alone))
    other = copy.deepcopy(model)
    _train(model, batch)
    assert_equal(full_parameters(other), full_parameters(alone))
    trained = full_parameters(model)
    _train(other, batch + 1)
    assert_equal(full_parameters(model), trained)
    _train(alone, batch + 1)
    _assert_same(other, alone)
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}


@on_ranks(2)
def test_original_and_copy_train_in_turns(api: Api) -> None:
    alone, batch = mlp(), make_batch(16)
    model = _shard(api, copy.deepcopy(alone))
    other = copy.deepcopy(model)
    expected = gradients_alone(alone, batch)
    outputs = [each(my_part(batch)) for each in (model, other)]
    for out in outputs:
        mean_square(out).backward()
    for each in (model, other):
        assert_equal(full_gradients(each), expected, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_copy_has_the_classes_of_the_original(api: Api) -> None:
    model = _shard(api, mlp())
    other = copy.deepcopy(model)
    for name, module in model.named_modules():
        assert type(other.get_submodule(name)) is type(module)
        assert isinstance(module, api.FSDPModule) == (name.count(".") == 0)
    for parameter, copied in zip(model.parameters(), other.parameters(), strict=True):
        assert isinstance(copied, nn.Parameter)
        assert isinstance(copied, DTensor)
        assert copied.placements == parameter.placements == (Shard(0),)
        assert copied.device_mesh == parameter.device_mesh


@on_ranks(2)
def test_units_of_a_copy_come_and_go_by_themselves(api: Api) -> None:
    model = _shard(api, mlp())
    whole = full_parameters(model)
    other = copy.deepcopy(model)
    other[1].unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in other[1].parameters())
    sharded = [model, other[0], other[2]]
    assert all(isinstance(p, DTensor) for module in sharded for p in module.parameters())
    assert torch.equal(other[1][0].weight, whole["1.0.weight"])
    other[1].reshard()
    assert all(isinstance(parameter, DTensor) for parameter in other.parameters())


@on_ranks(2)
def test_optimizer_of_the_original_does_not_move_the_copy(api: Api) -> None:
    model = _shard(api, mlp())
    optimizer = SGD(model.parameters(), lr=0.5)
    other, copied = copy.deepcopy((model, optimizer))
    before = full_parameters(model)
    mean_square(other(my_part(make_batch(16)))).backward()
    optimizer.step()
    assert_equal(full_parameters(other), before)
    copied.step()
    assert_equal(full_parameters(model), before)
    assert not torch.equal(full_parameters(other)["0.0.weight"], before["0.0.weight"])


@on_ranks(2)
def test_tied_parameters_of_a_copy_are_tied(api: Api) -> None:
    problem = make_problem("tied_transformer")
    model, alone = problem.model, copy.deepcopy(problem.model)
    for block in problem.units:
        api.fully_shard(block)
    api.fully_shard(model)
    other = copy.deepcopy(model)
    assert isinstance(other, Transformer)
    assert other.head.weight is other.embed.weight
    assert other.head.weight is not model.head.weight
    for each, inputs, targets in (
        (other, my_part(problem.inputs), my_part(problem.targets)),
        (alone, problem.inputs, problem.targets),
    ):
        optimizer = SGD(each.parameters(), lr=0.5)
        for _ in range(2):
            problem.loss(each(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert other.head.weight is other.embed.weight
    _assert_same(other, alone)


@on_ranks(2)
def test_parameters_tied_across_units_stay_tied_in_a_copy(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    model[2][0].weight = model[0][0].weight
    alone = copy.deepcopy(model)
    _shard(api, model)
    other = copy.deepcopy(model)
    assert other[2][0].weight is other[0][0].weight
    _train(other, batch)
    _train(alone, batch)
    assert other[2][0].weight is other[0][0].weight
    _assert_same(other, alone)
    _train(model, batch)
    _assert_same(model, alone)


@on_ranks(2)
def test_modules_sharded_together_are_copied_together(api: Api) -> None:
    model, batch = mlp(4), make_batch(16)
    alone = copy.deepcopy(model)
    api.fully_shard([model[1], model[2]])
    api.fully_shard(model)
    other = copy.deepcopy(model)
    other[1].unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in other[2].parameters())
    other[1].reshard()
    _train(other, batch)
    _train(alone, batch)
    _assert_same(other, alone)


@on_ranks(2)
def test_one_of_several_modules_sharded_together_is_not_copied(api: Api) -> None:
    model = mlp(4)
    api.fully_shard([model[1], model[2]])
    api.fully_shard(model)
    with pytest.raises(AssertionError, match="sharded together"):
        copy.deepcopy(model[1])
    _assert_still_trains(model)


@on_ranks(2)
def test_modules_sharded_together_are_copied_with_the_plain_module_around_them(api: Api) -> None:
    model = mlp(4)
    api.fully_shard([model[1], model[2]])
    other = copy.deepcopy(model)
    other[1].unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in other[2].parameters())
    assert all(isinstance(parameter, DTensor) for parameter in model[2].parameters())


@on_ranks(2)
def test_describing_a_model_does_not_keep_it_from_being_copied(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    alone = copy.deepcopy(model)
    _shard(api, model)
    fullshard.describe(model)
    other = copy.deepcopy(model)
    _train(other, batch)
    _train(alone, batch)
    _assert_same(other, alone)


@on_ranks(2)
def test_sub_module_becomes_a_model_of_its_own(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    alone = copy.deepcopy(model[1])
    _shard(api, model)
    other = copy.deepcopy(model[1])
    assert isinstance(other, api.FSDPModule)
    _train(other, batch)
    _train(alone, batch)
    _assert_same(other, alone)
    _assert_still_trains(model)


@on_ranks(2)
def test_plain_module_around_sharded_ones_is_copied_with_them(api: Api) -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()
            self.scale = nn.Parameter(torch.full((16,), 0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.scale

    model, batch = Around(), make_batch(16)
    alone = copy.deepcopy(model)
    _shard(api, model.inner)
    other = copy.deepcopy(model)
    assert type(other) is Around
    assert isinstance(other.inner, api.FSDPModule)
    mean_square(other(my_part(batch))).backward()
    assert type(other.scale) is nn.Parameter
    expected = gradients_alone(alone, batch)
    gradients = full_gradients(other)
    assert other.scale.grad is not None
    dist.all_reduce(other.scale.grad)
    gradients["scale"] = other.scale.grad / 2
    assert_equal(gradients, expected, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_part_that_uses_a_parameter_of_another_unit_is_not_copied(api: Api) -> None:
    model = mlp()
    model[2][0].weight = model[0][0].weight
    _shard(api, model)
    with pytest.raises(AssertionError, match="weight, which a module outside"):
        copy.deepcopy(model[2])
    _assert_still_trains(model)


def _assert_still_trains(model: nn.Sequential) -> None:
    """Assert that a refused or made copy has left the model as it was."""
    alone = mlp(len(model))
    if model[0][0].weight is model[2][0].weight:
        alone[2][0].weight = alone[0][0].weight
    alone.load_state_dict(full_parameters(model), strict=False)
    if model[0][0].weight is model[2][0].weight:
        assert alone[2][0].weight is alone[0][0].weight
    _train(model, make_batch(16))
    _train(alone, make_batch(16))
    _assert_same(model, alone)


@pytest.mark.parametrize("when", ["forward", "no_grad", "backward"])
@on_ranks(2)
def test_model_that_has_run_is_not_copied(api: Api, when: str) -> None:
    model = _shard(api, mlp())
    with torch.set_grad_enabled(when != "no_grad"):
        out = model(my_part(make_batch(16)))
    if when == "backward":
        mean_square(out).backward()
    for module in (model, model[1]):
        with pytest.raises(AssertionError, match=r"not support deepcopy.*first forward") as e:
            copy.deepcopy(module)
        assert isinstance(e.value, api.errors.MisuseError)
        assert type(module).__name__ in str(e.value)
        assert "state_dict" in str(e.value)
    if when == "forward":
        mean_square(out).backward()
    model.zero_grad()
    _assert_still_trains(model)


@on_ranks(2)
def test_copy_of_a_copy_is_a_copy(api: Api) -> None:
    alone, batch = mlp(), make_batch(16)
    model = _shard(api, copy.deepcopy(alone))
    other = copy.deepcopy(copy.deepcopy(model))
    _train(model, batch)
    _train(other, batch)
    _train(alone, batch)
    _assert_same(other, alone)


@on_ranks(2)
def test_copied_units_may_be_unsharded_when_copied(api: Api) -> None:
    alone, batch = mlp(), make_batch(16)
    model = _shard(api, copy.deepcopy(alone))
    model[1].unshard()
    other = copy.deepcopy(model)
    assert all(isinstance(p, DTensor) for each in (model, other) for p in each.parameters())
    assert_equal(full_parameters(other), full_parameters(alone))
    _train(other, batch)
    _train(alone, batch)
    _assert_same(other, alone)


@on_ranks(2)
def test_copy_of_a_model_on_meta_is_materialised_by_itself(api: Api) -> None:
    alone, batch = mlp(), make_batch(16)
    with torch.device("meta"):
        model = mlp()
    _shard(api, model)
    other = copy.deepcopy(model)
    assert all(parameter.is_meta for parameter in other.parameters())
    other.to_empty(device="cpu")
    assert all(parameter.is_meta for parameter in model.parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            local(parameter).copy_(alone.get_parameter(name).chunk(2)[rank()])
    _train(other, batch)
    _train(alone, batch)
    _assert_same(other, alone)


@on_ranks(4)
def test_copy_lives_on_the_meshes_of_the_original(api: Api) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alone = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Tanh())
    model = copy.deepcopy(alone)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    api.fully_shard(model, mesh=mesh["dp"])
    other = copy.deepcopy(model)
    for parameter, copied in zip(model.parameters(), other.parameters(), strict=True):
        assert copied.placements == parameter.placements
        assert copied.device_mesh == parameter.device_mesh
    batch = make_batch(8)
    expected = gradients_alone(alone, batch)
    mean_square(other(batch.chunk(2)[mesh["dp"].get_local_rank()])).backward()
    assert_equal(full_gradients(other), expected, rtol=1e-4, atol=1e-6)


@on_ranks(4)
def test_copy_of_a_hybrid_model_reduces_over_both_axes(api: Api) -> None:
    alone, batch = mlp(), make_batch(16)
    model = _shard(api, copy.deepcopy(alone), mesh=mesh_of(2, 2))
    other = copy.deepcopy(model)
    assert other[0][0].weight.placements == (Replicate(), Shard(0))
    _train(other, batch)
    _train(alone, batch)
    _assert_same(other, alone)


# What is carried over


@on_ranks(2)
def test_copy_keeps_the_options_of_the_original(api: Api) -> None:
    policy = api.MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    model = _shard(api, mlp(), mp_policy=policy, reshard_after_forward=False)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False)
    model[0].set_gradient_divide_factor(4.0)
    other = copy.deepcopy(model)
    seen: list[torch.dtype] = []
    other[1][0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.dtype))
    out = other(my_part(make_batch(16)))
    assert out.dtype == torch.float64
    assert seen == [torch.bfloat16]
    assert not any(isinstance(parameter, DTensor) for parameter in other.parameters())
    mean_square(out).backward()
    assert not any(isinstance(parameter, DTensor) for parameter in other.parameters())
    factors = [unit.divide_factor for unit in api.describe(other).units]
    assert factors == [4.0, 2.0, 2.0]
    for module in other.modules():
        if isinstance(module, api.FSDPModule):
            module.reshard()
    assert all(parameter.grad is None for parameter in other.parameters())
    other.set_requires_gradient_sync(True)
    mean_square(other(my_part(make_batch(16)))).backward()
    for module in other.modules():
        if isinstance(module, api.FSDPModule):
            module.reshard()
    assert all(parameter.grad.dtype == torch.float32 for parameter in other.parameters())


@on_ranks(2)
def test_options_set_after_the_copy_count_for_one_alone(api: Api) -> None:
    model = _shard(api, mlp(), reshard_after_forward=True)
    other = copy.deepcopy(model)
    other.set_reshard_after_forward(False)
    for each in (model, other):
        out = each(my_part(make_batch(16)))
        whole = [not isinstance(parameter, DTensor) for parameter in each.parameters()]
        assert whole == len(whole) * [each is other]
        mean_square(out).backward()


@on_ranks(2)
def test_frozen_and_ignored_parameters_of_a_copy_are_frozen_and_ignored(api: Api) -> None:
    alone, batch = mlp(), make_batch(16)
    alone[0].requires_grad_(False)
    model = copy.deepcopy(alone)
    ignored = model[1][0].weight
    api.fully_shard(model, ignored_params={ignored})
    other = copy.deepcopy(model)
    assert type(other[1][0].weight) is nn.Parameter
    assert other[1][0].weight is not ignored
    flags = {name: parameter.requires_grad for name, parameter in other.named_parameters()}
    assert flags == {name: parameter.requires_grad for name, parameter in alone.named_parameters()}
    mean_square(other(my_part(batch))).backward()
    expected = gradients_alone(alone, batch)
    del expected["1.0.weight"]
    gradients = full_gradients(other)
    del gradients["1.0.weight"]
    assert_equal(gradients, expected, rtol=1e-4, atol=1e-6)
    assert "0.0.weight" not in gradients


@on_ranks(2)
def test_modules_to_prefetch_are_those_of_the_copy(api: Api) -> None:
    order: list[int] = []

    class Recording(api.DefaultAllGather):
        def __init__(self, number: int) -> None:
            self.number = number

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            order.append(self.number)
            return super().__call__(*args, **kwargs)

    model = _shard(api, mlp())
    model[0].set_modules_to_forward_prefetch([model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])
    other = copy.deepcopy(model)
    for number, layer in enumerate(other):
        layer.set_custom_all_gather(Recording(number))
    mean_square(other(my_part(make_batch(16)))).backward()
    assert order == [0, 2, 1, 2, 0, 1]


@on_ranks(2)
def test_hooks_and_buffers_of_users_are_copied(api: Api) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    api.fully_shard(model)
    calls: list[str] = []
    model[0].register_forward_hook(lambda module, args, out: calls.append("called"))
    other = copy.deepcopy(model)
    other(make_batch(4)).sum().backward()
    assert calls == ["called"]
    assert other[1].num_batches_tracked.item() == 1
    assert model[1].num_batches_tracked.item() == 0


@on_ranks(2)
def test_registered_method_of_a_copy_uses_its_own_parameters(api: Api) -> None:
    class Head(nn.Linear):
        def project(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model, batch = api.fully_shard(Head(16, 16)), make_batch(16)
    api.register_fsdp_forward_method(model, "project")
    whole = full_parameters(model)["weight"]
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight.mul_(2)
        torch.testing.assert_close(other.project(batch), batch @ (2 * whole))
        torch.testing.assert_close(model.project(batch), batch @ whole)


@pytest.mark.parametrize("choice", [None, "collectives"])
@on_ranks(2)
def test_custom_communication_of_the_original_serves_the_copy(api: Api, choice: str | None) -> None:
    class Counting(api.DefaultAllGather):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            type(self).calls += 1
            return super().__call__(*args, **kwargs)

    previous = api.set_default_comm(choice or api.name)
    model = api.fully_shard(mlp())
    api.set_default_comm(previous)
    model.set_custom_all_gather(Counting())
    other = copy.deepcopy(model)
    other(make_batch(16))
    assert Counting.calls == 1


@on_ranks(2)
def test_original_is_freed_while_its_copy_lives(api: Api) -> None:
    alone = mlp()
    model = _shard(api, copy.deepcopy(alone))
    other = copy.deepcopy(model)
    references = [weakref.ref(each) for each in (*model.modules(), *model.parameters())]
    del model
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    _train(other, make_batch(16))
    _train(alone, make_batch(16))
    _assert_same(other, alone)


@on_ranks(2)
def test_state_dict_of_the_original_goes_into_the_copy(api: Api) -> None:
    model = _shard(api, mlp())
    other = copy.deepcopy(model)
    _train(model, make_batch(16))
    other.load_state_dict(model.state_dict())
    assert_equal(full_parameters(other), full_parameters(model))
    with torch.no_grad():
        torch.testing.assert_close(other(make_batch(16)), model(make_batch(16)))
