"""Unsharded parameters that somebody keeps after their reshard."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from fullshard.engine.guard import uses
from fullshard.engine.module_state import state_of
from tests.api import Api
from tests.harness import on_ranks
from tests.models import mlp
from tests.training import make_batch, mean_square, my_part

sizes = pytest.mark.parametrize("dim", [16, 1024])  # small buffers stay allocated
MESSAGE = r"weight was kept while"


class Keeper(nn.Module):
    """A layer that keeps its weight. x: (n, dim) -> same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.layer = nn.Linear(dim, dim)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        self.kept[:] = [self.layer.weight]
        return self.layer(x).tanh()


def _model(api: Api, dim: int, face: str) -> Any:
    model = nn.Sequential(Keeper(dim), mlp(1, dim))
    if face == "fully_shard":
        api.fully_shard(model[0])
        return api.fully_shard(model)
    options = {"use_orig_params": face == "orig", "device_id": torch.device("cpu")}
    model[0] = api.FullyShardedDataParallel(model[0], **options)
    return api.FullyShardedDataParallel(model, **options)


@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@pytest.mark.parametrize("is_training", [True, False])
@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_weight_kept_by_a_forward_may_not_be_used_after_its_reshard(
    api: Api, dim: int, is_training: bool, face: str
) -> None:
    model, x = _model(api, dim, face), make_batch(dim)
    with torch.set_grad_enabled(is_training):
        for _ in range(2):
            output = model(x)
            keeper = model[0] if face == "fully_shard" else model[0].module
            (weight,) = keeper.kept
            with pytest.raises(RuntimeError, match=MESSAGE):
                weight.sum()
            assert weight.shape == (dim, dim)
            assert weight.requires_grad
            if is_training:
                mean_square(output).backward()
                with pytest.raises(RuntimeError, match=MESSAGE):
                    weight + 1


@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_weight_kept_is_found_where_users_say_how_tensors_are_saved(api: Api, dim: int) -> None:
    with torch.autograd.graph.save_on_cpu():
        model, x = api.fully_shard(Keeper(dim)), make_batch(dim)
        for _ in range(2):
            mean_square(model(x)).backward()
            with pytest.raises(RuntimeError, match=MESSAGE):
                model.kept[0].sum()


@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_weight_kept_over_an_explicit_reshard_may_be_used_once_unsharded_again(
    api: Api, dim: int
) -> None:
    model = mlp(1, dim)
    expected = model[0][0].weight.detach().clone()
    api.fully_shard(model)
    model.unshard()
    weight = model[0][0].weight
    torch.testing.assert_close(weight, expected)
    model.reshard()
    with pytest.raises(RuntimeError, match=MESSAGE):
        torch.nn.functional.linear(make_batch(dim), weight)
    model.unshard()
    assert type(weight) is nn.Parameter
    torch.testing.assert_close(weight, expected)


@on_ranks(2)
def test_parameters_that_nobody_keeps_stay_what_they_are(api: Api) -> None:
    model = mlp(3)
    for layer in model:
        api.fully_shard(layer)
    api.fully_shard(model)
    for seed in range(2):
        mean_square(model(my_part(make_batch(16, seed=seed)))).backward()
        model(make_batch(16))
    model.unshard()
    types = {type(p) for p in model.parameters()}
    if not api.is_torch:
        states = [state_of(layer) for layer in model]
        units = [unit for state in states if state for unit in state.units]
        types |= {type(param.unsharded) for unit in units for param in unit.params}
        assert nn.Parameter in types
    assert not [each for each in types if each.__name__.startswith("Resharded")]


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "t": Tensor.t,
    "row": lambda weight: weight[1],
    "detach": Tensor.detach,
    "data": lambda weight: weight.data,
    "parameter": lambda weight: nn.Parameter(weight.detach()),
    "view of a view": lambda weight: weight.view(-1)[3:7],
    "numbers": lambda weight: weight.detach().view(torch.int32),
}
VIEW = rf"view of (\S+\.)?layer.{MESSAGE}"


class ViewKeeper(Keeper):
    """A layer that keeps a view of its weight."""

    def __init__(self, dim: int, way: str) -> None:
        super().__init__(dim)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        self.kept[:] = [WAYS[self.way](self.layer.weight)]
        return self.layer(x).tanh()


class Peeking(nn.Module):
    """Uses, after a child, what that keeps. x: (n, dim) -> same."""

    def __init__(self, keeper: Keeper) -> None:
        super().__init__()
        self.keeper = keeper
        self.peeks = True

    def forward(self, x: Tensor) -> Tensor:
        """Run the child, and add something of its weight."""
        y: Tensor = self.keeper(x)
        return y + _keeper(self.keeper).kept[0].sum() if self.peeks else y


def _keeper(module: nn.Module) -> Any:
    return getattr(module, "module", module)


