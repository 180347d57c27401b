"""`replicate`: whole parameters on every rank, averaged gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate

import fullshard
from tests.api import Api
from tests.collectives import record_traffic
from tests.harness import mesh_of, on_ranks, world_size
from tests.models import mlp
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    full_parameters,
    gradients_alone,
    make_batch,
    mean_square,
    my_part,
)

ours_only = pytest.mark.ours("has replicate() elsewhere")


@ours_only
@on_ranks(2, 3)
def test_gradients_are_those_of_the_whole_batch(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    whole, expected = full_parameters(model), gradients_alone(model, batch)
    for layer in model:
        fullshard.replicate(layer)
    fullshard.replicate(model)
    assert {parameter.placements for parameter in model.parameters()} == {(Replicate(),)}
    assert_equal(full_parameters(model), whole)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


@ours_only
@pytest.mark.apis("process_group")
@on_ranks(2)
def test_only_gradients_travel(api: Api) -> None:
    model = mlp()
    for layer in model:
        fullshard.replicate(layer)
    fullshard.replicate(model)
    for _ in range(2):
        with record_traffic() as traffic:
            mean_square(model(make_batch(16))).backward()
        assert set(traffic.calls) <= {"all_reduce"}
        # Gradients, and which parameters had one.
        assert traffic.calls["all_reduce"] == 2 * len(model)


@ours_only
@on_ranks(2)
def test_class_is_that_of_a_replicated_module(api: Api) -> None:
    layer = nn.Linear(4, 4)
    assert fullshard.replicate(layer) is layer
    assert isinstance(layer, fullshard.ReplicateModule)
    assert isinstance(layer, fullshard.FSDPModule)
    assert isinstance(layer, nn.Linear)
    assert type(layer).__name__ == "ReplicateLinear"
    assert type(fullshard.replicate(mlp())[:2]) is nn.Sequential


@ours_only
@on_ranks(4)
def test_replicated_blocks_train_inside_a_sharded_model(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    fullshard.replicate(model[1])
    api.fully_shard(model[0])
    api.fully_shard(model)
    assert model[1][0].weight.placements == (Replicate(),)
    mean_square(model(my_part(batch))).backward()
    assert_gradients_are_parts_of(model, expected)


@ours_only
@on_ranks(2)
def test_copy_is_replicated_too(api: Api) -> None:
    model, batch = mlp(), make_batch(16)
    expected = gradients_alone(model, batch)
    other = copy.deepcopy(fullshard.replicate(model))
    assert type(other) is type(model)
    mean_square(other(my_part(batch))).backward()
    assert_gradients_are_parts_of(other, expected)
    assert model[0][0].weight.grad is None


@ours_only
@on_ranks(2)
def test_module_is_either_sharded_or_replicated(api: Api) -> None:
    with pytest.raises(RuntimeError, match="by `fully_shard`"):
        fullshard.replicate(api.fully_shard(mlp()))
    with pytest.raises(RuntimeError, match="by `replicate`"):
        api.fully_shard(fullshard.replicate(mlp()))
    with pytest.raises(AssertionError, match="applied to a module once"):
        fullshard.replicate(fullshard.replicate(mlp()))


@ours_only
@on_ranks(2)
def test_mesh_has_one_dim_and_nothing_to_shard_over(api: Api) -> None:
    with pytest.raises(ValueError, match="1D DeviceMesh"):
        fullshard.replicate(mlp(), mesh=mesh_of(1, world_size()))
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="requires replicate-only dims"):
        fullshard.replicate(
            mlp(), mesh=mesh, dp_mesh_dims=fullshard.DataParallelMeshDims(shard="dp")
        )
