"""`gathered`: losses of weights get the gradients that one process would give them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.errors import CommError, DivergenceError, StateError, UnsupportedError
from tests.api import Api
from tests.fsdp1.models import Block, batch, clean, net, quiet
from tests.harness import Fate, mesh_of, on_ranks, rank, run_fresh, world_size
from tests.live.ways import TRAINING, sharded, without_sync
from tests.test_transfer import HYBRID
from tests.training import mean_square, my_part

ours = pytest.mark.apis("peer_memory")
both = pytest.mark.apis("peer_memory", "process_group")

Loss = Callable[[Any, Callable[[Any], Tensor], Tensor, int], Tensor]


def _term(weight: Tensor, number: int) -> Tensor:
    """A loss of a weight that differs between ranks."""
    return (number + 1) * (weight * weight).sum() + weight.abs().sum()


def _both_losses(model: Any, whole: Any, x: Tensor, number: int) -> Tensor:
    return mean_square(model(x)) + _term(whole(_weight(model)), number)


def _term_first(model: Any, whole: Any, x: Tensor, number: int) -> Tensor:
    loss = _term(whole(_weight(model)), number)
    return loss + mean_square(model(x))


def _of_block(model: Any, whole: Any, x: Tensor, number: int) -> Tensor:
    return mean_square(model(x)) + _term(whole(_block(model).wide.weight), number)


def _tied(model: Any, whole: Any, x: Tensor, number: int) -> Tensor:
    return mean_square(model(x)) + _term(whole(_inner(model).tied.weight), number)


LOSSES: dict[str, Loss] = {
    "after": _both_losses,
    "before": _term_first,
    "block": _of_block,
    "tied": _tied,
}


def _inner(model: Any) -> Any:
    return getattr(model, "_fsdp_wrapped_module", model)


def _weight(model: Any) -> Any:
    return _inner(model).stem.weight


def _block(model: Any) -> Any:
    return _inner(_inner(model).blocks[1])


def _buffers_alike(model: Any) -> Any:
    """Let batch statistics not couple samples: ranks have parts of the batch."""
    _inner(model).batch_norm.eval()
    return model


def _expected(losses: list[Loss], num_ranks: int, *, frozen: str = "") -> dict[str, Tensor]:
    """Return the gradients of one process that averages the losses of all ranks."""
    model = _buffers_alike(net())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    for seed, loss in enumerate(losses):
        parts = batch(seed).chunk(num_ranks)
        total = sum(loss(model, lambda w: w, parts[r], r) for r in range(num_ranks))
        (total / num_ranks).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _gradients(model: Any) -> dict[str, Tensor]:
    """Return whole gradients, by a step of which the update is the gradient."""
    before = dict(fullshard.iter_full_state(model))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    names = {clean(name) for name, _ in net().named_parameters()}
    after = dict(fullshard.iter_full_state(model))
    return {name: before[name] - after[name] for name in before if name in names}


def _assert_gradients(model: Any, expected: dict[str, Tensor], tol: float = 2e-6) -> None:
    found = _gradients(model)
    for name, grad in found.items():
        other = expected.get(name, torch.zeros_like(grad))
        torch.testing.assert_close(
            grad, other, rtol=tol * 50, atol=tol, msg=lambda text, n=name: f"{n}: {text}"
        )


def _x(seed: int) -> Tensor:
    return my_part(batch(seed))


@ours
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", TRAINING)
@on_ranks(2)
def test_gradients_are_those_of_one_process(api: Api, way: str, loss: str) -> None:
    model = _buffers_alike(sharded(api, way))
    expected = _expected([LOSSES[loss]], 2)
    for _ in range(2):  # the second time, units are gathered early
        model.zero_grad()
        LOSSES[loss](model, fullshard.gathered, _x(0), rank()).backward()
        _assert_gradients(model, expected)
        _restore(model)


def _restore(model: Any) -> None:
    """Give the model its first values again."""
    with fullshard.full_parameters(model), torch.no_grad():
        values = dict(net().named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters():
            parameter.copy_(values[clean(name)])


@ours
@pytest.mark.parametrize("way", HYBRID)
@on_ranks(4)
def test_replicas_and_shards_are_averaged(api: Api, way: str) -> None:
    model = _buffers_alike(sharded(api, way))
    _both_losses(model, fullshard.gathered, _x(0), rank()).backward()
    _assert_gradients(model, _expected([_both_losses], 4))


@both
@pytest.mark.parametrize("way", ["fully_shard", "orig", "flat"])
@on_ranks(2)
def test_a_loss_of_weights_alone(api: Api, way: str) -> None:
    model = _buffers_alike(sharded(api, way))
    with torch.no_grad():
        model(_x(0))

    def loss(model: Any, whole: Any, _: Tensor, number: int) -> Tensor:
        return _term(whole(_weight(model)), number)

    for _ in range(2):
        loss(model, fullshard.gathered, _x(0), rank()).backward()
    _assert_gradients(model, _expected([loss, loss], 2))


@ours
@pytest.mark.parametrize("last", ["after", "block"])
@pytest.mark.parametrize("way", ["fully_shard", "orig", "flat", "hybrid_fully_shard"])
@on_ranks(4)
def test_gradients_accumulate_without_sync(api: Api, way: str, last: str) -> None:
    model = _buffers_alike(sharded(api, way))
    losses = [LOSSES["after"], LOSSES["before"], LOSSES[last]]
    for seed, loss in enumerate(losses):
        is_last = seed == len(losses) - 1
        with contextlib.nullcontext() if is_last else without_sync(model):
            loss(model, fullshard.gathered, _x(seed), rank()).backward()
    _assert_gradients(model, _expected(losses, 4))


@ours
@on_ranks(4)
def test_a_late_all_reduce_has_them_too(api: Api) -> None:
    model = _buffers_alike(sharded(api, "hybrid_fully_shard"))
    for seed in range(2):
        model.set_requires_all_reduce(seed == 1)
        _both_losses(model, fullshard.gathered, _x(seed), rank()).backward()
    _assert_gradients(model, _expected([_both_losses] * 2, 4))


@ours
@pytest.mark.parametrize("way", ["fully_shard", "orig"])
@on_ranks(2)
def test_frozen_parameters_and_no_grad_get_none(api: Api, way: str) -> None:
    model = net()
    model.stem.weight.requires_grad_(False)
    model = _buffers_alike(sharded(api, way, model))
    whole = fullshard.gathered(_weight(model))
    assert not whole.requires_grad
    assert whole.equal(net().stem.weight)
    with torch.no_grad():
        assert not fullshard.gathered(_block(model).wide.weight).requires_grad
    loss = mean_square(model(_x(0))) + _term(whole, rank())
    loss.backward()
    _assert_gradients(model, _expected([_both_losses], 2, frozen="stem.weight"))


@ours
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_divide_factor_and_staying_unsharded(api: Api, reshard: bool) -> None:
    model = net()
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        api.fully_shard(module, mesh=mesh_of(2), reshard_after_forward=reshard)
        module.set_gradient_divide_factor(4.0)
        module.set_reshard_after_backward(reshard)
    _buffers_alike(model)
    for seed in range(2):
        _of_block(model, fullshard.gathered, _x(seed), rank()).backward()
    model.reshard()
    for module in model.modules():
        if isinstance(module, api.FSDPModule):
            module.reshard()
    expected = _expected([_of_block] * 2, 2)
    _assert_gradients(model, {name: grad / 2 for name, grad in expected.items()})


class _TiedAcross(nn.Module):
    """A head that reads the embedding's weight, which another unit owns. tokens: (n,) -> (n, 11)."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.Linear(6, 6)
        self.whole = [whole]
        self.checkpoints = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        if self.checkpoints:
            return checkpoint(self._head, x, use_reentrant=False)
        return self._head(x)

    def _head(self, x: Tensor) -> Tensor:
        x = self.layer(x).tanh()
        (whole,) = self.whole
        penalty = whole(self.layer.weight).square().sum()
        return F.linear(x, whole(self.embed.weight)) + penalty


