"""What users did before or beside sharding: hooks, added parameters, optimizers of old parameters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import on_ranks, world_size
from tests.models import mlp
from tests.selection import one_way
from tests.training import (
    full_gradients,
    gradients_alone,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

faces = pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])


def _shard(api: Api, model: nn.Sequential, face: str, **options: Any) -> Any:
    """Shard the layers and the model by one of the faces."""
    if face != "fully_shard":
        options = {"use_orig_params": face == "orig", "device_id": torch.device("cpu"), **options}
        with quiet():  # of strategies on one rank
            for index in range(len(model)):
                model[index] = api.FullyShardedDataParallel(model[index], **options)
            return api.FullyShardedDataParallel(model, **options)
    for layer in model:
        api.fully_shard(layer, **options)
    return api.fully_shard(model, **options)


def _step(model: nn.Module, seed: int = 0) -> None:
    mean_square(model(my_part(make_batch(16, seed=seed)))).backward()


def _whole_gradients(api: Api, model: nn.Module, face: str) -> dict[str, Tensor]:
    if face == "fully_shard":
        return full_gradients(model)
    with api.FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
        return {
            name.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
            for name, p in model.named_parameters()
            if p.grad is not None
        }


# Hooks


@faces
@pytest.mark.ours("forgets them")
@on_ranks(2)
def test_gradient_hook_set_before_sharding_gets_the_whole_gradient(api: Api, face: str) -> None:
    model = mlp(2)
    seen: list[tuple[int, ...]] = []

    def halve(grad: Tensor) -> Tensor:
        seen.append(tuple(grad.shape))
        return grad / 2

    expected = gradients_alone(model, make_batch(16, seed=0))
    handle = model[0][0].weight.register_hook(halve)
    model = _shard(api, model, face)
    _step(model)
    assert seen == [(16, 16)]
    if face != "flat":
        expected["0.0.weight"] /= 2
        found = _whole_gradients(api, model, face)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, msg=name)
    handle.remove()
    _step(model)
    assert len(seen) == 1


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@pytest.mark.ours("forgets them")
@on_ranks(2)
def test_hook_after_accumulation_set_before_sharding_gets_the_sharded_parameter(
    api: Api, face: str
) -> None:
    model = mlp(2)
    seen: list[nn.Parameter] = []
    handle = model[0][0].weight.register_post_accumulate_grad_hook(seen.append)
    model = _shard(api, model, face)
    _step(model)
    trained = dict(model.named_parameters())
    (parameter,) = seen
    assert any(parameter is each for each in trained.values())
    assert parameter.grad is not None
    handle.remove()
    _step(model)
    assert len(seen) == 1


@pytest.mark.ours("forgets them")
@on_ranks(2)
def test_hook_after_accumulation_that_flattening_loses_is_named(api: Api) -> None:
    model = mlp(1)
    model[0][0].bias.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.warns(UserWarning, match=r"0\.0\.bias: hooks after accumulation"):
        api.FullyShardedDataParallel(model)


@faces
@pytest.mark.ours("never calls them")
@on_ranks(1, 2)
def test_gradient_hook_on_a_sharded_parameter_gets_the_reduced_gradient(
    api: Api, face: str
) -> None:
    model = mlp(2)
    expected = gradients_alone(model, make_batch(16, seed=0))
    model = _shard(api, model, face)
    seen: dict[str, Tensor] = {}

    def keep(name: str, grad: Tensor) -> Tensor:
        seen[name] = grad
        return grad * 3

    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: keep(name, grad))
    for _ in range(2):  # the second is added to the first
        _step(model)
    for name, parameter in model.named_parameters():
        if name not in seen:  # a rank may own nothing of it
            assert not parameter.numel()
            continue
        assert seen[name].shape == parameter.shape
        assert isinstance(seen[name], DTensor) == (face == "fully_shard")
    if face != "flat":
        for name, gradient in _whole_gradients(api, model, face).items():
            torch.testing.assert_close(gradient, expected[name] * 6, msg=name)


@on_ranks(2)
@pytest.mark.ours("never calls them")
def test_hooks_of_a_flat_parameter_are_called(api: Api) -> None:
    model = api.FullyShardedDataParallel(mlp(2))
    (flat,) = model.parameters()
    seen: list[Any] = []
    flat.register_hook(lambda grad: seen.append(grad.shape))
    flat.register_post_accumulate_grad_hook(seen.append)
    _step(model)
    assert seen[0] == flat.shape
    assert seen[1] is flat


# Parameters


@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@pytest.mark.parametrize("when", ["before the first forward", "between steps"])
@pytest.mark.ours("trains them on each rank's own data, without a word")
@on_ranks(2)
def test_parameter_added_after_sharding_is_named_once(api: Api, face: str, when: str) -> None:
    model = _shard(api, mlp(2), face)
    layer = (model[0] if face == "fully_shard" else model[0].module)[0]
    if when == "between steps":
        _step(model)
    layer.lora_a = nn.Parameter(torch.zeros(2))
    layer.adapter = nn.Linear(2, 2, bias=False)
    with pytest.warns(UserWarning, match=r"0\.0\.adapter\.weight, 0\.0\.lora_a .*registered"):
        _step(model)
    _step(model)
    layer.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    _step(model)


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@on_ranks(2)
def test_ignored_parameters_are_not_complained_of(api: Api, face: str) -> None:
    model = mlp(2)
    own = model[0][0].weight
    option = "ignored_params" if face == "fully_shard" else "ignored_states"
    _step(_shard(api, model, face, **{option: {own}}))


@pytest.mark.ours("takes it over as well, but lets the optimizer train the old one")
@on_ranks(2)
def test_optimizer_of_a_parameter_that_was_replaced_is_refused(api: Api) -> None:
    model = mlp(2)
    api.fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _step(model)
    optimizer.step()
    model[0][0].weight = nn.Parameter(torch.ones(16, 16))
    _step(model)
    with pytest.raises(RuntimeError, match=r"SGD \(rank \d\) has 0\.0\.weight"):
        optimizer.step()


# Optimizers


@pytest.mark.parametrize("face", ["fully_shard", "flat"])
@pytest.mark.ours("trains nothing")
@on_ranks(2)
def test_optimizer_built_before_sharding_is_refused(api: Api, face: str) -> None:
    model = mlp(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model = _shard(api, model, face)
    _step(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"AdamW .* has 0\.0\.weight, .*sharding"):
            optimizer.step()
    torch.optim.AdamW(model.parameters()).step()


@pytest.mark.ours("trains nothing")
@on_ranks(2)
def test_optimizer_built_of_unsharded_parameters_is_refused(api: Api) -> None:
    model = mlp(2)
    api.fully_shard(model, reshard_after_forward=False)
    model(make_batch(16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.reshard()
    _step(model)
    with pytest.raises(RuntimeError, match=r"as they are while unsharded"):
        optimizer.step()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_group_added_to_an_optimizer_is_looked_at(api: Api) -> None:
    model = mlp(2)
    old = model[1][0].weight
    api.fully_shard(model)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    _step(model)
    optimizer.step()
    optimizer.add_param_group({"params": [old]})
    if api.is_torch:
        optimizer.step()  # trains nothing of it
        return
    with pytest.raises(RuntimeError, match=r"has 1\.0\.weight as before"):
        optimizer.step()


# torch.autograd.grad


@pytest.mark.parametrize("face", ["fully_shard", "orig"])
@pytest.mark.ours("says nothing")
@on_ranks(2)
def test_unreduced_gradient_from_autograd_is_named(api: Api, face: str) -> None:
    keep = {"sharding_strategy": api.ShardingStrategy.SHARD_GRAD_OP}
    keep = {"reshard_after_forward": False} if face == "fully_shard" else keep
    model = _shard(api, mlp(2), face, **keep)
    loss = mean_square(model(my_part(make_batch(16))))
    weight = (model[0] if face == "fully_shard" else model[0].module)[0].weight
    with pytest.warns(UserWarning, match=r"gradient of 0\.0\.weight .*nothing reduces"):
        (grad,) = torch.autograd.grad(loss, weight)
    assert grad.shape == (16, 16)


@on_ranks(2)
def test_gradient_of_inputs_alone_is_no_cause_for_complaint(api: Api) -> None:
    model = mlp(2)
    api.fully_shard(model, reshard_after_forward=False)
    x = make_batch(16).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (grad,) = torch.autograd.grad(model(x).sum(), x)
    assert grad.shape == x.shape
    assert world_size() == 2
    assert all(p.grad is None for p in model.parameters())
