"""Gradient accumulation with and without communication, and what divides a gradient."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank
from tests.models import mlp
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    full_gradients,
    gradients_alone,
    local,
    local_gradients,
    make_batch,
    mean_square,
    my_part,
)


def _sharded(api: Api, **options: object) -> tuple[nn.Sequential, nn.Sequential]:
    model = mlp()
    alone = copy.deepcopy(model)
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options), alone


@pytest.mark.parametrize("reshard_after_backward", [True, False])
@on_ranks(2, 3)
def test_unsynchronised_microbatches_are_reduced_with_the_last(
    api: Api, reshard_after_backward: bool
) -> None:
    model, alone = _sharded(api)
    model.set_reshard_after_backward(reshard_after_backward=reshard_after_backward)
    for _ in range(2):
        for index in range(3):
            batch = make_batch(16, seed=index)
            mean_square(alone(batch)).backward()
            model.set_requires_gradient_sync(requires_gradient_sync=index == 2)
            mean_square(model(my_part(batch))).backward()
            if index < 2 and reshard_after_backward:
                assert not local_gradients(model)
        for unit in (model, *model):
            unit.reshard()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.apis("peer_memory")
@pytest.mark.parametrize("is_kept_by_user", [False, True])
@on_ranks(2)
def test_sums_are_formed_in_the_memory_of_the_last_step_unless_somebody_has_it(
    api: Api, is_kept_by_user: bool
) -> None:
    model, _ = _sharded(api)
    param = model[0]._fullshard_hooks.state.units[0].params[0]
    addresses: list[int] = []
    kept: list[Tensor] = []
    for seed in range(2):
        batch = my_part(make_batch(16, seed=seed))
        for is_last in (False, False, True):
            model.set_requires_gradient_sync(is_last)
            mean_square(model(batch)).backward()
            if not is_last:
                addresses.append(param.accumulated_grad.data_ptr())
                kept += [param.accumulated_grad] if is_kept_by_user else []
        model.zero_grad()
        if seed == 0:
            expected = [each.clone() for each in kept]
    first, second = addresses[:2], addresses[2:]
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert (first[0] != second[0]) is is_kept_by_user
    assert_equal(dict(enumerate(kept[: len(expected)])), dict(enumerate(expected)))


class _Twice(nn.Module):
    """A layer that runs twice, so that its unit has two backwards in one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(torch.relu(self.layer(x)))
        return y


@pytest.mark.apis("peer_memory")
@on_ranks(2)
def test_memory_of_sums_stays_for_a_module_that_runs_twice_until_nothing_is_accumulated(
    api: Api,
) -> None:
    model = _Twice()
    api.fully_shard(model.layer)
    api.fully_shard(model)
    unit = model.layer._fullshard_hooks.state.units[0]
    for flags in ((False, True), (False, True), (True,)):
        for is_last in flags:
            model.set_requires_gradient_sync(is_last)
            mean_square(model(my_part(make_batch(16)))).backward()
        kept = [memory.nbytes for memory in unit.gradients.unreduced.sums.spare.tensors]
        assert kept == ([] if len(flags) == 1 else [16 * 16 * 4, 16 * 4])
        model.zero_grad()


@on_ranks(2)
def test_gradients_are_added_in_place_only_if_they_are_of_the_dtype_that_sums_have(
    api: Api,
) -> None:
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, alone = _sharded(api, mp_policy=policy)
    wide = {name: torch.zeros_like(p) for name, p in alone.named_parameters()}
    low = copy.deepcopy(alone).to(torch.bfloat16)
    for index in range(3):
        batch = make_batch(16, seed=index)
        model.set_requires_gradient_sync(index == 2)
        mean_square(model(my_part(batch))).backward()
        for part in batch.chunk(2):
            low.zero_grad()
            mean_square(low(part.to(torch.bfloat16))).backward()
            for name, parameter in low.named_parameters():
                wide[name] += parameter.grad.float() / 2
    assert_gradients_are_parts_of(model, wide)