@both
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_another_units_weight_inside_forward(
    api: Api, checkpoints: bool, param_dtype: torch.dtype | None
) -> None:
    torch.manual_seed(2)
    alone = _TiedAcross(lambda w: w)
    torch.manual_seed(2)
    model = _TiedAcross(lambda w: fullshard.gathered(w).to(param_dtype or w.dtype))
    model.checkpoints = checkpoints
    policy = api.MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for module in (model.embed, model.layer, model):
        api.fully_shard(module, mesh=mesh_of(2), mp_policy=policy)
    tokens = torch.arange(8).reshape(2, 4)
    for _ in range(2):
        sum(alone(tokens[r]).square().mean() for r in range(2)).div(2).backward()
        model(tokens[rank()]).float().square().mean().backward()
    tol = 1e-5 if param_dtype is None else 0.1
    for name, parameter in model.named_parameters():
        expected = alone.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), expected, rtol=tol, atol=tol)


@ours
@on_ranks(4)
def test_with_tensor_parallel_it_is_whole_over_the_data_parallel_ranks(api: Api) -> None:
    torch.manual_seed(2)
    alone = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    model = copy.deepcopy(alone)
    mesh = mesh_of(2, 2)
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, mesh["shard"], plan)
    api.fully_shard(model, mesh=mesh["replicate"])
    number = mesh["replicate"].get_local_rank()
    x = torch.ones(3, 6)

    def loss(own: Any, whole: Any, number: int) -> Any:
        return (number + 1) * own(x).square().mean() + whole(own[0].weight).square().mean()

    (sum(loss(alone, lambda w: w, n) for n in range(2)) / 2).backward()
    part = fullshard.gathered(model[0].weight)
    assert part.shape == (8, 6)
    assert part.to_local().shape == (4, 6)
    total = loss(model, lambda w: fullshard.gathered(w).full_tensor(), number)
    total.backward()
    for name, parameter in model.named_parameters():
        expected = alone.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), expected)


