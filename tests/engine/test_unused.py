"""Parameters without a gradient, and modules that only some ranks run: the same on every path."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard.errors import ShardingError, StateError
from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.selection import one_way
from tests.training import assert_equal, full_gradients

pytestmark = [
    one_way("tests/differential: zeros take the way of gradients"),
    pytest.mark.ours("PyTorch has no set_unused"),
    pytest.mark.apis("peer_memory", "process_group"),
]


class Experts(nn.Module):
    """Adds up the outputs of the experts that it is told to run, in any order."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(num_experts)
        )

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        x = self.inlet(x)
        return x + sum((self.experts[n](x) for n in route), torch.zeros(()))


class Model(nn.Module):
    """Two layers of experts around another layer, and a head."""

    def __init__(self, num_experts: int = 3) -> None:
        super().__init__()
        self.first = Experts(num_experts)
        self.middle = nn.Linear(4, 4)
        self.second = Experts(num_experts)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, routes: tuple[list[int], list[int]]) -> Tensor:
        first, second = routes
        return self.head(self.second(self.middle(self.first(x, first)).tanh(), second))


class Branches(nn.Module):
    """Adds up the branches that it is told to use."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, *names: str) -> Tensor:
        return sum((getattr(self, name)(x) for name in names), x.new_zeros(4))


# What each rank runs in each of the two layers, step by step.
ROUTES: list[list[tuple[list[int], list[int]]]] = [
    [([0], [1, 2]), ([1], []), ([2, 0], [1])],
    [([], []), ([0, 1, 2], [0, 1, 2]), ([2], [2, 1])],
    [([1], [0]), ([1], [0]), ([1], [0])],
    [([], [2]), ([], [2]), ([0], [])],
]


def _shard(api: Api, model: Model, face: str, mesh: tuple[int, ...] = (), **options: Any) -> Any:
    """Shard every expert and layer as a unit, and let ranks leave out experts."""
    sharded_over = mesh_of(*(mesh or (world_size(),)))

    def shard(module: nn.Module) -> Any:
        if face == "fully_shard":
            return api.fully_shard(module, mesh=sharded_over, **options)
        return api.FullyShardedDataParallel(
            module, device_mesh=sharded_over, use_orig_params=face == "orig", **wrapped
        )

    strategy = "HYBRID_SHARD" if mesh else "FULL_SHARD"
    wrapped = {"sharding_strategy": api.ShardingStrategy[strategy]} if face != "fully_shard" else {}
    with quiet():
        for layer in (model.first, model.second):
            for number in range(len(layer.experts)):
                layer.experts[number] = shard(layer.experts[number])
                fullshard.set_unused(layer.experts[number], "zero", may_be_skipped=True)
        model.first, model.middle = shard(model.first), shard(model.middle)
        model.second = shard(model.second)
        return shard(model)


def _train_like_one_process(
    api: Api, model: Any, *, needs_grad: bool = True, accumulates: bool = False
) -> None:
    """Step along `ROUTES`, and compare values with one process that has all ranks' batches."""
    torch.manual_seed(0)
    alone = Model()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (model, alone)]
    for step, routes in enumerate(ROUTES):
        batch = torch.randn(2 * world_size(), 4, generator=torch.Generator().manual_seed(step))
        parts = batch.chunk(world_size())
        for number, part in enumerate(parts):
            (alone(part, routes[number % 3]).square().mean() / world_size()).backward()
        for parameter in alone.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # what "zero" means
        inputs = parts[rank()].clone().requires_grad_(needs_grad)
        model(inputs, routes[rank() % 3]).square().mean().backward()
        with torch.no_grad():
            model(inputs, ROUTES[0][rank() % 3])  # an evaluation in between
        if accumulates and step % 2 == 0:
            continue
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = dict(fullshard.iter_full_state(model))
    assert_equal(found, alone.state_dict(), rtol=1e-4, atol=1e-5)


def _model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("face", ["fully_shard", "orig", "flat"])
@on_ranks(2, 3)
def test_ranks_may_leave_out_modules(api: Api, face: str, needs_grad: bool) -> None:
    if face == "flat" and needs_grad is False:
        pytest.skip("as with use_orig_params=True")
    model = _shard(api, _model(), face)
    _train_like_one_process(api, model, needs_grad=needs_grad, accumulates=needs_grad)


@pytest.mark.parametrize(
    "option", ["keeps", "prefetches", "recomputes", "not reentrant", "offloads"]
)
@on_ranks(2)
def test_other_settings_go_with_it(api: Api, option: str) -> None:
    options: dict[str, Any] = {}
    if option == "keeps":
        options["reshard_after_forward"] = False
    if option == "offloads":
        options["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
    model = _model()
    if option in ("recomputes", "not reentrant"):
        _recompute(model, use_reentrant=option == "recomputes")
    model = _shard(api, model, "fully_shard", **options)
    if option == "prefetches":
        model.first.set_modules_to_forward_prefetch([model.middle, model.second])
        model.second.set_modules_to_backward_prefetch([model.middle, model.first])
    _train_like_one_process(api, model)


def _recomputed(forward: Any, *args: Any, use_reentrant: bool) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=use_reentrant)


