"""Whole parameters that stay in sight outside of forward and backward, and their gradients."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank
from tests.models import mlp
from tests.selection import one_way
from tests.training import (
    assert_gradients_are_parts_of,
    full_gradients,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

KEEPS = ["method", "forward", "evaluation", "unshard"]
kept = pytest.mark.parametrize("how", KEEPS)


def _model(api: Api, how: str, **options: Any) -> nn.Sequential:
    model = mlp(2)
    options["reshard_after_forward"] = how not in ("forward", "evaluation")
    for layer in model:
        api.fully_shard(layer, **options)
    api.fully_shard(model, **options)
    if how == "method":
        model.set_reshard_after_backward(False)
    return model


def _backward(model: nn.Module, how: str, seed: int = 0) -> None:
    """Leave gradients behind, and whole parameters in sight."""
    mean_square(model(my_part(make_batch(16, seed=seed)))).backward()
    if how == "forward":
        model(make_batch(16))
    if how == "evaluation":
        with torch.no_grad():
            model(make_batch(16))
    for layer in model if how == "unshard" else ():
        layer.unshard()
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())


@kept
@pytest.mark.parametrize("clip", ["torch", "ours"])
@pytest.mark.ours("clips nothing")
@on_ranks(1, 2, 3)
def test_clipping_what_modules_show_clips_what_is_trained(api: Api, clip: str, how: str) -> None:
    alone = mlp(2)
    model = _model(api, how)
    with torch.no_grad():
        for one, sharded in zip(alone.parameters(), model.parameters(), strict=True):
            one.copy_(sharded.full_tensor())
    trained = list(model.parameters())
    optimizers = [torch.optim.SGD(trained, lr=0.1), torch.optim.SGD(alone.parameters(), lr=0.1)]
    for step in range(3):
        _backward(model, how, seed=step)
        mean_square(alone(make_batch(16, seed=step))).backward()
        clips = torch.nn.utils.clip_grad_norm_ if clip == "torch" else api.clip_grad_norm_
        norm = clips(model.parameters(), 0.01)
        expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        torch.testing.assert_close(norm, expected)
        for layer in model:
            layer.reshard()
        assert_gradients_are_parts_of(model, full_gradients(alone))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@kept
@pytest.mark.ours("shows none, and forgets none")
@on_ranks(2)
def test_gradients_are_seen_and_forgotten_through_what_modules_show(api: Api, how: str) -> None:
    model = _model(api, how)
    trained = list(model.parameters())
    _backward(model, how)
    seen = [p.grad for p in model.parameters() if p.grad is not None]
    assert [id(grad) for grad in seen] == [id(parameter.grad) for parameter in trained]
    for parameter in model.parameters():
        parameter.grad = None
    assert all(parameter.grad is None for parameter in trained)
    assert all(parameter.grad is None for parameter in model.parameters())
    _backward(model, how)
    nn.Module.zero_grad(model, set_to_none=False)
    assert all(not p.grad.full_tensor().any() for p in trained)
    mean_square(model(my_part(make_batch(16)))).backward()
    assert all(parameter.grad.full_tensor().any() for parameter in trained)


@on_ranks(2)
@pytest.mark.ours("takes it, and trains nothing")
def test_whole_gradient_given_to_what_is_shown_is_refused_by_name(api: Api) -> None:
    model = _model(api, "method")
    _backward(model, "method")
    with pytest.raises(RuntimeError, match=r"^0\.0\.weight stays unsharded.* model\.reshard\(\)"):
        model[0][0].weight.grad = torch.ones(16, 16)


@on_ranks(2)
@pytest.mark.parametrize("unused", [False, True])
def test_gradients_are_right_whatever_stays_in_sight_between_backwards(
    api: Api, unused: bool
) -> None:
    """A unit that a backward does not reach must not have its gradient taken for a new one."""
    model = _model(api, "method")
    model.set_reduce_scatter_unused_params(unused)
    alone = mlp(2)
    with torch.no_grad():
        for one, sharded in zip(alone.parameters(), model.parameters(), strict=True):
            one.copy_(sharded.full_tensor())
    for seed in range(3):
        batch = make_batch(16, seed=seed)
        for each, part in ((alone, batch), (model, my_part(batch))):
            hidden = each[0](part)
            if seed != 1:
                hidden = each[1](hidden)
            mean_square(hidden).backward()
    for layer in model:
        layer.reshard()
    assert_gradients_are_parts_of(model, full_gradients(alone))


@on_ranks(2)
def test_what_stays_in_sight_can_be_copied_and_is_a_parameter_in_the_next_forward(api: Api) -> None:
    model = _model(api, "method")
    types: list[type] = []
    model[0][0].register_forward_pre_hook(lambda module, _: types.append(type(module.weight)))
    for _ in range(2):
        _backward(model, "method")
        weight = model[0][0].weight
        assert isinstance(weight, nn.Parameter)
        other = copy.deepcopy(weight)
        assert type(other) is nn.Parameter
        assert other.grad is None
        torch.testing.assert_close(other.data, weight.data)
    assert types == [nn.Parameter, nn.Parameter]
    model.set_reshard_after_backward(True)
    mean_square(model(my_part(make_batch(16)))).backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


@on_ranks(4)
@pytest.mark.ours("clips nothing")
def test_clipping_reaches_what_tensor_parallel_divides(api: Api) -> None:
    mesh = mesh_of(2, 2)
    tensor_parallel, data_parallel = mesh["shard"], mesh["replicate"]
    alone = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
    model = copy.deepcopy(alone)
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, tensor_parallel, plan)
    api.fully_shard(model, mesh=data_parallel)
    model.set_reshard_after_backward(False)
    batch = make_batch(16)
    mean_square(alone(batch)).backward()
    mean_square(model(batch.chunk(2)[rank() // 2])).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    norm = api.clip_grad_norm_(model.parameters(), 0.01)
    torch.testing.assert_close(norm, expected)
    for one, parameter in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), one.grad)


@on_ranks(4)
@pytest.mark.ours("clears what is shown alone")
def test_zero_grad_reaches_what_is_kept_over_a_smaller_group(api: Api) -> None:
    model = mlp(2)
    for layer in model:
        api.fully_shard(layer, reshard_after_forward=2)
    api.fully_shard(model, reshard_after_forward=2)
    trained = list(model.parameters())
    mean_square(model(my_part(make_batch(16)))).backward()
    loss = mean_square(model(my_part(make_batch(16))))
    model.zero_grad()
    assert all(parameter.grad is None for parameter in trained)
    loss.backward()
    assert all(parameter.grad is not None for parameter in trained)


@pytest.mark.ours("keeps what is trained as it was, or cannot pickle a mesh")
@on_ranks(2)
def test_whole_parameters_in_sight_can_be_frozen_and_pickled(api: Api) -> None:
    model = mlp(2)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    model.set_reshard_after_backward(False)
    for is_trained in (True, False, True):
        for parameter in model[0].parameters():
            parameter.requires_grad_(is_trained)
        mean_square(model(my_part(make_batch(16)))).backward()
        copies = pickle.loads(pickle.dumps(list(model.parameters())))
        assert [c.shape for c in copies] == [p.shape for p in model.parameters()]
        assert [c.requires_grad for c in copies] == [is_trained] * 2 + [True] * 2
        assert [p.grad is not None for p in model.parameters()] == [is_trained] * 2 + [True] * 2
        model.reshard()
        assert [p.grad is not None for p in model.parameters()] == [is_trained] * 2 + [True] * 2
        model.zero_grad()
        model.unshard()
