"""A model that is built without memory has the values of an ordinary construction, in every bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.init import trunc_normal_

import fullshard
from fullshard.deferred import record
from fullshard.deferred.record import last_uses
from fullshard.deferred.recording import AsIfWithMemory, Recorder
from fullshard.errors import StateError, UnsupportedError
from fullshard.models.llama import Llama, init_weights
from fullshard.models.sizes import LlamaConfig
from tests.api import Api
from tests.fsdp1.models import quiet
from tests.harness import mesh_of, on_ranks, rank, world_size
from tests.training import assert_equal

pytestmark = pytest.mark.apis("peer_memory")


def layers() -> nn.Module:
    """Initialise by the modules themselves."""
    return nn.ModuleList(
        [
            *(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Embedding(5, 3, padding_idx=2), nn.LSTM(4, 5)),
            *(nn.Conv2d(3, 4, 3), nn.MultiheadAttention(8, 2)),
            nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        ]
    )


def again() -> nn.Module:
    """Initialise once more, by functions that draw until it fits, and by arithmetic."""
    model = layers()

    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Conv2d):
            nn.init.orthogonal_(module.weight)
            module.bias.data.normal_().mul_(0.5)

    model.apply(initialise)
    nn.init.sparse_(model[0].weight, 0.5)
    with torch.no_grad():
        model[0].weight[1:3] += 1.0
    return model


def buffers() -> nn.Module:
    """Compute buffers, tie weights, read numbers, ask where tensors are."""
    model = nn.ModuleDict({"embed": nn.Embedding(6, 8), "head": nn.Linear(8, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    inverse = 1.0 / 100.0 ** (torch.arange(0, 8, 2).float() / 8)
    model.register_buffer("inverse", inverse, persistent=False)
    model.register_buffer("mask", torch.ones(4, 4).tril().bool())
    model.register_buffer("constants", torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * 2)
    model.rates = [rate.item() for rate in torch.linspace(0, 0.1, 4)]
    weight = model["embed"].weight
    if weight.device.type == "cpu" and not weight.is_meta:
        weight.data.copy_(torch.randn(6, 8) * 0.02)
    return model


def language_model() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2}
    model = Llama(LlamaConfig(vocab_size=31, **sizes, tie_embeddings=True))
    init_weights(model, seed=5)  # by generators of its own
    return model


def parametrized() -> nn.Module:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    return nn.Sequential(linear, nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)))


BUILDS = [layers, again, buffers, language_model, parametrized]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _ordinary(build: Callable[[], nn.Module]) -> tuple[nn.Module, Tensor]:
    """Build as usual; return the model, and the next random number."""
    torch.manual_seed(3)
    return build(), torch.rand(1)


@pytest.mark.parametrize("build", BUILDS)
def test_values_are_those_of_the_ordinary_construction(build: Callable[[], nn.Module]) -> None:
    wanted, number = _ordinary(build)
    torch.manual_seed(3)
    model = fullshard.deferred_init(build)
    assert all(tensor.is_meta for tensor in _tensors(model).values())
    assert fullshard.materialize(model) is model
    assert torch.equal(torch.rand(1), number)
    assert_equal(_tensors(model), _tensors(wanted))
    dtypes = [{n: t.dtype for n, t in _tensors(each).items()} for each in (model, wanted)]
    assert dtypes[0] == dtypes[1]
    assert vars(model).get("rates") == vars(wanted).get("rates")


def _fully_shard(api: Api, model: nn.Module, *mesh: int) -> Any:
    for child in model.modules():
        if isinstance(child, nn.TransformerEncoderLayer) or child is model.head:
            api.fully_shard(child, mesh=mesh_of(*mesh))
    return api.fully_shard(model, mesh=mesh_of(*mesh))


def _wrapped(api: Api, model: nn.Module, *, use_orig_params: bool) -> Any:
    with quiet():
        return api.FullyShardedDataParallel(
            model,
            use_orig_params=use_orig_params,
            param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
        )


SHARDED: dict[str, Callable[[Api, nn.Module], Any]] = {
    "fully_shard": lambda api, model: _fully_shard(api, model, world_size()),
    "hybrid": lambda api, model: _fully_shard(api, model, 2, world_size() // 2),
    "replicate": lambda api, model: api.replicate(model, mesh=mesh_of(world_size())),
    "orig": lambda api, model: _wrapped(api, model, use_orig_params=True),
    "flat": lambda api, model: _wrapped(api, model, use_orig_params=False),
}


@pytest.mark.parametrize("way", SHARDED)
@on_ranks(2, 4)
def test_sharded_models_have_them_on_any_number_of_ranks(api: Api, way: str) -> None:
    wanted, number = _ordinary(_model)
    torch.manual_seed(3)
    model = SHARDED[way](api, fullshard.deferred_init(_model))
    fullshard.materialize(model)
    assert torch.equal(torch.rand(1), number)
    found = dict(fullshard.iter_full_state(model))
    assert_equal(found, {name: wanted.state_dict()[name] for name in found})
    own = dict(model.named_buffers())
    for name, buffer in wanted.named_buffers():
        assert torch.equal(next(b for n, b in own.items() if n.endswith(name)), buffer), name
    assert model.tied.weight is model.head.weight or way == "flat"
    inputs = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(rank()))
    torch.testing.assert_close(model(inputs), wanted(inputs))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 5)
        self.tied = nn.Linear(8, 5)
        self.tied.weight = self.head.weight
        self.register_buffer("scale", torch.arange(1.0, 6.0), persistent=False)
        trunc_normal_(self.head.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.encoder(x)
        return (self.head(x) + self.tied(x)) * self.scale


def _model() -> nn.Module:
    return _Model()


# What is refused


def test_a_construction_that_reads_random_numbers_is_refused() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        if model.weight.sum() > 0:
            nn.init.zeros_(model.bias)
        return model

    with pytest.raises(UnsupportedError, match="reads a random number"):
        fullshard.deferred_init(build)


def test_a_model_has_its_values_once() -> None:
    model = fullshard.materialize(fullshard.deferred_init(nn.Linear, 2, 3))
    with pytest.raises(StateError, match="Linear was not built by deferred_init"):
        fullshard.materialize(model)


@on_ranks(2)
def test_what_the_construction_leaves_unset_is_refused_at_the_first_forward(api: Api) -> None:
    class Unset(nn.Linear):
        def reset_parameters(self) -> None:
            """Leave the memory as it is."""

    model = fullshard.deferred_init(Unset, 4, 4)
    api.fully_shard(model, mesh=mesh_of(2))
    fullshard.materialize(model)
    with pytest.raises(StateError, match=r"^bias, weight \(rank \d\): to_empty"):
        model(torch.ones(1, 4))


# Memory


def test_memory_is_that_of_a_few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20)))
        model.apply(lambda m: trunc_normal_(m.weight) if isinstance(m, nn.Linear) else None)
        return model

    most, compute = 0, record._compute

    def watched(operation: Any, storages: dict[int, torch.UntypedStorage]) -> None:
        nonlocal most
        compute(operation, storages)
        most = max(most, sum(storage.nbytes() for storage in storages.values()))

    monkeypatch.setattr(record, "_compute", watched)
    fullshard.materialize(fullshard.deferred_init(build))
    assert 0 < most <= 2 * 64 * 64 * 4


def test_values_are_needed_until_they_are_overwritten() -> None:
    recorder = Recorder()
    with AsIfWithMemory(recorder), recorder:
        weight = torch.empty(4)
        weight.uniform_()
        half = weight[:2]
        half.mul_(2)
        weight.data.normal_()
        total = weight + 1
    names = [str(each.function) for each in recorder.record.operations]
    assert names == [
        f"aten.{name}"
        for name in (
            "empty.memory_format",
            "uniform_.default",
            "mul_.Tensor",
            "normal_.default",
            "add.Tensor",
        )
    ]
    ended = [sorted(memories) for memories in last_uses(recorder.record.operations)]
    assert ended == [[0], [], [0], [], [0, 1]]
    assert copy.copy(total.shape) == (4,)