def _peeking(api: Api, keeper: Keeper, face: str) -> Any:
    model: Any = Peeking(keeper)
    if face == "fully_shard":
        api.fully_shard(model.keeper)
        return api.fully_shard(model)
    options = {"use_orig_params": face == "orig", "device_id": torch.device("cpu")}
    model.keeper = api.FullyShardedDataParallel(model.keeper, **options)
    return api.FullyShardedDataParallel(model, **options)


faces = pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])


@pytest.mark.parametrize("way", WAYS)
@faces
@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_view_kept_by_a_forward_may_not_be_used_while_its_module_is_sharded(
    api: Api, dim: int, face: str, way: str
) -> None:
    model, x = _peeking(api, ViewKeeper(dim, way), face), make_batch(dim)
    peeking = _keeper(model)
    with pytest.raises(RuntimeError, match=VIEW):  # in the forward that made it
        model(x)
    peeking.peeks = False
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        output = model(x)
        (view,) = _keeper(peeking.keeper).kept
        shape = view.shape
        with pytest.raises(RuntimeError, match=VIEW):
            view + 1
        mean_square(output).backward()
        with pytest.raises(RuntimeError, match=VIEW):
            view.tolist()
        optimizer.step()
        with pytest.raises(RuntimeError, match=VIEW):
            view.mul_(2)
        assert view.shape == shape
        with torch.no_grad():
            model(x)
        (view,) = _keeper(peeking.keeper).kept
        with pytest.raises(RuntimeError, match=VIEW):
            view.sum()


@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_view_is_found_however_long_ago_it_was_made(api: Api, dim: int) -> None:
    class Aging(Keeper):
        def forward(self, x: Tensor) -> Tensor:
            self.kept[:] = [self.layer.weight.t()]
            gc.collect()  # it is no young object any more
            return self.layer(x).tanh()

    model = _peeking(api, Aging(dim), "fully_shard")
    with pytest.raises(RuntimeError, match=VIEW):
        model(make_batch(dim))


@sizes
@pytest.mark.ours("crashes")
@on_ranks(2)
def test_views_kept_over_a_reshard_read_what_is_there_once_unsharded_again(
    api: Api, dim: int
) -> None:
    model = mlp(2, dim)
    api.fully_shard(model)
    model.unshard()
    views = {name: value.t() for name, value in model.named_parameters() if value.dim() > 1}
    model.reshard()
    for view in views.values():
        with pytest.raises(RuntimeError, match=r"view of (\S+\.)?weight"):
            view.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean_square(model(make_batch(dim))).backward()
    optimizer.step()
    model.unshard()
    for name, view in views.items():
        assert type(view) is Tensor
        torch.testing.assert_close(view, model.get_parameter(name).detach().t(), rtol=0, atol=0)