@on_ranks(2)
def test_sync_can_be_off_for_one_unit_alone(api: Api) -> None:
    model, alone = _sharded(api)
    batch = make_batch(16)
    mean_square(alone(batch)).backward()
    model[1].set_requires_gradient_sync(requires_gradient_sync=False, recurse=False)
    mean_square(model(my_part(batch))).backward()
    assert model[0][0].weight.grad is not None
    assert model[1][0].weight.grad is None
    model[1].set_requires_gradient_sync(requires_gradient_sync=True)
    mean_square(alone(batch)).backward()
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_last_backward_flag_does_not_change_the_sum(api: Api) -> None:
    model, alone = _sharded(api)
    for index in range(3):
        batch = make_batch(16, seed=index)
        mean_square(alone(batch)).backward()
        model.set_is_last_backward(is_last_backward=index == 2)
        mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))


@pytest.mark.parametrize("setter", ["set_requires_all_reduce", "set_requires_gradient_sync"])
@on_ranks(4)
def test_reductions_on_two_axes_can_wait_for_the_last_microbatch(api: Api, setter: str) -> None:
    model, alone = _sharded(api, mesh=mesh_of(2, 2))
    for _ in range(2):
        for index in range(3):
            batch = make_batch(16, seed=index)
            mean_square(alone(batch)).backward()
            getattr(model, setter)(index == 2)
            mean_square(model(my_part(batch))).backward()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.ours("Gloo has no premultiplied sum")
@pytest.mark.parametrize("factor", [1.0, 2.0, 5.0])
@on_ranks(2, 3)
def test_gradient_divide_factor_replaces_the_number_of_ranks(api: Api, factor: float) -> None:
    model = nn.Linear(8, 6)
    api.fully_shard(model)
    model.set_gradient_divide_factor(factor)
    model(torch.full((1, 8), float(rank() + 1))).sum().backward()
    total = sum(range(1, torch.distributed.get_world_size() + 1))
    gradient = local(model.weight.grad)
    torch.testing.assert_close(gradient, torch.full_like(gradient, total / factor))


@on_ranks(2)
def test_unsynchronised_gradients_survive_an_evaluation(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = {n: 2 * g for n, g in gradients_alone(model, batch).items()}
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    mean_square(model(my_part(batch))).backward()
    with torch.no_grad():
        model(batch)
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


@on_ranks(2)
def test_exception_in_forward_keeps_what_was_accumulated(api: Api) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.isnan().any():
                raise ValueError("this micro-batch is bad")
            return x

    model, batch = nn.Sequential(nn.Linear(16, 16), Fails(), nn.Linear(16, 4)), make_batch(16)
    expected = {n: 2 * g for n, g in gradients_alone(model, batch).items()}
    api.fully_shard(model[2])
    api.fully_shard(model)
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    mean_square(model(my_part(batch))).backward()
    with pytest.raises(ValueError, match="micro-batch is bad"):
        model(torch.full((2, 16), math.nan))
    model.set_requires_gradient_sync(requires_gradient_sync=True)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


class _FailsInBackward(torch.autograd.Function):
    """The identity, whose backward raises."""

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: object, *grads: Tensor) -> Tensor:
        raise ValueError("this backward is bad")


@pytest.mark.ours("PyTorch keeps what earlier backwards and the failed one accumulated")
@on_ranks(1, 2)
def test_after_an_exception_in_a_backward_that_accumulates_the_next_step_is_right(
    api: Api,
) -> None:
    model, alone = _sharded(api)
    batch = make_batch(16)
    for is_last in (False, True, False):  # memory of sums is kept by the third
        model.set_requires_gradient_sync(is_last)
        mean_square(model(my_part(batch))).backward()
    model.zero_grad()
    model.set_requires_gradient_sync(requires_gradient_sync=False)
    mean_square(model(my_part(batch))).backward()
    hook = model[0][0].register_forward_pre_hook(
        lambda _, args: (_FailsInBackward.apply(args[0].clone().requires_grad_()),)
    )
    with pytest.raises(ValueError, match="backward is bad"):
        mean_square(model(my_part(batch))).backward()  # autograd has added to the first unit's sums
    hook.remove()
    for is_last in (False, False, True):
        model.set_requires_gradient_sync(is_last)
        mean_square(alone(batch)).backward()
        mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, full_gradients(alone))
