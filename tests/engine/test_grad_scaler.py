"""ShardedGradScaler: every rank skips a step or none does, whatever gradients each one holds."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import SGD, Adam

from fullshard.optim.grad_scaler import ShardedGradScaler
from tests.api import Api
from tests.collectives import record_traffic
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.selection import one_way
from tests.training import local, make_batch, mean_square, my_part

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")

INF = float("inf")


def _scaler(**options: Any) -> ShardedGradScaler:
    scaler = ShardedGradScaler("cpu", **{"init_scale": 8.0, **options})
    scaler.scale(torch.ones(()))  # the scale comes into being with its first use
    return scaler


def _parameter(grad: torch.Tensor | None) -> nn.Parameter:
    like = torch.empty(3) if grad is None else grad
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = grad
    return parameter


def _step(scaler: Any, *parameters: nn.Parameter, **options: Any) -> bool:
    """Step once with SGD and return whether it was skipped, as the scale says."""
    optimizer = SGD(parameters, lr=1.0, **options)
    scaler.step(optimizer)
    before = scaler.get_scale()
    scaler.update()
    return scaler.get_scale() < before


def test_constructor_is_pytorchs() -> None:
    def parameters(of: Any) -> list[tuple[str, Any]]:
        return [(p.name, p.default) for p in inspect.signature(of).parameters.values()]

    assert parameters(ShardedGradScaler) == parameters(TorchScaler)
    assert parameters(ShardedGradScaler._unscale_grads_) == parameters(TorchScaler._unscale_grads_)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scaled_outputs_keep_dtype_and_containers(dtype: torch.dtype) -> None:
    scaler = _scaler()
    one = torch.ones((), dtype=dtype)
    single, (first, [second, third]) = scaler.scale([one, (one, [one, one[None]])])
    for scaled in (scaler.scale(one), single, first, second, third):
        assert scaled.item() == 8.0
        assert scaled.dtype == dtype
    assert [scaled.item() for scaled in scaler.scale(iter([one, one]))] == [8.0, 8.0]
    with pytest.raises(ValueError, match="Tensor or an iterable"):
        scaler.scale(3)


def test_disabled_scaler_does_nothing() -> None:
    scaler = ShardedGradScaler("cpu", enabled=False)
    parameter = _parameter(torch.full((3,), INF))
    assert scaler.scale(3) == 3
    scaler.step(SGD([parameter], lr=1.0))
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert parameter.isinf().all()


@on_ranks(2)
def test_sparse_overflow_in_coalescing_is_found() -> None:
    indices = torch.tensor([[1, 1, 1], [0, 0, 2]])
    values = torch.tensor([2.0**15, 2.0**15, 1.0], dtype=torch.float16)
    with warnings.catch_warnings():  # of torch before 2.13, of checks that were asked for
        warnings.simplefilter("ignore", UserWarning)
        grad = torch.sparse_coo_tensor(indices, values, (2, 3), check_invariants=True)
    optimizer = SGD([_parameter(grad)], lr=1.0)
    found = _scaler()._unscale_grads_(optimizer, torch.tensor(0.5), torch.zeros(1))
    assert found == {torch.device("cpu"): torch.ones(1)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [INF, float("nan")])
@on_ranks(2, 4)
def test_one_bad_gradient_makes_every_rank_skip(dtype: torch.dtype, bad: float) -> None:
    scaler = _scaler()
    grad = torch.full((3,), bad if rank() == world_size() - 1 else 16.0, dtype=dtype)
    parameter = _parameter(grad)
    assert _step(scaler, parameter)
    assert scaler.get_scale() == 4.0
    assert parameter.equal(torch.zeros(3, dtype=dtype))
    parameter.grad = torch.full((3,), 16.0, dtype=dtype)
    assert not _step(scaler, parameter)
    assert parameter.equal(torch.full((3,), -4.0, dtype=dtype))


@pytest.mark.parametrize("overflows", [False, True])
@on_ranks(2)
def test_ranks_without_gradients_or_elements_take_part(overflows: bool) -> None:
    scaler = _scaler()
    grads = [torch.full((3,), INF if overflows else 1.0), None]
    nothing = _parameter(torch.empty(0))
    with record_traffic() as traffic:
        assert _step(scaler, _parameter(grads[rank()]), nothing) == overflows
    assert traffic.calls == {"all_reduce": 1}


@on_ranks(2)
def test_sharded_and_plain_gradients_go_together() -> None:
    whole = torch.arange(10.0).view(5, 2)
    sharded = _parameter(distribute_tensor(whole, mesh_of(2), [Shard(0)]))
    plain = _parameter(torch.full((3,), 8.0))
    half = _parameter(torch.full((3,), 8.0, dtype=torch.float16))
    scaler = _scaler()
    optimizer = SGD([{"params": [sharded, plain]}, {"params": [half]}], lr=1.0)
    scaler.unscale_(optimizer)
    assert isinstance(sharded.grad, DTensor)
    assert sharded.grad.full_tensor().equal(whole / 8)
    assert plain.grad.equal(torch.ones(3))
    assert half.grad.equal(torch.ones(3, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert sharded.full_tensor().equal(whole / -8)


@on_ranks(2)
def test_bad_element_in_one_shard_makes_every_rank_skip() -> None:
    whole = torch.ones(5, 2)
    whole[0, 0] = INF
    sharded = _parameter(distribute_tensor(whole, mesh_of(2), [Shard(0)]))
    assert _step(_scaler(), sharded, _parameter(torch.ones(3)))
    assert local(sharded).equal(torch.zeros_like(local(sharded)))


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_optimizers_that_unscale_for_themselves_skip_together(sharded: bool) -> None:
    grad = torch.full((4,), 8.0)
    grad[0] = INF if sharded or rank() == 0 else 8.0
    if sharded:
        grad = distribute_tensor(grad, mesh_of(2), [Shard(0)])
    parameter = _parameter(grad)
    optimizer = Adam([parameter], fused=True)
    scaler = _scaler()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert local(parameter).equal(torch.zeros_like(local(parameter)))


@on_ranks(4)
def test_other_groups_go_on() -> None:
    mesh = mesh_of(2, 2)
    scaler = _scaler(process_group=mesh.get_group("shard"))
    parameter = _parameter(torch.full((3,), INF if rank() == 0 else 8.0))
    assert _step(scaler, parameter) == (mesh.get_local_rank("replicate") == 0)


@on_ranks(2)
def test_scale_moves_as_pytorchs() -> None:
    scalers = [
        kind("cpu", init_scale=2.0**10, growth_interval=2, growth_factor=3.0, backoff_factor=0.25)
        for kind in (ShardedGradScaler, TorchScaler)
    ]
    overflows = [False, False, True, False, True, True, False, False, False, False]
    trajectories: list[list[Any]] = [[], []]
    for scaler, trajectory in zip(scalers, trajectories, strict=True):
        parameter = nn.Parameter(torch.ones(3))
        for step, overflow in enumerate(overflows):
            scaler.scale((parameter * (rank() + 1)).sum()).backward()
            if overflow and step % world_size() == rank():
                parameter.grad[1] = INF
            optimizer = SGD([parameter], lr=0.1)
            scaler.step(optimizer)
            scaler.update(100.0 if step == len(overflows) - 1 else None)
            optimizer.zero_grad()
            trajectory.append((scaler.state_dict(), parameter.tolist()))
    assert trajectories[0] == trajectories[1]


@on_ranks(2)
def test_sharded_model_in_float16_trains_through_an_overflow(api: Api) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4))
    policy = api.MixedPrecisionPolicy(torch.float16, torch.float16)
    for module in (model[0], model[2], model):
        api.fully_shard(module, mp_policy=policy)
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**30)  # more than float16 can hold
    batch = my_part(make_batch(4))
    start = [local(p).clone() for p in model.parameters()]
    skipped = []
    for _ in range(25):
        scaler.scale(mean_square(model(batch))).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        skipped.append(scaler.get_scale() < before)
        same = all(map(torch.equal, start, map(local, model.parameters())))
        assert same == all(skipped)
    assert skipped[0]
    assert not skipped[-1]
    views: list[Any] = [None] * world_size()
    dist.all_gather_object(views, skipped)
    assert views == [skipped] * world_size()
