"""Twelve reports of runs that finish with wrong results: on ours each is right, or says what is wrong.

Each names where it was reported. Beside it stands what PyTorch's engine does, as far as that can be shown in the
same process without a hang: checked with the release of torch that is pinned, as others may mend it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fullshard
from fullshard.errors import StateError
from fullshard.fsdp2.module import RELEASE
from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.selection import one_way
from tests.training import assert_equal, full, full_gradients

pytestmark = [
    pytest.mark.ours("the tests show what PyTorch's engine does themselves"),
    one_way("tests/differential"),
]

TORCH = Api("torch")
is_pinned = RELEASE == (2, 13)


def _whole(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters whole, of either engine."""
    return {name: full(p).detach().clone() for name, p in model.named_parameters()}


def _differs(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    """Whether results are wrong by more than rounding."""
    return any(not torch.allclose(found[n], wanted[n], rtol=1e-3, atol=1e-6) for n in wanted)


# 1. PrimeIntellect-ai/prime-rl#1960


@on_ranks(2)
def test_unequal_tokens_per_rank_give_the_mean_over_tokens(api: Api) -> None:
    torch.manual_seed(0)
    alone = nn.Linear(4, 3)
    tokens = torch.randn(12, 4).split((2, 10))  # of rank 0 and rank 1
    alone(torch.cat(tokens)).square().mean().backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}

    model = api.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2))
    own = tokens[rank()]
    fullshard.weighted_loss(model(own).square().mean(), len(own), model).backward()
    assert_equal(full_gradients(model), wanted, rtol=1e-5, atol=1e-6)

    theirs = TORCH.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2))
    theirs(own).square().mean().backward()
    assert _differs(full_gradients(theirs), wanted)


# 2. pytorch#174862


class _TwoExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: Tensor, number: int) -> Tensor:
        return self.experts[number](self.inlet(x))


@on_ranks(2)
def test_an_expert_that_one_rank_does_not_use_gets_the_gradient_of_the_other(api: Api) -> None:
    torch.manual_seed(0)
    alone, batch = _TwoExperts(), torch.randn(4, 4)
    for number, part in enumerate(batch.chunk(2)):
        (alone(part, number).square().mean() / 2).backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    alone.zero_grad()
    own = batch.chunk(2)[rank()]

    model = api.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2))  # one unit, as PyTorch below
    model(own, rank()).square().mean().backward()
    assert_equal(full_gradients(model), wanted, rtol=1e-5, atol=1e-6)

    theirs = TORCH.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2))
    theirs(own, rank()).square().mean().backward()
    if is_pinned:  # the sum of both experts' gradients, for one of them on each rank
        local = {name: p.grad for name, p in theirs.named_parameters()}
        assert [local[f"experts.{n}.weight"] is not None for n in range(2)] == [
            n == rank() for n in range(2)
        ]


# 3. pytorch#176076


class _Tied(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


@pytest.mark.parametrize("vocabulary", [5, 7, 9])  # on 4 ranks: 2+2+1+0, 2+2+2+1, 3+3+3+0
@on_ranks(4)
def test_tied_weights_of_an_uneven_vocabulary_are_trained_on_all_ranks(
    api: Api, vocabulary: int
) -> None:
    torch.manual_seed(0)
    alone = _Tied(vocabulary)
    model = copy.deepcopy(alone)
    for part in (model.embed, model.body, model.head, model):
        api.fully_shard(part, mesh=mesh_of(4))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (alone, model)]
    for step in range(3):
        tokens = torch.arange(4 * 3).view(4, 3).add(step) % vocabulary
        F.cross_entropy(alone(tokens).flatten(0, 1), tokens.flatten()).backward()
        own = tokens[rank()]
        F.cross_entropy(model(own), own).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = dict(fullshard.iter_full_state(model))
    assert_equal(found, {n: alone.state_dict()[n] for n in found}, rtol=1e-3, atol=1e-4)
    assert model.embed.weight is model.head.weight

    torch.manual_seed(0)
    theirs = _Tied(vocabulary)
    for part in (theirs.embed, theirs.body, theirs.head, theirs):
        TORCH.fully_shard(part, mesh=mesh_of(4))
    if is_pinned:
        with pytest.raises(ValueError, match=r"head\.weight' is shared"):
            theirs(tokens[rank()])


# 4. KempnerInstitute/KempnerForge#115