class _Matmul(torch.autograd.Function):
    """x @ w.t(), by a view that it keeps."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.view = weight.t()
        ctx.save_for_backward(x, weight)
        return x @ ctx.view

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, _ = ctx.saved_tensors
        return grad @ ctx.view.t(), grad.t() @ x


class _Custom(Keeper):
    def forward(self, x: Tensor) -> Tensor:
        return _Matmul.apply(x, self.layer.weight).tanh()


class _Checkpointed(Keeper):
    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            self.kept[:] = [self.layer.weight.t()]
            return (x @ self.kept[0]).tanh()

        return checkpoint(inner, x, use_reentrant=False)


class _Hooked(Keeper):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, lambda each: each):
            return (x @ self.layer.weight.t()).tanh()


@pytest.mark.parametrize("layer", [_Custom, _Checkpointed, _Hooked])
@sizes
@on_ranks(2)
def test_backward_uses_the_views_that_its_forward_kept(
    api: Api, dim: int, layer: type[Keeper]
) -> None:
    def train(model: Any) -> list[Tensor]:
        losses = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            loss = mean_square(model(make_batch(dim, seed=seed)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    torch.manual_seed(0)
    model = nn.Sequential(*[layer(dim) for _ in range(2)])
    expected = train(copy.deepcopy(model))
    for each in model:
        api.fully_shard(each)
    torch.testing.assert_close(train(api.fully_shard(model)), expected)


@sizes
@pytest.mark.ours("crashes")
@on_ranks(4)
def test_tensor_parallel_weights_and_their_views_are_named_too(api: Api, dim: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Peeking(ViewKeeper(dim, "t"))
    model.peeks = False
    parallelize_module(
        model, mesh["tp"], {"keeper.layer": ColwiseParallel(output_layouts=Replicate())}
    )
    api.fully_shard(model.keeper, mesh=mesh["dp"])
    api.fully_shard(model, mesh=mesh["dp"])
    x = make_batch(dim)
    for _ in range(2):
        output = model(x)
        (view,) = model.keeper.kept
        assert isinstance(view, DTensor)
        with pytest.raises(RuntimeError, match=VIEW):
            view.full_tensor()
        mean_square(output).backward()
        with pytest.raises(RuntimeError, match=VIEW):
            view + 1
    model.keeper.unshard()
    weight, local = model.keeper.layer.weight, model.keeper.layer.weight.to_local()
    expected = local.clone()
    model.keeper.reshard()
    with pytest.raises(RuntimeError, match=rf"^keeper.layer.{MESSAGE}"):
        weight.full_tensor()
    with pytest.raises(RuntimeError, match=VIEW):
        local + 1
    model.keeper.unshard()
    torch.testing.assert_close(local, expected)
    torch.testing.assert_close(weight.to_local(), expected)


@pytest.mark.ours("looks into the engine")
@on_ranks(2)
def test_the_search_for_views_adds_nothing_to_what_a_forward_saves(api: Api) -> None:
    """A checkpointed forward has to save the same number of tensors when it is run again."""
    model = nn.Sequential(ViewKeeper(16, "t"), nn.Linear(16, 16))
    api.fully_shard(model[0])  # resharded, and looked into, in the midst of the forward
    api.fully_shard(model)
    uses._references_in_list.cache_clear()  # as in a new process
    output = checkpoint(model, make_batch(16), use_reentrant=False)
    assert uses._references_in_list.cache_info().misses == 1
    mean_square(output).backward()


@pytest.mark.ours("looks into the engine")
@on_ranks(2)
def test_models_that_keep_nothing_are_not_looked_into_after_their_first_passes(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*[ViewKeeper(16, "t") for _ in range(2)], Keeper(16))
    for layer in model:
        layer.register_forward_hook(lambda module, *_: module.kept.clear())
        api.fully_shard(layer)
    api.fully_shard(model)
    looks: list[int] = []
    look, single = uses._adopt_views, uses.Uses._forbid_parameters
    monkeypatch.setattr(uses, "_adopt_views", lambda each: (looks.append(1), look(each)))
    monkeypatch.setattr(  # asks each parameter, if the sum of references is not what it was
        uses.Uses, "_forbid_parameters", lambda *a, **kw: (looks.append(1), single(*a, **kw))
    )
    for seed in range(5):
        looks.clear()
        mean_square(model(my_part(make_batch(16, seed=seed)))).backward()
        with torch.no_grad():
            model(make_batch(16))
        assert not looks or seed < 2


@pytest.mark.ours("looks into the engine")
@on_ranks(2)
def test_a_search_by_another_thread_takes_no_view_from_a_gather(api: Api) -> None:
    """It may run while a gather makes its views, before the unit has them."""
    model = mlp(1, 16)
    api.fully_shard(model)
    for seed in range(3):
        mean_square(model(my_part(make_batch(16, seed=seed)))).backward()
        for unit in state_of(model).units:  # type: ignore[union-attr]
            for view in unit.params.buffers.own_views():
                unit.params.shown.uses.adopt(view)


class Cached(Keeper):
    """A layer that computes with a view that it made once, for all steps."""

    def forward(self, x: Tensor) -> Tensor:
        """Run the layer."""
        if not self.kept:
            self.kept.append(self.layer.weight.t())
        return x @ self.kept[0] + self.layer.bias


@faces
@pytest.mark.ours("loses the gradient, or raises")
@on_ranks(2)
def test_gradients_of_views_that_are_older_than_the_forward_are_reduced(
    api: Api, face: str
) -> None:
    model: Any = nn.Sequential(Cached(8), Cached(8))
    alone = copy.deepcopy(model)
    options = {"use_orig_params": face == "orig", "device_id": torch.device("cpu")}
    for number, layer in enumerate(model):
        if face == "fully_shard":
            api.fully_shard(layer)
        else:
            model[number] = api.FullyShardedDataParallel(layer, **options)
    if face == "fully_shard":
        api.fully_shard(model)
    else:
        model = api.FullyShardedDataParallel(model, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, alone)]
    for step in range(5):
        x = make_batch(8, seed=step)
        losses = [mean_square(m(part)) for m, part in ((model, my_part(x)), (alone, x))]
        total = losses[0].detach().clone()
        dist.all_reduce(total)
        torch.testing.assert_close(total / 2, losses[1].detach())
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ours("says nothing of the weight")
@on_ranks(2)
def test_weight_of_another_unit_may_not_be_used_while_that_is_sharded(api: Api) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)) @ self.first.weight.t()

    cpu = torch.device("cpu")
    inner: Any = Tied()
    inner.first = api.FullyShardedDataParallel(inner.first, device_id=cpu)
    model = api.FullyShardedDataParallel(inner, device_id=cpu)
    assert copy.deepcopy(inner.first.module.weight).shape == (8, 8)
    with pytest.raises(RuntimeError, match=r"first.weight is used .*sharded"):
        model(make_batch(8))