class _InOwn(nn.Module):
    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.whole = [whole]
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        (whole,) = self.whole
        weight = whole(self.layer.weight)
        self.seen.append(weight is self.layer.weight)
        return self.layer(x) + weight.square().sum()


@ours
@on_ranks(2)
def test_in_its_own_units_forward_it_is_the_parameter_itself(api: Api) -> None:
    torch.manual_seed(2)
    alone = _InOwn(lambda w: w)
    torch.manual_seed(2)
    model = _InOwn(fullshard.gathered)
    api.fully_shard(model, mesh=mesh_of(2))
    x = torch.ones(3, 5)
    alone(x).square().mean().backward()
    model(x).square().mean().backward()
    assert model.seen == [True]
    grad = model.layer.weight.grad.full_tensor()
    torch.testing.assert_close(grad, alone.layer.weight.grad)


@ours
@on_ranks(2)
def test_hooks_from_before_sharding_see_whole_gradients(api: Api) -> None:
    model = net()
    seen = []
    model.stem.weight.register_hook(lambda grad: seen.append(grad.shape) or 2 * grad)
    model = _buffers_alike(sharded(api, "fully_shard", model))
    _both_losses(model, fullshard.gathered, _x(0), rank()).backward()
    expected = _expected([_both_losses], 2)
    expected["stem.weight"] *= 2
    _assert_gradients(model, expected)
    assert set(seen) == {torch.Size([6, 7])}


