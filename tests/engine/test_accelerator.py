"""An accelerator that torch was built for and that this machine does not have."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from torch import nn

from fullshard.faces import meshes
from tests.api import Api
from tests.harness import mesh_of, on_ranks
from tests.models import mlp
from tests.training import make_batch, mean_square, my_part

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="this machine has an accelerator"
)


def _built_for_cuda() -> mock._patch[mock.Mock]:
    """Let torch be what the package index gives: CUDA is built in, whatever the machine has."""
    return mock.patch("torch._C._accelerator_getAccelerator", return_value=torch.device("cuda"))


def _train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model(my_part(make_batch(16)))).backward()
    optimizer.step()
    assert {parameter.device for parameter in model.parameters()} == {CPU}


@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_fully_shard_without_a_mesh_goes_on_on_the_cpu(api: Api, offload: bool) -> None:
    if api.is_torch and offload:
        pytest.skip("PyTorch pins memory for the device that is missing")
    model = mlp()
    options = {"offload_policy": api.CPUOffloadPolicy()} if offload else {}
    with _built_for_cuda():
        for layer in model:
            api.fully_shard(layer, **options)
        _train(api.fully_shard(model, **options))


@pytest.mark.ours("asks the missing device for its number")
@pytest.mark.parametrize("offload", [False, True])
@on_ranks(2)
def test_the_wrapper_without_a_device_goes_on_on_the_cpu(api: Api, offload: bool) -> None:
    options = {"cpu_offload": api.CPUOffload(offload_params=True)} if offload else {}
    with _built_for_cuda():
        _train(api.FullyShardedDataParallel(mlp(), use_orig_params=True, **options))


@pytest.mark.ours("has it in another package")
@on_ranks(2)
def test_replicate_without_a_mesh_goes_on_on_the_cpu(api: Api) -> None:
    with _built_for_cuda():
        _train(api.replicate(mlp()))


@pytest.mark.ours("asks the missing device for its number")
@pytest.mark.parametrize("axes", [1, 2])
@on_ranks(2)
def test_the_wrapper_on_a_mesh_of_the_cpu_goes_on_there(api: Api, axes: int) -> None:
    mesh = mesh_of(*[1, 2][-axes:])
    strategy = api.ShardingStrategy.FULL_SHARD if axes == 1 else api.ShardingStrategy.HYBRID_SHARD
    with _built_for_cuda():
        _train(api.FullyShardedDataParallel(mlp(), device_mesh=mesh, sharding_strategy=strategy))


@pytest.mark.ours("asks the missing device for its number")
@pytest.mark.parametrize("face", ["fully_shard", "replicate", "FullyShardedDataParallel"])
@pytest.mark.parametrize("is_built", [True, False], ids=["built for CUDA", "CPU build"])
@on_ranks(2)
def test_a_mesh_of_missing_devices_is_refused_before_anything_changes(
    api: Api, face: str, is_built: bool
) -> None:
    model = mlp()
    before = (type(model), dict(model.named_parameters()))
    option = "device_mesh" if face == "FullyShardedDataParallel" else "mesh"
    with _built_for_cuda() if is_built else contextlib.nullcontext():
        mesh = torch.distributed.DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)
        with pytest.raises(api.errors.MeshError) as refused:
            getattr(api, face)(model, **{option: mesh})
    for fact in (f"{mesh} is", "no accelerator", "init_device_mesh('cpu', ...)"):
        assert fact in str(refused.value)
    assert (type(model), dict(model.named_parameters())) == before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.ours("asks the missing device for its number")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
@on_ranks(2)
def test_a_device_that_is_asked_for_and_missing_is_refused(api: Api, device: str | int) -> None:
    model = mlp()
    before = dict(model.named_parameters())
    refused = pytest.raises(api.errors.ShardingError, match=f"device_id={device}: .* no acceler")
    with _built_for_cuda(), refused:
        api.FullyShardedDataParallel(model, device_id=device)
    assert dict(model.named_parameters()) == before


@pytest.mark.ours("makes one in each call, and beside a GPU a process group with it")
@on_ranks(2)
def test_calls_without_a_mesh_share_one(api: Api) -> None:
    model = mlp()
    with mock.patch.object(meshes, "init_device_mesh", wraps=meshes.init_device_mesh) as made:
        for layer in model:
            api.fully_shard(layer)
        _train(api.fully_shard(model))
    assert made.call_count <= 1  # none, if a test before has one that is still alive