def _recompute(model: Model, *, use_reentrant: bool) -> None:
    for layer in (model.first, model.second):
        layer.forward = functools.partial(_recomputed, layer.forward, use_reentrant=use_reentrant)


@on_ranks(4)
def test_replicas_may_leave_out_modules(api: Api) -> None:
    _train_like_one_process(api, _shard(api, _model(), "fully_shard", (2, 2)))


@pytest.mark.apis("process_group")
@on_ranks(2)
def test_custom_collectives_go_with_it(api: Api) -> None:
    fullshard.set_default_comm("collectives")  # the fixture sets it back
    model = _shard(api, _model(), "fully_shard")
    _train_like_one_process(api, model)
    units = str(fullshard.describe(model))
    assert units.count("zeros as gradients of unused parameters, ranks may skip it") == 6


@on_ranks(2)
def test_the_root_is_never_skipped(api: Api) -> None:
    model = _shard(api, _model(), "fully_shard")
    fullshard.set_unused(model, "zero", may_be_skipped=True, recurse=False)
    _train_like_one_process(api, model)


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)
        )

    def forward(self, x: Tensor, route: list[int]) -> Tensor:
        x = self.inlet(x)
        for number in route:
            x = x + self.experts[number](x) + self.experts[number](x.tanh())  # twice
        return x


@on_ranks(2)
def test_sharded_modules_inside_of_what_is_skipped(api: Api) -> None:
    torch.manual_seed(0)
    alone = _Nested()
    model = copy.deepcopy(alone)
    for expert in model.experts:
        for part in (expert[0], expert[2], expert):
            api.fully_shard(part, mesh=mesh_of(2))
        fullshard.set_unused(expert, "zero", may_be_skipped=True)
    api.fully_shard(model, mesh=mesh_of(2))
    routes = [[([0], [1]), ([], [1, 0]), ([1], [])][step % 3] for step in range(4)]
    for step, own in enumerate(routes):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
        alone.zero_grad()
        model.zero_grad()
        for part, route in zip(batch.chunk(2), own, strict=True):
            (alone(part, route).square().mean() / 2).backward()
        model(batch.chunk(2)[rank()], own[rank()]).square().mean().backward()
        wanted = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in alone.named_parameters()
        }
        assert_equal(full_gradients(model), wanted, rtol=1e-4, atol=1e-6)


# Errors on request


@pytest.mark.parametrize("needs_grad", [False, True])
@on_ranks(2)
def test_unused_parameters_are_an_error_on_request(api: Api, needs_grad: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of ranks that do not tell each other
        model = Branches()
        api.fully_shard(model, mesh=mesh_of(2))
        fullshard.set_unused(model, "error")
        inputs = torch.ones(2, 4, requires_grad=needs_grad)
        model(inputs, "left", "right").sum().backward()
        both = ("left", "right") if rank() == 0 else ("left",)
        with pytest.raises(
            StateError,
            match=r": right\.weight \(ranks \[1\]\), right\.bias \(ranks \[1\]\)\.",
        ):
            model(inputs, *both).sum().backward()
        with pytest.raises(StateError, match=r"left\.weight \(ranks \[0, 1\]\)"):
            model(inputs, "right").sum().backward()
        model.zero_grad()
        model(inputs, "left", "right").sum().backward()  # and the model goes on
        # Micro-batches count together: what one of them used is used.
        model.set_requires_gradient_sync(False)
        model(inputs, "left").sum().backward()
        model.set_requires_gradient_sync(True)
        model(inputs, "right").sum().backward()
        model.left.requires_grad_(False)
        model(inputs, "right").sum().backward()
        assert set(full_gradients(model)) >= {"right.weight", "right.bias"}


@on_ranks(2)
def test_what_set_unused_cannot_do_is_refused(api: Api) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ShardingError, match="Sequential is not sharded"):
        fullshard.set_unused(model, "zero")
    api.fully_shard(model, mesh=mesh_of(2))
    with pytest.raises(ShardingError, match="leave, error, zero"):
        fullshard.set_unused(model, "ignore")
    with pytest.raises(ShardingError, match="Pass 'zero'"):
        fullshard.set_unused(model, "error", may_be_skipped=True)


# Where ranks do not tell each other


@pytest.mark.apis("process_group")
@on_ranks(2)
def test_a_gradient_that_others_may_have_is_named_where_nobody_tells(api: Api) -> None:
    fullshard.set_default_comm("collectives")
    model = Branches()
    api.fully_shard(model, mesh=mesh_of(2))
    names = ("left", "right") if rank() == 0 else ("left",)
    if rank() == 1:
        with pytest.warns(UserWarning, match=r"right\.\w+ .*no gradient on rank 1"):
            model(torch.ones(2, 4), *names).sum().backward()
    else:
        model(torch.ones(2, 4), *names).sum().backward()
    fullshard.set_unused(model, "zero")
    wanted = {"right.weight": torch.ones(4, 4)}  # 2 of rank 0, 0 of rank 1
    model.zero_grad()
    model(torch.ones(2, 4), *names).sum().backward()
    assert_equal({"right.weight": full_gradients(model)["right.weight"]}, wanted)
