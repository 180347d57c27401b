"""Ranks that reach each other's device memory, on a device that is host memory."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fullshard
from fullshard.comm import select
from fullshard.comm.device_memory import DeviceMemoryComm
from fullshard.errors import CommError
from fullshard.policies import CommChoice
from tests.api import Api
from tests.harness import mesh_of, on_ranks, rank
from tests.host_peers import HostPeers, NoPeers
from tests.models import MixedDtypes, UnevenMLP, mlp
from tests.selection import repeats
from tests.training import assert_equal, full_parameters, make_batch, mean_square, my_part
from tests.twins import assert_train_alike, shard_layers

API = Api("peer_memory")


@contextlib.contextmanager
def _peers(device: HostPeers) -> Iterator[HostPeers]:
    """Let peer memory be that of a device, until the end."""

    def connect(group: dist.ProcessGroup, _: torch.device) -> DeviceMemoryComm:
        return DeviceMemoryComm(group, device)

    before = fullshard.set_default_comm("peer_memory")
    with (
        mock.patch.object(select, "_connect", connect),
        mock.patch.object(select, "_connected", type(select._connected)()),
    ):
        yield device
    fullshard.set_default_comm(before)


def _train(model: nn.Module, features: int, num_microbatches: int = 1) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(3):
        for micro in range(num_microbatches):
            if isinstance(model, fullshard.FSDPModule):
                model.set_requires_gradient_sync(micro == num_microbatches - 1)
            batch = make_batch(features, seed=10 * step + micro)
            mean_square(model(my_part(batch))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@on_ranks(2, 3)
def test_training_is_that_of_one_process() -> None:
    with _peers(HostPeers(seed=rank(), dawdle_s=2e-4)) as device:
        model, alone = shard_layers(API, mlp())
        assert_train_alike(alone, model)
        assert "peer memory (one host, test)" in str(fullshard.describe(model))
    assert device.waits > 0
    assert device.exports > 0


@repeats(lambda s: s["kind"] in ("bf16", "columns"))
@pytest.mark.parametrize("kind", ["uneven", "mixed", "bf16", "columns", "accumulate", "hybrid"])
@on_ranks(2)
def test_every_kind_of_unit_trains_as_over_collectives(kind: str) -> None:
    torch.manual_seed(3)
    model: Any = {"uneven": UnevenMLP, "mixed": MixedDtypes}.get(kind, mlp)()
    features = next(p for p in model.parameters() if p.dim() == 2).shape[1]
    options: dict[str, Any] = {}
    if kind == "bf16":
        options["mp_policy"] = fullshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if kind == "columns":
        options["shard_placement_fn"] = lambda p: (
            torch.distributed.tensor.Shard(1) if p.dim() == 2 else None
        )
    if kind == "hybrid":
        options["mesh"] = mesh_of(2, 1)
    other = copy.deepcopy(model)

    def shard(model: Any) -> nn.Module:
        for child in model.children():
            if any(True for _ in child.parameters()):
                fullshard.fully_shard(child, **options)
        return fullshard.fully_shard(model, **options)

    microbatches = 2 if kind == "accumulate" else 1
    with _peers(HostPeers(seed=rank(), dawdle_s=1e-4)):
        ours = _train(shard(model), features, microbatches)
    before = fullshard.set_default_comm("process_group")
    theirs = _train(shard(other), features, microbatches)
    fullshard.set_default_comm(before)
    assert_equal(ours, theirs, rtol=0.0, atol=0.0)


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@on_ranks(2)
def test_the_wrapper_trains_as_over_collectives(use_orig_params: bool) -> None:
    torch.manual_seed(3)
    model = mlp()
    other = copy.deepcopy(model)

    def losses(model: nn.Module) -> list[float]:
        wrapped = fullshard.FullyShardedDataParallel(
            model,
            auto_wrap_policy=fullshard.ModuleWrapPolicy({nn.Linear}),
            use_orig_params=use_orig_params,
        )
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.2)
        found = []
        for step in range(3):
            loss = mean_square(wrapped(my_part(make_batch(16, seed=step))))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with _peers(HostPeers(seed=rank(), dawdle_s=1e-4)):
        ours = losses(model)
    before = fullshard.set_default_comm("process_group")
    assert ours == losses(other)
    fullshard.set_default_comm(before)


@on_ranks(2)
def test_a_parameter_that_one_rank_used_gets_its_gradient_on_both() -> None:
    with _peers(HostPeers()):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
        model.forward = model[rank()].forward  # type: ignore[method-assign]
        fullshard.fully_shard(model)
        mean_square(model(make_batch(8))).backward()
        assert [layer.weight.grad is not None for layer in model] == [True, True, False]


@on_ranks(2)
def test_a_step_after_an_exception_works() -> None:
    with _peers(HostPeers(seed=rank(), dawdle_s=1e-4)):
        model, alone = shard_layers(API, mlp())
        for _ in range(2):
            loss = mean_square(model(my_part(make_batch(16))))
            loss.register_hook(lambda grad: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                loss.backward()
        assert_train_alike(alone, model)


@on_ranks(2)
def test_ranks_whose_memory_cannot_be_opened_say_so() -> None:
    group = dist.group.WORLD
    with _peers(NoPeers()):
        with pytest.raises(CommError, match="invalid device"):
            select.select_comm(group, torch.device("cpu"), CommChoice.PEER_MEMORY)
        comm = select.select_comm(group, torch.device("cpu"), CommChoice.AUTO)
    assert "no peer memory: rank " in comm.name


@on_ranks(2)
def test_a_rank_with_a_gpu_of_its_own_gets_the_process_group() -> None:
    cuda = torch.device("cuda", 0)
    with _peers(HostPeers()), mock.patch.object(select, "_share_a_gpu", return_value=False):
        comm = select.select_comm(dist.group.WORLD, cuda, CommChoice.AUTO)
    assert "no two ranks share a GPU" in comm.name
    with (
        _peers(HostPeers()),
        mock.patch.object(select, "_share_a_gpu", return_value=True),
    ):
        comm = select.select_comm(dist.group.WORLD, cuda, CommChoice.AUTO)
        assert isinstance(comm, DeviceMemoryComm)
        offloaded = select.select_comm(
            dist.group.WORLD, cuda, CommChoice.AUTO, shards_on=torch.device("cpu")
        )
    assert "shards are on cpu" in offloaded.name