@ours
@on_ranks(2)
def test_what_cannot_be_right_is_refused(api: Api) -> None:
    flat = sharded(api, "flat")
    with pytest.raises(UnsupportedError, match="all parameters of its unit"):
        fullshard.gathered(flat._flat_param)
    original = nn.Linear(4, 4)
    kept = original.weight
    api.fully_shard(original, mesh=mesh_of(world_size()))
    with pytest.raises(StateError, match="from before sharding"):
        fullshard.gathered(kept)
    whole = fullshard.gathered(original.weight)
    with pytest.raises(StateError, match="before the model's first forward"):
        whole.sum().backward()
    with fullshard.full_parameters(original), pytest.raises(StateError, match="shown whole now"):
        fullshard.gathered(original.weight)


@pytest.mark.long
@ours
@on_ranks(2)
def test_compiled_models_take_gradients_of_whole_weights(api: Api) -> None:
    torch.manual_seed(2)
    alone = _TiedAcross(lambda w: w)
    torch.manual_seed(2)
    model = _TiedAcross(fullshard.gathered)
    for module in (model.embed, model.layer, model):
        api.fully_shard(module, mesh=mesh_of(2))
    compiled = torch.compile(model, backend="eager")
    tokens = torch.arange(8).reshape(2, 4)
    sum(alone(tokens[r]).square().mean() for r in range(2)).div(2).backward()
    with quiet():  # dynamo looks at ``.grad`` of activations
        compiled(tokens[rank()]).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), alone.get_parameter(name).grad)


def _alone(api: Api) -> None:
    model = nn.Linear(4, 4)
    group = dist.new_group(timeout=timedelta(seconds=3))
    assert isinstance(group, dist.ProcessGroup)
    mesh = DeviceMesh.from_group(group, "cpu")
    api.fully_shard(model, mesh=mesh)
    if rank() == 0:
        with pytest.raises(CommError, match="gathering weight"):
            fullshard.gathered(model.weight)


def _meets_another(call: str) -> None:
    model = nn.Linear(4, 4)
    fullshard.fully_shard(model, mesh=mesh_of(2))
    model(torch.ones(1, 4)).sum().backward()
    calls: dict[str, Callable[[], object]] = {
        "gathering weight": lambda: fullshard.gathered(model.weight),
        "gathering whole tensors": lambda: [*fullshard.iter_full_state(model)],
    }
    mine = calls[call] if rank() == 0 else lambda: model(torch.ones(1, 4))
    with pytest.raises(DivergenceError, match=rf"rank 0: .*{call}; rank 1: "):
        mine()


@pytest.mark.parametrize("call", ["gathering weight", "gathering whole tensors"])
def test_a_rank_that_calls_alone_is_told_at_once_where_memory_is_shared(call: str) -> None:
    outcomes = run_fresh(2, _meets_another, limit_s=20, call=call)
    assert [outcome.fate for outcome in outcomes] == [Fate.RETURNED] * 2, outcomes


@pytest.mark.long
def test_a_rank_that_calls_alone_is_told_after_the_timeout() -> None:
    outcomes = run_fresh(2, _alone_on, limit_s=40)
    assert [outcome.fate for outcome in outcomes] == [Fate.RETURNED] * 2, outcomes


def _alone_on() -> None:
    _alone(Api("process_group"))


def test_a_plain_parameter_is_returned_as_it_is() -> None:
    layer = nn.Linear(2, 2)
    assert fullshard.gathered(layer.weight) is layer.weight


@ours
@on_ranks(2)
def test_after_an_exception_in_forward_it_is_gathered_from_shards(api: Api) -> None:
    model = net()
    for module in (*(m for m in model.modules() if isinstance(m, Block)), model):
        api.fully_shard(
            module,
            mesh=mesh_of(world_size()),
            mp_policy=api.MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        )

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(_x(0))
    handle.remove()
    whole = fullshard.gathered(model.stem.weight)
    assert whole.dtype == torch.float32
    assert whole.equal(net().stem.weight)
