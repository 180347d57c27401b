"""An accelerator that torch was built for and that this machine does not have."""

from __future__ import annotations

import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from tests.api import Api
from tests.harness import on_ranks
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


@pytest.mark.ours("asks the missing device for its number")
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
@on_ranks(2)
def test_a_device_that_is_asked_for_and_missing_is_refused(api: Api, device: str | int) -> None:
    model = mlp()
    before = dict(model.named_parameters())
    with _built_for_cuda(), warnings.catch_warnings():
        with pytest.raises(api.errors.ShardingError, match=f"device_id={device}: .* no acceler"):
            api.FullyShardedDataParallel(model, device_id=device)
        mesh = torch.distributed.DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=0)
        with pytest.raises(api.errors.MeshError, match=r"init_device_mesh\('cpu'"):
            api.fully_shard(model, mesh=mesh)
    assert dict(model.named_parameters()) == before