@on_ranks(2)
def test_moments_are_there_after_resume(api: Api, tmp_path: Path) -> None:
    def build(implementation: Api) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        for part in (model[0], model[2], model):
            implementation.fully_shard(part, mesh=mesh_of(2))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(2 * step + rank()))
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    for implementation in (api, TORCH):
        model, optimizer = build(implementation)
        train(model, optimizer, range(4))
        where = tmp_path / implementation.name
        if implementation is TORCH:
            # As programs do: what a new optimizer has is loaded, which is nothing.
            dcp.save(
                {"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=where
            )
        else:
            fullshard.save_checkpoint(where, model, optimizer)
        train(model, optimizer, range(4, 6))
        wanted = _whole(model)

        model, optimizer = build(implementation)
        if implementation is TORCH:
            states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
            dcp.load(states, checkpoint_id=where)
            model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optim"])
        else:
            fullshard.load_checkpoint(where, model, optimizer)
        train(model, optimizer, range(4, 6))
        if implementation is TORCH:
            assert _differs(_whole(model), wanted)
        else:
            assert_equal(_whole(model), wanted)  # in every bit


# 5. NovaSky-AI/SkyRL#1709


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1.0 / 100.0 ** (torch.arange(4.0) / 4), persistent=False)
        self.register_buffer("positions", torch.arange(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.inv_freq + self.positions


@on_ranks(2)
def test_buffers_that_nobody_wrote_after_meta_are_refused_by_their_path(api: Api) -> None:
    state = nn.Sequential(_Rotary(), nn.Linear(4, 4)).state_dict()
    outs: dict[str, Tensor] = {}
    for implementation in (api, TORCH):
        with torch.device("meta"):
            model = nn.Sequential(_Rotary(), nn.Linear(4, 4))
        for part in (*model, model):
            implementation.fully_shard(part, mesh=mesh_of(2))
        model.to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            with torch.no_grad():
                parameter.copy_(distribute_tensor(state[name], parameter.device_mesh, [Shard(0)]))
        if implementation is TORCH:
            outs["torch"] = model(torch.ones(2, 4))  # whatever the memory held
            continue
        with pytest.raises(
            StateError, match=r"^0\.inv_freq, 0\.positions \(rank \d\): to_empty\(\)"
        ):
            model(torch.ones(2, 4))
        with torch.no_grad():
            model[0].inv_freq.copy_(_Rotary().inv_freq)
        with pytest.raises(StateError, match=r"^0\.positions \(rank"):
            model(torch.ones(2, 4))
        model[0].positions = torch.arange(4)
        wanted = nn.Sequential(_Rotary(), nn.Linear(4, 4))
        wanted.load_state_dict(state)
        torch.testing.assert_close(model(torch.ones(2, 4)), wanted(torch.ones(2, 4)))
    assert outs["torch"].shape == (2, 4)


DTYPES = [
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.int8,
    torch.bool,
]


@on_ranks(2)
def test_buffers_of_any_dtype_are_told_apart_from_what_was_written(api: Api) -> None:
    class Buffers(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            for dtype in (*DTYPES, torch.float8_e4m3fn):
                name = str(dtype).removeprefix("torch.")
                self.register_buffer(name, torch.zeros(3).to(dtype), persistent=False)

    with torch.device("meta"):
        model = Buffers()
    api.fully_shard(model, mesh=mesh_of(2))
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(1.0)
    names = sorted(name for name, _ in model.named_buffers())
    with pytest.raises(StateError, match=rf"^{', '.join(names[:5])}.* \(rank"):
        model(torch.ones(1, 4))
    # What a program may set, among it what was there as a mark.
    with torch.no_grad():
        model.float16.fill_(float("nan"))
        model.bool.fill_(True)
        model.uint8.fill_(0xA5)
        for name in ("complex64", "int64", "int16", "int8"):
            getattr(model, name).data.zero_()
        model.float8_e4m3fn.copy_(torch.ones(3))
    assert model(torch.ones(1, 4)).eq(5).all()


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2)
def test_the_wrapper_looks_at_what_param_init_fn_leaves(api: Api, flat: bool) -> None:
    def init(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()

    with torch.device("meta"):
        model = nn.Sequential(_Rotary(), nn.Linear(4, 4))
    with quiet():
        model = api.FullyShardedDataParallel(model, use_orig_params=not flat, param_init_fn=init)
    with pytest.raises(StateError, match=r"^0\.inv_freq, 0\.positions \(rank \d\): to_empty\(\)"):
        model(torch.ones(2, 4))


@on_ranks(2)
def test_parameters_that_nobody_wrote_after_meta_are_refused(api: Api) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for part in (*model, model):
        api.fully_shard(part, mesh=mesh_of(2))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in (model[0].weight, model[0].bias, model[1].weight):
            parameter.data.fill_(1.0)  # past version counters, as many initialisers do
    with pytest.raises(StateError, match=r"^1\.bias \(rank \d\): to_empty\(\)"):
        model(torch.ones(2, 4))
    with torch.no_grad():
        model[1].bias.fill_(0.0)
    assert model(torch.ones(2, 4)).eq(20.0).all()


# 6. NVIDIA-NeMo/Automodel#3414


@on_ranks(2)
def test_a_loss_that_reads_a_weight_outside_its_module_is_right_or_named(api: Api) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5, bias=False))
    batch = torch.randn(4, 4)
    (alone[0](batch) @ alone[1].weight.T).square().mean().backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    alone.zero_grad()

    def build(implementation: Api) -> Any:
        class Hidden(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return self[0](x)

        model = Hidden(*copy.deepcopy(alone))
        for part in (*model, model):
            implementation.fully_shard(part, mesh=mesh_of(2))
        return model

    own = batch.chunk(2)[rank()]
    model = build(api)
    (model(own) @ fullshard.gathered(model[1].weight).T).square().mean().backward()
    assert_equal(full_gradients(model), wanted, rtol=1e-5, atol=1e-6)

    model = build(api)
    with pytest.warns(UserWarning, match=r"^1\.weight: .* fullshard\.gathered"):
        (model(own) @ model[1].weight.full_tensor().T).square().mean().backward()

    theirs = build(TORCH)
    (theirs(own) @ theirs[1].weight.full_tensor().T).square().mean().backward()
    assert _differs(full_gradients(theirs), wanted)


# 7. NVIDIA/Megatron-LM#5956


@on_ranks(4)
def test_experts_that_divide_by_fewer_ranks_are_named(api: Api) -> None:
    mesh = mesh_of(2, 2)
    outcomes = {}
    for implementation in (api, TORCH):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        implementation.fully_shard(model[1], mesh=mesh["shard"])  # an expert of two ranks
        implementation.fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        if implementation is api:
            named = pytest.raises(UserWarning, match=r"1 \(rank \d\): .* 2 times")
            with named, _strict():
                model(torch.ones(2, 4))
            model[1].set_gradient_divide_factor(4)
        model(torch.ones(2, 4)).sum().backward()
        outcomes[implementation.name] = full(model[1].bias.grad)
    # Two ranks' gradients of 2.0 each: with the divisor of all four, half of that.
    assert outcomes[api.name].eq(1.0).all()
    assert outcomes["torch"].eq(2.0).all()


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# 8. RLinf/RLinf#1522, verl-project/verl#7493

REPLICAS: dict[str, Callable[[Api, nn.Module], Any]] = {
    "fully_shard, one rank per shard group": lambda api, model: api.fully_shard(
        model, mesh=mesh_of(world_size(), 1)
    ),
    "HYBRID_SHARD, one rank per shard group": lambda api, model: api.FullyShardedDataParallel(
        model,
        sharding_strategy=api.ShardingStrategy.HYBRID_SHARD,
        device_mesh=mesh_of(world_size(), 1),
        use_orig_params=True,
    ),
    "one replica": lambda api, model: api.fully_shard(model, mesh=mesh_of(1, world_size())),
    "NO_SHARD": lambda api, model: api.FullyShardedDataParallel(
        model, sharding_strategy=api.ShardingStrategy.NO_SHARD, use_orig_params=True
    ),
}


@pytest.mark.parametrize("way", REPLICAS)
@on_ranks(2)
def test_replicas_of_one_rank_are_kept_equal(api: Api, way: str) -> None:
    torch.manual_seed(0)
    alone, batch = nn.Linear(4, 3), torch.randn(4, 4)
    with quiet():
        model = REPLICAS[way](api, copy.deepcopy(alone))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (alone, model)]
    for _ in range(2):
        alone(batch).square().mean().backward()
        model(batch.chunk(2)[rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = dict(fullshard.iter_full_state(model))
    assert_equal(found, alone.state_dict(), rtol=1e-5, atol=1e-6)


# 9. radixark/miles_diffusion#35


@on_ranks(2)
def test_the_logged_gradient_norm_is_that_of_all_ranks(api: Api) -> None:
    torch.manual_seed(0)
    alone, batch = nn.Linear(4, 4), torch.randn(4, 4)
    alone(batch).square().mean().backward()
    wanted = nn.utils.clip_grad_norm_(alone.parameters(), 1e9).item()
    alone.zero_grad()
    model = api.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2))
    model(batch.chunk(2)[rank()]).square().mean().backward()
    norm = fullshard.clip_grad_norm_(model.parameters(), 1e9)
    assert type(norm) is Tensor
    assert norm.item() == pytest.approx(wanted, rel=1e-5)

    theirs = TORCH.fully_shard(copy.deepcopy(alone), mesh=mesh_of(2))
    theirs(batch.chunk(2)[rank()]).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(theirs.parameters(), 1e9)
    if is_pinned:
        assert isinstance(norm, DTensor)  # which programs have to know how to read


# 10. MakazhanAlpamys/Soup#335


@on_ranks(2)
def test_what_a_compiled_model_exports_loads_by_its_own_names(api: Api, tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    model = copy.deepcopy(plain)
    model[1] = checkpoint_wrapper(model[1])
    model[0] = torch.compile(model[0], backend="eager")
    for part in (*model, model):
        api.fully_shard(part, mesh=mesh_of(2))
    assert any("_orig_mod" in name for name in model.state_dict())
    fullshard.export_hf(model, tmp_path / "exported")
    from safetensors.torch import load_file

    found = load_file(tmp_path / "exported" / "model.safetensors")
    loaded = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    loaded.load_state_dict(found)  # strict
    assert_equal(loaded.state_dict(), plain.state_dict())


# 11. pytorch#144045


@on_ranks(1, 2)
def test_tiny_parameters_get_their_gradient(api: Api) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale = nn.Parameter(torch.zeros(1))
            self.shift = nn.Parameter(torch.zeros(()))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.log_scale.exp().mean() + self.shift

    torch.manual_seed(0)
    alone = nn.Sequential(Scaled(), Scaled())
    batch = torch.randn(2 * world_size(), 3)
    model = copy.deepcopy(alone)
    with contextlib.suppress(AttributeError):
        for part in model:  # a scalar is left to a unit of its own kind: see `Scaled.shift`
            part.shift = nn.Parameter(part.shift.detach().reshape(1))
    for part in (*model, model):
        api.fully_shard(part, mesh=mesh_of(world_size()))
    alone(batch).square().mean().mul(30000).backward()
    model(batch.chunk(world_size())[rank()]).square().mean().mul(30000).backward()
    for name, parameter in alone.named_parameters():
        found = full(model.get_parameter(name).grad).reshape(parameter.shape)
        assert found.abs().sum() > 0, name
        torch.testing.assert_close(found, parameter.grad, rtol=1e-4, atol=1e-3)


# 12. pytorch/ao#4912


class _LowBit(torch.Tensor):
    """Stands for a tensor that keeps its values in 8 bits."""


class _EightBitSGD(torch.optim.Optimizer):
    """Keeps momentum in few bits where this rank's part has enough elements, as torchao's AdamW8bit."""

    def __init__(self, params: Any, block_size: int = 256) -> None:
        super().__init__(params, {})
        self.block_size = block_size

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in itertools.chain(*(group["params"] for group in self.param_groups)):
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            state = torch.zeros_like(local)
            if local.numel() >= 4096 and local.numel() % self.block_size == 0:
                state = state.as_subclass(_LowBit)
            if isinstance(parameter, DTensor):
                spec = (parameter.device_mesh, parameter.placements)
                state = DTensor.from_local(
                    state, *spec, run_check=False, shape=parameter.shape, stride=parameter.stride()
                )
            self.state[parameter]["momentum"] = state


@on_ranks(2)
def test_optimizer_state_whose_precision_depends_on_the_mesh_is_named(api: Api) -> None:
    def stepped(implementation: Api, *mesh: int) -> nn.Module:
        model = nn.Linear(1024, 6, bias=False)  # 6144 elements, 3072 on each of two ranks
        implementation.fully_shard(model, mesh=mesh_of(*mesh))
        model(torch.ones(1, 1024)).sum().backward()
        optimizer = _EightBitSGD(model.parameters())
        optimizer.step()
        optimizer.step()  # warns once
        return optimizer.state[model.weight]["momentum"]._local_tensor

    assert type(stepped(api, 2, 1)) is _LowBit
    with pytest.warns(UserWarning, match=r"state of weight in torch.float32, .* 3072 of 6144"):
        assert type(stepped(api, 2)) is Tensor
    assert type(stepped(TORCH, 2, 1)) is _LowBit
    assert type(stepped(TORCH, 2)) is Tensor  # without a word


# Found by `fullshard verify`: not among the twelve


@pytest.mark.parametrize("flat", [False, True], ids=["orig", "flat"])
@on_ranks(2)
def test_an_optimizer_that_needs_whole_parameters_is_named(api: Api, flat: bool) -> None:
    def norms(model: nn.Module) -> set[str]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 5)).square().mean()
            loss.backward()
            return loss

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step(closure)
            optimizer.step(closure)
        return {str(each.message) for each in caught if "LBFGS" in str(each.message)}

    with quiet():
        wrapped = api.FullyShardedDataParallel(nn.Linear(5, 3), use_orig_params=not flat)
    (said,) = norms(wrapped)
    assert "dot products" in said
    assert (
        "a flat parameter is this rank's part" if flat else "weight is this rank's part"
    ) in said

    torch.manual_seed(0)
    alone = nn.Linear(5, 4)  # of uneven sizes torch makes no vector, and says so
    sharded = api.fully_shard(copy.deepcopy(alone))
    assert norms(sharded) == norms(alone) == set()
    assert not _differs(_whole(sharded), _whole(alone))  # DTensors know that they are parts
