"""The global gradient norm."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD

from fullshard.errors import StateError
from fullshard.optim import grad_norm
from tests.api import Api
from tests.fsdp1.models import CPU, quiet
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.models import UnevenMLP
from tests.selection import one_way, repeats
from tests.training import (
    assert_equal,
    assert_gradients_are_parts_of,
    full,
    full_gradients,
    make_batch,
    mean_square,
    my_part,
)

pytestmark = one_way("the other files of this folder; tests/parity; tests/differential")


def _sharded_after_backward(api: Api, **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    alone = UnevenMLP()
    torch.manual_seed(1)
    model = UnevenMLP()
    batch = 10 * make_batch(7)
    mean_square(alone(batch)).backward()
    api.fully_shard(model[0], **options)
    api.fully_shard(model, **options)
    mean_square(model(my_part(batch))).backward()
    return model, alone


@pytest.mark.ours("not part of the API")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
@on_ranks(2, 4)
def test_norm_and_clipping_equal_the_unwrapped_models(
    api: Api, norm_type: float, max_norm: float
) -> None:
    model, alone = _sharded_after_backward(api)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
    norm = api.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    assert isinstance(norm, torch.Tensor)
    assert not isinstance(norm, DTensor)
    assert norm.shape == ()
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))


@pytest.mark.ours("not part of the API")
@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("-inf"), float("nan")])
@on_ranks(2)
def test_other_orders_are_refused_where_gradients_are_divided(api: Api, norm_type: float) -> None:
    model, _ = _sharded_after_backward(api)
    before = [param.grad.to_local().clone() for param in model.parameters()]
    with pytest.raises(StateError, match="norm_type is"):
        api.clip_grad_norm_(model.parameters(), 1e-3, norm_type)
    for param, grad in zip(model.parameters(), before, strict=True):
        assert param.grad.to_local().equal(grad)


@pytest.mark.ours("its wrapper divides by zero where it shards")
@pytest.mark.parametrize("norm_type", [0.0, float("-inf")])
@on_ranks(2)
def test_other_orders_are_those_of_torch_where_no_gradient_is_divided(
    api: Api, norm_type: float
) -> None:
    alone = UnevenMLP()
    with quiet():
        model = api.FullyShardedDataParallel(
            copy.deepcopy(alone),
            device_id=CPU,
            sharding_strategy=api.ShardingStrategy.NO_SHARD,
            use_orig_params=True,
        )
    for each in (alone, model):
        mean_square(each(make_batch(7))).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3, norm_type)
    torch.testing.assert_close(model.clip_grad_norm_(1e-3, norm_type), expected)


@pytest.mark.ours("not part of the API")
@on_ranks(4)
def test_replicas_are_counted_once(api: Api) -> None:
    model, alone = _sharded_after_backward(api, mesh=mesh_of(2, 2))
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    norm = api.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_parameters_without_gradient_do_not_count(api: Api) -> None:
    model, alone = _sharded_after_backward(api)
    model[4].zero_grad()
    alone[4].zero_grad()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    torch.testing.assert_close(api.clip_grad_norm_(model.parameters(), 1e-3), expected)
    model.zero_grad()
    assert api.clip_grad_norm_(model.parameters(), 1e-3).item() == 0.0


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_plain_parameters_may_be_among_them(api: Api) -> None:
    model, alone = _sharded_after_backward(api)
    extra, extra_alone = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    extra.grad, extra_alone.grad = torch.full((3,), 2.0), torch.full((3,), 2.0)
    expected = nn.utils.clip_grad_norm_([*alone.parameters(), extra_alone], 1e-3)
    norm = api.clip_grad_norm_([*model.parameters(), extra], 1e-3)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(extra.grad, extra_alone.grad)


@on_ranks(2, 4)
def test_clipping_of_torch_works_on_sharded_parameters(api: Api) -> None:
    model, alone = _sharded_after_backward(api)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
    assert_gradients_are_parts_of(model, full_gradients(alone))


# Under tensor parallel

# A weight that both kinds of parallelism cut along one dim, one cut along two, a bias that tensor
# parallel repeats, and layers that it leaves plain.
PLAN: dict[str, ParallelStyle] = {"1.0": ColwiseParallel(), "2": RowwiseParallel()}


def _layers() -> nn.Sequential:
    torch.manual_seed(1)
    linear = nn.Linear
    columns = nn.Sequential(linear(8, 12), nn.Tanh())
    return nn.Sequential(linear(7, 8), columns, linear(12, 6), linear(6, 3), nn.LayerNorm(3))


@functools.cache
def _parallel_mesh() -> DeviceMesh:
    """Replicas that are one rank each, data parallel over two, tensor parallel over two."""
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))


def _parallelized(model: nn.Module) -> nn.Module:
    return parallelize_module(model, _parallel_mesh()["tp"], PLAN)


def _fully_shard(api: Api, model: nn.Module, **options: Any) -> nn.Module:
    api.fully_shard(model[1], **options)
    return api.fully_shard(model, **options)


def _wrap(api: Api, model: nn.Module, **options: Any) -> nn.Module:
    with quiet():
        model[1] = api.FullyShardedDataParallel(model[1], device_id=CPU, **options)
        return api.FullyShardedDataParallel(model, device_id=CPU, **options)


def _spmd(api: Api, model: nn.Module) -> nn.Module:
    mesh = _parallel_mesh()["dp", "tp"]
    # What tensor parallel divides is repeated over the data-parallel axis until it is sharded.
    for layer, style in ((model[1][0], "columns"), (model[2], "rows")):
        _distribute(layer, mesh, style)
    distribute_module(model, mesh)
    dims = api.DataParallelMeshDims(shard="dp")
    return _fully_shard(api, model, mesh=mesh, dp_mesh_dims=dims)


def _distribute(layer: nn.Linear, mesh: DeviceMesh, style: str) -> None:
    weight = Shard(0) if style == "columns" else Shard(1)
    bias = Shard(0) if style == "columns" else Replicate()
    for name, placement in (("weight", weight), ("bias", bias)):
        value = distribute_tensor(layer.get_parameter(name).data, mesh, [Replicate(), placement])
        layer.register_parameter(name, nn.Parameter(value))


FACES: dict[str, Callable[[Api, nn.Module], nn.Module]] = {
    "fully_shard": lambda api, model: _fully_shard(
        api, _parallelized(model), mesh=_parallel_mesh()["dp"]
    ),
    "hybrid": lambda api, model: _fully_shard(
        api, _parallelized(model), mesh=_parallel_mesh()["replicate", "dp"]
    ),
    "dp_mesh_dims": _spmd,
    "replicate": lambda api, model: api.replicate(
        _parallelized(model), mesh=_parallel_mesh()["dp"]
    ),
    **{
        f"wrapper_{style}_{strategy}": functools.partial(
            lambda api, model, strategy, use_orig_params: _wrap(
                api,
                _parallelized(model),
                device_mesh=_parallel_mesh()["dp"],
                sharding_strategy=api.ShardingStrategy[strategy],
                use_orig_params=use_orig_params,
            ),
            strategy=strategy,
            use_orig_params=style == "orig",
        )
        for style in ("orig", "flat")
        for strategy in ("FULL_SHARD", "NO_SHARD")
    },
}


def _clip(api: Api, model: Any, max_norm: float, norm_type: float) -> Tensor:
    if hasattr(model, "clip_grad_norm_"):
        return model.clip_grad_norm_(max_norm, norm_type)
    return api.clip_grad_norm_(model.parameters(), max_norm, norm_type)


def _assert_same_on_every_rank(value: Tensor) -> None:
    everyone = [torch.empty_like(value) for _ in range(world_size())]
    dist.all_gather(everyone, value.contiguous())
    for other in everyone:
        assert torch.equal(other, value)


def _forward(model: nn.Module, face: str, part: Tensor) -> Tensor:
    if face != "dp_mesh_dims":
        return model(part)
    placements = [Shard(0), Replicate()]
    out = model(DTensor.from_local(part, _parallel_mesh()["dp", "tp"], placements))
    return out.redistribute(placements=placements).to_local()


@pytest.mark.ours("its wrapper leaves the tensor-parallel axis out, and it has no function")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@repeats(lambda s: s["face"] not in ("fully_shard", "dp_mesh_dims", [*FACES][-1]))
@pytest.mark.parametrize("face", FACES)
@on_ranks(4)
def test_clipping_under_tensor_parallel_equals_one_process(
    api: Api, face: str, norm_type: float
) -> None:
    alone = _layers()
    model = FACES[face](api, copy.deepcopy(alone))
    batch = 10 * make_batch(7)
    dp = _parallel_mesh()["dp"].get_local_rank()
    optimizers = [SGD(each.parameters(), lr=0.5) for each in (alone, model)]
    for step in range(2):
        rolled = batch.roll(step, 0)
        mean_square(alone(rolled)).backward()
        mean_square(_forward(model, face, rolled.chunk(2)[dp])).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-1, norm_type)
        assert expected > 0.1
        norm = _clip(api, model, 1e-1, norm_type)
        torch.testing.assert_close(norm, expected, rtol=1e-5, atol=0)
        _assert_same_on_every_rank(norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = {name: full(value) for name, value in model.state_dict().items()}
    assert_equal(state, alone.state_dict(), rtol=1e-5, atol=1e-6)
    for value in model.state_dict().values():
        for axis, placement in enumerate(getattr(value, "placements", ())):
            if placement.is_replicate():
                _assert_replicated(value, axis)


def _assert_replicated(value: DTensor, axis: int) -> None:
    mine = value.to_local().contiguous()
    group = value.device_mesh.get_group(axis)
    everyone = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyone, mine, group=group)
    assert all(torch.equal(other, mine) for other in everyone)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@on_ranks(4)
def test_clipping_of_torch_works_under_tensor_parallel(api: Api, norm_type: float) -> None:
    layers = _layers()  # of which it takes those on one mesh alone
    alone = nn.Sequential(layers[1][0], nn.Tanh(), layers[2], nn.Tanh())
    mesh = _parallel_mesh()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(copy.deepcopy(alone), mesh["tp"], plan)
    api.fully_shard(model, mesh=mesh["dp"])
    batch = make_batch(8)
    mean_square(alone(batch)).backward()
    mean_square(model(batch.chunk(2)[mesh["dp"].get_local_rank()])).backward()
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 1e-3, norm_type)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3, norm_type)
    torch.testing.assert_close(full(norm), expected, rtol=1e-5, atol=0)
    assert_equal(full_gradients(model), full_gradients(alone), rtol=1e-5, atol=1e-9)


@pytest.mark.ours("not part of the API")
@on_ranks(4)
def test_gradients_whose_sums_are_still_to_be_formed_count_as_the_sums(api: Api) -> None:
    mesh = _parallel_mesh()["dp", "tp"]
    parts = nn.Parameter(DTensor.from_local(torch.zeros(3), mesh))
    parts.grad = DTensor.from_local(torch.full((3,), 0.5), mesh, [Partial(), Partial()])
    plain = nn.Parameter(torch.zeros(4))
    plain.grad = torch.full((4,), 2.0)
    norm = api.clip_grad_norm_([parts, plain], 1.0)
    torch.testing.assert_close(norm, torch.tensor(28.0).sqrt())
    torch.testing.assert_close(full(parts.grad), torch.full((3,), 2.0 / 28**0.5))


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_rank_without_gradient_of_what_is_sharded_takes_part(api: Api) -> None:
    model, alone = _sharded_after_backward(api)
    first, *_ = model.parameters()
    expected = nn.utils.clip_grad_norm_([*alone.parameters()][:1], 1e9)
    if mesh_of(2).get_local_rank() == 1:
        expected = expected.clone()
        shard = first.grad.to_local().clone()
        first.grad = None
    else:
        shard = torch.zeros(0)
    missing = torch.cat([shard.flatten(), torch.zeros(100)])[:100]
    dist.all_reduce(missing)
    norm = api.clip_grad_norm_([first], 1e9)
    torch.testing.assert_close(norm.square() + missing.square().sum(), expected.square())


@pytest.mark.ours("not part of the API")
@on_ranks(2)
def test_dtypes_may_be_mixed(api: Api) -> None:
    torch.manual_seed(1)
    alone = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 3).double())
    model = copy.deepcopy(alone)
    for parameter in alone.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    expected = sum(p.grad.double().square().sum() for p in alone.parameters()) ** 0.5
    with quiet():
        model = api.FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0) if parameter.numel() else None
    norm = api.clip_grad_norm_(model.parameters(), 1e9)
    torch.testing.assert_close(norm, expected)


@on_ranks(2)
@pytest.mark.ours("says nothing")
def test_a_norm_that_is_not_finite_is_mentioned_once_on_one_rank(api: Api) -> None:
    model, _ = _sharded_after_backward(api)
    said: list[str] = []
    grad_norm._mention_debug.cache_clear()  # of an earlier test
    with mock.patch.object(grad_norm.logger, "warning", lambda text, *_: said.append(text)):
        api.clip_grad_norm_(model.parameters(), 1.0)
        assert not said
        if rank() == 1:
            next(model.parameters()).grad.to_local().fill_(math.nan)
        for _ in range(2):
            assert api.clip_grad_norm_(model.parameters(), 1.0).isnan()
    assert len(said) == (1 if rank() == 0 else 0)
    assert not said or "FULLSHARD_DEBUG=nan" in said[0]


@pytest.mark.ours("takes it in the gradients' dtype")
def test_a_norm_is_float32_on_one_rank_as_on_several() -> None:
    parameter = nn.Parameter(torch.empty(1000, dtype=torch.bfloat16))
    parameter.grad = torch.linspace(1, 2, 1000).bfloat16()
    expected = parameter.grad.float().norm()
    norm = grad_norm.clip_grad_norm_([parameter], 1e9)
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, expected)
